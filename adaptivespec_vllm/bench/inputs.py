"""The options of the command line, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from adaptivespec_vllm.bench import arms, prompts
from adaptivespec_vllm.bench.arms import Arm
from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.bench.prompts import Prompt
from adaptivespec_vllm.bench.result import Place
from adaptivespec_vllm.runtime import looks_like_path

DTYPES = ("auto", "float32", "bfloat16", "float16")
MOST_BATCH = 1024
MOST_CONTEXT = 1_000_000
OUTPUT = Path("bench-results")


@dataclass(frozen=True)
class Inputs:
    """What is to be measured."""

    model: str
    head: str | None
    arms: list[Arm]
    places: list[Place]
    prompts: list[Prompt]
    tokens: int
    repeats: int
    temperature: float
    dtype: str | None
    eager: bool | None
    seed: int

    @property
    def longest_context(self) -> int:
        return max(place.context or 0 for place in self.places)

    @property
    def largest_batch(self) -> int:
        return max(place.batch for place in self.places)


def gather(
    *,
    model: str,
    head: str | None,
    arm_names: str,
    batch: str,
    context: str | None,
    kinds: str | None,
    file: Path | None,
    limit: int | None,
    tokens: int,
    repeats: int,
    temperature: float,
    dtype: str | None,
    eager: bool | None,
    seed: int,
) -> Inputs:
    """All options, or the first fault among them.

    Raises:
        BadInput: it names the option, what was given and what is allowed.

    """
    for option, value in (("--model", model), ("--head", head)):
        check_path(option, value)
    for option, number, least, most in (
        ("--max-tokens", tokens, 2, MOST_CONTEXT),  # the first token is prefill's
        ("--repeats", repeats, 1, 1000),
        ("--limit", limit, 1, None),
        ("--seed", seed, 0, 2**31 - 1),
    ):
        check_integer(option, number, least, most)
    if not 0 <= temperature <= 2:
        raise BadInput("--temperature", temperature, "a number from 0 to 2")
    if dtype is not None and dtype not in DTYPES:
        raise BadInput("--dtype", dtype, ", ".join(DTYPES))
    batches = integers("--batch", batch, 1, MOST_BATCH)
    contexts = [None] if context is None else integers("--context", context, 1, MOST_CONTEXT)
    wanted = None if kinds is None else words("--kinds", kinds)
    chosen = prompts.choose(prompts.bundled() if file is None else prompts.read(file), wanted, limit)
    return Inputs(
        model=model,
        head=head,
        arms=arms.parse(arm_names, head),
        places=[Place(batch=b, context=c) for c in contexts for b in batches],
        prompts=chosen,
        tokens=tokens,
        repeats=repeats,
        temperature=temperature,
        dtype=dtype,
        eager=eager,
        seed=seed,
    )


def output_directory(given: Path | None, option: str = "--output") -> Path:
    """Where everything is written; a new directory named by the time unless one was given."""
    directory = given if given is not None else OUTPUT / datetime.now().strftime("%Y%m%d-%H%M%S")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BadInput(option, str(directory), f"a directory that can be written ({error.strerror})") from None
    return directory


def check_path(option: str, value: str | None) -> None:
    """What looks like a path must be a directory; anything else may be a hub id."""
    if value is None:
        return
    if not value.strip():
        raise BadInput(option, value, "a directory or a hub id")
    if looks_like_path(value) and not Path(value).is_dir():
        raise BadInput(option, value, "a directory that exists, or a hub id")


def check_integer(option: str, value: int | None, least: int, most: int | None) -> None:
    """Within its bounds, where it is given."""
    if value is not None and (value < least or (most is not None and value > most)):
        raise BadInput(option, value, f"an integer from {least}" + (f" to {most}" if most is not None else " on"))


def words(option: str, text: str) -> list[str]:
    """Names of a list separated by commas."""
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise BadInput(option, text, "names separated by commas")
    return words


def integers(option: str, text: str, least: int, most: int) -> list[int]:
    """Numbers of a list separated by commas, each once."""
    allowed = f"integers from {least} to {most}, separated by commas"
    words: Sequence[str] = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        raise BadInput(option, text, allowed)
    numbers = list(dict.fromkeys(int(word) for word in words))
    if not all(least <= number <= most for number in numbers):
        raise BadInput(option, text, allowed)
    return numbers
