"""Two ranks as actors of Ray: run as a script by ``test_ray_executor.py``, prints one line of JSON.

``python ray_ranks.py TARGET HEAD [FOLDER]``: with FOLDER, the workers import this package from there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

PROMPTS = [[5, 9, 40, 12, 77], [300, 4, 4, 61, 90, 33, 8]]
TOKENS = 24


def main(target: str, head: str, folder: str | None) -> dict[str, Any]:
    import ray

    environment = {"env_vars": {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ['PYTHONPATH']}"}} if folder else {}
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=2,
        object_store_memory=100_000_000,
        include_dashboard=False,
        runtime_env=environment,
        _temp_dir=tempfile.mkdtemp(prefix="r"),
        _node_ip_address="127.0.0.1",
    )
    try:
        return decode(target, head)
    finally:
        ray.shutdown()


def decode(target: str, head: str) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    shape = {"depth": 4, "width": 3, "nodes": 8}
    try:
        llm = LLM(
            model=target,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=256,
            max_num_seqs=4,
            enforce_eager=True,
            kv_cache_memory_bytes=16 << 20,
            block_size=32,
            tensor_parallel_size=2,
            distributed_executor_backend="ray",
            speculative_config={"method": "adaptivespec", "model": head, "tree": {"policy": "static", "shape": shape}},
        )
    except Exception as error:
        return {"error": str(error)}
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "drafted": [stats["drafted_nodes"] for stats in llm.collective_rpc("adaptivespec_stats")],
        "variables": llm.collective_rpc(switches),
    }


def switches(worker: Any) -> str | None:
    """What a worker sees of a switch that was set for the process that started it."""
    return os.environ.get("VLLM_ADAPTIVESPEC_OF_A_TEST")


if __name__ == "__main__":
    arguments = [*sys.argv[1:], None]
    # Ray's workers are started before they are told these
    os.environ["VLLM_ADAPTIVESPEC_OF_A_TEST"] = "set"
    os.environ |= {
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    print(json.dumps(main(arguments[0], arguments[1], arguments[2])))
