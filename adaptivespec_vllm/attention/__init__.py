"""Tree attention: paged prefix joined with the fresh keys and values of the tree, one ancestor mask a row."""

from adaptivespec_vllm.attention.paged import LayoutError, PagedLayout, probe_layout
from adaptivespec_vllm.attention.rows import TreeRows

__all__ = ["LayoutError", "PagedLayout", "TreeRows", "probe_layout"]
