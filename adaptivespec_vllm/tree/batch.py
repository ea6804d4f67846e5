"""Trees of a step, flat, as attention and verification read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.types import DraftTree, TreeBatch


def batch_trees(trees: Sequence[DraftTree], root_tokens: Sequence[int]) -> TreeBatch:
    """Flatten the trees of a step.

    Args:
        trees: one tree a request; a tree without nodes stands for a request that decodes plainly.
        root_tokens: the token id at each root.

    Returns:
        The batch, on the CPU.

    """
    sizes = np.fromiter((len(tree) + 1 for tree in trees), dtype=np.int32, count=len(trees))
    start = np.zeros(len(trees) + 1, dtype=np.int32)
    np.cumsum(sizes, out=start[1:])
    tokens = np.empty(start[-1], dtype=np.int32)
    parents = np.empty(start[-1], dtype=np.int32)
    for tree, root, first, end in zip(trees, root_tokens, start[:-1], start[1:], strict=True):
        tokens[first] = root
        tokens[first + 1 : end] = tree.tokens
        parents[first] = -1
        parents[first + 1 : end] = tree.parents
    root_positions = np.fromiter((tree.root_position for tree in trees), dtype=np.int64, count=len(trees))
    return ops.build_tree(
        torch.from_numpy(tokens), torch.from_numpy(parents), torch.from_numpy(start), torch.from_numpy(root_positions)
    )
