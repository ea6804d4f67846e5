"""Reading and resolving a configuration; every fault is one clear error."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from adaptivespec_vllm.config import (
    AdaptiveSpecConfig,
    ConfigError,
    describe,
    load,
    markdown_table,
    read,
    reason,
    resolve,
)

STATIC = {"policy": "static", "shape": {"depth": 5, "width": 4, "nodes": 8}}
MINIMAL = {"method": "adaptivespec", "model": "HEAD"}
DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


class TestResolve:
    def test_minimal_is_lossless_and_cost_aware(self):
        config = load(MINIMAL).config
        assert config.lossless
        assert (config.tree.policy, config.tree.costs) == ("cost-aware", None)
        assert config.tree.min_path_probability == 0.0
        assert config.tree.shape.tree_shape() == (8, 4, 24)
        assert config.tree.low is None and config.tree.high is None
        assert config.num_speculative_tokens == config.max_nodes == 24
        assert (config.max_depth, config.max_width) == (8, 4)

    def test_adaptive(self):
        config = resolve({"tree": {"policy": "adaptive"}})
        assert (config.tree.policy, config.tree.scope, config.tree.min_path_probability) == (
            "adaptive",
            "request",
            0.05,
        )
        assert config.tree.low.tree_shape() == (3, 4, 3)
        assert config.tree.high.tree_shape() == (7, 1, 7)
        assert config.num_speculative_tokens == config.max_nodes == 7
        assert config.max_depth == 7
        assert config.max_width == 4

    @pytest.mark.parametrize(
        "tree",
        [{"scope": "batch"}, {"low": {"width": 3}}, {"high": {"nodes": 7}}, {"min_path_probability": 0.0}],
        ids=["scope", "low", "high", "min_path_probability"],
    )
    def test_a_key_that_belongs_to_adaptive_asks_for_it(self, tree):
        assert resolve({"tree": tree}) == resolve({"tree": tree | {"policy": "adaptive"}})

    @pytest.mark.parametrize("tree", [{}, {"shape": {"depth": 3}}, {"shape": None}, {"costs": "costs.json"}])
    def test_any_other_key_is_cost_aware(self, tree):
        assert resolve({"tree": tree}).tree.policy == "cost-aware"
        assert resolve({"tree": tree}) == resolve({"tree": tree | {"policy": "cost-aware"}})

    @pytest.mark.parametrize(
        ("shape", "whole"),
        [
            ({"nodes": 5}, (5, 4, 5)),
            ({"depth": 3}, (3, 4, 24)),
            ({"width": 1}, (8, 1, 8)),
            ({"depth": 1}, (1, 4, 4)),
            ({"depth": 22}, (22, 3, 24)),
            ({"depth": 2, "width": 2, "nodes": 6}, (2, 2, 6)),
        ],
    )
    def test_a_part_of_the_largest_tree(self, shape, whole):
        assert resolve({"tree": {"shape": shape}}).tree.shape.tree_shape() == whole

    def test_the_largest_tree_is_cut_to_the_cap(self):
        assert resolve({"num_speculative_tokens": 6}).tree.shape.tree_shape() == (6, 4, 6)
        assert resolve({"num_speculative_tokens": 32}).tree.shape.tree_shape() == (8, 4, 24)

    def test_costs_in_the_home_directory(self, monkeypatch):
        monkeypatch.setenv("HOME", "/home/of/somebody")
        assert resolve({"tree": {"costs": "~/costs.json"}}).tree.costs == "/home/of/somebody/costs.json"

    def test_paper_preset(self):
        config = resolve({"preset": "paper"})
        assert config.tree.policy == "adaptive"
        assert config.tree.low.tree_shape() == (3, 4, 3)
        assert config.tree.high.tree_shape() == (7, 1, 7)
        assert (config.tree.scope, config.tree.min_path_probability) == ("batch", 0.0)
        assert (config.signal.alpha, config.signal.initial, config.signal.divisor) == (0.3, 0.5, 0.5)
        assert config.signal.breaker_steps == 5
        assert config.lossless  # a preset never makes decoding lossy

    def test_explicit_keys_win_over_the_preset(self):
        tree = {"scope": "request", "min_path_probability": 0.1, "high": {"width": 2, "nodes": 12}}
        config = resolve({"preset": "paper", "tree": tree})
        assert (config.tree.scope, config.tree.min_path_probability) == ("request", 0.1)
        assert config.tree.high.tree_shape() == (7, 2, 12)
        assert config.tree.low.tree_shape() == (3, 4, 3)
        assert config.max_nodes == 12

    def test_preset_shapes_are_cut_to_the_cap(self):
        config = resolve({"num_speculative_tokens": 2, "preset": "paper"})
        assert config.tree.low.tree_shape() == (2, 4, 2)
        assert config.tree.high.tree_shape() == (2, 1, 2)

    def test_preset_depth_yields_to_explicit_nodes(self):
        assert resolve({"tree": {"low": {"nodes": 2}}}).tree.low.tree_shape() == (2, 4, 2)

    def test_static(self):
        config = resolve({"tree": STATIC})
        assert config.max_nodes == 8
        assert config.tree.min_path_probability == 0.0
        assert config.tree.low is None and config.tree.high is None

    def test_pruning_of_static_only_when_written_out(self):
        assert resolve({"tree": STATIC | {"min_path_probability": 0.2}}).tree.min_path_probability == 0.2

    def test_cap_above_the_shapes_is_kept(self):
        assert resolve({"num_speculative_tokens": 32}).max_nodes == 32

    @pytest.mark.parametrize(
        ("margin", "lossless"), [(None, True), ({"kappa": 1}, True), ({}, False), ({"kappa": 0.9}, False)]
    )
    def test_lossless(self, margin, lossless):
        assert resolve({"margin": margin}).lossless == lossless

    def test_an_empty_margin_has_the_published_kappa(self):
        assert resolve({"margin": {}}).margin.kappa == 0.2

    def test_resolved_dict_is_a_fixed_point(self):
        for options in (
            {},
            {"preset": "paper"},
            {"tree": STATIC},
            {"tree": {"scope": "batch"}},
            {"tree": {"policy": "cost-aware", "costs": "costs.json"}, "preset": "paper"},
            {"margin": {}, "num_speculative_tokens": 5},
        ):
            config = resolve(options)
            assert resolve(json.loads(json.dumps(config.to_resolved_dict()))) == config

    def test_pickles(self):
        config = resolve({"margin": {}})
        assert pickle.loads(pickle.dumps(config)) == config

    def test_direct_construction_fills_the_preset_too(self):
        assert AdaptiveSpecConfig().tree == resolve({}).tree

    @given(st.integers(1, 63), st.integers(1, 63), st.integers(1, 63))
    def test_a_static_shape_is_taken_or_refused_by_its_path(self, depth, width, nodes):
        shape = {"depth": depth, "width": width, "nodes": nodes}
        capacity = width + (depth - 1) * width**2
        possible = depth <= nodes <= capacity and width * (depth - 1) <= 63
        try:
            config = resolve({"tree": {"policy": "static", "shape": shape}})
        except ConfigError as error:
            assert not possible
            assert str(error).startswith("tree.shape.")
        else:
            assert possible
            assert config.tree.shape.tree_shape() == (depth, width, nodes)

    @pytest.mark.parametrize(("depth", "width"), [(10, 7), (8, 9), (64 // 3 + 1, 3)])
    def test_the_head_expands_63_nodes_at_most(self, depth, width):
        def static(depth: int, width: int) -> dict:
            return {"policy": "static", "shape": {"depth": depth, "width": width, "nodes": depth}}

        assert width * (depth - 1) == 63
        assert resolve({"tree": static(depth, width)})
        assert resolve({"tree": static(9, 7)})
        with pytest.raises(ConfigError, match=r"tree\.shape\.width: got 8, .*allowed: at most 7"):
            resolve({"tree": static(9, 8)})

    @pytest.mark.parametrize(
        "shape", [(1, 1, 1), (3, 1, 3), (5, 4, 8), (7, 4, 16), (8, 8, 48), (10, 6, 60), (63, 1, 63)]
    )
    def test_shapes_in_use_elsewhere_are_possible(self, shape):
        named = dict(zip(("depth", "width", "nodes"), shape, strict=True))
        assert resolve({"tree": {"policy": "static", "shape": named}}).max_nodes == shape[2]


class TestSources:
    OPTIONS = MINIMAL | {"tree": {"low": {"depth": 2}}, "margin": {"kappa": 0.5}, "revision": "main"}

    def test_path_text_and_dict_mean_the_same(self, tmp_path):
        file = tmp_path / "adaptivespec.json"
        text = json.dumps(self.OPTIONS, indent=2)
        file.write_text(text)
        expected = load(self.OPTIONS, {"revision"})
        assert expected.vllm == {"revision": "main"}
        for source in (file, str(file), text, f"\n {text}"):
            assert load(source, {"revision"}) == expected

    def test_dashes_in_keys(self):
        options = {"num-speculative-tokens": 9, "tree": {"min-path-probability": 0.5}}
        config = resolve(options)
        assert (config.num_speculative_tokens, config.tree.min_path_probability) == (9, 0.5)

    def test_the_source_is_not_changed(self):
        options = json.loads(json.dumps(self.OPTIONS))
        load(options, {"revision"})
        assert options == self.OPTIONS

    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ('{"method": "adaptivespec",\n "model": }', ["invalid JSON", "line 2 column 11"]),
            ('{"method": "adaptivespec"', ["invalid JSON", "line 1 column 26"]),
            ("[1, 2]", ["a JSON object"]),
            ('{"tree": {"low": 1, "low": 2}}', ["low", "given twice"]),
            ('{"num-speculative-tokens": 1, "num_speculative_tokens": 2}', ["num_speculative_tokens", "given twice"]),
            ('{"margin": {"kappa": NaN}}', ["NaN"]),
            ("[" * 100_000, ["nested too deeply"]),
            ('{"a": ' * 100_000, ["nested too deeply"]),
            ('{"signal": {"alpha": 0.1, "alpha": 0.2}}', ["signal.alpha: given twice"]),
            ('{"tree": {"low": {"nodes": 1, "nodes": 2}}}', ["tree.low.nodes: given twice"]),
            ('{"signal": {"alpha": 1, "alpha": 2}, "signal": {}}', ["signal: given twice"]),
            ('{"num_speculative_tokens": ' + "9" * 5000 + "}", ["too many digits"]),
        ],
    )
    def test_broken_text(self, tmp_path, text, parts):
        file = tmp_path / "broken.json"
        file.write_text(text)
        for source in (text, file):
            with pytest.raises(ConfigError) as error:
                read(source)
            assert all(part in str(error.value) for part in parts)
        assert "broken.json" in str(error.value)

    def test_missing_file_is_named(self, tmp_path):
        with pytest.raises(ConfigError, match=r"nothing\.json: no such file"):
            load(tmp_path / "nothing.json")

    def test_directory_and_binary_files(self, tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load(tmp_path)
        (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match="not UTF-8"):
            load(tmp_path / "binary.json")

    def test_many_keys_are_read_in_linear_time(self):
        many = json.dumps({f"key{number}": number for number in range(60_000)})
        start = time.perf_counter()
        assert len(read(many)) == 60_000
        assert time.perf_counter() - start < 5

    @pytest.mark.parametrize(
        ("path", "part"), [("x" * 5000, "too long"), ("a\0b.json", "not a path"), ("", "the path")]
    )
    def test_a_path_that_cannot_be_one(self, path, part):
        for look in (read, load):
            with pytest.raises(ConfigError, match=part) as error:
                look(path)
            assert len(str(error.value)) < 200
            assert "\0" not in str(error.value)

    def test_the_home_directory(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "a.json").write_text(json.dumps(MINIMAL | {"model": "~/head"}))
        assert load("~/a.json").config.model == load(Path("~/a.json")).config.model == str(tmp_path / "head")

    def test_a_mapping_nested_too_deeply(self):
        deep: dict = {}
        for _ in range(5000):
            deep = {"tree": deep}
        with pytest.raises(ConfigError, match="nested too deeply"):
            load(MINIMAL | deep)

    def test_a_fault_in_a_file_names_the_file(self, tmp_path):
        file = tmp_path / "a.json"
        file.write_text(json.dumps(MINIMAL | {"tree": {"scope": "x"}}))
        with pytest.raises(ConfigError, match=r"a\.json: tree\.scope: got"):
            load(file)


FAULTS = [
    ({"tree": {"hgih": {}}}, ["tree.hgih", "unknown key", "'high'", "allowed"]),
    ({"signal": {"aplha": 0.1}}, ["signal.aplha", "'alpha'"]),
    ({"tree": {"high": {"nodse": 3}}}, ["tree.high.nodse", "'nodes'"]),
    ({"tree": {"high": {"nodes": "9"}}}, ["tree.high.nodes", '"9"', "integer from 1 to 63"]),
    ({"tree": {"high": {"nodes": 7.0}}}, ["tree.high.nodes", "7.0", "integer"]),
    ({"tree": {"high": {"nodes": True}}}, ["tree.high.nodes", "true", "integer"]),
    ({"tree": {"high": {"depth": 0}}}, ["tree.high.depth", "got 0", "1 to 63"]),
    ({"tree": {"high": [7, 1, 7]}}, ["tree.high", "[7, 1, 7]", "depth, width, nodes"]),
    ({"tree": 5}, ["tree: got 5", "object with the keys"]),
    ({"tree": None}, ["tree: got null"]),
    ({"tree": {"policy": "dynamic"}}, ["tree.policy", '"dynamic"', "'cost-aware' or 'adaptive' or 'static'"]),
    ({"tree": {"scope": "all"}}, ["tree.scope", "'request' or 'batch'"]),
    ({"tree": {"min_path_probability": 1.0}}, ["tree.min_path_probability", "below 1"]),
    ({"tree": {"low": None}}, ["tree.low", "missing"]),
    ({"tree": {"policy": "static"}}, ["tree.shape", "missing", "'static'"]),
    ({"tree": {"policy": "static", "shape": {"depth": 5, "width": 4}}}, ["tree.shape.nodes", "missing"]),
    ({"tree": STATIC | {"low": {"depth": 1}}}, ["tree.low", "not allowed", "'static'"]),
    ({"tree": STATIC | {"policy": "adaptive"}}, ["tree.shape", "not allowed", "'adaptive'", "low, high"]),
    ({"tree": STATIC | {"costs": "x"}}, ["tree.costs", "not allowed", "'static'"]),
    ({"tree": {"shape": {"depth": 5}, "low": {"depth": 1}}}, ["tree.shape", "not allowed", "'adaptive'"]),
    ({"tree": {"shape": {"depth": 5}}, "preset": "paper"}, ["tree.shape", "not allowed", "'adaptive'"]),
    ({"tree": {"policy": "cost-aware", "low": {"depth": 1}}}, ["tree.low", "not allowed", "'cost-aware'", "shape"]),
    ({"tree": {"policy": "cost-aware", "scope": "batch"}}, ["tree.scope", "not allowed", "'cost-aware'"]),
    (
        {"tree": {"policy": "cost-aware", "min_path_probability": 0.1}},
        ["tree.min_path_probability", "not allowed", "'cost-aware'"],
    ),
    ({"tree": {"costs": {"target": []}}}, ["tree.costs", "got", "a string"]),
    ({"tree": {"costs": ""}}, ["tree.costs", "not empty"]),
    ({"tree": {"shape": {"depth": 30}}}, ["tree.shape.nodes", "got 24", "at least 30"]),
    ({"tree": {"high": {"depth": 7, "nodes": 6}}}, ["tree.high.nodes", "got 6", "at least 7"]),
    ({"tree": {"high": {"nodes": 8}}}, ["tree.high.nodes", "got 8", "at most 7"]),
    ({"tree": {"high": {"depth": 10, "width": 10, "nodes": 60}}}, ["tree.high.width", "got 10", "at most 7"]),
    ({"num_speculative_tokens": 4, "tree": {"low": {"nodes": 5}}}, ["tree.low.nodes", "got 5", "at most 4"]),
    ({"num_speculative_tokens": 7, "tree": STATIC}, ["tree.shape.nodes", "got 8", "at most 7"]),
    ({"num_speculative_tokens": 64}, ["num_speculative_tokens", "got 64", "1 to 63"]),
    ({"num_speculative_tokens": 0}, ["num_speculative_tokens", "got 0"]),
    ({"num_speculative_tokens": "8"}, ["num_speculative_tokens", '"8"']),
    ({"signal": {"alpha": 0}}, ["signal.alpha", "above 0 and at most 1"]),
    ({"signal": {"initial": 1.5}}, ["signal.initial", "from 0 to 1"]),
    ({"signal": {"divisor": -1}}, ["signal.divisor"]),
    ({"signal": {"breaker_steps": 0}}, ["signal.breaker_steps", "from 1 to"]),
    ({"margin": {"kappa": 0}}, ["margin.kappa", "got 0", "above 0 and at most 1"]),
    ({"margin": {"kappa": 1.01}}, ["margin.kappa", "1.01"]),
    ({"margin": {"kappa": float("nan")}}, ["margin.kappa", "NaN"]),
    ({"margin": {"kappa": "0.2"}}, ["margin.kappa", '"0.2"']),
    ({"margin": 0.2}, ["margin: got 0.2", "kappa"]),
    ({"margin": {"max_promotions_per_step": 0}}, ["margin.max_promotions_per_step", "null"]),
    ({"guard": {"min_acceptance": 2}}, ["guard.min_acceptance", "from 0 to 1"]),
    ({"guard": {"max_regret": 0}}, ["guard.max_regret", "above 0", "null"]),
    ({"guard": {"max_regret": float("inf")}}, ["guard.max_regret"]),
    ({"guard": None}, ["guard: got null"]),
    ({"preset": "fast"}, ["preset", '"fast"', "'default' or 'paper'"]),
    ({"preset": ["paper"]}, ["preset"]),
    ({"method": "eagle3"}, ["method", '"eagle3"', "'adaptivespec'"]),
    ({"model": 5}, ["model: got 5", "string"]),
    ({"model": ""}, ["model", "not empty"]),
    ({"model": None}, ["model: missing"]),
    ({"num_spec_tokens": 4}, ["num_spec_tokens", "unknown key", "'num_speculative_tokens'"]),
    ({"revison": "x"}, ["revison", "'revision'"]),
    ({"": 1}, ['"": unknown key']),
    ({"a\nb": 1}, [r'"a\nb": unknown key']),
    ({"signal": {"": 1}}, ['signal."": unknown key']),
]


@pytest.mark.parametrize(("options", "parts"), FAULTS, ids=[json.dumps(options) for options, _ in FAULTS])
def test_every_fault_is_one_line_with_the_key_what_was_given_and_what_is_allowed(options, parts):
    with pytest.raises(ConfigError) as error:
        load(MINIMAL | options, {"revision"})
    message = str(error.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []
    if "unknown key" not in message and "missing" not in message:
        assert "allowed" in message


@pytest.mark.parametrize(
    "options",
    [
        {"k" * 5000: 1},
        {"tree": {"k" * 5000: 1}},
        {"preset": "v" * 5000},
        {"num_speculative_tokens": 10**5000},
        {"signal": {"alpha": 10**5000}},
    ],
    ids=["key", "nested key", "value", "integer", "number"],
)
def test_what_is_repeated_is_shortened(options):
    with pytest.raises(ConfigError) as error:
        load(MINIMAL | options)
    assert len(str(error.value)) < 400


def test_reasons_of_other_packages_are_short_and_complete():
    class Model(BaseModel):
        a: int
        b: int

    with pytest.raises(ValidationError) as both:
        Model.model_validate({"a": "x"})
    assert "a: Input should be a valid integer" in reason(both.value)
    assert "b: Field required" in reason(both.value)
    assert reason(ValueError("Class failed:\n    ValueError: 64 is not 3\n")) == (
        "ValueError: Class failed: ValueError: 64 is not 3"
    )
    assert reason(KeyError()) == "KeyError"
    assert len(reason(ValueError("x" * 9999))) == 300


def test_method_and_model_are_required():
    with pytest.raises(ConfigError, match="method: missing"):
        load({"model": "HEAD"})
    with pytest.raises(ConfigError, match="model: missing"):
        load({"method": "adaptivespec"})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["low", "nodes", "depth", "kappa", "policy", "x"]), inner, max_size=4)
        ),
        max_leaves=8,
    ),
    st.sampled_from(list(AdaptiveSpecConfig.model_fields)),
)
def test_no_value_gives_anything_but_a_configuration_or_our_error(value, key):
    try:
        resolve({key: value})
    except ConfigError as error:
        assert "\n" not in str(error)


class TestDocumentation:
    def test_every_key_has_a_meaning_and_bounds(self):
        for doc in describe():
            assert doc.meaning, doc.key
            assert doc.allowed, doc.key
            assert doc.default, doc.key

    def test_docs_hold_the_table_of_the_model(self):
        assert markdown_table() in DOCS.read_text(encoding="utf-8"), "run: python -m adaptivespec_vllm.config"
