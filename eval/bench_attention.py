"""Correctness and speed of the CuTe DSL verify attention on a GPU.

    python -m eval.bench_attention build --kernels DIR            # any machine with the DSL, no GPU
    python -m eval.bench_attention run --kernels DIR --json FILE  # the GPU machine; needs torch and tvm-ffi

`run` compares random cases (poisoned outputs, NaN in every cache slot nobody may read) with the float32 reference, then
times the shapes below: one CUDA graph of back-to-back calls over rotating caches larger than L2, median of the replays,
beside the floor max(KV bytes / read rate, flops / matrix rate) with both rates measured in the same job.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from eval.attention_peers import time_peers
from eval.environment import environment
from verify_kernels.batch import KVCache, PassBatch
from verify_kernels.cute import compile as kernels, implementations
from verify_kernels.cute.attention.run import append_kv, choose, commit_path, plan, plan_variant, run, variants_of
from verify_kernels.cute.variants import AnyVariant, AppendVariant, CommitVariant, Variant
from verify_kernels.reference import attention as reference
from verify_kernels.reference.attention import paged_tree_attention

TOLERANCE = 4e-3
"""Relative error allowed against the float32 reference."""

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn

# dtype, head_dim, heads, kv_heads, page_size, mask, longest request, softcap, fp8: the random cases draw from these.
CASES: list[tuple[Any, ...]] = [
    (BF16, 128, 32, 8, 16, "tree", 16, False),
    (BF16, 128, 32, 8, 16, "tree", 64, False),
    (BF16, 128, 32, 4, 16, "tree", 8, False),
    (BF16, 128, 32, 4, 16, "tree", 16, False),
    (BF16, 128, 32, 4, 16, "tree", 64, False),
    (BF16, 128, 8, 1, 64, "tree", 8, False),
    (BF16, 128, 16, 1, 128, "tree", 64, False),
    (BF16, 64, 14, 2, 32, "tree", 9, False),
    (BF16, 64, 14, 2, 32, "tree", 40, False),
    (FP16, 128, 8, 8, 32, "tree", 64, False),
    (FP16, 64, 12, 4, 128, "tree", 33, False),
    (BF16, 128, 32, 8, 64, "causal", 16, False),
    (BF16, 128, 32, 8, 16, "causal", 300, False),
    (BF16, 128, 32, 8, 16, "full", 7, False),
    (FP16, 128, 20, 4, 16, "full", 32, True),
    (BF16, 128, 32, 8, 16, "tree", 16, False, True),
    (BF16, 128, 32, 4, 16, "tree", 64, False, True),
    (FP16, 64, 14, 2, 64, "causal", 300, True, True),
]

# heads, kv_heads, requests, context, new tokens of each.
SHAPES = [
    (32, kv, b, length, q)
    for kv in (8, 4)
    for b, length in ((1, 1024), (1, 8192), (1, 32768), (1, 131072), (8, 8192), (32, 4096))
    for q in (8, 16, 32, 64)
]


FP8_SHAPES = [
    (32, kv, b, length, q) for kv in (8, 4) for b, length in ((1, 8192), (1, 131072), (32, 4096)) for q in (8, 16)
]


APPENDS = [
    AppendVariant("bfloat16", 128, 32, 8, norm=True),
    AppendVariant("float16", 64, 14, 2, norm=False),
    AppendVariant("bfloat16", 128, 32, 8, norm=True, fp8=True),
    AppendVariant("float16", 64, 14, 2, norm=False, fp8=True),
]
COMMITS = [CommitVariant(512), CommitVariant(64)]

# What an engine asks for with Qwen3-8B, Qwen3-30B-A3B and, as draft model, Qwen3-0.6B: prompts, chains and trees.
ENGINES = [(32, 8), (32, 4), (16, 8)]


def variants() -> list[AnyVariant]:
    all_ = [choose(*case) for case in CASES] + [choose(BF16, 128, h, kv, 16, "tree", q) for h, kv, _, _, q in SHAPES]
    all_ += [choose(BF16, 128, h, kv, 16, "tree", q, fp8=True) for h, kv, _, _, q in FP8_SHAPES]
    others: list[AnyVariant] = [*APPENDS, *COMMITS]
    for heads, kv_heads in ENGINES:
        others += variants_of(BF16, 128, heads, kv_heads, 16, norm=True)
    return list(dict.fromkeys(all_ + [plan_variant(v) for v in all_] + others))


def plan_kernel(variant: Variant, folder: Path | None) -> Any:
    return kernels.load(kernels.build(plan_variant(variant), folder))


def random_tree(n: int, rng: random.Random) -> list[int]:
    """Ancestor words of a random tree: every node but the root has an earlier parent."""
    words = [1]
    for i in range(1, n):
        words.append(words[rng.randrange(i)] | 1 << i)
    return [w - (1 << 64) if w >> 63 else w for w in words]


def make_batch(
    contexts: list[int], lengths: list[int], mask: str, page_size: int, rng: random.Random, device: str, first: int = 0
) -> tuple[PassBatch, int]:
    """A batch over a shuffled page table. Returns it and the number of pages; page 0 is nobody's.

    lengths: new tokens of each request, of which the first `first` are no queries.
    """
    needed = [-(-(c + n) // page_size) for c, n in zip(contexts, lengths, strict=True)]
    ids = list(range(1, sum(needed) + 4))
    rng.shuffle(ids)
    width = max(needed) + rng.randrange(3)
    table, used = torch.full((len(needed), width), ids[-1], dtype=torch.int32), 0
    for r, n in enumerate(needed):
        table[r, :n] = torch.tensor(ids[used : used + n], dtype=torch.int32)
        used += n
    offsets = [0]
    for n in lengths:
        offsets.append(offsets[-1] + n - first)
    words = [w for n in lengths for w in random_tree(n, rng)[first:]] if mask == "tree" else None
    total = offsets[-1]
    batch = PassBatch(
        token_ids=torch.zeros(total, dtype=torch.int64, device=device),
        positions=torch.zeros(total, dtype=torch.int64, device=device),
        request_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        page_table=table.to(device),
        slot_mapping=torch.zeros(total, dtype=torch.int64, device=device),
        ancestor_masks=None if words is None else torch.tensor(words, dtype=torch.int64, device=device),
        max_query_len=max(lengths) - first,
        max_kv_len=max(c + n for c, n in zip(contexts, lengths, strict=True)),
        first_query=first,
    )
    return batch, len(ids) + 1


def poison(cache: torch.Tensor, batch: PassBatch) -> torch.Tensor:
    """A copy of the cache with NaN in every slot that no request owns."""
    pages, page_size = cache.shape[:2]
    owned = torch.zeros(pages * page_size, dtype=torch.bool, device=cache.device)
    lengths = batch.request_offsets.diff() + batch.context_lens + batch.first_query
    for r, n in enumerate(lengths.tolist()):
        t = torch.arange(n, device=cache.device)
        owned[batch.page_table[r].long()[t // page_size] * page_size + t % page_size] = True
    copy = cache.clone().view(pages * page_size, *cache.shape[2:])
    if cache.dtype == FP8:
        copy.view(torch.uint8)[~owned] = 0x7F  # NaN of e4m3
    else:
        copy[~owned] = float("nan")
    return copy.view_as(cache)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[P, page, Hkv, D] as e4m3 and a scale for each head, which differ widely from head to head."""
    scales = x.float().abs().amax((0, 1, 3)) / 448 * torch.logspace(0, -1.5, x.shape[2], device=x.device)
    return (x.float() / scales[:, None]).clamp(-448, 448).to(FP8), scales


