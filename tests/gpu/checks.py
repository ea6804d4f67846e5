"""Every op against a float64 reference on fresh random inputs, outputs poisoned first.

Each check takes a device and a seed, runs one random case and returns its largest error in tolerances (0 where results
must be equal); it raises ``AssertionError`` above 1. References are computed on the CPU, and the tensors of a case keep
their strides and lie in memory full of NaN, so that a read beside them shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from adaptivespec_vllm import ops
from adaptivespec_vllm.ops import reference
from adaptivespec_vllm.types import MarginLimits, TreeBatch, VerifyResult
from tests.kernels.cases import (
    AttentionCase,
    assert_equal,
    attention_case,
    generator,
    in_float64,
    randint,
    random_batch,
    random_limits,
    random_parents,
)

Check = Callable[[torch.device, int], float]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = tuple(TOLERANCE)
HEAD_SIZES = (64, 80, 96, 128, 256)


def pick(choices, rng: torch.Generator):
    """One of them, at random."""
    return choices[randint(0, len(choices), rng)]


def on(device: torch.device, value):
    """A tensor, or a dataclass or dictionary of them, on the device: same strides, NaN in the gaps."""
    if isinstance(value, torch.Tensor):
        count = value.untyped_storage().nbytes() // value.element_size()
        poison = math.nan if value.is_floating_point() else 77
        room = torch.full((count,), poison, dtype=value.dtype, device=device)
        moved = room.as_strided(value.shape, value.stride(), value.storage_offset())
        return moved.copy_(value)
    if isinstance(value, dict):
        return {name: on(device, each) for name, each in value.items()}
    if isinstance(value, TreeBatch | MarginLimits):
        return type(value)(*(on(device, getattr(value, name)) for name in value.__slots__))
    return value


def error_of(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> float:
    """The largest ``|got - want| / (tolerance (1 + |want|))``; equal infinities and NaN in both places count as 0."""
    got, want = got.double().cpu(), want.double().cpu()
    same = (got == want) | (got.isnan() & want.isnan())
    excess = (got - want).abs() / (tolerance * (1 + want.abs()))
    worst = float(torch.where(same, 0.0, excess).nan_to_num(nan=math.inf).max()) if got.numel() else 0.0
    assert worst <= 1, f"off by {worst:.3g} tolerances of {tolerance}"
    return worst


def check_build_tree(device: torch.device, seed: int) -> float:
    """Random trees, then one of each way to be wrong."""
    rng = generator(seed)
    sizes = [randint(1, 65, rng) for _ in range(randint(1, 33, rng))]
    parents = [p for size in sizes for p in random_parents(size, rng, chain=bool(randint(0, 2, rng)))]
    start = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32)
    given = (
        torch.zeros(len(parents), dtype=torch.int32),
        torch.tensor(parents, dtype=torch.int32),
        start,
        torch.randint(0, 2**40, (len(sizes),), generator=rng),
    )
    got, want = ops.build_tree(*on(device, dict(enumerate(given))).values()), reference.build_tree(*given)
    for name in ("depths", "positions", "ancestors"):
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name

    bad = [[-1, 0], [0], [-1, 1, 0], [-1, 0, -1], [-1, 0, 3, 1], [-1] + [0] * 64, [-1, 0]]
    wanted = [0, 1, 3 | 1 << 8, 3 | 2 << 8, 3 | 2 << 8, 2 | 64 << 8, 0]
    flat = torch.tensor([p for tree in bad for p in tree], dtype=torch.int32, device=device)
    first = torch.tensor([0, *torch.tensor([len(t) for t in bad]).cumsum(0).tolist()], dtype=torch.int32, device=device)
    depths, long = torch.full_like(flat, 77), torch.full((2, len(flat)), 77, dtype=torch.int64, device=device)
    tree = TreeBatch(first, flat, flat, depths, long[0], long[1])
    status = torch.full((len(bad),), 77, dtype=torch.int32, device=device)
    ops.build_tree_into(tree, torch.zeros(len(bad), dtype=torch.int64, device=device), status)
    assert status.tolist() == wanted, status.tolist()
    assert depths[:2].tolist() == depths[-2:].tolist() == [0, 1]
    assert depths[2] == 77, "a row past the first bad one was written"
    return 0.0


def walked(
    device: torch.device, logits: torch.Tensor, tree: TreeBatch, limits: MarginLimits | None,
    sampled: torch.Tensor | None, depth: int,
) -> VerifyResult:  # fmt: skip
    """What the op finds, in outputs and a workspace that were full of something else."""
    requests = tree.start.shape[0] - 1
    result = VerifyResult(
        torch.full((requests, depth), 77, dtype=torch.int32, device=device),
        torch.full((requests,), 77, dtype=torch.int32, device=device),
        torch.full((requests,), 77, dtype=torch.int64, device=device),
        torch.full((requests,), 77, dtype=torch.int32, device=device),
        torch.full((requests,), math.nan, device=device),
    )
    workspace = ops.walk_workspace(tree.parents.shape[0], device).fill_(-1)
    ops.walk_trees_into(
        result, on(device, logits), on(device, tree), on(device, limits), on(device, sampled), workspace
    )
    return VerifyResult(*(getattr(result, name).cpu() for name in result.__slots__))


def check_walk_trees(device: torch.device, seed: int) -> float:
    """Any vocabulary and alignment, ties, NaN and infinities, with and without margin and sampled choices."""
    rng = generator(seed)
    requests, long_rows = randint(1, 9, rng), device.type != "cpu" and seed % 3 == 0
    vocab = pick((128256, 151936, 201088), rng) if long_rows else randint(1, 9000, rng)
    tree, logits = random_batch(seed, requests, vocab)
    logits = logits.to(pick(DTYPES, rng))
    if seed % 2:  # strided rows of any alignment
        wide = torch.full((logits.shape[0], vocab + 11), math.nan, dtype=logits.dtype)
        offset = randint(0, 12, rng)
        wide[:, offset : offset + vocab] = logits
        logits = wide[:, offset : offset + vocab]
    if seed % 5 == 0:
        logits[randint(0, len(logits), rng), randint(0, vocab, rng)] = math.nan
        logits[randint(0, len(logits), rng)] = -math.inf
        logits[randint(0, len(logits), rng), randint(0, vocab, rng)] = math.inf
    depth = max(int(tree.depths.max()) + randint(-1, 3, rng), 0)
    sampled = torch.randint(0, vocab, tree.tokens.shape, generator=rng)
    for limits in (None, random_limits(seed, requests)):
        for choice in (None, sampled):
            got = walked(device, logits, tree, limits, choice, depth)
            assert_equal(got, reference.walk_trees(logits, tree, limits, choice, depth))
    return 0.0


def check_topk_logprobs(device: torch.device, seed: int) -> float:
    """Indices must be equal, ties included."""
    rng = generator(seed)
    long_rows = device.type != "cpu" and seed % 3 == 0
    vocab = pick((32000, 128256), rng) if long_rows else randint(70, 9000, rng)
    logits = torch.randn(randint(1, 9, rng), vocab, generator=rng) * 4
    if seed % 2:
        logits = logits.round()  # ties
    logits = logits.to(pick(DTYPES, rng))
    if seed % 5 == 0:
        logits[0, 10 : vocab - 10] = -math.inf
        logits[-1, randint(0, vocab, rng)] = math.nan
    k = pick((1, 8, 10, 32, 33, 64), rng)
    values = torch.full((len(logits), k), 77.0, device=device)
    indices = torch.full((len(logits), k), 77, dtype=torch.int64, device=device)
    ops.topk_logprobs_into(values, indices, on(device, logits))
    want_values, want_indices = reference.topk_logprobs(logits.double(), k)
    assert torch.equal(indices.cpu(), want_indices)
    return error_of(values, want_values, 1e-5)


def random_attention(device: torch.device, seed: int, prefix: bool) -> AttentionCase:
    """A case of awkward sizes on the device; its tree rows are slices of one projection, as a model gives them."""
    rng = generator(seed)
    few = device.type == "cpu"
    count, kv_heads = randint(1, 3 if few else 9, rng), randint(1, 3 if few else 5, rng)
    case = attention_case(
        [pick((1, 2, 8, 15, 16, 17, 33, 64), rng) for _ in range(count)],
        [pick((0, 1, 15, 17, 100), rng) if prefix else 0 for _ in range(count)],
        heads=kv_heads * pick((1, 2, 3, 4, 7), rng),
        kv_heads=kv_heads,
        dim=pick((*HEAD_SIZES, 32, 100), rng),
        block_size=pick((16, 32, 64, 128), rng),
        dtype=pick(DTYPES, rng),
        layout=pick(("transposed_keys", "token_major", "strided"), rng),
        seed=seed,
        last_queries=pick((None, None, 3), rng),
        chain=seed % 4 == 0,
    )
    return case


def attention_arguments(device: torch.device, case: AttentionCase) -> dict:
    """The arguments of a case on the device; the slices of its projection keep their strides."""
    return on(device, case.arguments)


def check_tree_attention(device: torch.device, seed: int) -> float:
    """Prefix and tree in one pass."""
    case = random_attention(device, seed, prefix=True)
    arguments = attention_arguments(device, case)
    out = torch.full_like(arguments["query"], math.nan)
    ops.tree_attention(**arguments, out=out)
    return error_of(out, in_float64(case).run(reference.tree_attention), TOLERANCE[out.dtype])


PART = ("query", "tree_key", "tree_value", "query_start", "key_start", "ancestors", "scale")


def check_tree_part_attention(device: torch.device, seed: int) -> float:
    """The tree alone, with log-sum-exps; some rows see nothing, some ancestor words have bits too many."""
    rng = generator(seed + 1000)
    case = random_attention(device, seed, prefix=False)
    words = case.arguments["ancestors"]
    words[torch.rand(words.shape, generator=rng) < 0.1] = 0
    words |= torch.where(torch.rand(words.shape, generator=rng) < 0.2, -(1 << 63), 0)
    given = {name: value for name, value in attention_arguments(device, case).items() if name in PART}
    heads, rows = given["query"].shape[1], given["query"].shape[0]
    out = torch.full((rows, heads + 1, given["query"].shape[2]), math.nan, dtype=given["query"].dtype, device=device)
    lse = torch.full((rows, heads), math.nan, device=device).t()
    ops.tree_part_attention(**given, out=out[:, :heads], lse=lse)

    exact = {name: value for name, value in in_float64(case).arguments.items() if name in PART}
    want, want_lse = torch.empty_like(exact["query"]), torch.empty(heads, rows, dtype=torch.float64)
    reference.tree_part_attention(**exact, out=want, lse=want_lse)
    assert out[:, heads:].isnan().all(), "written beside the output"
    worst = error_of(out[:, :heads], want, TOLERANCE[out.dtype])
    return max(worst, error_of(lse, want_lse, max(TOLERANCE[out.dtype] / 10, 1e-5)))


def commit_case(seed: int, layers: int, layout: str, dtype: torch.dtype) -> tuple[list[list[torch.Tensor]], tuple]:
    """Fresh rows, caches full of 0 in a layout of vLLM's backends, and where the accepted rows belong."""
    rng = generator(seed)
    requests, depth, kv_heads = (randint(1, most, rng) for most in (6, 7, 4))
    block_size, dim, blocks = pick((16, 32), rng), pick((64, 80, 96, 20), rng), 12
    sizes = [randint(1, 12, rng) for _ in range(requests)]
    rows = sum(sizes) + 3

    def values(*shape: int) -> torch.Tensor:
        return torch.randint(0, 200, shape, generator=rng).to(torch.uint8).to(dtype)

    def cache() -> tuple[torch.Tensor, torch.Tensor]:
        if layout == "flash":  # [2, blocks, block_size, heads, dim]
            both = torch.zeros(2, blocks, block_size, kv_heads, dim, dtype=dtype)
            return both[0].transpose(1, 2), both[1].transpose(1, 2)
        if layout == "triton":  # [blocks, 2, block_size, heads, dim]
            both = torch.zeros(blocks, 2, block_size, kv_heads, dim, dtype=dtype)
            return both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2)
        if layout == "heads_first":  # [blocks, 2, heads, block_size, dim]
            both = torch.zeros(blocks, 2, kv_heads, block_size, dim, dtype=dtype)
            return both[:, 0], both[:, 1]
        assert layout == "packed"  # [blocks, block_size, heads, 2 dim]
        both = torch.zeros(blocks, block_size, kv_heads, 2 * dim, dtype=dtype)
        return both[..., :dim].transpose(1, 2), both[..., dim:].transpose(1, 2)

    fresh = [values(rows, 2 * kv_heads, dim).chunk(2, dim=1) for _ in range(layers)]
    caches = [cache() for _ in range(layers)]
    tensors = [[pair[0] for pair in fresh], [pair[1] for pair in fresh], [c[0] for c in caches], [c[1] for c in caches]]
    paths, lengths, roots, first = [], [], [], 0
    for size in sizes:
        accepted = randint(0, min(size - 1, depth) + 1, rng)
        chosen = sorted((torch.randperm(size - 1, generator=rng)[:accepted] + 1).tolist())
        paths.append(chosen + [-1] * (depth - accepted))
        lengths.append(accepted)
        roots.append(first)
        first += size
    slots = torch.randperm(blocks * block_size, generator=rng)[:rows]
    slots[torch.rand(rows, generator=rng) < 0.1] = -1
    places = (*(torch.tensor(value, dtype=torch.int32) for value in (paths, lengths, roots)), slots)
    return tensors, places


def check_commit_kv(device: torch.device, seed: int) -> float:
    """Layouts and element sizes of vLLM's caches; one more layer than a launch takes now and then."""
    layers = 97 if seed % 5 == 0 else 1 + seed % 4
    layout = ("flash", "triton", "heads_first", "packed")[seed % 4]
    dtype = (torch.bfloat16, torch.float32, torch.uint8, torch.float16)[seed // 4 % 4]
    tensors, places = commit_case(seed, layers, layout, dtype)
    moved = [[on(device, tensor) for tensor in group] for group in tensors]
    ops.commit_kv(*moved, *(on(device, place) for place in places))
    reference.commit_kv(*tensors, *places)
    for got, want in zip((*moved[2], *moved[3]), (*tensors[2], *tensors[3]), strict=True):
        assert torch.equal(got.cpu(), want)
    return 0.0


CHECKS: dict[str, Check] = {
    "build_tree": check_build_tree,
    "walk_trees": check_walk_trees,
    "topk_logprobs": check_topk_logprobs,
    "tree_attention": check_tree_attention,
    "tree_part_attention": check_tree_part_attention,
    "commit_kv": check_commit_kv,
}
