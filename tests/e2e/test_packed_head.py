"""Passes on packed weights: the heads that get them, and that they are the passes of the head's own modules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.v1.attention.backend import CommonAttentionMetadata

from adaptivespec_vllm.draft import LevelRows
from adaptivespec_vllm.engine.v1.first_pass import Rows, slots_of
from adaptivespec_vllm.engine.v1.head import Eagle3Head
from adaptivespec_vllm.engine.v1.proposer import TreeProposer
from tests.e2e import tiny
from tests.e2e.conftest import adaptivespec, generate, greedy, random_prompts
from tests.e2e.oracle import runner_of


def make_head(path: Path, changes: dict[str, Any], *, exact: bool = True) -> Path:
    """The tiny head with changes to its config, with the tensors that these ask for."""
    tiny.make_head(path, draft_vocabulary=changes.get("draft_vocab_size", tiny.DRAFT_VOCABULARY))
    config = json.loads((path / "config.json").read_text()) | changes
    state = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(9)
    q, kv = tiny.HEADS * tiny.HEAD_SIZE, tiny.KV_HEADS * tiny.HEAD_SIZE
    for name in [name for name in state if name.endswith("norm.weight")]:
        state[name] = 1 + 0.2 * torch.randn(state[name].shape, generator=generator)
    if config["num_hidden_layers"] == 2:
        state = {name.replace("midlayer.", "layers.0."): value for name, value in state.items()}
        for name in [name for name in state if name.startswith("layers.0.") and "hidden_norm" not in name]:
            second = state[name].roll(1, 0)
            if any(f"{part}_proj" in name for part in "qkv"):  # embeddings enter the first layer only
                second = second[:, : tiny.HIDDEN]
            state[name.replace("layers.0.", "layers.1.")] = second.clone()
    if config.get("fc_norm"):
        for index in range(3):
            state[f"fc_norm.{index}.weight"] = 1 + 0.2 * torch.randn(tiny.HIDDEN, generator=generator)
    if config.get("norm_before_fc"):
        state["input_norm.weight"] = 1 + 0.2 * torch.randn(3 * tiny.HIDDEN, generator=generator)
    if config.get("attention_bias"):
        for part, size in (("q", q), ("k", kv), ("v", kv), ("o", tiny.HIDDEN)):
            state[f"midlayer.self_attn.{part}_proj.bias"] = torch.randn(size, generator=generator)
    if config.get("mlp_bias"):
        for part, size in (("gate", tiny.INTERMEDIATE), ("up", tiny.INTERMEDIATE), ("down", tiny.HIDDEN)):
            state[f"midlayer.mlp.{part}_proj.bias"] = torch.randn(size, generator=generator)
    if config["model_type"] == "qwen3":
        for part in "qk":
            state[f"midlayer.self_attn.{part}_norm.weight"] = 1 + 0.2 * torch.randn(tiny.HEAD_SIZE, generator=generator)
    if exact:
        state = {name: v.bfloat16().float() if v.is_floating_point() else v for name, v in state.items()}
    (path / "config.json").write_text(json.dumps(config))
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return path


QWEN3 = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}


@pytest.fixture
def drafter_of(make_llm: Callable[..., Any], tmp_path: Path) -> Callable[..., TreeProposer]:
    """The drafter of an engine that has drafted with a head."""

    def make(changes: dict[str, Any], **how: Any) -> TreeProposer:
        llm = make_llm(speculative_config=adaptivespec(make_head(tmp_path / "head", changes, **how)))
        generate(llm, random_prompts(2), greedy(4))
        return runner_of(llm).drafter

    return make


@torch.inference_mode()
def two_levels(head: Eagle3Head) -> list[torch.Tensor]:
    """Logits and hidden states of two levels of two requests, behind prefixes of the head's cache."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, tiny.HIDDEN, generator=generator)
    table = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)
    head.begin(hidden, torch.tensor([40, 7], dtype=torch.int32), table, 8)
    levels = [
        ([0, 0, 1], [40, 40, 7], [0, 2, 3], [0, 1, 0], [0b1, 0b10, 0b1]),
        ([0, 1, 1, 2], [41, 41, 41, 8], [0, 3, 4], [2, 3, 4, 1], [0b101, 0b1010, 0b10010, 0b11]),
    ]
    seen = []
    for parents, positions, start, scratch, ancestors in levels:
        rows = LevelRows(
            tokens=torch.randint(0, tiny.VOCABULARY, (len(parents),), generator=generator),
            parent_rows=torch.tensor(parents),
            positions=torch.tensor(positions),
            start=torch.tensor(start, dtype=torch.int32),
            scratch_rows=torch.tensor(scratch),
            ancestors=torch.tensor(ancestors),
        )
        seen += [head.level(rows), head._hidden]
    return seen


