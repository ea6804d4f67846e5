"""The block in the log that says what is on, once a start, when everything is loaded and measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from adaptivespec_vllm import __version__, ops
from adaptivespec_vllm.config import AdaptiveSpecConfig, ShapeConfig
from adaptivespec_vllm.engine.front_end import REFUSED_PARAMETERS

if TYPE_CHECKING:
    from adaptivespec_vllm.engine.v1.runner import TreeModelRunner

logger = init_logger("vllm.adaptivespec")  # below vLLM's own, so that it is shown

_TREES = "all requests, with grammars, penalties and bans too; none in beam search"


def announce(runner: TreeModelRunner) -> None:
    """Log the block."""
    log_block(runner.settings, _rows(runner))


def log_block(settings: AdaptiveSpecConfig, rows: Iterable[tuple[str, str]]) -> None:
    """Log rows of name and text; that decoding is lossy is a warning of its own."""
    lines = [f"  {name:<14}{text}" for name, text in rows]
    logger.info("AdaptiveSpec %s is on\n%s", __version__, "\n".join(lines))
    if not settings.lossless:
        logger.warning("AdaptiveSpec verification is %s", settings.verification)


def _rows(runner: TreeModelRunner) -> Iterator[tuple[str, str]]:
    settings = runner.settings
    head = runner.drafter.head
    yield "method", f"EAGLE-3 draft trees on the V1 model runner, policy {settings.tree.policy}"
    yield "head", f"{settings.model}, levels on {'packed weights' if head and head.is_packed else 'its own modules'}"
    yield from rows_of_settings(settings)
    yield "attention", runner.describe_attention()
    yield "ops", ops.describe()[runner.device.type]
    if runner.policy.costs is not None:
        yield "costs", f"from {settings.tree.costs}" if settings.tree.costs else "measured on this machine"
    yield "trees for", _TREES
    yield "HTTP 400 for", ", ".join(REFUSED_PARAMETERS)
    if runner.decision_log is not None:
        yield "decisions", f"logged to {runner.decision_log.path}"
    if runner.checks:
        yield "checks", "every step is checked for integrity, which takes time"


def rows_of_settings(settings: AdaptiveSpecConfig) -> Iterator[tuple[str, str]]:
    """What the configuration says of drafting and verification."""
    yield "shapes", f"{_shapes(settings)}; vLLM reserves {settings.max_nodes} KV slots for drafts of a request"
    yield "verification", settings.verification
    if settings.lossy is not None:
        yield "guards", _guards(settings)


def _shapes(settings: AdaptiveSpecConfig) -> str:
    tree = settings.tree
    if tree.policy == "adaptive":
        return f"from {_shape(tree.low)} at no confidence to {_shape(tree.high)} at full, for each {tree.scope}"
    (_, largest), *_ = tree.bounds()
    return f"{'always' if tree.policy == 'static' else 'at most'} {_shape(largest)}"


def _shape(shape: ShapeConfig | None) -> str:
    assert shape is not None
    return f"{shape.nodes} nodes, {shape.depth} deep, {shape.width} wide"


def _guards(settings: AdaptiveSpecConfig) -> str:
    guard = settings.guard
    limits = [f"strict below a rolling acceptance of {guard.min_acceptance}"] if guard.min_acceptance else []
    limits += [f"strict after {guard.max_regret} nats given up"] if guard.max_regret is not None else []
    return ", ".join(limits) or "none"