def check(case: tuple[Any, ...], seed: int, folder: Path | None) -> dict[str, Any]:
    """One random batch of a case against the float32 reference."""
    dtype, dim, heads, kv_heads, page, mask, longest, softcap, fp8 = (*case, False)[:9]
    rng = random.Random(seed)
    torch.manual_seed(seed)
    requests = rng.choice([1, 1, 2, 5, 9])
    edge = [0, 1, page - 1, page, page + 1, 63, 64, 127, 128, 129]
    contexts = [rng.choice(edge + [rng.randrange(3000)] * 6 + [rng.randrange(20000)]) for _ in range(requests)]
    lengths = [rng.choice([1, longest, rng.randint(1, longest)]) for _ in range(requests)]
    first = rng.choice([0, 0, 1, rng.randrange(24)])
    lengths = [first + n if mask == "causal" else min(first + n, max(64, first + 1)) for n in lengths]
    batch, pages = make_batch(contexts, lengths, mask, page, rng, "cuda", first)
    q = torch.randn(batch.num_tokens, heads, dim, device="cuda", dtype=dtype) * 2
    k = torch.randn(pages, page, kv_heads, dim, device="cuda", dtype=dtype)
    v = torch.randn(pages, page, kv_heads, dim, device="cuda", dtype=dtype)
    scale, cap = dim**-0.5, 8.0 if softcap else 0.0
    scales: tuple[torch.Tensor, ...] = ()
    if fp8:
        (k, k_scale), (v, v_scale) = quantised(k), quantised(v)
        scales = (k_scale, v_scale)
    variant = choose(dtype, dim, heads, kv_heads, page, mask, longest, softcap, fp8)
    kernel = kernels.load(kernels.build(variant, folder))
    bad_k, bad_v = poison(k, batch), poison(v, batch)
    make = (batch.page_table, batch.context_lens, batch.request_offsets, batch.ancestor_masks, len(q))
    by_torch = plan(variant, *make, first_query=first)
    by_kernel = plan(variant, *make, kernel=plan_kernel(variant, folder), first_query=first)
    if not torch.equal(by_torch.segments, by_kernel.segments):
        return {"case": str(case), "seed": seed, "error": float("nan"), "why": "schedules differ"}
    outs = []
    for setup in (None, rng.choice([0, 3, 10])):
        p = by_kernel if setup is None else plan(variant, *make, setup=setup, first_query=first)
        p.partial.fill_(float("nan"))
        p.stats.fill_(float("nan"))
        out = torch.full_like(q, float("nan"))
        outs.append(run(kernel, p, q, bad_k, bad_v, out, scale, cap, *scales))
        again = torch.full_like(q, float("nan"))
        run(kernel, p, q, bad_k, bad_v, again, scale, cap, *scales)
        if not torch.equal(out.view(torch.int16), again.view(torch.int16)):
            return {"case": str(case), "seed": seed, "error": float("nan"), "why": "two runs differ"}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        if not fp8:
            k, v = k.float(), v.float()
        wide = dict(zip(("k_scale", "v_scale"), scales))
        want = paged_tree_attention(q.float(), k, v, batch, scale=scale, mask=mask, softcap=cap, **wide)
    error = max(((o.float() - want).norm() / want.norm()).item() for o in outs)
    worst = max(((o.float() - want).abs().max() / want.abs().max()).item() for o in outs)
    if any(not o.isfinite().all() for o in outs):
        error = float("nan")
    return {"case": str(case), "seed": seed, "requests": requests, "error": error, "worst": worst}


