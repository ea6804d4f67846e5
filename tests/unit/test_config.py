"""What a configuration resolves to."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec_vllm.config import AdaptiveSpecConfig, ConfigError, describe, load, markdown_table, resolve

STATIC = {"policy": "static", "shape": {"depth": 5, "width": 4, "nodes": 8}}
DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


class TestResolve:
    def test_minimal_is_lossless_and_cost_aware(self):
        config = load({"method": "adaptivespec", "model": "HEAD"}).config
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

    def test_it_looks_ahead_unless_it_is_to_be_as_published(self):
        assert resolve({"margin": {"kappa": 0.3}}).margin.lookahead
        assert not resolve({"margin": {}, "preset": "paper"}).margin.lookahead
        assert resolve({"margin": {"lookahead": True}, "preset": "paper"}).margin.lookahead

    def test_resolved_dict_is_a_fixed_point(self):
        for options in (
            {},
            {"preset": "paper"},
            {"tree": STATIC},
            {"tree": {"scope": "batch"}},
            {"tree": {"policy": "cost-aware", "costs": "costs.json"}, "preset": "paper"},
            {"margin": {}, "num_speculative_tokens": 5},
            {"rule": {"name": "mars", "theta": 0.8}},
            {"rule": {"name": "fly"}, "preset": "paper"},
            {"tree": {"policy": "talon"}, "num_speculative_tokens": 20},
            {"tree": {"policy": "ddd", "threshold": -2}},
            {"tree": {"policy": "sglang-adaptive", "lengths": [2, 4]}},
        ):
            config = resolve(options)
            assert resolve(json.loads(json.dumps(config.to_resolved_dict()))) == config

    @pytest.mark.parametrize("options", [{"margin": {}}, {"rule": {"name": "fly"}}, {"tree": {"policy": "talon"}}])
    def test_pickles(self, options):
        config = resolve(options)
        assert pickle.loads(pickle.dumps(config)) == config

    def test_every_key_enters_the_dump(self):
        rule = {"name": "typical", "epsilon": 0.1, "delta": 0.2, "max_promotions_per_step": 2}
        dumped = resolve({"rule": rule, "tree": {"policy": "talon", "mu": 0.5}}).model_dump(mode="json")
        assert dumped["rule"] == rule
        assert dumped["tree"]["mu"] == 0.5

    def test_a_rule_is_lossy_and_says_what_it_accepts(self):
        config = resolve({"rule": {"name": "mars", "theta": 0.8}})
        assert not config.lossless
        assert config.lossy is config.rule
        assert config.verification.startswith("lossy: the target's second choice")
        assert "0.8" in config.verification

    @pytest.mark.parametrize(
        "options", [{}, {"preset": "paper"}, {"tree": {"policy": "talon"}}, {"tree": {"policy": "ddd"}}]
    )
    def test_shapes_that_are_not_written_are_chains_with_fly(self, options):
        config = resolve({"rule": {"name": "fly"}} | options)
        assert config.max_width == 1
        assert all(shape.nodes == shape.depth for _, shape in config.tree.bounds())

    def test_lengths_of_a_chain_bound_the_tree(self):
        config = resolve({"tree": {"policy": "sglang-adaptive", "lengths": [2, 6]}})
        assert (config.max_depth, config.max_width, config.max_nodes) == (6, 1, 6)

    def test_a_beam_expands_as_many_nodes_as_are_kept(self):
        assert resolve({}).tree.expanded_nodes == 28  # 4 on each level but the last
        assert resolve({"tree": {"policy": "talon"}}).tree.expanded_nodes == 60

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


class TestDocumentation:
    def test_every_key_has_a_meaning_and_bounds(self):
        for doc in describe():
            assert doc.meaning, doc.key
            assert doc.allowed, doc.key
            assert doc.default, doc.key

    def test_docs_hold_the_table_of_the_model(self):
        assert markdown_table() in DOCS.read_text(encoding="utf-8"), "run: python -m adaptivespec_vllm.config"
