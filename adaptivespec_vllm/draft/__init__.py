"""Level-by-level expansion of draft trees, with the head given as an object."""

from adaptivespec_vllm.draft.ahead import Ahead, AheadRows, DeviceHead, RecordedHead, draft_ahead
from adaptivespec_vllm.draft.expand import DraftHead, LevelRows, expand_trees, scratch_rows_needed

__all__ = [
    "Ahead",
    "AheadRows",
    "DeviceHead",
    "DraftHead",
    "LevelRows",
    "RecordedHead",
    "draft_ahead",
    "expand_trees",
    "scratch_rows_needed",
]
