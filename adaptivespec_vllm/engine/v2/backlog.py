"""Rows of the head's first pass that are put off while nobody drafts.

A step in which nothing is drafted and nothing was to be verified has one row a request, so the host knows how many rows
wait without a look at the device. They go through the head together, before the next first pass that there is.
"""

from __future__ import annotations

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from adaptivespec_vllm.engine.v1.first_pass import Rows

MOST = 16
"""Rows of a request that wait; as many steps without a pass of the head."""


class Backlog:
    """Hidden states of waiting rows, by request slot, on the device.

    Args:
        slots: request slots.
        width: hidden states of a row.
        dtype: theirs.
        device: where they are.

    """

    def __init__(self, slots: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.waiting = np.zeros(slots, dtype=np.int64)
        """Rows of each slot."""
        self._hidden = torch.zeros(slots, MOST, width, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self._hidden.nbytes

    def has_room(self, slots_np: np.ndarray) -> bool:
        """Whether one row more of each of these slots may wait."""
        return bool((self.waiting[slots_np] < MOST).all())

    def put(self, slots: torch.Tensor, slots_np: np.ndarray, hidden: torch.Tensor) -> None:
        """Put off a row ``hidden [B, width]`` of each of B slots."""
        self._hidden[slots, async_tensor_h2d(self.waiting[slots_np], device=slots.device)] = hidden
        self.waiting[slots_np] += 1

    def forget(self, slot: int) -> None:
        """Another request begins in a slot."""
        self.waiting[slot] = 0

    def take(
        self,
        slots_np: np.ndarray,
        roots: torch.Tensor,
        all_tokens: torch.Tensor,
        block_table: torch.Tensor,
        block_size: int,
    ) -> tuple[Rows, torch.Tensor, torch.Tensor]:
        """Everything that waits in some slots, which is no longer here: C requests, as many rows of each as of the one
        that has most. Those that a request does not have are behind its own, and have slot -1.

        Args:
            slots_np: ``[C]``.
            roots: ``int64 [C]``, position of the first row of each that does not wait.
            all_tokens: ``[slots, positions]`` texts.
            block_table: ``int32 [C, blocks]``.
            block_size: tokens of a block.

        Returns:
            the rows; ``int32 [C + 1]``, first row of each request; ``int64`` cache slot of each row.

        """
        device = roots.device
        counts_np, self.waiting[slots_np] = self.waiting[slots_np], 0
        most = int(counts_np.max())
        counts, slots = (async_tensor_h2d(array, device=device) for array in (counts_np, slots_np))
        columns = torch.arange(most, device=device)
        places = (roots - counts)[:, None] + columns
        own = columns < counts[:, None]
        blocks = (places // block_size).clamp(max=block_table.shape[1] - 1)
        cache_slots = block_table.gather(1, blocks).long() * block_size + places % block_size
        following = (places + 1).clamp(max=all_tokens.shape[1] - 1)
        tokens = all_tokens[slots[:, None], following].masked_fill(~own, 0)
        start = torch.arange(0, (len(counts_np) + 1) * most, most, dtype=torch.int32, device=device)
        rows = Rows(tokens.flatten(), places.flatten(), self._hidden[slots, :most].flatten(0, 1))
        return rows, start, cache_slots.masked_fill(~own, -1).flatten()
