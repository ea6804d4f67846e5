"""What a request may change for itself: values, bounds, errors."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from adaptivespec_vllm import plugin
from adaptivespec_vllm.config import AdaptiveSpecConfig, MarginConfig, resolve
from adaptivespec_vllm.engine.overrides import Overrides, overrides_of
from adaptivespec_vllm.types import NO_TREE, TreeShape


def settings(**sections: Any) -> AdaptiveSpecConfig:
    return resolve({"method": "adaptivespec", "num_speculative_tokens": 24} | sections)


STRICT, LOSSY = settings(), settings(margin={"kappa": 0.3, "max_promotions_per_step": 2})
ADAPTIVE = {"low": {"depth": 2, "width": 8, "nodes": 20}, "high": {"depth": 9, "width": 1, "nodes": 9}}
WIDE = settings(tree=ADAPTIVE)
LOOSE = settings(margin={"kappa": 0.3}, requests={"looser_margin": True})


def read(config: AdaptiveSpecConfig, **given: Any) -> Overrides:
    return overrides_of({f"adaptivespec_{name}": value for name, value in given.items()}, config)


def test_nothing_given_is_the_server() -> None:
    for config in (STRICT, LOSSY):
        for extra_args in (None, {}, {"kv_transfer_params": {}, "margin": 0.9}):
            assert overrides_of(extra_args, config) == Overrides(config.margin)


@pytest.mark.parametrize("value", [0, 0.0, "off", 1, 1.0])
def test_strict(value: Any) -> None:
    for config in (STRICT, LOSSY, LOOSE):
        margin = read(config, margin=value).margin
        assert margin is None or margin.kappa == 1.0


def test_a_stricter_margin_keeps_the_rest_of_the_rule() -> None:
    assert read(LOSSY, margin=0.5).margin == MarginConfig(kappa=0.5, max_promotions_per_step=2)
    assert read(LOSSY, margin=0.3).margin == LOSSY.margin


def test_a_looser_margin_where_the_server_allows_it() -> None:
    assert read(LOOSE, margin=0.1).margin == MarginConfig(kappa=0.1)
    assert read(settings(requests={"looser_margin": True}), margin=0.1).margin == MarginConfig(kappa=0.1)


@pytest.mark.parametrize("name", ["mars", "fly", "typical"])
def test_another_rule_can_only_be_left(name: str) -> None:
    config = settings(rule={"name": name})
    assert overrides_of(None, config).margin == config.rule
    for value in (0, 1, 0.0, "off"):
        assert read(config, margin=value).margin is None
    for value in (0.5, True, "on", None, 2):
        with pytest.raises(ValueError, match=rf"adaptivespec_margin: .*0, 1 or 'off'.*'{name}' has no kappa"):
            read(config, margin=value)


@pytest.mark.parametrize(
    ("config", "key", "value", "allowed"),
    [
        (LOSSY, "margin", 0.29, "a kappa from the server's 0.3 to 1"),
        (LOSSY, "margin", -0.1, "0 or 'off' for strict"),
        (LOSSY, "margin", 1.5, "0 or 'off' for strict"),
        (LOSSY, "margin", True, "0 or 'off' for strict"),
        (LOSSY, "margin", "0.5", "0 or 'off' for strict"),
        (LOSSY, "margin", float("nan"), "0 or 'off' for strict"),
        (LOSSY, "margin", None, "0 or 'off' for strict"),
        (STRICT, "margin", 0.9, "this server is strict"),
        (LOOSE, "margin", 1.1, "a kappa above 0 and at most 1"),
        (STRICT, "max_nodes", 25, "an integer from 0 to 24"),
        (STRICT, "max_nodes", -1, "an integer from 0 to 24"),
        (STRICT, "max_nodes", 2.0, "an integer from 0 to 24"),
        (STRICT, "max_nodes", True, "an integer from 0 to 24"),
        (STRICT, "max_nodes", "3", "an integer from 0 to 24"),
        (STRICT, "shape", [8, 4], "integers from 1 to this server's [8, 4, 24]"),
        (STRICT, "shape", "8,4", "integers from 1 to this server's [8, 4, 24]"),
        (STRICT, "shape", "8,4,x", "integers from 1 to this server's [8, 4, 24]"),
        (STRICT, "shape", "8,4,24,", "integers from 1 to this server's [8, 4, 24]"),
        (STRICT, "shape", [8, 4, 24.0], "integers from 1 to this server's [8, 4, 24]"),
        (STRICT, "shape", [0, 4, 24], "integers from 1 to this server's [8, 4, 24]"),
        (STRICT, "shape", [8, 4, 64], "integers from 1 to this server's [8, 4, 24]"),
        (STRICT, "shape", {"depth": 1}, "integers from 1 to this server's [8, 4, 24]"),
        (STRICT, "shape", [8, 4, 25], "integers from 1 to this server's [8, 4, 24]"),
        (STRICT, "shape", [9, 1, 9], "integers from 1 to this server's [8, 4, 24]"),
        (STRICT, "shape", [4, 5, 9], "integers from 1 to this server's [8, 4, 24]"),
        (STRICT, "shape", [8, 1, 7], "allowed: at least 8"),
        (STRICT, "shape", [1, 4, 5], "allowed: at most 4"),
        (WIDE, "shape", [9, 8, 20], "too many nodes to expand at depth 9"),
        (STRICT, "nodes", 3, "unknown key"),
        (STRICT, "max_node", 3, "did you mean 'adaptivespec_max_nodes'?"),
        (STRICT, "", 3, "unknown key"),
    ],
)
def test_what_is_not_allowed_is_named(config: AdaptiveSpecConfig, key: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"adaptivespec_{key}") as error:
        read(config, **{key: value})
    assert allowed in str(error.value)


def test_switched_off_by_the_server() -> None:
    config = settings(requests={"overrides": False})
    assert overrides_of({"other": 1}, config) == Overrides(None)
    with pytest.raises(ValueError, match=r"adaptivespec_max_nodes: .*requests\.overrides switched off"):
        read(config, max_nodes=1)


def test_shapes_of_a_step() -> None:
    policys = TreeShape(8, 4, 24)
    assert read(STRICT).bound(policys) == policys
    assert read(STRICT, shape="2, 3, 5").bound(policys) == TreeShape(2, 3, 5) == read(STRICT, shape=[2, 3, 5]).shape
    assert read(STRICT, max_nodes=3).bound(policys) == TreeShape(3, 4, 3)
    assert read(STRICT, max_nodes=2, shape=[4, 1, 4]).bound(policys) == TreeShape(2, 1, 2)
    assert read(STRICT, max_nodes=0).bound(policys) == NO_TREE
    assert not read(STRICT, max_nodes=0).drafts
    # what the policy does not draft for stays without a tree
    assert read(STRICT, shape=[2, 3, 5]).bound(NO_TREE) == NO_TREE


class _Speculative:
    """As vLLM hands it to a request's check: our settings are all that is looked at."""

    adaptivespec = LOSSY


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"extra_args": {"adaptivespec_margin": 0.1}}, "adaptivespec_margin: got 0.1"),
        ({"extra_args": {"adaptivespec_depth": 3}}, "adaptivespec_depth: unknown key"),
        ({"watermarking": True}, "watermarking: got true"),
        ({"routed_experts_prompt_start": 3}, "routed_experts_prompt_start: got 3"),
    ],
)
def test_vllms_check_of_a_request_refuses(parameters: dict[str, Any], named: str) -> None:
    plugin.register()
    with pytest.raises(VLLMValidationError, match=named):
        SamplingParams(**parameters)._validate_spec_decode(_Speculative())
    SamplingParams(**parameters)._validate_spec_decode(None)  # not asked for: not our business


def test_vllms_check_of_a_request_accepts_what_trees_honour() -> None:
    plugin.register()
    params = SamplingParams(min_p=0.1, logit_bias={5: 2.0}, extra_args={"adaptivespec_max_nodes": 0})
    params._validate_spec_decode(_Speculative())
    assert (params.min_p, params.logit_bias) == (0.1, {5: 2.0})
    with pytest.raises(VLLMValidationError, match="min_p and logit_bias"):
        params._validate_spec_decode(object())  # another method: vLLM's own answer
