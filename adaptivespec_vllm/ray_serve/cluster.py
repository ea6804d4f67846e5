"""Ray itself: joined, or started for this process alone and ended with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from adaptivespec_vllm import runtime
from adaptivespec_vllm.config import ConfigError, reason
from adaptivespec_vllm.ray_serve.schema import RayConfig

_MOST_TEMP_DIR = 40
"""Characters; Ray makes names of sockets of it, which Linux limits to 107."""


@contextmanager
def cluster(config: RayConfig) -> Iterator[bool]:
    """Connect to Ray; whether the cluster is a local one, which ends with the context.

    Raises:
        ConfigError: no cluster can be reached or started as configured.

    """
    import ray

    local = config.address is None
    if local:
        # what a local cluster starts has this environment; on other nodes theirs counts
        os.environ.update(runtime.completed(os.environ, RAY_USAGE_STATS_ENABLED="0"))
    try:
        ray.init(**(_local(config) if local else _remote(config)))
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"ray: {'cannot be started' if local else 'cannot be reached'} ({reason(error)})") from None
    try:
        yield local
    finally:
        ray.shutdown()


def _local(config: RayConfig) -> dict[str, Any]:
    if config.temp_dir is not None and len(config.temp_dir) > _MOST_TEMP_DIR:
        raise ConfigError(
            f"ray.temp_dir: got {config.temp_dir!r}; allowed: at most {_MOST_TEMP_DIR} characters, since Ray makes "
            "names of sockets of it"
        )
    options: dict[str, Any] = {
        "address": "local",
        "num_cpus": config.num_cpus,
        "num_gpus": config.num_gpus,
        "object_store_memory": config.object_store_memory,
        "include_dashboard": False,
        "_temp_dir": config.temp_dir,
        "_node_ip_address": "127.0.0.1",
        "_metrics_export_port": config.metrics_port,
    }
    return {name: value for name, value in options.items() if value is not None}


def _remote(config: RayConfig) -> dict[str, Any]:
    for name in sorted(config.model_fields_set - {"address"}):
        raise ConfigError(f"ray.{name}: given with ray.address; allowed: without it, for a local cluster")
    return {"address": config.address}
