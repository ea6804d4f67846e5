"""Tree attention: paged prefix joined with the fresh keys and values of the tree, one ancestor mask a row."""

from adaptivespec_vllm.attention.choice import ALLOWED, choose
from adaptivespec_vllm.attention.contract import AttentionUnavailable, PagedKV, TreeAttention, TreePlaces
from adaptivespec_vllm.attention.paged import LayoutError, PagedLayout, probe_layout
from adaptivespec_vllm.attention.rows import TreeRows

__all__ = [
    "ALLOWED",
    "AttentionUnavailable",
    "LayoutError",
    "PagedKV",
    "PagedLayout",
    "TreeAttention",
    "TreePlaces",
    "TreeRows",
    "choose",
    "probe_layout",
]
