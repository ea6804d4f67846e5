"""Arms: the ways of decoding that are compared, each by a short name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.config import METHOD, ConfigError, load, read
from adaptivespec_vllm.registry import POLICIES, RULES

ARMS_HELP = """plain; stock:K (vLLM's EAGLE-3 chain of K tokens; stock:1-5 is five arms); tree:D,W,N (a static tree of
depth, width, nodes); default and paper (the presets); default:D,W,N (default with that as its largest tree); adaptive,
talon, ddd, sglang-adaptive (these policies with their own defaults); config:FILE (a speculative configuration; its own
"model" wins over --head). To an arm of ours, /P adds min_path_probability, @KAPPA the lossy margin rule and @mars, @fly
or @typical that rule; its keys may follow: tree:5,4,8/0.1@0.2, tree:5,4,8@margin:kappa=0.2,lookahead=false."""

DEFAULT_ARMS = (
    "plain stock:1-5 tree:3,4,3 tree:5,4,8 tree:7,4,16 paper default "
    "tree:3,4,3@0.2 tree:5,4,8@0.2 tree:7,4,16@0.2 default@0.2"
)
"""Plain decoding, vLLM's own chains, static trees, the presets; with the margin rule at the same shapes as without."""

PLAIN = "plain"
MARGIN = "margin"
MOST_STOCK = 32
_OPTION = "--arms"
_FORMS = (
    "plain, stock:K, stock:A-B, tree:D,W,N, default, default:D,W,N, paper, a policy, config:FILE; /P and @KAPPA or "
    "@RULE behind one of ours"
)

Family = Literal["plain", "stock", "static", "policy"]
"""``static``: one tree shape for all steps; ``policy``: a tree that follows the request."""


@dataclass(frozen=True)
class Arm:
    """One way of decoding.

    Attributes:
        name: as given, which is what every report calls it.
        family: what it is compared as.
        speculative: vLLM's speculative config with the head's path; ``None`` decodes plainly.
        lossless: the text must be that of plain decoding.
        chain: draft tokens a step where vLLM's own method drafts that many; ``None`` otherwise.

    """

    name: str
    family: Family
    speculative: dict[str, Any] | None
    lossless: bool = True
    chain: int | None = None

    @property
    def ours(self) -> bool:
        """Whether AdaptiveSpec decodes, which keeps counters."""
        return self.family in ("static", "policy")


def parse(text: str, head: str | None) -> list[Arm]:
    """The arms of a list separated by spaces, plain decoding first: everything is compared with it.

    Raises:
        BadInput: a name that is no arm, or a configuration that is not valid.

    """
    try:
        words = shlex.split(text)
    except ValueError:
        raise BadInput(_OPTION, text, "names separated by spaces") from None
    if not words:
        raise BadInput(_OPTION, text, _FORMS)
    names = dict.fromkeys([PLAIN, *(name for word in words for name in _expanded(word))])
    return [_arm(name, head) for name in names]


def _expanded(word: str) -> Iterator[str]:
    """``stock:2-4`` is three arms."""
    match = re.fullmatch(r"stock:(\d{1,3})-(\d{1,3})", word)
    if match is None:
        yield word
        return
    first, last = int(match[1]), int(match[2])
    if not 1 <= first <= last <= MOST_STOCK:
        raise BadInput(_OPTION, word, f"stock:A-B with 1 <= A <= B <= {MOST_STOCK}")
    yield from (f"stock:{k}" for k in range(first, last + 1))


def _arm(name: str, head: str | None) -> Arm:
    if name == PLAIN:
        return Arm(name, "plain", None)
    if name.startswith("config:"):
        return _from_file(name, head)
    if head is None:
        raise BadInput("--head", None, f"the directory or hub id of an EAGLE-3 head, which arm {name!r} needs")
    if name.startswith("stock:"):
        return _stock(name, head)
    base, kappa = _split(name, "@")
    base, prune = _split(base, "/")
    options = _ours(base, name) | {"method": METHOD, "model": head}
    if prune is not None:
        options["tree"] = options.get("tree", {}) | {"min_path_probability": _number(name, prune)}
    return _validated(name, options, kappa)


