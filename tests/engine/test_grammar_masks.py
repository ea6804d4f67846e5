"""Masks of trees in either layout that vLLM has had: rows of requests end to end, or as many for every request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from adaptivespec_vllm.engine.v1.scheduler import TreeGrammars
from adaptivespec_vllm.types import TreeTokens

MOST_DRAFTS = 6
REQUESTS = {"chain": 100, "tree": 200, "none": 300}
DRAFTS = {"chain": [1, 2], "tree": TreeTokens([1, 2, 3, 4], parents=[0, 0, 1, 2])}
PATHS = {"chain": [(), (1,), (1, 2)], "tree": [(), (1,), (2,), (1, 3), (2, 4)], "none": [()]}


class Manager:
    """Follows texts, not trees; a mask is what names the request and the path, in a buffer that is written again."""

    def __init__(self, padded: bool) -> None:
        self.padded = padded
        self.buffer = np.full((3 * (1 + MOST_DRAFTS), 2), -9)

    def grammar_bitmask(
        self, requests: Mapping[str, int], req_ids: Sequence[str], drafts: Mapping[str, list[int]]
    ) -> np.ndarray:
        end = 0
        for place, name in enumerate(req_ids):
            text = drafts.get(name, [])
            start = place * (1 + MOST_DRAFTS) if self.padded else end
            end = start + 1 + len(text)
            self.buffer[start:end] = [mask(requests[name], tuple(text[:i])) for i in range(1 + len(text))]
        return self.buffer[: len(req_ids) * (1 + MOST_DRAFTS) if self.padded else end]


def mask(request: Any, path: tuple[int, ...]) -> tuple[int, int]:
    return request, int("0" + "".join(map(str, path)))


@pytest.mark.parametrize("padded", [False, True], ids=["rows end to end", "rows padded, as in vLLM 0.33"])
def test_a_node_has_the_mask_of_its_own_path(padded: bool) -> None:
    masks = TreeGrammars(Manager(padded)).grammar_bitmask(REQUESTS, ["chain", "tree", "none"], DRAFTS)  # type: ignore[arg-type]
    starts = [0, 1 + MOST_DRAFTS, 2 * (1 + MOST_DRAFTS)] if padded else [0, 3, 8]
    assert len(masks) == (3 * (1 + MOST_DRAFTS) if padded else 9)
    for start, (name, paths) in zip(starts, PATHS.items(), strict=True):
        expected = [mask(REQUESTS[name], path) for path in paths]
        assert [tuple(row) for row in masks[start : start + len(paths)]] == expected, name
