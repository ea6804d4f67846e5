"""What a run writes: where and how it ran, every turn of every arm, and the figures made of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from adaptivespec_vllm.bench.arms import Family
from adaptivespec_vllm.bench.errors import BadInput

SCHEMA_VERSION: Literal[1] = 1
FILE = "result.json"
ALL_KINDS = "all"
"""Stands for every kind of prompt together."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Place(_Model):
    """What is measured on its own: a batch size at a length of context."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: int = Field(description="requests decoded together")
    context: int | None = Field(description="tokens that prompts were brought to; null is as they are")

    def title(self) -> str:
        """For headings."""
        return f"batch {self.batch}" + (f", context of {self.context}" if self.context is not None else "")


class Sample(_Model):
    """One arm's turn at one batch of prompts.

    Times and counts begin when every request of the batch has its first token, so prefill counts in none of them.
    """

    arm: str
    place: Place
    kind: str
    group: int = Field(description="number of the batch of prompts within its place")
    round: int = Field(description="number of the repeat")
    prompts: list[str] = Field(description="ids, one a request")
    prompt_tokens: int = Field(description="of all requests")
    prefill_seconds: float
    seconds: float
    emitted: int = Field(description="tokens of all requests")
    steps: int = Field(description="steps of single requests: how often one of them emitted")
    engine_steps: int
    reached: list[int] = Field(description="steps whose accepted path reached depth 1, 2, ...")
    drafted: dict[str, float] = Field(description="sums over steps of nodes, depth and width; empty where unknown")
    promotions: int | None = None
    sections: dict[str, float] = Field(description="seconds of the parts of a step")
    same_text: int = Field(description="requests whose text is that of plain decoding, token for token")
    device_peak_bytes: int | None = Field(default=None, description="device memory taken beyond that held before")


class ArmInfo(_Model):
    """An arm, and what starting its engine took."""

    name: str
    family: Family
    lossless: bool
    chain: int | None
    speculative: dict[str, Any] | None
    start_seconds: float
    resident_bytes: int = Field(description="growth of the process's resident memory")
    device_bytes: int | None = Field(default=None, description="growth of the memory allocated on the device")


class Spread(_Model):
    """Of one value a batch of prompts (the median of its repeats)."""

    median: float
    q1: float
    q3: float
    low: float = Field(description="95 % bootstrap interval of the median, batches of prompts resampled")
    high: float
    n: int


class Figures(_Model):
    """One arm on one kind of prompts at one place; null where there is nothing to say."""

    arm: str
    place: Place
    kind: str
    tokens_per_second: float | None
    ratio: Spread | None = Field(description="tokens/s over that of plain decoding in the same turn")
    ratio_of_totals: float | None
    ms_per_step: float | None
    accepted_length: float | None = Field(description="tokens a step of a request, the target's own included")
    accepted_at_depth: list[float] = Field(description="share of steps whose accepted path reached depth 1, 2, ...")
    nodes: float | None
    depth: float | None
    width: float | None
    promotions: int | None
    same_text: int
    requests: int
    split_ms: dict[str, float] = Field(description="milliseconds of an engine step by part; their sum is the step")
    device_peak_bytes: int | None


class Relative(_Model):
    """An arm's tokens/s over another's in the same turn."""

    arm: str
    to: str
    role: Literal["best stock", "best static tree", "same without margin"]
    ratio: Spread


class Standing(_Model):
    """Who is best on a kind of prompts, and where the others stand beside them.

    The best is chosen on the figures it is then compared on, which flatters it and not the arms compared with it.
    """

    place: Place
    kind: str
    best_stock: str | None
    best_static: str | None = Field(description="among lossless static trees")
    relatives: list[Relative]


class TracedToken(_Model):
    """A token of a traced text."""

    text: str
    lost: float = Field(description="nats that it gave up against the target's first choice, which 0 is")


class TracedStep(_Model):
    """What one engine step emitted, and the tree that it verified; the first step reads the prompt."""

    tokens: list[TracedToken]
    nodes: int
    depth: int
    width: int

    @property
    def promoted(self) -> int:
        """Tokens that were not the target's first choice."""
        return sum(token.lost > 0 for token in self.tokens)


class Trace(_Model):
    """The answer of an arm to one prompt, decoded alone and untimed."""

    arm: str
    prompt: str = Field(description="its id")
    question: str
    steps: list[TracedStep]

    @property
    def emitted(self) -> int:
        """Tokens of the answer."""
        return sum(len(step.tokens) for step in self.steps)


class Result(_Model):
    """The whole of a run."""

    schema_version: Literal[1] = SCHEMA_VERSION
    complete: bool = Field(default=False, description="false: it was stopped, or is still going on")
    provenance: dict[str, Any]
    settings: dict[str, Any] = Field(description="what has to be alike where two results are compared")
    warnings: list[str] = Field(default_factory=list)
    memory: dict[str, int] = Field(default_factory=dict, description="peaks of the whole process, in bytes")
    arms: list[ArmInfo] = Field(default_factory=list)
    samples: list[Sample] = Field(default_factory=list)
    figures: list[Figures] = Field(default_factory=list)
    standings: list[Standing] = Field(default_factory=list)
    traces: list[Trace] = Field(default_factory=list, description="of arms of ours; none where texts were drawn")

    def places(self) -> list[Place]:
        """In the order in which they were measured."""
        return list(dict.fromkeys(sample.place for sample in self.samples))

    def kinds(self) -> list[str]:
        """All kinds, and all of them together last where there are several."""
        kinds = list(dict.fromkeys(sample.kind for sample in self.samples))
        return kinds if len(kinds) < 2 else [*kinds, ALL_KINDS]

    def write(self, directory: Path) -> Path:
        """Write to the directory; a reader never finds half a file."""
        path = directory / FILE
        half = path.with_suffix(".json.part")
        half.write_text(self.model_dump_json(indent=1), encoding="utf-8")
        os.replace(half, path)
        return path

    @classmethod
    def read(cls, path: Path) -> Result:
        """The result of a file, or of a directory that holds one."""
        file = path / FILE if path.is_dir() else path
        allowed = f"the {FILE} of adaptivespec bench, or its directory"
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise BadInput("result", str(path), allowed) from None
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA_VERSION:
            raise BadInput("result", f"{path}, schema {version}", f"{allowed}, of schema {SCHEMA_VERSION}")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in fault["loc"])
            raise BadInput("result", f"{path}, {where}: {fault['msg']}", allowed) from None