def _stock(name: str, head: str) -> Arm:
    length = name.removeprefix("stock:")
    if not re.fullmatch(r"\d{1,3}", length) or not 1 <= int(length) <= MOST_STOCK:
        raise BadInput(_OPTION, name, f"stock:K with K from 1 to {MOST_STOCK}, or a range like stock:1-5")
    options = {"method": "eagle3", "model": head, "num_speculative_tokens": int(length)}
    return Arm(name, "stock", options, chain=int(length))


def _ours(base: str, name: str) -> dict[str, Any]:
    """The options that a name of ours stands for, without method, head and suffixes."""
    if base in ("default", "paper"):
        return {"preset": base}
    if base in POLICIES and base != "static":
        return {"tree": {"policy": base}}
    if match := re.fullmatch(r"(tree|default):(\d{1,4}),(\d{1,4}),(\d{1,4})", base):
        policy, *numbers = match.groups()
        shape = {key: int(number) for key, number in zip(("depth", "width", "nodes"), numbers, strict=True)}
        return {"tree": {"shape": shape} if policy == "default" else {"policy": "static", "shape": shape}}
    raise BadInput(_OPTION, name, _FORMS)


def _from_file(name: str, head: str | None) -> Arm:
    path, kappa = _split(name.removeprefix("config:"), "@")
    try:
        options = {"model": head, **read(path)} if head is not None else read(path)
    except ConfigError as error:
        raise BadInput(_OPTION, name, f"config:FILE with a configuration ({error})") from None
    if options.get("method") == METHOD:
        return _validated(name, options, kappa)
    if kappa is not None:
        raise BadInput(_OPTION, name, f"@KAPPA behind a configuration with method {METHOD!r} only")
    length = options.get("num_speculative_tokens")
    return Arm(name, "stock", options, chain=length if isinstance(length, int) else None)


def _validated(name: str, options: dict[str, Any], kappa: str | None) -> Arm:
    rule = None if kappa is None else _rule(name, kappa)
    if rule is not None and rule["name"] == MARGIN:
        options = {**options, "margin": {key: value for key, value in rule.items() if key != "name"}}
    elif rule is not None:
        options = {**options, "rule": rule, "margin": None}
    elif kappa is not None:
        options = options | {"margin": {**(options.get("margin") or {}), "kappa": _number(name, kappa)}}
    try:
        # Keys that are not ours are vLLM's to judge when the engine starts.
        config = load(options, foreign=options.keys()).config
    except ConfigError as error:
        raise BadInput(_OPTION, name, f"what the configuration allows ({error})") from None
    family: Family = "static" if config.tree.policy == "static" else "policy"
    return Arm(name, family, options, lossless=config.lossless)


def _rule(name: str, text: str) -> dict[str, Any] | None:
    """``mars``, ``mars:theta=0.8`` or ``margin:kappa=0.2,lookahead=false``; None of what names no rule."""
    rule, _, keys = text.partition(":")
    if rule not in (*RULES, MARGIN):
        return None
    pairs = [key.partition("=") for key in keys.split(",") if key]
    return {"name": rule} | {key: _value(name, value) for key, _, value in pairs}


def _value(name: str, text: str) -> int | float | bool:
    words = {"true": True, "false": False}
    return words[text] if text in words else int(text) if text.isdigit() else _number(name, text)


def _split(text: str, mark: str) -> tuple[str, str | None]:
    """What stands before and behind the last ``mark``."""
    base, found, rest = text.rpartition(mark)
    return (base, rest) if found else (text, None)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadInput(
            _OPTION,
            name,
            "a number behind / and a number or a rule behind @, as in tree:5,4,8/0.1@0.2 or tree:5,4,8@mars:theta=0.8",
        ) from None