@torch.inference_mode()
def assert_same_levels(head: Eagle3Head) -> None:
    packed = head._packed
    assert packed is not None
    mine = two_levels(head)
    head._packed = None
    for attention in head._attention:
        attention.scratch.zero_()
    for got, want in zip(mine, two_levels(head), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    head._packed = packed


@torch.inference_mode()
def first_passes(drafter: TreeProposer) -> list[torch.Tensor]:
    """Outputs and cache of two first passes of two requests; the second one reads what the first has written."""
    generator = torch.Generator().manual_seed(4)
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    block_size = drafter.runner.input_batch.block_table.block_tables[drafter.kv_cache_gid].block_size
    seen = []
    for spans in ([(0, 40), (0, 1)], [(40, 43), (1, 6)]):
        lengths = torch.tensor([end - first for first, end in spans])
        count, longest = int(lengths.sum()), int(lengths.max())
        start = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
        positions = [torch.arange(*span) for span in spans]
        ends = torch.tensor([end for _, end in spans], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=start,
            query_start_loc_cpu=start,
            seq_lens=ends,
            seq_lens_cpu_upper_bound=ends,
            num_reqs=2,
            num_actual_tokens=count,
            max_query_len=longest,
            max_seq_len=int(ends.max()),
            block_table_tensor=table,
            slot_mapping=torch.cat([slots_of(p, row, block_size) for p, row in zip(positions, table, strict=True)]),
            causal=True,
        )
        rows = Rows(
            torch.randint(0, tiny.VOCABULARY, (count,), generator=generator).int(),
            torch.cat(positions),
            torch.randn(count, drafter.model.model.fc_input_size, generator=generator),
        )
        following = torch.tensor([5, 6], dtype=torch.int32)
        drafter._pass(
            rows,
            {
                "next_token_ids": following,
                "token_indices_to_sample": None,
                "common_attn_metadata": common,
                "sampling_metadata": None,
            },
        )
        at = drafter._sampled_rows.long()
        seen += [t[at].clone() for t in drafter._first_pass]
    for attention in drafter.head._attention:
        keys, values = attention.caches
        seen += [t[1:5].clone() for t in (keys, values)]
        for cache in (keys, values):
            cache[1:5] = 0
    return seen


def assert_same_first_pass(drafter: TreeProposer) -> None:
    head = drafter.head
    packed = head._packed
    assert head.takes(40)
    first_passes(drafter)  # leaves an empty cache
    mine = first_passes(drafter)
    head._packed = None
    assert not head.takes(1)
    for got, want in zip(mine, first_passes(drafter), strict=True):
        assert float(want.abs().max()) > 0.1
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    head._packed = packed


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fc_norm": True},
        {"norm_before_fc": True},
        {"attention_bias": True, "mlp_bias": True},
        {"norm_before_residual": True},
        {"norm_output": True},
        {"num_hidden_layers": 2},
        {"draft_vocab_size": tiny.VOCABULARY},
        {"draft_vocab_size": 100},
        {"logit_scale": 0.5},
        {"rope_scaling": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 128}},
        QWEN3,
        QWEN3 | {"attention_bias": True, "norm_before_residual": True},
    ],
    ids=lambda changes: "-".join(f"{key}={value}"[:30] for key, value in changes.items()) or "plain",
)  # fmt: skip
def test_packed_passes_are_those_of_the_modules(drafter_of: Callable[..., TreeProposer], changes: dict) -> None:
    drafter = drafter_of(changes)
    assert_same_levels(drafter.head)
    assert_same_first_pass(drafter)


def test_weights_that_bfloat16_cannot_hold_stay_where_they_are(drafter_of: Callable[..., TreeProposer]) -> None:
    assert drafter_of({}, exact=False).head._packed is None


def test_a_head_whose_trial_differs_keeps_its_modules(drafter_of: Callable[..., TreeProposer]) -> None:
    """Another activation: the structure looks right, the result is not."""
    head = drafter_of({}).head
    assert head._packed is not None
    for layer in head._inner.layers:
        layer.mlp.act_fn = torch.nn.GLU()
    assert Eagle3Head(head._model)._packed is None
