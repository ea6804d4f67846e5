"""The training loop: soft targets of the target model, unrolled draft steps, checkpoints to go on from."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from adaptivespec_vllm.training.curve import CURVE, note
from adaptivespec_vllm.training.features import Shards
from adaptivespec_vllm.training.network import Batch, Eagle3Network, StepOutput

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class Schedule:
    """How long and how fast.

    Args:
        epochs: passes over the training answers.
        batch_tokens: tokens of a batch, padding included.
        learning_rate: peak, reached after ``warmup`` of all steps; a cosine leads to a twentieth of it.
        warmup: share of all steps.
        unrolled: draft steps that are trained.
        keep: share of the rows with which each further step goes on.
        decay: weight of a step's loss relative to the step before it.
        seed: of the order of the answers.

    """

    epochs: int = 8
    batch_tokens: int = 4096
    learning_rate: float = 1e-3
    warmup: float = 0.03
    unrolled: int = 5
    keep: float = 0.7
    decay: float = 0.9
    seed: int = 0

    def rate(self, progress: float) -> float:
        """Learning rate at a share of all steps."""
        if progress < self.warmup:
            return self.learning_rate * progress / self.warmup
        cosine = 0.5 + 0.5 * math.cos(math.pi * (progress - self.warmup) / (1 - self.warmup))
        return self.learning_rate * (0.05 + 0.95 * cosine)


@dataclass(frozen=True)
class Agreement:
    """How often the head's first choice is the target's.

    Attributes:
        at_depth: share of rows, by depth, given that the text up to there is the target's.
        chain: mean number of tokens in a row, from depth 1, that agree.
        rows: rows at depth 1.

    """

    at_depth: list[float]
    chain: float
    rows: int


class TargetOutput:
    """The target's output layer over the draft vocabulary, and over all tokens.

    Args:
        weight: ``[target vocabulary, hidden]``.
        ids: ``int64 [D]``, the draft vocabulary.

    """

    def __init__(self, weight: torch.Tensor, ids: torch.Tensor) -> None:
        self._weight, self._ids = weight, ids
        self._reduced = weight[ids].contiguous()

    def probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[N, D]``: the target's distribution, given that it stays within the draft vocabulary."""
        return F.linear(hidden, self._reduced.to(hidden.dtype)).float().softmax(-1)

    def choices(self, hidden: torch.Tensor) -> torch.Tensor:
        """``int64 [N]``: the target's first choice among all its tokens."""
        return F.linear(hidden, self._weight.to(hidden.dtype)).argmax(-1)

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return self._ids[draft_ids]


def batches(data: Shards, indices: Sequence[int], tokens: int, order: random.Random | None) -> Iterator[list[int]]:
    """Examples of similar length together, at most ``tokens`` with padding; in random order if there is one."""
    by_length = sorted(indices, key=lambda i: (data.length(i), order.random() if order else 0.0))
    groups: list[list[int]] = [[]]
    for index in by_length:
        if groups[-1] and (len(groups[-1]) + 1) * data.length(index) > tokens:
            groups.append([])
        groups[-1].append(index)
    if order:
        order.shuffle(groups)
    return iter(groups)


