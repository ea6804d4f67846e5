"""Expansion of draft trees, with the head given as an object; on the host, or in a grid on the device."""

from adaptivespec_vllm.draft.ahead import Ahead, AheadRows, DeviceHead, RecordedHead, draft_ahead
from adaptivespec_vllm.draft.expand import DraftHead, LevelRows, expand_trees, scratch_rows_needed
from adaptivespec_vllm.draft.grid import NO_TOKEN, GridBounds, TreeGrid, WorthOnDevice, expand_grid, grid_of

__all__ = [
    "NO_TOKEN",
    "Ahead",
    "AheadRows",
    "DeviceHead",
    "DraftHead",
    "GridBounds",
    "LevelRows",
    "RecordedHead",
    "TreeGrid",
    "WorthOnDevice",
    "draft_ahead",
    "expand_grid",
    "expand_trees",
    "grid_of",
    "scratch_rows_needed",
]
