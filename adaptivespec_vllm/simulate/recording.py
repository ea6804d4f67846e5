"""What a draft head proposes at every position of texts, recorded once.

Greedy strict decoding emits the target's text whatever is drafted, so the accepted path of any tree is the longest
beginning of the rest of the text that lies in it. A step may begin anywhere, so a tree is recorded at every position::

    text       t0   t1   t2   t3 ...          position 1: the root is t1, and the text goes on with t2, t3, ...
                    |
                root ── children, best first: t2, x, y, ...       taken of the root: 0
                         └── children of t2: u, t3, v, ...        taken of t2: 1

A recorded node is one that the head ran over, with its best children. Tokens are not kept: a child is its rank.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adaptivespec_vllm.bench.errors import BadInput

CHILDREN = 8
"""Children that are recorded of each node: the widest tree that can be replayed."""

NOT_TAKEN = -1
_OPTION = "--recording"
_NO_RECORDING = (ValueError, KeyError, TypeError, IndexError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error)
"""What reading another file as a recording ends in."""
_ARRAYS = {"log_probs": np.float16, "parents": np.int16, "ranks": np.int8, "taken": np.int8, "nodes": np.int32}


@dataclass(frozen=True, slots=True)
class Position:
    """The drafts behind one token of a text; E recorded nodes, a parent before its children, the root first.

    Attributes:
        log_probs: ``float32 [E, CHILDREN]`` of each node's best children given the node, descending.
        nodes: ``int16 [E, CHILDREN]`` the recorded node that each child is, -1 where the head did not run over it.
        taken: ``int8 [E]`` which child the text goes on with, -1 where none of them or where the node itself is not
            in the text.

    """

    log_probs: np.ndarray
    nodes: np.ndarray
    taken: np.ndarray

    @staticmethod
    def of(log_probs: np.ndarray, parents: np.ndarray, ranks: np.ndarray, taken: np.ndarray) -> Position:
        """From the way a file keeps them: the parent of each node, and which of its children the node is."""
        nodes = np.full(log_probs.shape, -1, dtype=np.int16)
        nodes[parents[1:], ranks[1:]] = np.arange(1, len(parents))
        return Position(log_probs.astype(np.float32), nodes, taken)


@dataclass(frozen=True, slots=True)
class RecordedText:
    """One text of the target; ``positions[i]`` has its token i as the root, the last of them the last but one."""

    id: str
    kind: str
    positions: list[Position]

    @property
    def tokens(self) -> int:
        """Tokens to decode; the first one of the text comes with its prompt."""
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class Recording:
    """Recorded texts, and where they come from."""

    texts: list[RecordedText]
    about: dict[str, Any]

    @property
    def kinds(self) -> list[str]:
        """Kinds of the texts in the order of their first ones."""
        return list(dict.fromkeys(text.kind for text in self.texts))

    def only(self, kinds: Sequence[str]) -> Recording:
        """The texts of some kinds."""
        for kind in kinds:
            if kind not in self.kinds:
                raise BadInput("--kinds", kind, f"kinds of the recording: {', '.join(self.kinds)}")
        return Recording([text for text in self.texts if text.kind in kinds], self.about)

    @staticmethod
    def read(path: Path) -> Recording:
        """A recording from its file.

        Raises:
            BadInput: no such file, or not a recording.

        """
        allowed = "a file that scripts/record_steps.py wrote"
        try:
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                arrays = {name: np.asarray(file[name], dtype=dtype) for name, dtype in _ARRAYS.items()}
            return Recording(_texts(about.pop("texts"), arrays), about)
        except OSError as error:
            raise BadInput(_OPTION, str(path), f"{allowed} ({error.strerror or 'it cannot be read'})") from None
        except _NO_RECORDING:
            raise BadInput(_OPTION, str(path), f"{allowed} (this is none, or one of another version)") from None


def write(path: Path, texts: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Write a recording.

    Args:
        path: the file, of the format ``.npz``.
        texts: of each its ``id``, its ``kind`` and its ``positions``, each ``(log_probs, parents, ranks, taken)`` as
            :meth:`Position.of` takes them.
        about: plain values that say where they come from.

    """
    positions = [position for text in texts for position in text["positions"]]
    columns = dict(zip(("log_probs", "parents", "ranks", "taken"), zip(*positions, strict=True), strict=True))
    arrays = {name: np.concatenate(parts).astype(_ARRAYS[name]) for name, parts in columns.items()}
    arrays["nodes"] = np.array([len(parents) for parents in columns["parents"]], dtype=_ARRAYS["nodes"])
    listed = [{"id": t["id"], "kind": t["kind"], "positions": len(t["positions"])} for t in texts]
    np.savez_compressed(path, about=json.dumps({**about, "texts": listed}), **arrays)


def _texts(listed: list[dict[str, Any]], arrays: Mapping[str, np.ndarray]) -> list[RecordedText]:
    ends = np.cumsum(arrays["nodes"]).tolist()
    bounds = iter(zip([0, *ends], ends, strict=False))
    texts = []
    for text in listed:
        positions = []
        for _ in range(text["positions"]):
            part = slice(*next(bounds))
            positions.append(Position.of(*(arrays[name][part] for name in ("log_probs", "parents", "ranks", "taken"))))
        texts.append(RecordedText(text["id"], text["kind"], positions))
    return texts
