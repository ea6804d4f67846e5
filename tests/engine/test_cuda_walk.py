"""One whole step of the CUDA runner's tensor code on tensors without data.

Device tensors are meta tensors here: an operation that mixes them with host tensors fails, and so does every look at a
number (``item``, ``tolist``, ``cpu``), so what passes has the right shapes and dtypes, and waits for the device only
where :func:`transfer.to_host` is called. vLLM's own methods run where they are plain tensor code; its kernels and its
models are stood in for by functions that check what they are given.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn, triton_attn
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

from adaptivespec_vllm import ops
from adaptivespec_vllm.attention import triton_paged
from adaptivespec_vllm.config import resolve
from adaptivespec_vllm.engine import seams
from adaptivespec_vllm.engine.v1 import (
    cuda_attention,
    cuda_proposer,
    device_steps,
    first_pass,
    transfer,
    tree_attention,
)
from adaptivespec_vllm.engine.v1.cuda_runner import CUDATreeModelRunner
from adaptivespec_vllm.engine.v1.faults import DraftFaults
from adaptivespec_vllm.engine.v1.stats import WorkerStats
from adaptivespec_vllm.engine.v1.step import match_trees
from adaptivespec_vllm.policy import make_policy
from adaptivespec_vllm.rules import make_rule
from adaptivespec_vllm.types import DraftTree, VerifyResult

META = torch.device("meta")
DTYPE = torch.bfloat16
HEADS, KV_HEADS, DIM, BLOCK_SIZE, BLOCKS = 8, 2, 64, 16, 40
HIDDEN, VOCABULARY, DRAFT_VOCABULARY = 64, 512, 256
REQUESTS = ["tree", "root", "prompt"]
COMPUTED, SCHEDULED = np.array([50, 9, 0]), np.array([6, 1, 11])
ROWS, MOST_ROWS, PADDED = int(SCHEDULED.sum()), 64, 32


def meta(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def expect(tensor: torch.Tensor, *shape: int, dtype: torch.dtype = DTYPE) -> None:
    assert (tensor.device.type, tuple(tensor.shape), tensor.dtype) == ("meta", shape, dtype)


class HostCopies:
    """Stands in for the copy to the host: counts, and gives numbers."""

    def __init__(self) -> None:
        self.shapes: list[list[tuple[int, ...]]] = []

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        assert all(tensor.is_meta for tensor in tensors)
        self.shapes.append([tuple(tensor.shape) for tensor in tensors])
        if len(self.shapes) == 1:  # what the walk decided: the first request accepted two nodes
            given = VerifyResult(
                paths=torch.tensor([[1, 3], [-1, -1], [-1, -1]], dtype=torch.int32),
                lengths=torch.tensor([2, 0, 0], dtype=torch.int32),
                next_tokens=torch.tensor([7, 8, 9]),
                promotions=torch.zeros(3, dtype=torch.int32),
                regrets=torch.zeros(3),
            )
            values = [getattr(given, field.name) for field in fields(given)]
        else:
            generator = torch.Generator().manual_seed(0)
            values = [
                torch.rand(t.shape, generator=generator).log() if t.is_floating_point() else torch.zeros(t.shape)
                for t in tensors
            ]
            for i in (0, 4):
                values[i] = values[i].sort(dim=-1, descending=True).values
            values[1] = torch.arange(values[1].numel()).view(values[1].shape)  # siblings differ
            values[5] = torch.arange(values[5].numel()).view(values[5].shape)
            values[2][0], values[3][0] = values[1], 0  # level 1 was expanded whole
        return [value.to(tensor.dtype) for value, tensor in zip(values, tensors, strict=True)]


def flash_stand_in(*args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(flash_attn_varlen_func).bind(*args, **kwargs).arguments
    rows, requests = given["q"].shape[0], given["cu_seqlens_q"].shape[0] - 1
    expect(given["q"], rows, HEADS, DIM)
    expect(given["k"], BLOCKS, BLOCK_SIZE, KV_HEADS, DIM)
    assert given["k"].stride() == given["v"].stride()
    assert given["k"].stride(-1) == 1
    expect(given["cu_seqlens_q"], requests + 1, dtype=torch.int32)
    expect(given["seqused_k"], requests, dtype=torch.int32)
    assert (given["block_table"].shape[0], given["block_table"].dtype) == (requests, torch.int32)
    assert type(given["max_seqlen_q"]) is int
    assert type(given["max_seqlen_k"]) is int
    assert given["causal"] is False
    assert given["return_softmax_lse"]
    return meta(rows, HEADS, DIM), meta(HEADS, rows, dtype=torch.float32)


def merge_stand_in(*args: Any, **kwargs: Any) -> None:
    given = inspect.signature(merge_attn_states).bind(*args, **kwargs).arguments
    rows = given["output"].shape[0]
    for name in ("output", "prefix_output", "suffix_output"):
        expect(given[name], rows, HEADS, DIM)
    for name in ("prefix_lse", "suffix_lse"):
        expect(given[name], HEADS, rows, dtype=torch.float32)
    assert given["prefix_output"].stride(1) == given["suffix_output"].stride(1)


def stock_forward(self: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, md: Any, output: Any) -> Any:
    """vLLM's own attention, of rows that are none of a tree."""
    rows = md.num_actual_tokens
    expect(query, rows, HEADS, DIM)
    expect(output, rows, HEADS, DIM)
    expect(md.query_start_loc, 2, dtype=torch.int32)
    expect(md.seq_lens, 1, dtype=torch.int32)
    expect(md.slot_mapping, rows, dtype=torch.int64)
    assert (md.max_query_len, md.max_seq_len) == (11, 11)
    return output


