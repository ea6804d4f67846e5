"""Measured costs of earlier starts: files in the cache directory, each with the facts that its costs depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from adaptivespec_vllm import runtime
from adaptivespec_vllm.policy.costs import Costs

Facts = Mapping[str, Any]
"""Plain values by name; the costs of a start are those of another one if all of its facts are the same."""


@dataclass(frozen=True)
class KeptCosts:
    """Costs of an earlier start.

    Attributes:
        facts: what they depend on; ``machine``, ``target`` and ``head`` are names.
        costs: the costs.
        measured: when (ISO 8601).
        path: the file.

    """

    facts: Facts
    costs: Costs
    measured: str
    path: Path


def directory() -> Path:
    """Where the files are."""
    return runtime.cache_dir() / "costs"


def model_name(model: str) -> str:
    """A target or head as facts name it: a directory by its absolute path, wherever it was started from."""
    path = Path(model)
    return str(path.resolve()) if path.exists() else model


def look_up(facts: Facts) -> Costs | None:
    """Costs of an earlier start with these facts."""
    kept = _read(_path(facts))
    return None if kept is None else kept.costs


def keep(facts: Facts, costs: Costs) -> None:
    """Keep costs for the next start with these facts.

    Raises:
        OSError: they could not be written.

    """
    path = _path(facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    measured = datetime.now(UTC).isoformat(timespec="seconds")
    content = {"measured": measured, "facts": dict(facts), "costs": costs.to_dict()}
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.rename(path)


def find(target: str, head: str) -> list[KeptCosts]:
    """All costs of a target and a head on this machine, the newest first."""
    wanted = {"machine": runtime.machine(), "target": model_name(target), "head": model_name(head)}
    kept = [costs for path in directory().glob("*.json") if (costs := _read(path)) is not None]
    found = [costs for costs in kept if wanted.items() <= costs.facts.items()]
    return sorted(found, key=lambda costs: costs.measured, reverse=True)


def _path(facts: Facts) -> Path:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return directory() / f"{digest[:16]}.json"


def _read(path: Path) -> KeptCosts | None:
    """None for a file that is not there or not ours: its costs are measured anew."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return KeptCosts(dict(content["facts"]), Costs.from_dict(content["costs"]), str(content["measured"]), path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
