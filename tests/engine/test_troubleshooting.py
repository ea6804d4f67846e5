"""Every message that ``docs/troubleshooting.md`` quotes is what this software says when that goes wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_configs import CPU_ONLY, engine_config
from plugin_models import DRAFT_VOCAB, write_head, write_target

from adaptivespec_vllm.config import load
from adaptivespec_vllm.engine import seams
from adaptivespec_vllm.engine.overrides import overrides_of
from adaptivespec_vllm.engine.seam import Seam

pytestmark = [pytest.mark.usefixtures("registered"), CPU_ONLY]

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
QUOTED = [block.strip() for block in re.findall(r"```text error\n(.*?)```", PAGE.read_text(), re.DOTALL)]


@dataclass
class Case:
    """What goes wrong: a configuration, settings of vLLM, a target, a head, or a call."""

    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)
    call: Callable[[], Any] | None = None

    def message(self, path: Path) -> str:
        """What is said, with the directories named as the page names them."""
        target, head = path / "TARGET", path / "HEAD"
        write_target(target, **self.target)
        write_head(head, **self.head)
        options = {"method": "adaptivespec", "model": str(head)} | self.options
        with pytest.raises((ValueError, RuntimeError)) as error:
            if self.call is not None:
                self.call()
            engine_config(str(target), options, **self.settings)
        return str(error.value).replace(f"{path}/", "").splitlines()[0]


def _missing_symbol() -> None:
    gone = Seam("vllm.v1.worker.gpu_model_runner:GPUModelRunner.gone", "start of a step", "front")
    seams.SEAMS.append(gone)
    try:
        seams.require("front")
    finally:
        seams.SEAMS.remove(gone)


def _override(extra: dict[str, Any], **options: Any) -> Callable[[], Any]:
    return lambda: overrides_of(extra, load({"method": "adaptivespec", "model": "HEAD"} | options).config)


CASES = {
    "version": Case(call=lambda: seams.check_version("0.31.0")),
    "symbol": Case(call=_missing_symbol),
    "typo": Case({"tre": {}}),
    "value": Case({"tree": {"shape": {"depth": 8, "width": 4, "nodes": 99}}}),
    "shape": Case({"tree": {"policy": "static", "shape": {"depth": 5, "width": 4, "nodes": 3}}}),
    "policy": Case({"tree": {"policy": "static", "costs": "costs.json"}}),
    "quoting": Case(call=lambda: load("{method: adaptivespec}")),
    "file": Case(call=lambda: load("adaptivespec.jsn")),
    "async": Case(settings={"async_scheduling": True}),
    "fp8": Case(settings={"kv_cache_dtype": "fp8"}),
    "window": Case(
        target={"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64},
    ),
    "no head": Case({"model": None}),
    "map": Case(head={"tensors": {"d2t": None}}),
    "zero map": Case(head={"tensors": {"d2t": np.zeros(DRAFT_VOCAB, np.int64)}}),
    "hidden size": Case(target={"hidden_size": 128, "head_dim": 32}),
    "tensor": Case(head={"tensors": {"norm.weight": None}}),
    "looser": Case(call=_override({"adaptivespec_margin": 0.1})),
    "too many": Case(call=_override({"adaptivespec_max_nodes": 64})),
    "overrides off": Case(call=_override({"adaptivespec_max_nodes": 4}, requests={"overrides": False})),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_is_said_and_quoted(case: Case, tmp_path: Path) -> None:
    message = case.message(tmp_path)
    found = [quote for quote in QUOTED if re.fullmatch(re.escape(quote).replace(r"\.\.\.", ".*"), message)]
    assert len(found) == 1, f"docs/troubleshooting.md does not quote: {message}"


def test_nothing_else_is_quoted() -> None:
    assert len(QUOTED) == len(set(QUOTED)) == len(CASES)
