"""All processes of an engine run one version of this package, with the same settings and the same ops.

Ranks decide alike only because each computes the same from the same. On one machine that is given; over the nodes of a
cluster it is not, and a rank that differs would hang the others or, worse, decode another text. So the process that
builds the configuration writes down what it is (:class:`Build`), every worker compares that with itself before anything
is loaded, and ranks compare once more what only they know.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from adaptivespec_vllm import __version__, ops
from adaptivespec_vllm.config import AdaptiveSpecConfig, ConfigError
from adaptivespec_vllm.engine import seams


class RanksDiffer(ConfigError):
    """Two processes of one engine are not the same software, or were not given the same settings."""


@dataclass(frozen=True)
class Build:
    """What has to be the same in all processes of an engine; field names are those of messages.

    Attributes:
        adaptivespec_vllm: version of this package.
        vllm: version of vLLM.
        settings: digest of our settings, as this process reads them.

    """

    adaptivespec_vllm: str
    vllm: str
    settings: str

    @classmethod
    def of(cls, settings: AdaptiveSpecConfig) -> Build:
        """What this process is."""
        digest = hashlib.sha256(settings.model_dump_json().encode()).hexdigest()[:16]
        return cls(__version__, seams.vllm_version(), digest)


def check_build(built_by: Build, settings: AdaptiveSpecConfig) -> None:
    """Raise unless this worker is what the process was that built its configuration."""
    mine = Build.of(settings)
    if mine != built_by:
        here = f"this worker on {socket.gethostname()}"
        raise _error([("the process that started the engine", asdict(built_by)), (here, asdict(mine))])


def check_ranks(built_by: Build, device: str) -> None:
    """Raise on every rank unless all ranks are the same, ops for ``device`` included; called by all of them."""
    group = get_tp_group()
    if group.world_size == 1:
        return
    mine = (socket.gethostname(), asdict(built_by) | {"ops": ops.describe()[device]})
    gathered: list[tuple[str, dict[str, str]]] = [mine] * group.world_size
    torch.distributed.all_gather_object(gathered, mine, group=group.cpu_group)
    check_same(gathered)


def check_same(ranks: Sequence[tuple[str, dict[str, str]]]) -> None:
    """Raise for the first rank that is not like rank 0; of each the name of its node and what it is."""
    (first_host, first), *others = ranks
    for rank, (host, other) in enumerate(others, start=1):
        if other != first:
            raise _error([(f"rank 0 on {first_host}", first), (f"rank {rank} on {host}", other)])


def _error(two: list[tuple[str, Any]]) -> RanksDiffer:
    (one, first), (other, second) = two
    names = [name for name in first if first[name] != second.get(name)]
    parts = "; ".join(f"{name}: {first[name]!r} in {one}, {second.get(name)!r} in {other}" for name in names)
    return RanksDiffer(f"{parts}; allowed: the same in every process of an engine, so install the same on every node")
