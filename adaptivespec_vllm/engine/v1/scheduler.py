"""vLLM's scheduler with grammars that follow trees; vLLM finds it through ``scheduler_cls``.

A worker hands the drafts of a request with a grammar over as ``TreeTokens``. vLLM's manager of grammars advances along
a list of tokens as along a text; here it is given the path of each leaf instead, one text after the other, so that a
node's mask is that of its own path. It rolls the grammar back after each by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.structured_output import StructuredOutputManager

from adaptivespec_vllm.types import TreeTokens


class TreeScheduler(Scheduler):
    """vLLM's scheduler; the only difference is who answers its questions about grammars."""

    def __init__(self, *args: Any, structured_output_manager: StructuredOutputManager, **kwargs: Any) -> None:
        super().__init__(*args, structured_output_manager=TreeGrammars(structured_output_manager), **kwargs)


class TreeGrammars:
    """vLLM's manager of grammars, which also knows drafts that are trees.

    Args:
        stock: does the work, one path at a time.

    """

    def __init__(self, stock: StructuredOutputManager) -> None:
        self._stock = stock
        self._room = 0
        """Rows that vLLM gives a request without drafts: one, or from 0.33 on room for the most drafts."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def validate_tokens(self, request: Any, tokens: list[int]) -> list[int]:
        """The tokens that the grammar allows where they stand: of a tree, those below an allowed one too."""
        if not isinstance(tokens, TreeTokens) or not request.use_structured_output:
            return self._stock.validate_tokens(request, tokens)
        allowed: set[int] = set()
        for path in tokens.paths():
            valid = self._stock.validate_tokens(request, [tokens[place] for place in path])
            allowed.update(path[: len(valid)])
        return tokens.pick(sorted(allowed))

    def grammar_bitmask(
        self, requests: Mapping[str, Any], req_ids: list[str], drafts: Mapping[str, list[int]]
    ) -> np.ndarray | None:
        """``int32 [rows, words]``: for each request the mask behind its root, then behind each of its drafts.

        Where vLLM gives every request the same number of rows, those behind are padding.
        """
        if not any(isinstance(drafts.get(req_id), TreeTokens) for req_id in req_ids):
            return self._stock.grammar_bitmask(requests, req_ids, drafts)
        self._room = self._room or len(self._stock.grammar_bitmask(requests, req_ids[:1], {}))
        masks = (self._masks(requests, req_id, drafts.get(req_id, [])) for req_id in req_ids)
        return np.concatenate([np.pad(rows, ((0, max(0, self._room - len(rows))), (0, 0))) for rows in masks])

    def _masks(self, requests: Mapping[str, Any], req_id: str, tokens: list[int]) -> np.ndarray:
        if not isinstance(tokens, TreeTokens):
            return self._along(requests, req_id, tokens)
        masks: np.ndarray | None = None
        for path in tokens.paths():
            along = self._along(requests, req_id, [tokens[place] for place in path])
            if masks is None:
                masks = np.empty((1 + len(tokens), along.shape[1]), dtype=along.dtype)
            masks[[0, *(place + 1 for place in path)]] = along
        assert masks is not None
        return masks

    def _along(self, requests: Mapping[str, Any], req_id: str, text: list[int]) -> np.ndarray:
        """The masks along one text; the stock manager's own buffer is written again by its next call."""
        return self._stock.grammar_bitmask(requests, [req_id], {req_id: text})[: 1 + len(text)].copy()
