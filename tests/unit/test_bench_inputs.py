"""What `adaptivespec bench` is asked for: arms by name, prompts, options; one sentence for each that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adaptivespec_vllm.bench import inputs
from adaptivespec_vllm.bench.arms import DEFAULT_ARMS, parse
from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.bench.prompts import Encoded, Prompt, batches, bundled, choose, digest, encode, read

# --- arms ---


def one(name: str, head: str | None = "HEAD") -> Any:
    """The arm of a name; plain decoding always comes first."""
    first, *others = parse(name, head)
    assert first.name == "plain" and first.speculative is None and not first.ours
    (arm,) = others
    return arm


def test_plain_is_there_once_and_first() -> None:
    assert [arm.name for arm in parse("stock:1 plain stock:1", "HEAD")] == ["plain", "stock:1"]


def test_a_stock_chain_is_vllms_own_method() -> None:
    arm = one("stock:3")
    assert arm.speculative == {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 3}
    assert (arm.family, arm.chain, arm.ours, arm.lossless) == ("stock", 3, False, True)


def test_a_range_of_chains() -> None:
    assert [arm.chain for arm in parse("stock:2-4", "HEAD")] == [None, 2, 3, 4]


def test_suffixes_add_pruning_and_margin() -> None:
    arm = one("tree:5,4,8/0.1@0.2")
    assert arm.speculative == {
        "method": "adaptivespec",
        "model": "HEAD",
        "tree": {"policy": "static", "shape": {"depth": 5, "width": 4, "nodes": 8}, "min_path_probability": 0.1},
        "margin": {"kappa": 0.2},
    }
    assert (arm.family, arm.lossless) == ("static", False)
    assert one("default@1").lossless  # a margin of 1 promotes nothing


@pytest.mark.parametrize("rule", ["mars", "typical", "fly"])
def test_a_suffix_may_be_a_rule(rule: str) -> None:
    arm = one(f"tree:5,1,5@{rule}")
    assert arm.speculative["rule"] == {"name": rule}
    assert (arm.family, arm.lossless) == ("static", False)
    assert one(f"default@{rule}").lossless is False


def test_a_rule_may_have_its_keys() -> None:
    assert one("tree:5,4,8@mars:theta=0.8").speculative["rule"] == {"name": "mars", "theta": 0.8}
    fly = one("tree:5,1,5@fly:theta=0.5,window=2").speculative["rule"]
    assert fly == {"name": "fly", "theta": 0.5, "window": 2} and type(fly["window"]) is int
    published = one("tree:5,4,8@margin:kappa=0.2,lookahead=false")
    assert published.speculative["margin"] == {"kappa": 0.2, "lookahead": False} and not published.lossless
    for name in ("tree:5,4,8@mars:theta", "tree:5,4,8@mars:kappa=0.2", "tree:5,4,8@margin:kappa=x"):
        with pytest.raises(BadInput, match="--arms: got"):
            one(name)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("default", {"preset": "default"}),
        ("paper", {"preset": "paper"}),
        ("adaptive", {"tree": {"policy": "adaptive"}}),
        ("talon", {"tree": {"policy": "talon"}}),
        ("ddd", {"tree": {"policy": "ddd"}}),
        ("sglang-adaptive", {"tree": {"policy": "sglang-adaptive"}}),
        ("paper/0.02", {"preset": "paper", "tree": {"min_path_probability": 0.02}}),
    ],
)
def test_presets_and_the_adaptive_policy(name: str, own: dict[str, Any]) -> None:
    arm = one(name)
    assert arm.speculative == {"method": "adaptivespec", "model": "HEAD"} | own
    assert (arm.family, arm.lossless) == ("policy", True)


def test_a_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    tree = {"policy": "static", "shape": {"depth": 2, "width": 2, "nodes": 4}}
    path.write_text(json.dumps({"method": "adaptivespec", "tree": tree}))
    arm = one(f"config:{path}")
    assert (arm.family, arm.speculative["model"], arm.lossless) == ("static", "HEAD", True)
    path.write_text(json.dumps({"method": "adaptivespec", "model": "OWN", "margin": {"max_promotions_per_step": 1}}))
    arm = one(f"config:{path}@0.3", head=None)
    assert (arm.family, arm.speculative["model"], arm.lossless) == ("policy", "OWN", False)
    assert one(f"config:{path}").speculative["model"] == "OWN"  # before --head
    assert arm.speculative["margin"] == {"max_promotions_per_step": 1, "kappa": 0.3}
    path.write_text(json.dumps({"method": "ngram", "num_speculative_tokens": 4}))
    arm = one(f"config:{path}", head=None)
    assert (arm.family, arm.chain, arm.ours) == ("stock", 4, False)


def test_the_default_set_compares_like_with_like() -> None:
    arms = {arm.name: arm for arm in parse(DEFAULT_ARMS, "HEAD")}
    assert len(arms) == 15
    assert [arm.chain for arm in arms.values() if arm.family == "stock"] == [1, 2, 3, 4, 5]
    lossy = [name for name, arm in arms.items() if not arm.lossless]
    assert len(lossy) == 4 and all(name.removesuffix("@0.2") in arms for name in lossy)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("", "allowed: plain"),
        ("fast", '"fast"'),
        ("stock:0", "K from 1 to 32"),
        ("stock:3-2", "1 <= A <= B"),
        ("stock:x", "K from 1 to 32"),
        ("stock:2@0.2", "K from 1 to 32"),
        ("tree:5,4", '"tree:5,4"'),
        ("tree:5,4,99", "tree.shape.nodes: got 99"),
        ("default@", "a number behind"),
        ("default@medusa", "a number or a rule behind @"),
        ("tree:5,4,8@fly", "tree.shape.width: got 4"),
        ("static", '"static"'),
        ("default@2", "margin.kappa: got 2.0"),
        ("default/1", "tree.min_path_probability: got 1.0"),
        ("config:/nowhere.json", "/nowhere.json: no such file"),
        ("'default", "separated by spaces"),
    ],
)
def test_names_that_are_no_arm(names: str, said: str) -> None:
    with pytest.raises(BadInput, match=r"^--arms: got ") as caught:
        parse(names, "HEAD")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_arm_that_drafts_needs_a_head() -> None:
    with pytest.raises(BadInput, match=r"^--head: got nothing; .* 'stock:2'"):
        parse("plain stock:2", None)


# --- prompts ---


class Words:
    """A tokenizer with a token a word."""

    chat_template = "yes"

    def apply_chat_template(self, chat: list[dict[str, str]], **options: Any) -> str:
        return f"<user> {chat[0]['content']} <assistant>"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens  # the template has them
        return [len(word) + 1000 * (word[0] == "<") for word in text.split()]


def test_prompts_stay_as_they_are_without_context() -> None:
    assert encode(Words(), Prompt("a", "math", "two words"), None, 0) == Encoded("a", "math", (1006, 3, 5, 1011))


def test_context_brings_prompts_to_about_that_length() -> None:
    for context in (64, 512):
        encoded = encode(Words(), Prompt("a", "math", "how many"), context, 0)
        assert context <= len(encoded.tokens) < context + 40
        assert encoded.tokens[-3:] == (3, 4, 1011)  # the question comes last


def test_context_is_another_for_each_prompt_and_the_same_again() -> None:
    first, again, other = (encode(Words(), Prompt(name, "math", "how"), 200, 0).tokens for name in ("a", "a", "b"))
    assert first == again != other
    assert encode(Words(), Prompt("a", "math", "how"), 200, 1).tokens != first
    assert (
        digest([Encoded("a", "x", first)]) == digest([Encoded("b", "y", again)]) != digest([Encoded("a", "x", other)])
    )


def test_a_prompt_longer_than_the_context_is_not_cut() -> None:
    assert len(encode(Words(), Prompt("a", "math", "word " * 90), 64, 0).tokens) == 92


def test_limit_is_by_kind_and_spread_over_the_file() -> None:
    rows = [Prompt(str(i), "math" if i < 6 else "code", "x") for i in range(8)]
    assert [row.id for row in choose(rows, None, 3)] == ["0", "2", "4", "6", "7"]
    assert [row.id for row in choose(rows, ["code", "math"], 1)] == ["6", "0"]


def test_batches_are_of_one_kind_and_full() -> None:
    rows = [Encoded(str(i), "math" if i < 3 else "code", (1,)) for i in range(4)]
    assert [[row.id for row in batch] for batch in batches(rows, 2)] == [["0", "1"], ["2", "0"], ["3", "3"]]


def test_bundled_prompts_have_three_kinds() -> None:
    assert {prompt.kind for prompt in bundled()} == {"math", "code", "chat"}
    assert len({prompt.id for prompt in bundled()}) == len(bundled())


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"id": "a", "kind": "math"}', '{"id": 1, "kind": "math", "prompt": "x"}', "null"]
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "kind": "math", "prompt": "x"}\n\n' + line + "\n")
    with pytest.raises(BadInput, match=r'^--prompts: got "prompts\.jsonl:3"; allowed: an object a line'):
        read(path)


# --- options ---


def gather(**changes: Any) -> inputs.Inputs:
    options: dict[str, Any] = {
        "model": "org/target", "head": "org/head", "arm_names": "stock:1", "batch": "1", "context": None, "kinds": None,
        "file": None, "limit": None, "tokens": 16, "repeats": 1, "temperature": 0.0, "dtype": None, "eager": None,
        "seed": 0,
    }  # fmt: skip
    return inputs.gather(**options | changes)


def test_every_batch_size_is_measured_at_every_context() -> None:
    chosen = gather(batch="1,8", context="64, 512")
    assert [(place.batch, place.context) for place in chosen.places] == [(1, 64), (8, 64), (1, 512), (8, 512)]
    assert (chosen.largest_batch, chosen.longest_context) == (8, 512)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "/nowhere/model"}, '--model: got "/nowhere/model"; allowed: a directory that exists'),
        ({"model": " "}, "--model"),
        ({"head": "./nowhere"}, '--head: got "./nowhere"'),
        ({"batch": "0"}, '--batch: got "0"; allowed: integers from 1'),
        ({"batch": "1,,2"}, '--batch: got "1,,2"'),
        ({"batch": "two"}, '--batch: got "two"'),
        ({"context": "-5"}, '--context: got "-5"'),
        ({"context": ""}, '--context: got ""'),
        ({"kinds": "poems"}, '--kinds: got "poems"; allowed: kinds of the prompts: math, code, chat'),
        ({"kinds": ","}, "--kinds"),
        ({"file": Path("/nowhere.jsonl")}, '--prompts: got "/nowhere.jsonl"'),
        ({"limit": 0}, "--limit: got 0; allowed: an integer from 1 on"),
        ({"tokens": 1}, "--max-tokens: got 1; allowed: an integer from 2"),
        ({"repeats": 0}, "--repeats: got 0"),
        ({"temperature": -1.0}, "--temperature: got -1.0; allowed: a number from 0 to 2"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"dtype": "int8"}, '--dtype: got "int8"; allowed: auto, float32'),
        ({"seed": -1}, "--seed: got -1"),
    ],
)
def test_options_that_cannot_be_used(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        gather(**changes)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_output_must_be_a_directory_that_can_be_written(tmp_path: Path) -> None:
    assert inputs.output_directory(tmp_path / "a" / "b").is_dir()
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="--output"):
        inputs.output_directory(tmp_path / "file")
