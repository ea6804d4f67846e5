"""The head's first pass: rows of the tokens that the target has just confirmed, with the target's hidden states.

The pass keeps the head's KV cache complete, and its last row of each request is where drafting begins. A request that
does not draft for a while needs neither, so its rows are put off and go through the head together when it drafts again:
a pass over many rows costs little more than one over a single row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from adaptivespec_vllm.engine.v1.transfer import to_device


@dataclass(frozen=True)
class Rows:
    """Consecutive tokens of a request, or of several one after the other.

    Attributes:
        tokens: ``[R]`` token ids.
        positions: ``int64 [R]``.
        hidden: ``[R, hidden states of the auxiliary layers]``.

    """

    tokens: torch.Tensor
    positions: torch.Tensor
    hidden: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.positions.nbytes + self.hidden.nbytes

    def part(self, first: int, end: int) -> Rows:
        """A view of some rows."""
        return Rows(self.tokens[first:end], self.positions[first:end], self.hidden[first:end])

    def copies(self, spans: Sequence[tuple[int, int]]) -> list[Rows]:
        """Copies of spans of rows that outlive the step: vLLM writes the next step into the same memory.

        They share theirs, as one copy costs much less than many.
        """
        at = to_device(np.concatenate([np.arange(first, end) for first, end in spans]), self.tokens.device)
        copy = Rows(self.tokens[at], self.positions[at], self.hidden[at])
        ends = np.cumsum([end - first for first, end in spans]).tolist()
        return [copy.part(first, end) for first, end in zip([0, *ends[:-1]], ends, strict=True)]

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        if len(parts) == 1:
            return parts[0]
        return Rows(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.positions for part in parts]),
            torch.cat([part.hidden for part in parts]),
        )


MOST_PUT_OFF = 64
"""Rows of a request that may wait in any case; as many steps without drafting, or the end of a short prompt."""

PUT_OFF_BYTES = 128 << 20
"""More of them may wait while those of all requests take less."""


_PARTS = 64
"""Steps whose rows a request may share with others; then it gets a copy of its own, so that no step's stay for long."""


class Backlog:
    """Rows that were put off, by request.

    Args:
        most: rows of a request that fit into one pass.

    """

    def __init__(self, most: int) -> None:
        self.parts: dict[str, list[Rows]] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        """Positions of a request's first waiting row and behind its last; the rows themselves may be on a device."""
        self._most = most
        self._bytes = 0

    @property
    def limit(self) -> int:
        """Rows of a request that may wait now."""
        return self._most if self._bytes < PUT_OFF_BYTES else min(self._most, MOST_PUT_OFF)

    def __len__(self) -> int:
        """Requests that have rows waiting."""
        return len(self.parts)

    def waiting(self, request: str, position: int) -> int:
        """Rows of a request that lead up to a position. Those that do not (it was preempted since) are dropped."""
        parts = self.parts.get(request)
        if not parts:
            return 0
        first, end = self._spans[request]
        if end != position:
            self.forget(request)
            return 0
        return position - first  # there may be thousands of parts

    def put(self, request: str, rows: Rows, end: int) -> None:
        """Put rows off, behind those that wait already; ``end`` is the position behind the last of them."""
        parts = self.parts.setdefault(request, [])
        if len(parts) > _PARTS:
            parts[:] = [Rows.joined(parts)]
        parts.append(rows)
        first, _ = self._spans.get(request, (end - len(rows), end))
        self._spans[request] = first, end
        self._bytes += rows.nbytes

    def take(self, request: str) -> list[Rows]:
        """What was put off, in order; it is no longer here."""
        parts = self.parts.pop(request, [])
        self._spans.pop(request, None)
        self._bytes -= sum(part.nbytes for part in parts)
        return parts

    def forget(self, request: str) -> None:
        """The request has ended, or begins anew."""
        self.take(request)


def slots_of(positions: torch.Tensor, block_row: torch.Tensor, block_size: int) -> torch.Tensor:
    """Cache slots of positions of one request, from its row of the block table."""
    return block_row[positions // block_size].long() * block_size + positions % block_size


def metadata_of(
    common: Any, requests: Sequence[int], lengths: Sequence[int], block_table: torch.Tensor, slots: torch.Tensor
) -> Any:
    """vLLM's common metadata of some requests of the batch, with so many rows each.

    Args:
        common: ``CommonAttentionMetadata`` of the whole batch.
        requests: ``[C]`` which requests.
        lengths: ``[C]`` rows of each.
        block_table: of the whole batch.
        slots: ``int64`` of all those rows.

    """
    device = common.query_start_loc.device
    start = torch.zeros(len(requests) + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(lengths, dtype=torch.int32), 0, out=start[1:])
    chosen = torch.tensor(requests)
    seq_lens = common.seq_lens_cpu_upper_bound[chosen]  # exact: tokens are verified before they are counted here
    return replace(
        common,
        query_start_loc=to_device(start, device),
        query_start_loc_cpu=start,
        seq_lens=to_device(seq_lens, device),
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(requests),
        num_actual_tokens=int(start[-1]),
        max_query_len=max(lengths),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=block_table[to_device(chosen, device)],
        slot_mapping=slots,
        positions=None,
        is_prefilling=None,
    )