def check_graph(folder: Path | None) -> float:
    """One CUDA graph of plan and call serves other lengths: relative error after the lengths changed in place."""
    rng = random.Random(0)
    batch, pages = make_batch([3000, 0, 900], [16, 9, 1], "tree", 16, rng, "cuda")
    q = torch.randn(26, 32, 128, device="cuda", dtype=BF16)
    k, v = (torch.randn(pages, 16, 8, 128, device="cuda", dtype=BF16) for _ in range(2))
    variant = choose(BF16, 128, 32, 8, 16, "tree", 16)
    kernel = kernels.load(kernels.build(variant, folder))
    planner, out = plan_kernel(variant, folder), torch.empty_like(q)
    make = (batch.page_table, batch.context_lens, batch.request_offsets, batch.ancestor_masks, len(q))

    def call() -> None:
        p = plan(variant, *make, kernel=planner)
        run(kernel, p, q, k, v, out, 128**-0.5)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    batch.context_lens.copy_(torch.tensor([17, 0, 899]))
    out.fill_(float("nan"))
    graph.replay()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = paged_tree_attention(q.float(), k.float(), v.float(), batch, scale=128**-0.5)
    return ((out.float() - want).norm() / want.norm()).item()


def check_ops(folder: Path | None) -> float:
    """The operations as an engine calls them: two layers of one pass, planned once, against the reference."""
    rng = random.Random(1)
    batch, pages = make_batch([700, 0, 33], [16, 4, 9], "tree", 16, rng, "cuda")
    table = implementations(folder)
    worst = 0.0
    batch.plan = table["plan_attention"](batch, 16)
    for _ in range(2):
        q = torch.randn(29, 32, 128, device="cuda", dtype=BF16)
        k, v = (torch.randn(pages, 16, 8, 128, device="cuda", dtype=BF16) for _ in range(2))
        got = table["paged_tree_attention"](q, k, v, batch, scale=128**-0.5)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            bare = dataclasses.replace(batch, plan=None)
            want = paged_tree_attention(q.float(), k.float(), v.float(), bare, scale=128**-0.5)
        worst = max(worst, ((got.float() - want).norm() / want.norm()).item())
    return worst


