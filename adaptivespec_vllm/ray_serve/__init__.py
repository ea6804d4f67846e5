"""AdaptiveSpec behind Ray Serve: Ray's own LLM application, with engines that decode by our method.

Replicas, autoscaling, multiplexing, routing and the OpenAI API are Ray's. What is ours is one file that says which
models are served and how (``schema``, ``reading``), the translation into Ray's configuration with what can be checked
before anything starts (``application``), and the command (``cli``, ``cluster``). Ray's own way in is
``serve run adaptivespec_vllm.ray_serve:app config=app.yaml``.
"""

from __future__ import annotations

from typing import Any


def app(arguments: dict[str, Any]) -> Any:
    """An application builder for ``serve run`` and for the configuration files of ``serve deploy``.

    Args:
        arguments: ``{"config": PATH}`` of an ``app.yaml``, or what such a file holds.

    Returns:
        The ``ray.serve`` application.

    Raises:
        ConfigError: for whatever is wrong with it.

    """
    from adaptivespec_vllm.ray_serve.application import build
    from adaptivespec_vllm.ray_serve.reading import of_arguments

    return build(of_arguments(arguments))
