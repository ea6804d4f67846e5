"""Every fault of a configuration is one clear error."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from adaptivespec_vllm.config import AdaptiveSpecConfig, ConfigError, load, reason, resolve

MINIMAL = {"method": "adaptivespec", "model": "HEAD"}
STATIC = {"policy": "static", "shape": {"depth": 5, "width": 4, "nodes": 8}}

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
    ({"rule": {"name": "medusa"}}, ["rule.name", '"medusa"', "'mars' or 'fly' or 'typical'"]),
    ({"rule": {}}, ["rule.name: missing", "'mars'"]),
    ({"rule": "mars"}, ["rule: got", '"mars"', "an object"]),
    ({"rule": {"name": "mars", "theta": 1}}, ["rule.theta", "got 1", "at least 0 and below 1"]),
    ({"rule": {"name": "mars", "epsilon": 0.1}}, ["rule.epsilon: unknown key", "theta"]),
    ({"rule": {"name": "typical", "delta": 0}}, ["rule.delta", "above 0 and at most 1"]),
    ({"rule": {"name": "fly", "windw": 2}}, ["rule.windw", "'window'"]),
    ({"rule": {"name": "fly", "window": 8}}, ["rule.window", "got 8", "at most 7"]),
    (
        {"rule": {"name": "fly"}, "tree": {"shape": {"width": 2}}},
        ["tree.shape.width: got 2", "chains only", "allowed: 1"],
    ),
    ({"rule": {"name": "fly"}, "tree": STATIC}, ["tree.shape.width: got 4", "'fly'"]),
    ({"rule": {"name": "fly"}, "tree": {"low": {"width": 3}}}, ["tree.low.width: got 3", "'fly'"]),
    ({"rule": {"name": "fly"}, "num_speculative_tokens": 1}, ["rule.name", "'fly'", "at least 2"]),
    ({"rule": {"name": "mars"}, "margin": {}}, ["margin: not allowed", "'mars'"]),
    ({"tree": {"policy": "talon", "mu": 0}}, ["tree.mu", "above 0 and at most 1"]),
    ({"tree": {"policy": "talon", "scope": "batch"}}, ["tree.scope", "not allowed", "'talon'", "shape, mu"]),
    ({"tree": {"policy": "static", "mu": 0.1, "shape": STATIC["shape"]}}, ["tree.mu: unknown key"]),
    ({"tree": {"policy": "ddd", "threshold": 0.1}}, ["tree.threshold", "at most 0"]),
    ({"tree": {"policy": "sglang-adaptive", "lengths": []}}, ["tree.lengths", "ascending integers from 1 to 63"]),
    ({"tree": {"policy": "sglang-adaptive", "lengths": [3, 1]}}, ["tree.lengths", "[3, 1]", "ascending"]),
    ({"tree": {"policy": "sglang-adaptive", "lengths": [1, 64]}}, ["tree.lengths", "from 1 to 63"]),
    ({"tree": {"policy": "sglang-adaptive", "shape": {"depth": 1}}}, ["tree.shape", "not allowed"]),
    ({"tree": {"policy": "sglang-adaptive"}, "num_speculative_tokens": 4}, ["tree.lengths: got 7", "at most 4"]),
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
