"""``app.yaml``: what it means to Ray, and every fault in one line that says where it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

pytest.importorskip("ray.serve.llm")

from adaptivespec_vllm import cli
from adaptivespec_vllm.config import ConfigError
from adaptivespec_vllm.ray_serve import application as builder
from adaptivespec_vllm.ray_serve.application import PREFIX_ROUTER, llm_configs
from adaptivespec_vllm.ray_serve.reading import of_arguments, read

METHOD = {"method": "adaptivespec", "model": "HEAD"}


def file_of(folder: Path, options: Any) -> Path:
    (folder / "method.json").write_text(json.dumps(METHOD))
    path = folder / "app.yaml"
    path.write_text(options if isinstance(options, str) else yaml.safe_dump(options))
    return path


def one(**keys: Any) -> dict[str, Any]:
    return {"models": [{"name": "a", "model": "TARGET", **keys}]}


def test_what_ray_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ADAPTIVESPEC_CHECK", "1")
    engine = {"dtype": "float32", "max_model_len": 512}
    config = read(file_of(tmp_path, one(adaptivespec="method.json", engine=engine, deployment={"num_replicas": 2})))
    (given,) = llm_configs(config)
    assert given.model_id == "a" and given.model_loading_config.model_source == "TARGET"
    assert given.engine_kwargs == engine | {"speculative_config": METHOD}
    router = given.deployment_config["request_router_config"]
    assert given.deployment_config["num_replicas"] == 2
    assert router["request_router_class"] == PREFIX_ROUTER
    assert given.runtime_env is not None and given.runtime_env["env_vars"]["VLLM_ADAPTIVESPEC_CHECK"] == "1"
    assert given.log_engine_metrics


def test_models_have_configurations_of_their_own(tmp_path: Path) -> None:
    other = {**METHOD, "tree": {"policy": "static", "shape": {"depth": 2, "width": 2, "nodes": 3}}}
    models = [
        {"name": "a", "model": "A", "adaptivespec": "method.json"},
        {"name": "b", "model": "B", "adaptivespec": other, "routing": "load"},
        {"name": "c", "model": "C"},
    ]
    config = read(file_of(tmp_path, {"models": models}))
    a, b, c = llm_configs(config)
    assert (a.engine_kwargs["speculative_config"], b.engine_kwargs["speculative_config"]) == (METHOD, other)
    assert "speculative_config" not in c.engine_kwargs
    assert "request_router_config" not in b.deployment_config


def test_rays_own_command_passes_a_path_or_the_keys(tmp_path: Path) -> None:
    path = file_of(tmp_path, one())
    assert of_arguments({"config": str(path)}) == of_arguments(one())
    with pytest.raises(ConfigError, match="models: given beside config"):
        of_arguments({"config": str(path), **one()})


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ("models: [", "while parsing"),
        ("models: []\nmodels: []\n", "key 'models' is given twice"),
        ([], "got []; allowed: an object with the keys models, http, ray, metrics"),
        ({}, "models: missing"),
        ({"models": []}, "models: got []"),
        (one(modle="x"), "models[0].modle: unknown key"),
        (one(routing="nearest"), 'models[0].routing: got "nearest"'),
        (one() | {"http": {"port": 0}}, "http.port: got 0"),
        (one(adaptivespec="missing.json"), "models[0].adaptivespec: "),
        (one(adaptivespec={**METHOD, "tre": {}}), "models[0].adaptivespec: tre: unknown key; did you mean 'tree'?"),
        (one(adaptivespec={**METHOD, "margin": {"kappa": 2.0}}), "models[0].adaptivespec: margin.kappa: got 2.0"),
    ],
)
def test_a_fault_of_the_file(tmp_path: Path, options: Any, fault: str) -> None:
    path = file_of(tmp_path, options)
    with pytest.raises(ConfigError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: ") and fault in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        (
            {"engine": {"max_model_length": 5}},
            "models[0].engine.max_model_length: unknown key; did you mean 'max_model_len'?",
        ),
        ({"engine": {"model": "x"}}, 'models[0].engine.model: got "x"; not allowed here: the key is models[].model'),
        ({"engine": {"speculative_config": {}}}, "the key is models[].adaptivespec"),
        ({"deployment": {"replicas": 2}}, "models[0].deployment.replicas: unknown key"),
        ({"deployment": {"num_replicas": -1}}, "models[0]: "),
        ({"accelerator_type": "X9"}, "models[0]: "),
        (
            {"routing": "load", "deployment": {"request_router_config": {}}},
            "models[0]: routing and deployment.request_router_config; allowed: one of them",
        ),
        ({"engine": {"disable_log_stats": True}}, "disable_log_stats"),
    ],
)
def test_a_fault_of_a_model(keys: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as error:
        llm_configs(of_arguments(one(**keys)))
    assert fault in str(error.value)
    assert "\n" not in str(error.value)


def test_names_differ() -> None:
    with pytest.raises(ConfigError, match=r"models\[\].name: 'a' given twice"):
        llm_configs(of_arguments({"models": one()["models"] * 2}))


def test_a_cpu_a_rank_where_vllm_runs_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    config = of_arguments(one())
    monkeypatch.setattr(type(builder.current_platform), "is_cpu", lambda self: True)
    assert llm_configs(config)[0].placement_group_config == {"bundle_per_worker": {"CPU": 1}}
    monkeypatch.setattr(type(builder.current_platform), "is_cpu", lambda self: False)
    assert llm_configs(config)[0].placement_group_config is None


def test_the_command_checks_and_says_what_is_wrong(tmp_path: Path) -> None:
    good = CliRunner().invoke(cli.app, ["serve-ray", "--check", str(file_of(tmp_path, one()))])
    assert good.exit_code == 0 and "1 model(s): a" in good.output
    bad = CliRunner().invoke(cli.app, ["serve-ray", "--check", str(file_of(tmp_path, one(nam="b")))])
    assert bad.exit_code == 2
    assert bad.stderr.startswith("serve-ray: ") and "models[0].nam: unknown key" in bad.stderr
