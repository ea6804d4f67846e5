"""What vLLM does by itself, as JSON on the last line; run with and without the plugin by ``test_not_asked_for.py``.

Arguments: a target (with a tokenizer), a head.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(target: str, head: str) -> None:
    from prometheus_client import REGISTRY
    from vllm import LLM, SamplingParams
    from vllm.config.speculative import SpeculativeConfig
    from vllm.plugins import load_general_plugins
    from vllm.sampling_params import StructuredOutputsParams

    load_general_plugins()
    wrapped = "adaptivespec_vllm.plugin" in sys.modules
    settings: dict[str, Any] = {
        "model": target,
        "dtype": "float32",
        "max_model_len": 256,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 16 << 20,
        "max_num_seqs": 4,
        "seed": 0,
        "disable_log_stats": False,
    }
    chain = {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
    requests = {
        "greedy": SamplingParams(temperature=0, max_tokens=24),
        "sampled": SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=24),
        "unseeded": SamplingParams(temperature=0.9, max_tokens=24),
        "logprobs": SamplingParams(temperature=0, logprobs=3, prompt_logprobs=1, max_tokens=12),
        "penalties": SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=24),
        "structured": SamplingParams(
            temperature=0, max_tokens=24, structured_outputs=StructuredOutputsParams(choice=["yes", "no", "perhaps"])
        ),
        "stop": SamplingParams(temperature=0, stop=["a", "e"], max_tokens=24),
    }
    prompts = ["The capital of France is", "def add(a, b):"]
    answers, engines = {}, []
    for name, speculative in (("plain", None), ("eagle3", chain)):
        engines.append(llm := LLM(**settings, speculative_config=speculative))
        for kind, params in requests.items():
            if speculative and params.temperature:
                continue  # vLLM's chains sample otherwise in every process, with a seed too
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers[f"{name}, {kind}"] = [
                [
                    output.outputs[0].text,
                    list(output.outputs[0].token_ids),
                    output.outputs[0].finish_reason,
                    _logprobs(output.outputs[0].logprobs),
                    _logprobs(output.prompt_logprobs),
                ]
                for output in outputs
            ]
        config = llm.llm_engine.vllm_config
        speculative_class = type(config.speculative_config)
        answers[f"{name}, engine"] = [
            config.compute_hash(),
            config.parallel_config.worker_cls,
            config.scheduler_config.async_scheduling,
            speculative_class in (SpeculativeConfig, type(None)),
            type(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker).__name__,
        ]
    metrics = sorted({metric.name for metric in REGISTRY.collect()})
    print(json.dumps({"plugin": wrapped, "answers": answers, "metrics": metrics}))


def _logprobs(places: Any) -> list | None:
    """Token, rank and value of each entry, in order."""
    if places is None:
        return None
    return [place and [[token, entry.rank, entry.logprob] for token, entry in place.items()] for place in places]


if __name__ == "__main__":
    main(*sys.argv[1:])
