"""Correctness and speed of the CuTe DSL latent attention (MLA) on a GPU.

    python -m eval.bench_latent build --kernels DIR            # any machine with the DSL, no GPU
    python -m eval.bench_latent run --kernels DIR --json FILE  # the GPU machine; needs torch and tvm-ffi

`run` compares random cases (poisoned outputs and partial results, NaN in every slot nobody may read, every call twice,
two prices of a new request) with the float32 reference, then times one layer of a TP16 rank of Kimi-K3 (6 heads) and of
other runs of tiles: CUDA graphs of calls over caches larger than L2, beside floor, prediction, and FlashMLA and
FlashInfer where they import (without the tree's mask, which neither has).

The GPU's work is done by a second process that is started anew when it hangs or dies (`eval.gpu_jobs`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eval import gpu_jobs
from eval.gpu_jobs import Job, graph_us
from verify_kernels.cute import compile as kernels
from verify_kernels.cute.variants import AnyVariant, LatentVariant

TOLERANCE = 4e-3
"""Relative error allowed against the float32 reference: rounding probabilities and output gives about 2.5e-3."""

READ_TBPS, MATRIX_TFLOPS = 4.5, 790.0  # an H200
RANK, WIDTH = 512, 576
HEADS, PAGE, SCALE = 6, 64, 192**-0.5
CONTEXTS, REQUESTS, QUERIES = (1152, 8192, 131072), (1, 8, 32), (1, 8, 16, 32)
RUNS = (1, 4)  # other numbers of tiles that stay together; 2 is what is served
EDGES = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129]
# heads, page, mask, longest request of the random cases
CASES = [
    (6, 64, "tree", 8), (6, 64, "tree", 16), (6, 64, "tree", 32), (6, 16, "tree", 64), (6, 16, "causal", 8),
    (6, 16, "causal", 100), (16, 128, "tree", 4), (12, 32, "causal", 16), (1, 16, "tree", 40),
]  # fmt: skip
PEERS = ("flashmla", "flashinfer")
SECONDS = {"time": 20.0, "peer": 25.0, "check": 10.0}
CAPACITY = 24e9  # bytes of caches at most


def variant_of(heads: int, page: int, mask: str, queries: int, run: int = 2) -> LatentVariant:
    import torch

    from verify_kernels.cute.latent.run import choose

    return dataclasses.replace(choose(torch.bfloat16, heads, WIDTH, RANK, page, mask, queries), run=run)


def variants_of(job: Job) -> tuple[AnyVariant, ...]:
    """What a job runs; nothing of ours for a peer."""
    from verify_kernels.cute.attention.run import plan_variant
    from verify_kernels.cute.latent.run import SETUP

    if job["job"] == "peer":
        return ()
    if job["job"] == "check":
        variant = variant_of(*CASES[job["case"]])
    else:
        variant = variant_of(HEADS, PAGE, "tree", job["queries"], job.get("run", 2))
    return variant, plan_variant(variant, SETUP)


def all_variants() -> list[AnyVariant]:
    return list(dict.fromkeys(v for job in jobs(0) for v in variants_of(job)))


def jobs(cases: int) -> list[Job]:
    """What a run does, in order: some random cases of every kernel, the times, then the other cases."""
    found: list[Job] = [{"job": "check", "case": i, "seeds": [2 * i, 2 * i + 1]} for i in range(len(CASES))]
    shapes = [(c, r, q) for c in CONTEXTS for r in REQUESTS for q in QUERIES]
    shapes = [s for s in shapes if s[0] * s[1] * WIDTH * 2 <= CAPACITY]
    found += [dict(zip(("job", "context", "requests", "queries"), ("time", *s))) for s in shapes]
    found += [
        {"job": "peer", "name": name, "context": c, "requests": r, "queries": 8}
        for name in PEERS
        for c, r in ((1152, 1), (8192, 1), (131072, 1), (8192, 32))
    ]
    found += [
        {"job": "time", "context": c, "requests": r, "queries": 8, "run": run}
        for run in RUNS
        for c, r in ((1152, 1), (8192, 1), (131072, 1), (8192, 32))
    ]
    rest = max(cases - 2 * len(CASES), 0)
    for i in range(rest // 4):
        found.append({"job": "check", "case": i % len(CASES), "seeds": list(range(1000 + 4 * i, 1004 + 4 * i))})
    return found


def floor_us(context: int, requests: int, queries: int, heads: int = HEADS) -> tuple[float, int, int]:
    """(microseconds, bytes, flops): latents read once, and the products of the real rows."""
    keys = requests * (context + queries)
    moved, flops = keys * WIDTH * 2, 2 * keys * queries * heads * (WIDTH + RANK)
    return max(moved / READ_TBPS, flops / MATRIX_TFLOPS) / 1e6, moved, flops


def predicted_us(context: int, requests: int, queries: int, heads: int = HEADS, run: int = 2) -> float:
    """As stated before any measurement: 3 us of launches and latencies; tiles at 2800 cycles, at 4.0 TB/s of memory or
    at 5.5 TB/s of L2, whichever is slowest; partial results written and read at 4 TB/s."""
    rows = queries * heads
    blocks = min(math.ceil(rows / 64), 6)
    units = 132 // blocks
    runs = requests * math.ceil((context + queries) / (64 * run))
    share = math.ceil(runs / units)
    active = min(units, math.ceil(runs / share))
    tile = 64 * WIDTH * 2
    tile_us = max(2800 / 1755, active * tile / 4.0e6, active * blocks * tile / 5.5e6)
    parts = active if requests < active else 0  # else most units hold whole requests
    return 3 + share * run * tile_us + 2 * parts * rows * RANK * 4 / 4e6


class Bench:
    """Runs jobs."""

    def __init__(self, folder: Path | None, tell: Callable[[str], None]) -> None:
        import torch

        self.torch, self.folder, self.tell = torch, folder, tell
        torch.backends.cuda.matmul.allow_tf32 = False

    def kernel(self, variant: AnyVariant) -> Any:
        return kernels.load(kernels.build(variant, self.folder))

    def check(self, case: int, seeds: list[int]) -> Job:
        found: Job = {"cases": len(seeds), "bad": [], "worst": 0.0}
        for seed in seeds:
            self.tell(f"seed {seed}")
            error, why = self.one_check(case, seed)
            if not error <= TOLERANCE:
                found["bad"].append({"seed": seed, "error": str(error), "why": why})
            else:
                found["worst"] = max(found["worst"], error)
        return found

    def one_check(self, case: int, seed: int) -> tuple[float, str]:
        from eval.bench_attention import make_batch, poison
        from verify_kernels.cute.attention.run import plan, plan_variant
        from verify_kernels.cute.latent.run import SETUP, run
        from verify_kernels.reference.attention import plan_attention
        from verify_kernels.reference.latent import latent_attention

        torch = self.torch
        heads, page, mask, longest = CASES[case]
        rng = random.Random(seed)
        torch.manual_seed(seed)
        requests = rng.choice([1, 1, 2, 5, 9])
        contexts = [rng.choice(EDGES + [rng.randrange(3000)] * 6 + [rng.randrange(20000)]) for _ in range(requests)]
        lengths = [rng.choice([1, longest, rng.randint(1, longest)]) for _ in range(requests)]
        first = rng.choice([0, 0, 1, rng.randrange(24)])
        lengths = [first + n if mask == "causal" else min(first + n, max(64, first + 1)) for n in lengths]
        batch, pages = make_batch(contexts, lengths, mask, page, rng, "cuda", first)
        q = torch.randn(batch.num_tokens, heads, WIDTH, device="cuda", dtype=torch.bfloat16)
        latents = torch.randn(pages, page, 1, WIDTH, device="cuda", dtype=torch.bfloat16)
        bad = poison(latents, batch)
        variant = variant_of(heads, page, mask, longest)
        kernel = self.kernel(variant)
        make = (batch.page_table, batch.context_lens, batch.request_offsets, batch.ancestor_masks, len(q))
        plans = [plan(variant, *make, setup=s, first_query=first) for s in (SETUP, rng.choice([0, 3, 10]))]
        by_kernel = plan(
            variant, *make, kernel=self.kernel(plan_variant(variant, SETUP)), setup=SETUP, first_query=first
        )
        if not torch.equal(plans[0].segments, by_kernel.segments):
            return float("nan"), "schedules differ"
        want = latent_attention(q.float(), latents.float(), plan_attention(batch, page, mask=mask), RANK, SCALE)
        error = 0.0
        for one in plans:
            outs = []
            for _ in range(2):
                one.partial.fill_(float("nan"))
                one.stats.fill_(float("nan"))
                out = q.new_full((len(q), heads, RANK), float("nan"))
                outs.append(run(kernel, one, q, bad, out, SCALE))
            if not torch.equal(outs[0].view(torch.int16), outs[1].view(torch.int16)):
                return float("nan"), "two runs differ"
            if not outs[0].isfinite().all():
                return float("nan"), "not finite"
            error = max(error, ((outs[0].float() - want).norm() / want.norm()).item())
        return error, "relative error"

    def setting(self, context: int, requests: int, queries: int) -> tuple[Any, Any, list[Any]]:
        from eval.bench_attention import make_batch

        torch = self.torch
        batch, pages = make_batch([context] * requests, [queries] * requests, "tree", PAGE, random.Random(0), "cuda")
        copies = max(2, math.ceil(300e6 / (requests * context * WIDTH * 2)))
        caches = [torch.randn(pages, PAGE, 1, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        return batch, torch.randn(batch.num_tokens, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16), caches

    def report(self, us: float, context: int, requests: int, queries: int) -> Job:
        floor, moved, flops = floor_us(context, requests, queries)
        rates = {"tbps": moved / us / 1e6, "tflops": flops / us / 1e6}
        return {"us": us, "bytes": moved, "flops": flops, "floor_us": floor, "over_floor": us / floor, **rates}

    def time(self, context: int, requests: int, queries: int, run: int = 2) -> Job:
        from verify_kernels.cute.attention.run import plan
        from verify_kernels.cute.latent import run as latent_run

        batch, q, caches = self.setting(context, requests, queries)
        variant = variant_of(HEADS, PAGE, "tree", queries, run)
        kernel, out = self.kernel(variant), q.new_empty(len(q), HEADS, RANK)
        make = (batch.page_table, batch.context_lens, batch.request_offsets, batch.ancestor_masks, len(q))
        made = plan(variant, *make, setup=latent_run.SETUP)

        def call() -> None:
            for cache in caches:
                latent_run.run(kernel, made, q, cache, out, SCALE)

        found = self.report(graph_us(call) / len(caches), context, requests, queries)
        return found | {"predicted_us": predicted_us(context, requests, queries, run=run)}

    def peer(self, name: str, context: int, requests: int, queries: int) -> Job:
        """A causal chain: a peer's nearest."""
        batch, q, caches = self.setting(context, requests, queries)
        try:
            call = (self.flashmla if name == "flashmla" else self.flashinfer)(batch, q, context, queries)
        except ImportError as error:
            return {"absent": str(error)[:120]}

        def every() -> None:
            for cache in caches:
                call(cache)

        return self.report(graph_us(every) / len(caches), context, requests, queries)

    def flashmla(self, batch: Any, q: Any, context: int, queries: int) -> Callable[[Any], Any]:
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata

        lengths = batch.context_lens + queries
        tiles, splits = get_mla_metadata(lengths, queries * HEADS, 1)
        rows = q.view(batch.num_requests, queries, HEADS, WIDTH)
        keywords = {"softmax_scale": SCALE, "causal": True}
        return lambda cache: flash_mla_with_kvcache(
            rows, cache, batch.page_table, lengths, RANK, tiles, splits, **keywords
        )

    def flashinfer(self, batch: Any, q: Any, context: int, queries: int) -> Callable[[Any], Any]:
        import flashinfer

        torch, requests = self.torch, batch.num_requests
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
            torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), backend="fa3"
        )
        used = -(-(context + queries) // PAGE)
        indptr = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * used
        indices = batch.page_table[:, :used].contiguous().flatten()
        wrapper.plan(
            batch.request_offsets, indptr, indices, batch.context_lens + queries, HEADS, RANK, WIDTH - RANK, PAGE, True,
            SCALE, q.dtype, q.dtype,
        )  # fmt: skip
        return lambda cache: wrapper.run(q[..., :RANK], q[..., RANK:], cache[:, :, 0, :RANK], cache[:, :, 0, RANK:])


def run(folder: Path | None, file: Path | None, cases: int, seconds: float) -> list[Job]:
    def save(device: str, results: list[Job]) -> None:
        if file:
            file.write_text(json.dumps({"schema_version": 1, "device": device, "results": results}, indent=0) + "\n")

    command = [sys.executable, "-m", "eval.bench_latent", "work", *(["--kernels", str(folder)] if folder else [])]
    uses = lambda job: {v.name for v in variants_of(job)[:1]}  # noqa: E731
    return gpu_jobs.run(jobs(cases), command, uses, lambda job: SECONDS[job["job"]], seconds, save)


def summary(results: list[Job]) -> str:
    """Checks in a line; then a line a shape: microseconds, floor, prediction, rates."""
    checks = [r for r in results if r["job"] == "check"]
    done, bad = sum(r.get("cases", 0) for r in checks), sum(len(r.get("bad", [])) for r in checks)
    failed, skipped = sum("failed" in r for r in results), sum("skipped" in r for r in results)
    worst = max((r["worst"] for r in checks if "worst" in r), default=0.0)
    lines = [f"{done} random cases, {bad} bad, largest error {worst:.2e}; jobs failed {failed}, skipped {skipped}"]
    absent = {r["name"]: r["absent"] for r in results if "absent" in r}
    lines += [f"peer {name} is absent: {why}" for name, why in absent.items()]
    for r in results:
        if "over_floor" in r:
            who = r.get("name", f"run {r.get('run', 2)}")
            told = f", predicted {r['predicted_us']:.1f}" if "predicted_us" in r else ""
            lines.append(
                f"  {who:10} context {r['context']:6} R={r['requests']:2} Q={r['queries']:2}: {r['us']:8.1f} us"
                f" (floor {r['floor_us']:.1f}, x {r['over_floor']:.2f}{told}), {r['tbps']:.2f} TB/s,"
                f" {r['tflops']:.0f} TFLOP/s"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["build", "run", "work"])
    parser.add_argument("--kernels", type=Path, help="folder of compiled kernels")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--cases", type=int, default=90, help="random cases")
    parser.add_argument("--seconds", type=float, default=240.0, help="what does not fit is left out")
    args = parser.parse_args()
    if args.command == "work":
        return gpu_jobs.serve(lambda tell: Bench(args.kernels, tell))
    if args.command == "build":
        for v in all_variants():
            path = kernels.build(v, args.kernels)
            for stale in path.parent.glob(f"{v.name}-*.so"):
                if stale != path:
                    stale.unlink()
            print(path, flush=True)
        return None
    results = run(args.kernels, args.json, args.cases, args.seconds)
    print(summary(results))
    if any(r.get("bad") or "failed" in r for r in results if r["job"] != "peer"):
        raise SystemExit("some jobs failed")
    return None


if __name__ == "__main__":
    main()