def host_cost(folder: Path | None) -> dict[str, float]:
    """What Python pays: milliseconds to load a library that is there, microseconds to launch one layer's attention."""
    rng = random.Random(2)
    batch, pages = make_batch([40], [8], "tree", 16, rng, "cuda")
    q = torch.randn(8, 32, 128, device="cuda", dtype=BF16)
    k, v = (torch.randn(pages, 16, 8, 128, device="cuda", dtype=BF16) for _ in range(2))
    variant, out = choose(BF16, 128, 32, 8, 16, "tree", 8), torch.empty_like(q)
    path = kernels.build(variant, folder)
    start = time.perf_counter()
    kernel = kernels.load.__wrapped__(path)
    loaded = time.perf_counter() - start
    p = plan(variant, batch.page_table, batch.context_lens, batch.request_offsets, batch.ancestor_masks, len(q))
    rounds = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):  # fewer launches than the driver queues, so that none waits for the GPU
            run(kernel, p, q, k, v, out, 128**-0.5)
        rounds.append((time.perf_counter() - start) / 100)
    return {"load_ms": round(loaded * 1e3, 2), "launch_us": round(statistics.median(rounds[1:]) * 1e6, 2)}


def check_commit(variant: CommitVariant, folder: Path | None, seed: int) -> bool:
    """Compaction of random paths against the reference, bit for bit: what is not on a path stays as it is."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    requests, depth, page, layers = rng.choice([1, 5, 33]), rng.randint(1, 40), rng.choice([16, 64]), 3
    contexts = [rng.choice([0, 1, page - 1, page, rng.randrange(500)]) for _ in range(requests)]
    batch, pages = make_batch(contexts, [64] * requests, "causal", page, rng, "cuda")
    path = torch.full((requests, depth), -1, dtype=torch.int64, device="cuda")
    for r in range(requests):
        kept = [0, *sorted(rng.sample(range(1, 64), rng.randrange(depth)))]
        path[r, : len(kept)] = torch.tensor(kept)
    shape = (layers, pages, page, variant.words // 32, 64)
    cache = KVCache(*(torch.randn(shape, device="cuda", dtype=BF16) for _ in range(2)))
    want = KVCache(cache.k.clone(), cache.v.clone())
    args = (batch.page_table, batch.context_lens.long(), path)
    commit_path(kernels.load(kernels.build(variant, folder)), cache, *args)
    reference.commit_path(want, *args)
    want.k[:, 0], want.v[:, 0] = cache.k[:, 0], cache.v[:, 0]  # the scratch page is nobody's
    return torch.equal(cache.k, want.k) and torch.equal(cache.v, want.v)


def check_append(variant: AppendVariant, folder: Path | None, tokens: int = 77) -> dict[str, Any]:
    """The write side against the float32 reference, and its time beside the reference's; other slots stay as they are."""
    torch.manual_seed(0)
    dtype, dim, heads, kv_heads = getattr(torch, variant.dtype), variant.head_dim, variant.heads, variant.kv_heads
    kernel = kernels.load(kernels.build(variant, folder))
    rows = torch.randn(tokens, heads + 2 * kv_heads, dim, device="cuda", dtype=dtype)
    q, k, v = rows.split([heads, kv_heads, kv_heads], dim=1)
    pages = torch.randn(2, 40, 16, kv_heads, dim, device="cuda", dtype=dtype)
    slots = torch.randperm(640, device="cuda")[:tokens]
    positions = torch.randint(0, 5000, (tokens,), device="cuda")
    angles = torch.arange(5000, device="cuda")[:, None] * 10000.0 ** (-torch.arange(dim // 2, device="cuda") / (dim // 2))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).float()
    norms = [1 + 0.1 * torch.randn(dim, device="cuda", dtype=dtype) for _ in range(2)] if variant.norm else [None, None]

    class Batch:
        slot_mapping = slots

    Batch.positions = positions
    scales = {}
    wide = pages.float()
    if variant.fp8:
        scales = {name: torch.rand(kv_heads, device="cuda") * 0.02 + 0.001 for name in ("k_scale", "v_scale")}
        pages, wide = pages.to(FP8), pages.to(dtype).to(FP8)
    mine = pages.clone()
    call = (slots, positions, cos_sin, *norms)
    got = append_kv(kernel, q, k, v, *mine, *call, **scales)
    # The reference rounds where the kernel does: before it quantises, so e4m3 values may differ by a near tie only.
    exactly = (lambda x: x) if variant.fp8 else torch.Tensor.float
    want = reference.append_kv(
        exactly(q), exactly(k), exactly(v), *wide, Batch, cos_sin, *(w if w is None else exactly(w) for w in norms), **scales
    )
    error = max(
        ((x.float() - y.float()).norm() / y.float().norm()).item() for x, y in ((got, want), (mine[0], wide[0]))
    )
    kept = torch.ones(640, dtype=torch.bool, device="cuda")
    kept[slots] = False
    raw, before = (x.view(2, 640, -1).view(torch.uint8) for x in (mine, pages))
    untouched = torch.equal(raw[:, kept], before[:, kept])
    exact = torch.equal(mine[1].float(), wide[1].float())
    us = time_graph(lambda i: append_kv(kernel, q, k, v, *mine, *call, **scales), 20)
    plain = time_graph(lambda i: reference.append_kv(q, k, v, *mine, Batch, cos_sin, *norms, **scales), 20)
    return {
        "op": "append_kv", "variant": variant.name, "shape": {"tokens": tokens}, "us": round(us, 2),
        "reference_us": round(plain, 2), "rel_error": error if untouched and exact else float("nan"),
    }  # fmt: skip


def time_graph(call, calls: int, replays: int = 7) -> float:
    """Median microseconds of one call(i) inside a CUDA graph of `calls` calls."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    times = []
    for _ in range(replays + 1):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / calls)
    return statistics.median(times[1:])


def read_rate() -> float:
    """TB/s of a kernel that only reads."""
    import triton
    import triton.language as tl

    @triton.jit
    def reader(x, out, n, BLOCK: tl.constexpr):
        total = tl.zeros((BLOCK,), dtype=tl.int32)
        for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
            total += tl.load(x + start + tl.arange(0, BLOCK))
        tl.store(out + tl.program_id(0), tl.sum(total))

    globals()["tl"] = tl
    x = torch.randint(0, 9, (1 << 28,), dtype=torch.int32, device="cuda")
    out = torch.empty(1024, dtype=torch.int32, device="cuda")
    best = min(
        time_graph(lambda i: reader[(p,)](x, out, x.numel(), BLOCK=4096, num_warps=8), 4) for p in (132, 264, 528)
    )
    return x.numel() * 4 / best / 1e6


def matrix_rate() -> float:
    """TFLOP/s of torch's bf16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    return 2 * 8192**3 / time_graph(lambda i: a @ b, 4) / 1e6


def timing(shape: tuple[int, ...], folder: Path | None, rates: tuple[float, float], options: dict[str, Any]) -> dict[str, Any]:
    heads, kv_heads, requests, context, new = shape
    rng = random.Random(0)
    dim, page, fp8 = 128, 16, options.get("fp8", False)
    batch, pages = make_batch([context] * requests, [new] * requests, "tree", page, rng, "cuda")
    kv_bytes = requests * (context + new) * kv_heads * dim * 2 * (1 if fp8 else 2)
    copies = max(1, -(-300_000_000 // kv_bytes))
    caches = [
        [torch.randn(pages, page, kv_heads, dim, device="cuda", dtype=BF16) for _ in range(2)] for _ in range(copies)
    ]
    scales: tuple[torch.Tensor, ...] = ()
    if fp8:
        caches = [[x.to(FP8) for x in cache] for cache in caches]
        scales = tuple(torch.ones(kv_heads, device="cuda") for _ in range(2))
    q = torch.randn(requests * new, heads, dim, device="cuda", dtype=BF16)
    out = torch.empty_like(q)
    variant = options.get("variant") or choose(BF16, dim, heads, kv_heads, page, "tree", new, fp8=fp8)
    kernel = kernels.load(kernels.build(variant, folder))
    make = (batch.page_table, batch.context_lens, batch.request_offsets, batch.ancestor_masks, len(q))
    p = plan(variant, *make, setup=options.get("setup"))
    us = time_graph(lambda i: run(kernel, p, q, *caches[i % copies], out, dim**-0.5, 0.0, *scales), max(copies, 8))
    plan_us = time_graph(lambda i: plan(variant, *make, kernel=plan_kernel(variant, folder)), 4)
    peers = {}
    if options.get("peers"):
        run(kernel, p, q, *caches[0], out, dim**-0.5)
        peers = time_peers(q, caches, batch, out, lambda call: time_graph(call, max(copies, 8)))
    flops = 4 * new * heads * dim * requests * (context + new)
    floor = max(kv_bytes / rates[0], flops / rates[1]) / 1e6
    return {
        "op": "paged_tree_attention",
        "variant": variant.name,
        "shape": {"heads": heads, "kv_heads": kv_heads, "requests": requests, "context": context, "new": new},
        "us": round(us, 2),
        "plan_us": round(plan_us, 1),
        "bytes": kv_bytes,
        "flops": flops,
        "floor_us": round(floor, 2),
        "over_floor": round(us / floor, 3),
        "tbps": round(kv_bytes / us / 1e6, 3),
        "tflops": round(flops / us / 1e6, 1),
        "peers": peers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["build", "run"])
    parser.add_argument("--kernels", type=Path, required=True, help="folder of compiled kernels")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--cases", type=int, default=300, help="random cases")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="relative error allowed")
    parser.add_argument("--peers", action="store_true", help="also time other projects' attention, where installed")
    parser.add_argument("--no-timing", action="store_true", help="correctness only")
    args = parser.parse_args()
    if args.command == "build":
        for variant in variants():
            print(kernels.build(variant, args.kernels), flush=True)
        return

    checks = [check(CASES[i % len(CASES)], i, args.kernels) for i in range(args.cases)]
    bad = [c for c in checks if not c["error"] <= args.tolerance]
    graph_error = check_graph(args.kernels)
    print(f"one graph, other lengths: relative error {graph_error:.2e}")
    ops_error = check_ops(args.kernels)
    print(f"as operations: relative error {ops_error:.2e}")
    commits = [check_commit(v, args.kernels, seed) for v in COMMITS for seed in range(10)]
    print(f"commit_path: {sum(commits)} of {len(commits)} cases equal the reference")
    appends = [check_append(v, args.kernels) for v in APPENDS]
    for row in appends:
        print(row["variant"], row["us"], "us, reference", row["reference_us"], "us, relative error", row["rel_error"])
    host = host_cost(args.kernels)
    print(f"Python: {host['load_ms']} ms to load a library, {host['launch_us']} us to launch a layer's attention")
    largest = max((c["error"] for c in checks), default=0.0)
    print(f"{len(checks)} random cases, largest relative error {largest:.2e}, {len(bad)} bad")
    for c in bad[:20]:
        print("BAD", c)
    result: dict[str, Any] = {
        "schema_version": 1,
        "command": "python -m eval.bench_attention run --kernels DIR --json FILE --cases " + str(args.cases) + (" --peers" if args.peers else ""),
        "environment": environment(torch.device("cuda"), 0),
        "correctness": {"cases": len(checks), "bad": len(bad), "largest": largest, "graph": graph_error, "ops": ops_error,
                        "commit_path": f"{sum(commits)} of {len(commits)}"},
        "host": host,
        "results": list(appends),
    }
    if not args.no_timing:
        rates = read_rate(), matrix_rate()
        result["read_tbps"], result["matrix_tflops"] = rates
        print(f"read {rates[0]:.2f} TB/s, matrix {rates[1]:.0f} TFLOP/s")
        for shape, fp8 in [(s, False) for s in SHAPES] + [(s, True) for s in FP8_SHAPES]:
            row = timing(shape, args.kernels, rates, {"peers": args.peers and not fp8, "fp8": fp8})
            result["results"].append(row)
            print(shape, "e4m3" if fp8 else "bf16", row["us"], "us, floor", row["floor_us"], "x", row["over_floor"], row["tbps"], "TB/s",
                  row["tflops"], "TFLOP/s", row["peers"] or "", flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if bad or not all(commits) or not all(e <= args.tolerance for e in (graph_error, ops_error, *(row["rel_error"] for row in appends))):
        raise SystemExit(f"{len(bad)} of {len(checks)} cases, or the graph, or append_kv, are above {args.tolerance}")


if __name__ == "__main__":
    main()
