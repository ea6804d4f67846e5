"""The trees of a step as one flat batch: parents -> depths, positions, ancestor bits."""

from adaptivespec_vllm.tree.batch import batch_trees

__all__ = ["batch_trees"]
