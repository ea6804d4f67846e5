"""What the decoding benchmarks share: arms by name, prompts in the chat format, engines in this process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

ARMS_HELP = """Arms: ``plain``, ``stock:K`` (vLLM's EAGLE-3 chain of K tokens), ``tree:D,W,N`` (a static tree) and
``adaptive``. To an arm of ours ``/P`` adds ``min_path_probability`` and ``@KAPPA`` the margin rule:
``tree:5,4,8/0.1@0.2``."""

Prompt = dict[str, list[int]]


def speculative_config(arm: str, head: str) -> dict[str, Any] | None:
    """The speculative config that an arm's name stands for."""
    base, _, kappa = arm.partition("@")
    base, _, prune = base.partition("/")
    kind, _, rest = base.partition(":")
    if kind == "plain":
        return None
    if kind == "stock":
        return {"method": "eagle3", "model": head, "num_speculative_tokens": int(rest)}
    config: dict[str, Any] = {"method": "adaptivespec", "model": head}
    if kind == "tree":
        depth, width, nodes = (int(x) for x in rest.split(","))
        config["tree"] = {"policy": "static", "shape": {"depth": depth, "width": width, "nodes": nodes}}
    if prune:
        config.setdefault("tree", {})["min_path_probability"] = float(prune)
    if kappa:
        config["margin"] = {"kappa": float(kappa)}
    return config


def is_ours(arm: str) -> bool:
    """Whether an arm decodes with AdaptiveSpec."""
    return not arm.startswith(("plain", "stock"))


def read_prompts(path: Path, kind: str | None, limit: int | None) -> list[dict[str, str]]:
    """Rows with "id", "kind" and "prompt", of one kind or all, spread evenly when there are more than ``limit``."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if kind in (None, row["kind"])]
    if limit is None or limit >= len(rows):
        return rows
    return [rows[i * len(rows) // limit] for i in range(limit)]


def encode(llm: Any, rows: list[dict[str, str]]) -> list[Prompt]:
    """Prompts as token ids, in the model's chat format."""
    tokenizer = llm.get_tokenizer()
    texts = (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        for row in rows
    )
    return [{"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in texts]


def start(arm: str, model: str, head: str, **settings: Any) -> Any:
    """An engine for an arm. Keep it: one that is collected tears down what all engines of the process share."""
    from vllm import LLM

    defaults = {
        "dtype": "float32",
        "max_model_len": 1024,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 256 << 20,
        "speculative_config": speculative_config(arm, head),
    }
    return LLM(model=model, **(defaults | settings))
