"""The command ``adaptivespec serve-ray``."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from adaptivespec_vllm.config import ConfigError, reason
from adaptivespec_vllm.ray_serve.reading import read

NAME = "adaptivespec"
"""Of the application in Ray Serve."""


def run(
    config: Annotated[Path, typer.Argument(metavar="app.yaml", help="What is served; see docs/ray.md.")],
    check: Annotated[bool, typer.Option("--check", help="Check the file and stop: no Ray, no engine.")] = False,
) -> None:
    """Serve models with Ray Serve's own OpenAI application, decoded by AdaptiveSpec.

    Runs until SIGINT or SIGTERM. With ``ray.address`` in the file the application is added to that cluster, and removed
    at the end; without, a cluster on this machine is started, and ended.
    """
    try:
        chosen = read(config)
        try:
            from adaptivespec_vllm.ray_serve.application import build, llm_configs
        except ImportError as error:
            raise ConfigError(f"ray: cannot be imported ({error}); install adaptivespec-vllm[ray]") from None
        llm_configs(chosen)
        if check:
            typer.echo(f"{config}: {len(chosen.models)} model(s): {', '.join(model.name for model in chosen.models)}")
            return
        from adaptivespec_vllm.ray_serve.cluster import cluster

        with cluster(chosen.ray) as local:
            _serve(build(chosen), chosen.http.host, chosen.http.port, local)
    except ConfigError as error:
        typer.echo(f"serve-ray: {error}", err=True)
        raise typer.Exit(2) from None


def _serve(application: Any, host: str, port: int, local: bool) -> None:
    from ray import serve

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as SIGINT, while replicas start too
    serve.start(http_options={"host": host, "port": port})
    try:
        serve.run(application, name=NAME, blocking=False)
        typer.echo(f"serving on http://{host}:{port}/v1")
        threading.Event().wait()
    except KeyboardInterrupt:
        typer.echo("stopping")
    except RuntimeError as error:  # a replica does not come up
        typer.echo(f"serve-ray: {reason(error)}; the replicas' logs say why", err=True)
        raise typer.Exit(1) from None
    finally:
        serve.shutdown() if local else serve.delete(NAME)