class Trainer:
    """Trains a head in a directory, and goes on there where it was interrupted."""

    def __init__(
        self,
        network: Eagle3Network,
        target: TargetOutput,
        data: Shards,
        held_out: Sequence[int],
        schedule: Schedule,
        directory: Path,
    ) -> None:
        self.network, self.target, self.data, self.schedule = network, target, data, schedule
        self.held_out = list(held_out)
        measured = set(held_out)
        self.training = [i for i in range(len(data)) if i not in measured]
        self.directory = directory
        decayed = [p for p in network.parameters() if p.ndim > 1]
        plain = [p for p in network.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], betas=(0.9, 0.95)
        )
        self.epoch = self.done_in_epoch = self.step = 0
        self.seconds = 0.0
        self._load()

    @property
    def steps_an_epoch(self) -> int:
        return sum(1 for _ in self._epoch_batches(0))

    def _epoch_batches(self, epoch: int) -> Iterator[list[int]]:
        order = random.Random(f"{self.schedule.seed}/{epoch}")
        return batches(self.data, self.training, self.schedule.batch_tokens, order)

    def run(
        self,
        progress: Callable[[int, int, dict[str, Any]], None],
        after_epoch: Callable[[], None] = lambda: None,
        checkpoint_seconds: float = 300.0,
    ) -> None:
        """Train to the end of the schedule, writing a checkpoint every so often."""
        total = self.steps_an_epoch * self.schedule.epochs
        saved = started = time.monotonic()
        before = self.seconds
        while self.epoch < self.schedule.epochs:
            for number, indices in enumerate(self._epoch_batches(self.epoch)):
                if number < self.done_in_epoch:
                    continue
                loss = self._train_on(indices, self.schedule.rate(self.step / total))
                self.step, self.done_in_epoch = self.step + 1, number + 1
                now = time.monotonic()
                self.seconds = before + now - started
                progress(self.step, total, {"loss": loss, "epoch": self.epoch})
                if now - saved >= checkpoint_seconds:
                    self.save()
                    saved = now
            self.epoch, self.done_in_epoch = self.epoch + 1, 0
            position = {"epoch": self.epoch, "step": self.step, "seconds": round(self.seconds)}
            note(self.directory / CURVE, position | asdict(self.evaluate()))
            self.save()
            after_epoch()

    def _train_on(self, indices: Sequence[int], rate: float) -> float:
        self.network.train()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros(())
        with self._autocast():
            batch = self._batch(indices)
            schedule = self.schedule
            outputs = self.network.steps(batch, schedule.unrolled, schedule.keep, schedule.seed + self.step)
            for k, output in enumerate(outputs):
                if len(output.b):
                    loss = loss + schedule.decay**k * self._loss(output, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach())

    def _loss(self, output: StepOutput, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.target.probabilities(batch.hidden[output.b, output.at])
        return F.cross_entropy(output.logits.float(), wanted)

    def _batch(self, indices: Sequence[int]) -> Batch:
        return Batch.of([self.data[i] for i in indices], next(self.network.parameters()).device)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(next(self.network.parameters()).device.type, dtype=torch.bfloat16)

    @torch.no_grad()
    def evaluate(self, depths: int = 5) -> Agreement:
        """Agreement on the answers that are held out."""
        self.network.eval()
        agreed, rows, chain = [0] * depths, [0] * depths, 0
        for indices in batches(self.data, self.held_out, self.schedule.batch_tokens, None):
            with self._autocast():
                batch = self._batch(indices)
                unbroken = torch.ones(batch.tokens.shape, dtype=torch.bool, device=batch.tokens.device)
                for k, output in enumerate(self.network.steps(batch, depths)):
                    choice = self.target.choices(batch.hidden[output.b, output.at])
                    same = self.target.target_ids(output.logits.argmax(-1)) == choice
                    agreed[k] += int(same.sum())
                    rows[k] += len(same)
                    # A row is known by where its draft began. Where a sampled text leaves the target's choices its
                    # chain ends.
                    began = (output.b, output.at - 1 - k)
                    unbroken[began] &= same
                    chain += int(unbroken[began].sum())
                    unbroken[began] &= choice == batch.tokens[output.b, output.at + 1]
        shares = [a / n if n else 0.0 for a, n in zip(agreed, rows, strict=True)]
        return Agreement(shares, chain / rows[0] if rows[0] else 0.0, rows[0])

    # --- what is kept ---

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": (self.epoch, self.done_in_epoch, self.step, self.seconds),
            "schedule": asdict(self.schedule),
        }
        partial = self.directory / f"{CHECKPOINT}.{os.getpid()}"
        torch.save(state, partial)
        partial.rename(self.directory / CHECKPOINT)

    def _load(self) -> None:
        path = self.directory / CHECKPOINT
        if path.exists():
            state = torch.load(path, weights_only=True)
            self.network.load_state_dict(state["network"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.epoch, self.done_in_epoch, self.step, self.seconds = state["progress"]