def cache_update(self: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
    layer.committed = slot_mapping.shape[0]
    expect(key, layer.committed, KV_HEADS, DIM)
    expect(value, layer.committed, KV_HEADS, DIM)
    expect(slot_mapping, layer.committed, dtype=torch.int64)


def walk_stand_in(logits: Any, tree: Any, limits: Any = None, sampled: Any = None, max_depth: Any = None) -> Any:
    """The native walk takes everything on the device, and is told the depth."""
    expect(logits, 8, VOCABULARY, dtype=torch.float32)
    assert all(getattr(tree, field.name).is_meta for field in fields(tree))
    assert limits is None or all(getattr(limits, field.name).is_meta for field in fields(limits))
    of_batch = [meta(3, dtype=dtype) for dtype in (torch.int32, torch.int64, torch.int32, torch.float32)]
    return VerifyResult(meta(3, max_depth, dtype=torch.int32), *of_batch)


def tree_part_stand_in(
    query: Any, key: Any, value: Any, q_start: Any, k_start: Any, words: Any, scale: Any, out: Any, lse: Any
) -> None:
    """The native op takes everything on the device."""
    rows, keys = query.shape[0], key.shape[0]
    expect(query, rows, HEADS, DIM)
    for fresh in (key, value):
        expect(fresh, keys, KV_HEADS, DIM)
    expect(q_start, *k_start.shape, dtype=torch.int32)
    expect(words, rows, dtype=torch.int64)
    expect(out, rows, HEADS, DIM)
    expect(lse, HEADS, rows, dtype=torch.float32)
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value, out))


class Kernel:
    """A Triton kernel that is launched with the right number of arguments, all of them on the device."""

    def __init__(self, kernel: Any) -> None:
        self.names = list(inspect.signature(kernel.fn).parameters)
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(type(size) is int and size > 0 for size in grid)

        def launch(*args: Any, **kwargs: Any) -> None:
            kwargs.pop("num_warps", None)
            assert self.names[: len(args)] + list(kwargs) == self.names
            assert all(not isinstance(value, torch.Tensor) or value.is_meta for value in args)
            self.launches += 1

        return launch


def layer_of(impl_class: type, name: str) -> Any:
    impl = object.__new__(impl_class)
    impl.__dict__ |= {
        "head_size": DIM, "scale": DIM**-0.5, "kv_cache_dtype": "auto", "vllm_flash_attn_version": 3,
        "fa4_hd256": False,
    }  # fmt: skip
    cache = meta(BLOCKS, BLOCK_SIZE, KV_HEADS, 2 * DIM).transpose(1, 2)  # vLLM's token-major layout
    return SimpleNamespace(
        layer_name=name, impl=impl, kv_cache=cache, num_kv_heads=KV_HEADS, num_heads=HEADS, head_size=DIM
    )


