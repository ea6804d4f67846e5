"""What clients ask for: prompts of every length with parameters of every kind, and what is known of the answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Check = Literal["tokens", "form", "refused"]
"""The answer is that of plain decoding; it has the right length; it is HTTP 400."""

SCHEMAS: list[dict[str, Any]] = [
    {"choice": ["yes", "no", "perhaps"]},
    {"regex": r"[A-Z][a-z]{2,8} (is|was) [0-9]{1,4}\."},
    {
        "json": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "colour": {"enum": ["red", "green", "blue"]},
                "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
            },
            "required": ["name", "colour", "sizes"],
            "additionalProperties": False,
        }
    },
    {"grammar": 'root ::= term (" + " term){0,4} " = " number\nterm ::= number | "x"\nnumber ::= [0-9]{1,3}\n'},
]


@dataclass(frozen=True)
class Case:
    """A request.

    Attributes:
        kind: what it is an example of.
        body: of ``/v1/completions``, without what a client adds.
        check: what is known of its answer.

    """

    kind: str
    body: dict[str, Any]
    check: Check = "tokens"

    @property
    def strict(self) -> bool:
        """Greedy, and so to be equal to plain decoding token for token."""
        return self.check == "tokens" and not self.body.get("temperature")


@dataclass
class Pool:
    """Cases of every kind.

    Args:
        prompts: token ids, of texts.
        vocabulary: token ids are below it.
        max_model_len: of the server.
        each: cases of a kind.
        seed: of everything random.

    """

    prompts: Sequence[Sequence[int]]
    vocabulary: int
    max_model_len: int
    each: int
    seed: int
    cases: list[Case] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._warm = [self._long(self.max_model_len // 2) for _ in range(3)]
        for make in (*_MIXED, *_REFUSED):
            self.cases += [make(self, self._random) for _ in range(self.each)]

    def short(self) -> list[int]:
        return list(self._random.choice(self.prompts))[: self.max_model_len // 3]

    def warm(self) -> list[int]:
        """One of few long prompts."""
        return self._random.choice(self._warm)

    def _long(self, tokens: int) -> list[int]:
        """A prompt of exactly so many tokens."""
        joined: list[int] = []
        while len(joined) < tokens:
            joined += self._random.choice(self.prompts)
        return joined[:tokens]

    def to_the_end(self, missing: int) -> dict[str, Any]:
        """A request that ends so many tokens before ``max_model_len``."""
        answer = self._random.choice([1, 2, 9, 30])
        prompt = self._long(self.max_model_len - answer - missing)
        return {"prompt": prompt, "max_tokens": answer, "ignore_eos": True}


def _case(kind: str, check: Check = "tokens") -> Callable[..., Callable[[Pool, random.Random], Case]]:
    def decorate(body: Callable[[Pool, random.Random], dict[str, Any]]) -> Callable[[Pool, random.Random], Case]:
        def make(pool: Pool, rng: random.Random) -> Case:
            return Case(kind, {"temperature": 0, "prompt": pool.short(), "max_tokens": 48} | body(pool, rng), check)

        return make

    return decorate


_MIXED = [
    _case("greedy")(lambda pool, rng: {"max_tokens": rng.randint(1, 100)}),
    _case("equal prompts")(lambda pool, rng: {"prompt": pool.warm(), "max_tokens": rng.randint(1, 60)}),
    _case("one token")(
        lambda pool, rng: {"prompt": [rng.randrange(pool.vocabulary)], "max_tokens": rng.randint(1, 40)}
    ),
    _case("max_model_len")(lambda pool, rng: pool.to_the_end(0)),
    _case("one before")(lambda pool, rng: pool.to_the_end(1)),
    _case("stop strings")(
        lambda pool, rng: {"stop": rng.sample([".", " the", "\n", ",", " of"], 2), "include_stop_str_in_output": True}
    ),
    _case("min_tokens")(
        lambda pool, rng: {"min_tokens": rng.randint(1, 30), "stop_token_ids": rng.sample(range(pool.vocabulary), 300)}
    ),
    _case("penalties")(
        lambda pool, rng: {
            "repetition_penalty": rng.choice([1.0, 1.2]),
            "frequency_penalty": rng.choice([-0.5, 0.5]),
            "presence_penalty": rng.choice([0.0, 0.4]),
        }
    ),
    _case("allowed and banned")(
        lambda pool, rng: rng.choice(
            [{"bad_words": ["the", "is", "a"]}, {"allowed_token_ids": sorted(rng.sample(range(pool.vocabulary), 9000))}]
        )
    ),
    _case("logprobs")(lambda pool, rng: {"logprobs": rng.randint(1, 5), "max_tokens": 24}),
    _case("prompt_logprobs")(lambda pool, rng: {"prompt_logprobs": 1, "max_tokens": 12}),
    _case("structured")(lambda pool, rng: {"structured_outputs": rng.choice(SCHEMAS)}),
    _case("several")(
        lambda pool, rng: {"n": rng.randint(2, 4), "max_tokens": 16, "temperature": 0.8, "seed": rng.randrange(1000)}
    ),
    _case("seeded")(
        lambda pool, rng: {
            "temperature": rng.choice([0.7, 1.0]),
            "top_p": rng.choice([1.0, 0.9]),
            "top_k": rng.choice([0, 40]),
            "seed": rng.randrange(1000),
        }
    ),
    _case("min_p and logit_bias")(
        lambda pool, rng: rng.choice(
            [{"logit_bias": {str(rng.randrange(pool.vocabulary)): 6.0}}, {"min_p": 0.1, "temperature": 1.0, "seed": 3}]
        )
    ),
    _case("sampled", "form")(lambda pool, rng: {"temperature": 1.0, "n": rng.randint(1, 3), "ignore_eos": True}),
]
_REFUSED = [
    _case("refused", "refused")(
        lambda pool, rng: rng.choice(
            [
                {"prompt": []},
                {"prompt": [1] * pool.max_model_len},
                {"max_tokens": -1},
                {"n": 3},  # greedy answers would all be the same
                {"structured_outputs": {"regex": "([a"}},
                {"prompt": [pool.vocabulary + 5]},
            ]
        )
    )
]


def hostile(pool: Pool, rng: random.Random) -> Case:
    """Many answers at once, or a grammar that nobody compiled before; made anew for each request."""
    if rng.random() < 0.5:
        body = {"temperature": 1.0, "n": rng.randint(8, 24), "max_tokens": rng.randint(1, 12), "ignore_eos": True}
    else:
        words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 6))) for _ in range(rng.randint(2, 40))]
        depth = rng.randint(1, 4)
        regex = f"(({'|'.join(words)})[0-9]{{0,{depth}}}( |\\.)){{1,{3 * depth}}}"
        body = {"temperature": 1.0, "max_tokens": rng.randint(1, 40), "structured_outputs": {"regex": regex}}
    return Case("hostile", {"prompt": pool.short()} | body, "form")
