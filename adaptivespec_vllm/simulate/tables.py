"""Cost tables: those that are shipped, and the same with dearer rows or levels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.config import ConfigError
from adaptivespec_vllm.policy.costs import Costs, CostTable

SHIPPED = {path.stem: path for path in sorted((Path(__file__).parent / "costs").glob("*.json"))}
"""By name; ``docs/simulation.md`` says where each comes from."""


def costs_of(name: str) -> Costs:
    """A shipped table by its name, or one from a file in the format of ``tree.costs``.

    Raises:
        BadInput: neither.

    """
    allowed = f"{', '.join(SHIPPED)}, or a file of costs"
    try:
        return Costs.read(SHIPPED.get(name, Path(name).expanduser()))
    except ConfigError as error:
        raise BadInput("--costs", name, f"{allowed} ({error})") from None


def with_rows(costs: Costs, factor: float) -> Costs:
    """Every row of the target's pass beyond the first costs ``factor`` times as much."""
    one = costs.target(1)
    return replace(
        costs, target=CostTable((rows, one + factor * (seconds - one)) for rows, seconds in costs.target.points)
    )


def with_head(costs: Costs, factor: float) -> Costs:
    """Every pass of the head costs ``factor`` times as much."""
    first, level = (
        CostTable((rows, factor * seconds) for rows, seconds in table.points) for table in (costs.first, costs.level)
    )
    return replace(costs, first=first, level=level)
