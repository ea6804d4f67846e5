"""Ray Data's own LLM processor with AdaptiveSpec engines, for texts alone: ``processor.py TARGET HEAD``."""

import sys

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

if __name__ == "__main__":
    target, head = sys.argv[1:3]
    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=200_000_000,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
    )
    processor = build_processor(
        vLLMEngineProcessorConfig(
            model_source=target,
            engine_kwargs={
                "dtype": "float32",
                "max_model_len": 256,
                "max_num_seqs": 4,
                "enforce_eager": True,
                "kv_cache_memory_bytes": 16 << 20,
                "speculative_config": {"method": "adaptivespec", "model": head},
            },
            placement_group_config={"bundles": [{"CPU": 1}]},
            batch_size=4,
            concurrency=1,
            chat_template_stage={"enabled": False},
            tokenize_stage={"enabled": False},
            detokenize_stage={"enabled": False},
        ),
        preprocess=lambda row: {"prompt": row["prompt"], "sampling_params": {"temperature": 0, "max_tokens": 12}},
        postprocess=lambda row: {"prompt": row["prompt"], "text": row["generated_text"]},
    )
    for row in processor(ray.data.from_items([{"prompt": "the cat"}, {"prompt": "a b c"}])).iter_rows():
        print(row)
    ray.shutdown()