def attend(layer: Any, rows: int) -> None:
    """What vLLM's attention op does, under the forward context or with metadata at hand."""
    metadata = get_forward_context().attn_metadata[layer.layer_name]
    query, key, value = meta(rows, HEADS, DIM), meta(rows, KV_HEADS, DIM), meta(rows, KV_HEADS, DIM)
    layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata, meta(rows, HEADS, DIM))


class Head(Eagle3LlamaForCausalLM):
    """A head whose forward pass is one attention layer."""

    def __init__(self, layer: Any) -> None:
        torch.nn.Module.__init__(self)
        self.logits_processor = SimpleNamespace(org_vocab_size=DRAFT_VOCABULARY)
        self.draft_id_to_target_id = torch.nn.Parameter(meta(DRAFT_VOCABULARY, dtype=torch.int64), requires_grad=False)
        self.model = SimpleNamespace(layers=[SimpleNamespace(self_attn=SimpleNamespace(attn=layer))])
        self.layer, self.passes = layer, []

    def combine_hidden_states(self, hidden: torch.Tensor) -> torch.Tensor:
        expect(hidden, hidden.shape[0], 3 * HIDDEN)
        return meta(hidden.shape[0], HIDDEN)

    def forward(self, input_ids: Any, positions: Any, hidden_states: Any, inputs_embeds: Any = None) -> Any:
        rows = input_ids.shape[0]
        expect(input_ids, rows, dtype=torch.int32)
        expect(positions, rows, dtype=torch.int64)
        expect(hidden_states, rows, HIDDEN)
        slots = get_forward_context().slot_mapping[self.layer.layer_name]
        expect(slots, rows, dtype=torch.int64)
        if self.layer.layer_name in get_forward_context().attn_metadata:
            attend(self.layer, rows)
        self.passes.append(rows)
        return meta(rows, HIDDEN), meta(rows, HIDDEN)


class Dispatcher:
    """Graphs of 8, 16 and 32 rows."""

    def dispatch(self, rows: int, valid_modes: Any = None) -> Any:
        size = next(size for size in (8, 16, 32, MOST_ROWS) if rows <= size)
        return CUDAGraphMode.PIECEWISE, SimpleNamespace(num_tokens=size)


