"""The keys of ``app.yaml``: which models are served, how each decodes, and on what of the cluster."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from adaptivespec_vllm.config.base import Section

Name = Annotated[str, Field(min_length=1)]


class ModelConfig(Section):
    """One model of the application: a deployment of its own, with as many replicas as Ray is told to start."""

    name: Name = Field(description="What requests call it.")
    model: Name = Field(description="Target: a directory that every node has, or a hub id.")
    adaptivespec: str | dict[str, Any] | None = Field(
        default=None,
        description="Configuration of the method: the path of a file, beside app.yaml if relative, or what it holds; "
        "null is plain vLLM.",
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="Arguments of vLLM's engine, as AsyncEngineArgs.")
    deployment: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of Ray Serve: num_replicas, autoscaling_config, max_ongoing_requests and more.",
    )
    routing: Literal["prefix", "load"] = Field(
        default="prefix",
        description="prefix: to the replica that saw the longest beginning of the prompt, unless it is busier than "
        "another by more than 16 requests; load: to the less busy of two.",
    )
    placement: dict[str, Any] | None = Field(
        default=None, description="Ray's placement_group_config; without it a CPU or a GPU a rank, by vLLM's platform."
    )
    accelerator_type: str | None = Field(default=None, description="Kind of GPU, by Ray's names.")
    lora: dict[str, Any] | None = Field(default=None, description="Ray's lora_config: adapters loaded on request.")
    environment: dict[str, str] = Field(default_factory=dict, description="Variables of the replicas' processes.")


class HttpConfig(Section):
    """Where Ray Serve listens."""

    host: Name = Field(default="127.0.0.1", description="Address.")
    port: int = Field(default=8000, ge=1, le=65535, description="Port.")


class RayConfig(Section):
    """The cluster: one that runs, or a local one for as long as the command runs."""

    address: str | None = Field(
        default=None, description='"auto", or the address of a running cluster; null starts a local one.'
    )
    num_cpus: int | None = Field(default=None, ge=1, description="Of a local cluster: CPUs that Ray counts.")
    num_gpus: int | None = Field(default=None, ge=0, description="Of a local cluster: GPUs that Ray counts.")
    object_store_memory: int = Field(
        default=100_000_000, ge=80_000_000, description="Of a local cluster: bytes; requests and answers are small."
    )
    temp_dir: str | None = Field(
        default=None, description="Of a local cluster: a directory for logs and sockets, of a short name."
    )
    metrics_port: int | None = Field(
        default=None, ge=1, le=65535, description="Of a local cluster: port of Ray's Prometheus endpoint."
    )


class AppConfig(Section):
    """All of ``app.yaml``."""

    models: list[ModelConfig] = Field(min_length=1, description="What is served.")
    http: HttpConfig = Field(default_factory=HttpConfig)
    ray: RayConfig = Field(default_factory=RayConfig)
    metrics: bool = Field(default=True, description="vLLM's metrics and ours through Ray's Prometheus endpoint.")
