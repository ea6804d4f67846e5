"""From turns to figures, on numbers made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.bench.figures import split_ms
from adaptivespec_vllm.bench.models import fingerprint, kv_cache_bytes, room, weight_bytes
from adaptivespec_vllm.bench.result import FILE, Figures, Place, Result
from adaptivespec_vllm.bench.statistics import spread, spread_of_change
from tests.unit.bench_results import PLACE, arm, result, sample, two_kinds


def test_spread_of_known_numbers() -> None:
    found = spread([5.0, 1.0, 3.0, 2.0, 4.0])
    assert found is not None
    assert (found.median, found.q1, found.q3, found.n) == (3.0, 2.0, 4.0, 5)
    assert 1.0 <= found.low <= 2.0 and 4.0 <= found.high <= 5.0
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == found  # the bootstrap is the same each time
    assert spread([]) is None


def test_the_interval_narrows_with_more_values() -> None:
    few, many = spread([1.0, 2.0, 3.0]), spread([1.0, 2.0, 3.0] * 40)
    assert few is not None and many is not None
    assert many.high - many.low < few.high - few.low


def test_spread_of_change_between_unlike_samples() -> None:
    found = spread_of_change([1.0, 1.0, 1.0], [3.0, 3.0])
    assert found is not None
    assert (found.median, found.low, found.high, found.n) == (2.0, 2.0, 2.0, 2)
    wide = spread_of_change([1.0, 5.0, 9.0], [2.0, 6.0, 10.0])
    assert wide is not None and wide.low < 0 < wide.median == 1.0 < wide.high
    assert spread_of_change([], [1.0]) is None


def figures_of(made: Result, name: str, kind: str = "math", place: Place = PLACE) -> Figures:
    (found,) = [row for row in made.figures if (row.arm, row.kind, row.place) == (name, kind, place)]
    return found


def test_ratios_are_paired_by_turn_and_the_median_of_repeats_counts() -> None:
    """A machine that slows down for a turn slows down both arms; one disturbed turn of three does not count."""
    plain = [sample("plain", 100, seconds, round=r) for r, seconds in enumerate((10.0, 20.0, 10.0))]
    ours = [sample("default", 200, seconds, round=r) for r, seconds in enumerate((10.0, 20.0, 80.0))]
    other = [sample("plain", 100, 10.0, group=1), sample("default", 300, 10.0, group=1)]
    made = result([*plain, *ours, *other], [arm("plain"), arm("default", "policy")])
    row = figures_of(made, "default")
    assert row.ratio is not None
    assert (row.ratio.median, row.ratio.q1, row.ratio.q3, row.ratio.n) == (2.5, 2.25, 2.75, 2)
    assert row.tokens_per_second == pytest.approx(900 / 120)
    assert row.ratio_of_totals == pytest.approx((900 / 120) / (400 / 50))


def test_a_turn_that_one_arm_lacks_is_left_out_of_ratios() -> None:
    both = [sample("plain", 100, 10.0), sample("default", 200, 10.0)]
    samples = [*both, sample("plain", 1, 10.0, round=1), sample("default", 900, 10.0, round=2)]
    row = figures_of(result(samples, [arm("plain"), arm("default", "policy")]), "default")
    assert row.ratio is not None and row.ratio.median == 2.0
    assert row.ratio_of_totals == 2.0


def test_lengths_depths_and_shapes() -> None:
    row = figures_of(two_kinds(), "tree:3,4,3")
    assert row.accepted_length == pytest.approx(2000 / 1000)  # of 1000 steps of 0.1 s
    assert row.accepted_at_depth == [0.5, 0.1]
    assert (row.nodes, row.depth, row.width, row.promotions) == (3.0, 2.0, 1.5, 0)
    assert row.ms_per_step == pytest.approx(100.0)
    assert (row.same_text, row.requests) == (2, 2)
    chain = figures_of(two_kinds(), "stock:2")
    assert (chain.nodes, chain.depth, chain.width, chain.promotions) == (2.0, 2.0, 1.0, None)
    assert figures_of(two_kinds(), "plain").nodes is None


def test_kinds_apart_and_together() -> None:
    made = two_kinds()
    assert made.kinds() == ["math", "code", "all"]
    medians = [figures_of(made, "tree:5,4,8", kind).ratio for kind in made.kinds()]
    assert [m.median for m in medians if m is not None] == pytest.approx([2.5, 0.8, 1.65])


def test_the_parts_of_a_step_add_up_to_it() -> None:
    sections = {
        "execute/target": 0.6,
        "execute/target/attention": 0.1,
        "draft/levels": 0.2,
        "draft/levels/forward": 0.1,
    }
    parts = split_ms([sample("a", 10, 1.0, sections=sections), sample("a", 10, 1.0, sections=sections)])
    assert parts == pytest.approx({"target forward": 50, "tree attention": 10, "draft levels": 20, "rest": 20})
    assert split_ms([]) == {}


def test_the_best_of_each_kind_and_ours_beside_it() -> None:
    math, code, _ = two_kinds().standings
    # Margin trees are faster on math, but lossy ones are not what lossless ones are held against.
    assert (math.best_stock, math.best_static) == ("stock:2", "tree:5,4,8")
    assert (code.best_stock, code.best_static) == ("stock:1", "tree:3,4,3")
    ratios = {(r.arm, r.role): (r.to, r.ratio.median) for r in math.relatives}
    assert ratios["default", "best stock"] == ("stock:2", pytest.approx(1.5))
    assert ratios["default", "best static tree"] == ("tree:5,4,8", pytest.approx(0.9))
    assert ratios["tree:3,4,3@0.2", "same without margin"] == ("tree:3,4,3", pytest.approx(1.5))
    assert ("tree:5,4,8", "best static tree") not in ratios  # itself
    assert ("default", "same without margin") not in ratios


def test_nothing_to_compare_with() -> None:
    (standing,) = result([sample("plain", 10)], [arm("plain")]).standings
    assert (standing.best_stock, standing.best_static, standing.relatives) == (None, None, [])


def test_places_are_kept_apart() -> None:
    other = Place(batch=8, context=512)
    samples = [
        sample(name, n, place=p) for p, k in ((PLACE, 2), (other, 3)) for name, n in (("plain", 10), ("x", 10 * k))
    ]
    made = result(samples, [arm("plain"), arm("x", "policy")])
    assert made.places() == [PLACE, other]
    both = [figures_of(made, "x", place=place).ratio for place in made.places()]
    assert [ratio.median for ratio in both if ratio is not None] == [2.0, 3.0]
    assert other.title() == "batch 8, context of 512"


# --- the file ---


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    made = two_kinds()
    path = made.write(tmp_path)
    assert Result.read(path) == Result.read(tmp_path) == made
    assert [file.name for file in tmp_path.iterdir()] == [FILE]  # no half file is left


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "the result.json of adaptivespec bench"),
        ('{"schema_version": 99}', "schema 99"),
        ("[]", "schema None"),
        ('{"schema_version": 1}', "provenance: Field required"),
    ],
)
def test_files_that_are_no_result(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(BadInput) as caught:
        Result.read(tmp_path / "a.json")
    assert said in str(caught.value)
    with pytest.raises(BadInput, match=r"allowed: the result\.json"):
        Result.read(tmp_path)


def test_the_schema_takes_no_strangers() -> None:
    with pytest.raises(ValidationError):
        Result.model_validate({**json.loads(two_kinds().model_dump_json()), "stranger": 1})


# --- sizes of models ---


class TargetConfig:
    num_hidden_layers, num_attention_heads, num_key_value_heads, hidden_size, head_dim = 30, 9, 3, 576, 64


def test_sizes_before_anything_is_loaded() -> None:
    assert room(30, 128) == 384 and room(128, 128) == 384 and room(129, 128) == 512
    assert kv_cache_bytes(TargetConfig, 10_000, 4) == int(1.1 * 2 * 31 * 3 * 64 * 4 * 10_000)
    assert kv_cache_bytes(TargetConfig, 1, 4) == 64 << 20


def test_weights_are_counted_from_headers_and_told_apart(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    for name, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.full((3, 5), value)}, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    assert weight_bytes(tmp_path / "a", 2) == 30
    assert weight_bytes(tmp_path, 2) is None
    a, b = fingerprint(str(tmp_path / "a")), fingerprint(str(tmp_path / "b"))
    assert a.startswith("a ") and a.split()[1] != b.split()[1]
    assert fingerprint("org/model") == "org/model"
