"""What an EAGLE-3 head directory holds, and whether it fits a target.

Only ``config.json``, the headers of the safetensors files and the small tensors are read; no model is built.
Both layouts are known: the EAGLE repository's (one flat config) and that of speculators (``speculators_config`` with
the layer's own config inside).

A reduced draft vocabulary needs the map ``d2t``, which holds offsets: ``target id = draft id + d2t[draft id]``. Without
it, or with zeros, nearly nothing would be accepted and nothing would say why, so such a head is refused.
"""

from adaptivespec_vllm.engine.head.checks import check, inspect, may_be_hub_id
from adaptivespec_vllm.engine.head.facts import HeadError, HeadFacts, TargetFacts
from adaptivespec_vllm.engine.head.loading import install_loading

__all__ = ["HeadError", "HeadFacts", "TargetFacts", "check", "inspect", "install_loading", "may_be_hub_id"]
