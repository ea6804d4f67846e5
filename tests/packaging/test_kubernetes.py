"""The manifests against Kubernetes' published schemas, and the rest of what they say against this package."""

from __future__ import annotations

import json
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from adaptivespec_vllm import __version__
from adaptivespec_vllm.config import load
from tests.packaging.conftest import ROOT

FOLDER = ROOT / "examples/kubernetes"
VERSIONS = ("1.30", "1.37")

# Keys of KubeRay's v1 types that the example may use; no package carries the schemas of its custom resources.
SERVICE = {"serveConfigV2", "rayClusterConfig"}
CLUSTER = {"headGroupSpec", "workerGroupSpecs", "rayVersion"}
HEAD = {"serviceType", "rayStartParams", "template"}
WORKERS = {"groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams", "template"}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_server_is_valid(version: str) -> None:
    parts = documents("server.yaml")
    assert [part["kind"] for part in parts] == ["ConfigMap", "PersistentVolumeClaim", "Deployment", "Service"]
    for part in parts:
        kubernetes_validate.validate(part, version, strict=True)


def test_a_mistake_would_be_found() -> None:
    deployment = documents("server.yaml")[2]
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[-1], strict=True)


def test_parts_of_the_server_fit_together() -> None:
    configuration, claim, deployment, service = documents("server.yaml")
    settings = load(configuration["data"]["adaptivespec.json"]).config
    assert settings.model == "HEAD"
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    by_name = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mounts = {mount["mountPath"]: by_name[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/cache"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert mounts["/etc/adaptivespec"]["configMap"]["name"] == configuration["metadata"]["name"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    ports = {port["name"] for port in container["ports"]}
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    assert all(probe["path"] == "/health" and probe["port"] in ports for probe in probes)
    assert service["spec"]["ports"][0]["targetPort"] in ports
    resources = container["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "1"
    assert pod["spec"]["securityContext"]["runAsUser"] == 10001


@pytest.mark.parametrize("version", VERSIONS)
def test_pods_of_the_ray_cluster_are_valid(version: str) -> None:
    (service,) = documents("ray.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    assert set(service["spec"]) <= SERVICE and set(cluster) <= CLUSTER and set(cluster["headGroupSpec"]) <= HEAD
    groups = cluster["workerGroupSpecs"]
    for group in groups:
        assert set(group) <= WORKERS and {"groupName", "minReplicas", "maxReplicas", "template"} <= set(group)
    for template in [cluster["headGroupSpec"]["template"], *(group["template"] for group in groups)]:
        assert set(template) <= {"metadata", "spec"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, version, strict=True)


def test_workers_have_the_gpus_that_the_application_asks_for() -> None:
    (service,) = documents("ray.yaml")
    application = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]
    assert application["import_path"] == "adaptivespec_vllm.ray_serve:app"
    (model,) = application["args"]["models"]
    load(json.dumps(model["adaptivespec"]))
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == model["engine"]["tensor_parallel_size"]
    assert group["replicas"] == model["deployment"]["num_replicas"]


def test_the_ray_application_is_one_that_this_package_takes() -> None:
    schema = pytest.importorskip("adaptivespec_vllm.ray_serve.schema")
    (service,) = documents("ray.yaml")
    application = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]
    assert schema.AppConfig(**application["args"]).models[0].name == "my-model"


@pytest.mark.parametrize("name", ["server.yaml", "ray.yaml"])
def test_images_are_those_of_this_version(name: str) -> None:
    tags = re.findall(r"^\s*(?:- )?image: \S+:(\S+)$", (FOLDER / name).read_text(), re.MULTILINE)
    assert tags and all(tag.startswith(f"{__version__}-") for tag in tags)
