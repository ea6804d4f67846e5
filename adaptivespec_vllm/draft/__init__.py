"""Level-by-level expansion of draft trees, with the head given as an object."""

from adaptivespec_vllm.draft.expand import DraftHead, LevelRows, expand_trees, scratch_rows_needed

__all__ = ["DraftHead", "LevelRows", "expand_trees", "scratch_rows_needed"]
