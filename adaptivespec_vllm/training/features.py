"""What the head sees of the target: hidden states of three layers, and the last one, for every token of every answer.

They are computed once, in shards of a fixed number of answers, so that an epoch of training reads them from disk and an
interrupted run goes on with the first shard that is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from adaptivespec_vllm.config import ConfigError
from adaptivespec_vllm.training.answers import Answer

ANSWERS_A_SHARD = 256
TOKENS_A_FORWARD = 4096


@dataclass(frozen=True)
class Example:
    """One answer with what the target thought of it; L tokens, prompt included.

    Attributes:
        tokens: ``int64 [L]``.
        features: ``bfloat16 [L, 3 * hidden]``, inputs of the auxiliary layers.
        hidden: ``bfloat16 [L, hidden]``, normed output of the last layer: the output layer makes logits of it.
        answer_start: index of the answer's first token.

    """

    tokens: torch.Tensor
    features: torch.Tensor
    hidden: torch.Tensor
    answer_start: int


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs vLLM hands to an EAGLE-3 head that names none; others where the target has too few.

    Raises:
        ConfigError: fewer than four layers.

    """
    for layers in ((2, num_layers // 2, num_layers - 3), (1, num_layers // 2, num_layers - 1)):
        if layers[0] < layers[1] < layers[2]:
            return layers
    raise ConfigError(f"--model: the target has {num_layers} layers; allowed: at least 4")


class Extractor:
    """The target in transformers, for teacher-forced passes over finished answers."""

    def __init__(self, network: Any, layers: Sequence[int]) -> None:
        self._network = network.eval()
        self._layers = tuple(layers)

    @torch.inference_mode()
    def __call__(self, answers: Sequence[Answer]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(features, hidden) of each answer, on the CPU, in bfloat16; similar lengths share a forward pass."""
        rows = [answer.prompt_ids + answer.answer_ids for answer in answers]
        results: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for group in _groups([len(row) for row in rows]):
            longest = max(len(rows[i]) for i in group)
            # Padding follows the tokens, so causal attention never sees it.
            ids = torch.tensor([rows[i] + [0] * (longest - len(rows[i])) for i in group], device=self._network.device)
            states = self._network(ids, output_hidden_states=True, use_cache=False).hidden_states
            features = torch.cat([states[layer] for layer in self._layers], dim=-1)
            for i, feature, last in zip(group, features, states[-1], strict=True):
                size = len(rows[i])
                results[i] = (feature[:size].to(torch.bfloat16).cpu(), last[:size].to(torch.bfloat16).cpu())
        return [results[i] for i in range(len(rows))]


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices, similar lengths together."""
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if group and (len(group) + 1) * lengths[index] > TOKENS_A_FORWARD:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def extract(
    extractor: Extractor, answers: Sequence[Answer], directory: Path, progress: Callable[[int, int], None]
) -> None:
    """Write the shards that are missing. A shard appears under its name only when it is complete."""
    directory.mkdir(parents=True, exist_ok=True)
    count = -(-len(answers) // ANSWERS_A_SHARD)
    for index in range(count):
        path = directory / f"{index:05d}.safetensors"
        if not path.exists():
            part = answers[index * ANSWERS_A_SHARD : (index + 1) * ANSWERS_A_SHARD]
            partial = path.with_suffix(f".{os.getpid()}")
            save_file(_shard(extractor, part), partial)
            partial.rename(path)
        progress(index + 1, count)


def _shard(extractor: Extractor, answers: Sequence[Answer]) -> dict[str, torch.Tensor]:
    features, hidden = zip(*extractor(answers), strict=True)
    tokens = [token for answer in answers for token in answer.prompt_ids + answer.answer_ids]
    return {
        "tokens": torch.tensor(tokens, dtype=torch.int32),
        "features": torch.cat(features),
        "hidden": torch.cat(hidden),
        "lengths": torch.tensor([len(part) for part in features], dtype=torch.int32),
        "answer_starts": torch.tensor([len(answer.prompt_ids) for answer in answers], dtype=torch.int32),
    }


class Shards:
    """All examples of a directory of shards, in the order of the answers, read from disk when asked for."""

    def __init__(self, directory: Path) -> None:
        self._files = [safe_open(path, framework="pt") for path in sorted(directory.glob("*.safetensors"))]
        self._index: list[tuple[int, int, int, int]] = []
        for number, file in enumerate(self._files):
            offset = 0
            for length, start in zip(
                file.get_tensor("lengths").tolist(), file.get_tensor("answer_starts").tolist(), strict=True
            ):
                self._index.append((number, offset, length, start))
                offset += length

    def __len__(self) -> int:
        return len(self._index)

    def length(self, index: int) -> int:
        """Tokens of an example, prompt included."""
        return self._index[index][2]

    def __getitem__(self, index: int) -> Example:
        number, offset, length, start = self._index[index]
        file, end = self._files[number], offset + length
        part = {name: file.get_slice(name)[offset:end] for name in ("tokens", "features", "hidden")}
        return Example(part["tokens"].long(), part["features"], part["hidden"], start)
