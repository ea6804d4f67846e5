"""What AdaptiveSpec takes of a worker's memory, beside the target and the KV cache.

vLLM sizes the KV cache by what is left once target and head are loaded. What is allocated later, with the first large
batch, is computed here from the loaded tensors and the scheduler's limits, so that it can be left out of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from adaptivespec_vllm.engine.v1.first_pass import MOST_PUT_OFF, PUT_OFF_BYTES
from adaptivespec_vllm.engine.v1.head import MOST_ROWS

if TYPE_CHECKING:
    from adaptivespec_vllm.engine.v1.runner import TreeModelRunner

_FLOAT32, _INT32, _INT64 = 4, 4, 8


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes of one worker. The largest batch has as many requests and rows as the scheduler allows.

    Attributes:
        requests: of the largest batch.
        rows: roots and draft nodes of the largest batch.
        weights: the head's own tensors; those that it shares with the target are the target's.
        packed: their packed copy.
        fresh: keys and values of tree rows, kept from the target's pass to the commit.
        logits: the target's, a row for each root and node.
        first_pass: the target's hidden states for the head: as they are, side by side, and with those that waited.
        levels: keys and values of expanded nodes or of a first pass, and the draft's logits of a level.
        backlog: hidden states of rows that are put off.
        kv_blocks: blocks of the KV cache that the scheduler holds for draft tokens.
        kv: bytes of these blocks.

    """

    requests: int
    rows: int
    weights: int
    packed: int
    fresh: int
    logits: int
    first_pass: int
    levels: int
    backlog: int
    kv_blocks: int
    kv: int

    @property
    def later(self) -> int:
        """What is not allocated when vLLM sizes the KV cache, and does not lie in it."""
        return self.fresh + self.logits + self.first_pass + self.levels + self.backlog

    def describe(self) -> str:
        """One line for people."""
        return (
            f"head {_mib(self.weights)}, packed copy {_mib(self.packed)}; at the largest batch ({self.requests} "
            f"requests, {self.rows} rows) buffers {_mib(self.later - self.backlog)} (kept keys and values "
            f"{_mib(self.fresh)}, logits {_mib(self.logits)}, first pass {_mib(self.first_pass)}, levels "
            f"{_mib(self.levels)}), rows put off {_mib(self.backlog)}, and {self.kv_blocks} KV blocks "
            f"({_mib(self.kv)}) for draft tokens"
        )


def memory_needs(runner: TreeModelRunner) -> MemoryNeeds:
    """What a runner whose models are loaded takes, and will take at the most."""
    settings, scheduler = runner.settings, runner.scheduler_config
    head, drafter = runner.drafter.model, runner.drafter
    requests, most_rows = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    rows = min(requests * (1 + settings.max_nodes), most_rows)
    dtype_bytes = runner.model_config.dtype.itemsize

    of_head = set(head.modules())
    layers = runner.attention_layers().values()
    target_kv = sum(_kv_numbers(layer) for layer in layers if layer not in of_head)
    head_kv = sum(_kv_numbers(layer) for layer in layers if layer in of_head)

    row_waiting = head.model.fc_input_size * dtype_bytes + _INT32 + _INT64  # hidden states, token, position
    scratch_rows = requests * settings.tree.expanded_nodes
    if drafter.head.is_packed:  # its first passes use the same scratch
        scratch_rows = max(scratch_rows, min(requests * MOST_ROWS, most_rows))
    level_logits = requests * settings.max_width * drafter.head.vocabulary * _FLOAT32
    specs = runner.get_kv_cache_spec().values()
    # The scheduler asks for room for the drafts that it sends, and for as many again behind them.
    blocks = requests * max(-(-2 * settings.max_nodes // spec.block_size) for spec in specs)
    return MemoryNeeds(
        requests=requests,
        rows=rows,
        weights=sum(_own_bytes(module) for module in of_head.difference(runner.model.modules())),
        packed=drafter.head.packed_bytes,
        fresh=rows * target_kv * dtype_bytes,
        logits=rows * runner.model_config.get_vocab_size() * dtype_bytes,
        first_pass=3 * most_rows * head.model.fc_input_size * dtype_bytes,
        levels=scratch_rows * head_kv * dtype_bytes + level_logits,
        backlog=min(
            requests * (most_rows // 2) * row_waiting, max(PUT_OFF_BYTES, requests * MOST_PUT_OFF * row_waiting)
        ),
        kv_blocks=blocks,
        kv=blocks * sum(spec.page_size_bytes for spec in specs),
    )


def _kv_numbers(layer: nn.Module) -> int:
    """Numbers of a token's keys and values."""
    return 2 * layer.num_kv_heads * layer.head_size


def _own_bytes(module: nn.Module) -> int:
    """Bytes of a module's tensors, without its children's. vLLM packs the weights of linear layers for a CPU and leaves
    an empty parameter: those count by their shape."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    total = sum(tensor.nbytes for tensor in tensors)
    weight = getattr(module, "weight", None)
    if weight is not None and not weight.numel():
        inputs = getattr(module, "input_size_per_partition", module.input_size)
        outputs = getattr(module, "output_size_per_partition", module.output_size)
        total += inputs * outputs * weight.itemsize
    return total


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
