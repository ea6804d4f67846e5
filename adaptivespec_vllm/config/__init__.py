"""Every knob of ``adaptivespec.json``: type, bound, default and meaning.

A configuration comes as a path, as JSON text or as a dict, and means the same each time::

    config, vllm_keys = load("adaptivespec.json", foreign=known_vllm_keys)

What is wrong with it is one :class:`ConfigError` that names the key (``tree.high.nodes``), what was given and what is
allowed. A preset gives the values that are not written out; whatever is written out wins over the preset.
"""

from adaptivespec_vllm.config.base import METHOD, ConfigError
from adaptivespec_vllm.config.explain import describe, key_error, markdown_table, reason, shortened, shown
from adaptivespec_vllm.config.lossy import LossyConfig, MarginConfig, RuleConfig
from adaptivespec_vllm.config.reading import Loaded, is_json_text, load, read, resolve
from adaptivespec_vllm.config.schema import AdaptiveSpecConfig, GuardConfig, RequestsConfig, SignalConfig
from adaptivespec_vllm.config.tree import (
    MAX_EXPANDED_NODES,
    AdaptiveTree,
    CostAwareTree,
    ShapeConfig,
    StaticTree,
    TreeConfig,
    shape_faults,
)

__all__ = [
    "MAX_EXPANDED_NODES",
    "METHOD",
    "AdaptiveSpecConfig",
    "AdaptiveTree",
    "ConfigError",
    "CostAwareTree",
    "GuardConfig",
    "Loaded",
    "LossyConfig",
    "MarginConfig",
    "RequestsConfig",
    "RuleConfig",
    "ShapeConfig",
    "SignalConfig",
    "StaticTree",
    "TreeConfig",
    "describe",
    "is_json_text",
    "key_error",
    "load",
    "markdown_table",
    "read",
    "reason",
    "resolve",
    "shape_faults",
    "shortened",
    "shown",
]
