"""Between the two end shapes: each of depth, width and nodes moves linearly with ``s``, then is rounded.

At half-way points the value has already moved: a half is rounded *towards the high-confidence shape*, up for a number
that grows and down for one that shrinks. This is what gives the published table of reachable shapes, thresholds
included; Python's own ``round`` (halves to even) does not, nor does rounding all halves up (width 3 at s = 0.5, not 2).

Counting the root, as the published numbers do, or not, as ours do, shifts a number by one and no threshold.
"""

from __future__ import annotations

import math

from adaptivespec_vllm.config import MAX_EXPANDED_NODES
from adaptivespec_vllm.types import TreeShape


def interpolate(low: TreeShape, high: TreeShape, s: float, cap: int) -> TreeShape:
    """The shape at strength ``s`` in [0, 1], made consistent and at most ``cap`` nodes large."""
    depth, width, nodes = (_between(a, b, s) for a, b in zip(low, high, strict=True))
    return bounded(TreeShape(depth, width, nodes), cap)


def bounded(shape: TreeShape, cap: int) -> TreeShape:
    """The largest shape within ``shape`` that has at most ``cap`` nodes and no more levels than nodes.

    The width is cut where the head could not expand that many nodes on so many levels.
    """
    nodes = min(shape.nodes, cap)
    depth = min(shape.depth, nodes)
    width = shape.width if depth <= 1 else min(shape.width, MAX_EXPANDED_NODES // (depth - 1))
    return TreeShape(depth, width, nodes)


def _between(low: int, high: int, s: float) -> int:
    steps = math.floor(abs(high - low) * s + 0.5)
    return low + steps if high >= low else low - steps