@contextmanager
def walked(attention: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner before its first step, made of what its constructor would make on a GPU."""
    impl_class = flash_attn.FlashAttentionImpl if attention != "triton" else triton_attn.TritonAttentionImpl
    target, head_layer = layer_of(impl_class, "target"), layer_of(impl_class, "head")
    copies = HostCopies()
    monkeypatch.setattr(cuda_attention, "flash_attn_varlen_func", flash_stand_in)
    monkeypatch.setattr(cuda_attention, "merge_attn_states", merge_stand_in)
    for stock in (flash_attn.FlashAttentionImpl, triton_attn.TritonAttentionImpl):
        monkeypatch.setattr(stock, "forward", stock_forward)
        monkeypatch.setattr(stock, "do_kv_cache_update", cache_update)
    for module in (cuda_proposer, device_steps):
        monkeypatch.setattr(module, "to_host", copies)
    monkeypatch.setattr(ops, "walk_trees", walk_stand_in)
    monkeypatch.setattr(ops, "tree_part_attention", tree_part_stand_in)

    walker = object.__new__(CUDATreeModelRunner)
    walker.device, walker.settings = (
        META,
        resolve(
            {
                "model": "head",
                "attention": attention,
                "tree": {"policy": "static", "shape": {"depth": 4, "width": 3, "nodes": 12}},
            }
        ),
    )
    walker.policy, walker.costs, walker.max_width = make_policy(walker.settings), None, 3
    walker.rule = make_rule(walker.settings)
    walker._overrides = {}
    walker.stats, walker.faults, walker.pending, walker.checks = WorkerStats(), DraftFaults(2), {}, False
    walker.compilation_config = SimpleNamespace(static_forward_context={"target": target, "head": head_layer})
    walker.positions = meta(MOST_ROWS, dtype=torch.int64)
    walker.slot_mapping = meta(MOST_ROWS, dtype=torch.int64)
    table = SimpleNamespace(slot_mapping=SimpleNamespace(gpu=walker.slot_mapping), block_size=BLOCK_SIZE)
    walker.input_batch = SimpleNamespace(
        req_ids=REQUESTS, num_reqs=3, block_table=SimpleNamespace(block_tables=[table])
    )
    walker.discard_request_mask = SimpleNamespace(np=np.zeros(3, dtype=bool))
    params = SimpleNamespace(extra_args=None, structured_outputs=None, all_stop_token_ids=set())
    walker.requests = {name: SimpleNamespace(sampling_params=params) for name in REQUESTS}

    walker.teach_attention()
    config = VllmConfig()
    object.__setattr__(config, "model_config", SimpleNamespace(uses_mrope=False))
    proposer = object.__new__(cuda_proposer.CUDATreeProposer)
    proposer.__dict__ |= {
        "runner": walker, "device": META, "method": "eagle3", "window": 1000, "max_model_len": 1000, "kv_cache_gid": 0,
        "max_num_tokens": MOST_ROWS, "num_speculative_tokens": 12, "hidden_size": HIDDEN, "uses_mrope": False,
        "use_heterogeneous_vocab": False, "needs_extra_input_slots": False, "supports_mm_inputs": False,
        "pass_hidden_states_to_model": True, "eplb_state": None, "_share_mtp_indices": False, "draft_attn_groups": [],
        "_draft_attn_layer_names": {"head"}, "token_arange_np": np.arange(MOST_ROWS, dtype=np.int32),
        "input_ids": meta(MOST_ROWS, dtype=torch.int32), "positions": meta(MOST_ROWS, dtype=torch.int64),
        "hidden_states": meta(MOST_ROWS, HIDDEN), "_slot_mapping_buffer": meta(MOST_ROWS, dtype=torch.int64),
        "cudagraph_dispatcher": Dispatcher(), "vllm_config": config, "model": Head(head_layer),
        "backlog": first_pass.Backlog(32), "_chosen": [],
    }  # fmt: skip
    proposer.model.register_forward_hook(proposer._keep_output)
    proposer.head = proposer.make_head()
    proposer.head._project = lambda hidden: meta(hidden.shape[0], DRAFT_VOCABULARY)
    walker.drafter, walker.copies, walker.layers = proposer, copies, (target, head_layer)
    yield walker


def common_metadata(walker: Any) -> CommonAttentionMetadata:
    start = torch.tensor([0, *np.cumsum(SCHEDULED).tolist()], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=meta(4, dtype=torch.int32),
        query_start_loc_cpu=start,
        seq_lens=meta(3, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.from_numpy(COMPUTED + SCHEDULED).int(),
        num_reqs=3,
        num_actual_tokens=ROWS,
        max_query_len=11,
        max_seq_len=56,
        block_table_tensor=meta(3, 6, dtype=torch.int32),
        slot_mapping=walker.slot_mapping[:PADDED],
        causal=True,
    )


class Builder:
    """vLLM's metadata of a batch, from its common metadata."""

    def build(self, common_prefix_len: int, common: CommonAttentionMetadata) -> Any:
        return SimpleNamespace(**{field.name: getattr(common, field.name, None) for field in fields(common)})


@pytest.mark.parametrize("attention", ["flash", "triton"])
def test_a_step(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = SimpleNamespace(dot_type=lambda dtype: dtype)
    if attention == "triton":
        real = pytest.importorskip("adaptivespec_vllm.attention.triton_kernels")
        kernels.tree_attention_kernel = Kernel(real.tree_attention_kernel)
        kernels.join_splits_kernel = Kernel(real.join_splits_kernel)
        monkeypatch.setattr(triton_paged, "kernels", lambda: kernels)
    with walked(attention, monkeypatch) as walker, torch.inference_mode():
        target, _ = walker.layers
        proposer = walker.drafter

        # Match and place, as _prepare_inputs does around vLLM's.
        tree = DraftTree([11, 12, 13, 14, 15], [0, 0, 1, 1, 3], 50, confidence=0.5)
        walker.pending = {"tree": tree}
        walker.step = step = match_trees(
            walker.pending, REQUESTS, {"tree": tree.tokens}, COMPUTED, SCHEDULED, np.arange(ROWS)
        )
        step.slots = [walker.slot_mapping[:ROWS].clone()]
        assert step.deferred == [True, True, False]
        walker._place_trees(step)

        # Attach, and the target's forward pass over a padded batch.
        common = common_metadata(walker)
        metadata = SimpleNamespace(block_table=common.block_table_tensor)
        group = SimpleNamespace(layer_names=["target"], get_metadata_builder=Builder)
        walker.attn_groups = [[group]]
        walker._attention_steps = tree_attention.attach_trees(
            step, walker.attn_groups, {"target": metadata}, common, walker.attention, META
        )
        query, key = meta(PADDED, HEADS, DIM), meta(PADDED, KV_HEADS, DIM)
        target.impl.forward(target, query, key, key, target.kv_cache, metadata, meta(PADDED, HEADS, DIM))
        expect(walker._attention_steps[0].trees.fresh["target"][0], 7, KV_HEADS, DIM)

        # Verify and commit: one wait.
        step.result = walker.verify(meta(8, VOCABULARY, dtype=torch.float32), walker.margins())
        assert len(walker.copies.shapes) == 1
        walker._commit(step)
        assert target.committed == 2

        # Draft: rows of the accepted path through the head, then its levels; one more wait.
        sampled = [[11, 13, 7], [8], [9]]
        common, rows = proposer.prepare_inputs(common, sampled, [5, 0, 0])
        expect(rows, 15, dtype=torch.int64)
        lists = proposer.propose(
            12,
            target_token_ids=meta(15, dtype=torch.int32),
            target_positions=meta(15, dtype=torch.int64),
            target_hidden_states=meta(15, 3 * HIDDEN),
            next_token_ids=meta(3, dtype=torch.int32),
            token_indices_to_sample=None,
            common_attn_metadata=common,
            sampling_metadata=None,
        )
        assert len(walker.copies.shapes) == 2
        assert walker.copies.shapes[1] == [(3, 3), (3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3, 3), (3, 3, 3, 3)]
        # 15 rows and three levels of 3 trees x 3 nodes, each padded to a captured size
        assert proposer.model.passes == [16, 16, 16, 16]
        assert [walker.pending[name].root_position for name in REQUESTS] == [53, 10, 11]
        assert all(0 < len(tokens) <= 12 for tokens in lists)
        if attention == "triton":
            assert kernels.tree_attention_kernel.launches == 4


def test_putting_off_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that wait are joined with later ones by positions that the host knows."""
    with walked("flash", monkeypatch) as walker, torch.inference_mode():
        backlog = walker.drafter.backlog
        backlog.put("root", first_pass.Rows(meta(1, dtype=torch.int32), meta(1, dtype=torch.int64), meta(1, 9)), 10)
        assert backlog.waiting("root", 10) == 1
        assert backlog.waiting("root", 11) == 0


@pytest.mark.parametrize("impl", [flash_attn.FlashAttentionImpl, triton_attn.TritonAttentionImpl])
def test_without_trees_the_backend_is_vllms(impl: type, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(impl, "forward", lambda self, *args: called.append(args) or args[6])
    layer = layer_of(impl, "layer")
    cuda_attention.teach({"layer": layer}, {"layer": layer}, "auto")
    given = [layer, *(object() for _ in range(8))]
    assert layer.impl.forward(*given) is given[6]
    assert called == [tuple(given)]


def test_other_backends_are_refused_by_name() -> None:
    other = SimpleNamespace(impl=SimpleNamespace())
    with pytest.raises(seams.ConfigError, match=r"layer x .*FLASH_ATTN and TRITON_ATTN"):
        cuda_attention.teach({}, {"x": other}, "auto")


def test_heads_of_256_on_blackwell_are_left_to_triton() -> None:
    layer = layer_of(flash_attn.FlashAttentionImpl, "layer")
    layer.impl.fa4_hd256 = True
    assert cuda_attention.teach({"layer": layer}, {"layer": layer}, "auto")[0] == "triton"
    with pytest.raises(seams.ConfigError, match="got 'flash'"):
        cuda_attention.teach({"layer": layer}, {"layer": layer}, "flash")


def test_everything_that_the_cuda_runner_touches_is_there() -> None:
    """vLLM's build for CPUs has the same Python files."""
    assert [(s.seam.path, s.error) for s in seams.check_seams(on="cuda") if not s.found] == []


def test_a_changed_signature_is_seen() -> None:
    seam = seams.Seam("vllm.forward_context:set_forward_context", "test", takes=("attn_metadata", "gone"))
    assert "takes no gone any more" in (seams._status(seam).error or "")


def test_host_tensors_are_not_copied() -> None:
    here = [torch.ones(2), torch.zeros(1)]
    assert transfer.to_host(*here) == here
    assert transfer.to_device([1, 2], META).is_meta
