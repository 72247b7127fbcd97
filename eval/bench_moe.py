"""Correctness and speed of the CuTe DSL mixture of experts on a GPU.

    python -m eval.bench_moe build --kernels DIR            # any machine with the DSL, no GPU
    python -m eval.bench_moe run --kernels DIR --json FILE  # the GPU machine; needs torch and tvm-ffi

`run` compares random cases (poisoned outputs, every call twice, other numbers of CTAs, all tokens to one expert, ties, experts
with numbers of tokens around where kernels change, any T) with float32 products, then times layers of E128 top-8 hidden 2048 inter 768 under uniform routing, in bf16, in fp8
blocks and in MXFP4: CUDA graphs of calls whose weights and picks rotate, beside the peers of `eval.moe_peers` in the same
job; and one layer of Kimi-K3's shape (896 experts, top 16, latent 3584, inter 3072) in MXFP4. TB/s are bytes of the
experts that were picked over time; the floor is those bytes at 4.5 TB/s.

The GPU's work is done by a second process that is started anew when it hangs or dies (`eval.gpu_jobs`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from eval import gpu_jobs
from eval.gpu_jobs import Job, graph_us
from verify_kernels.cute import compile as kernels
from verify_kernels.cute.variants import ExpertsVariant, RouteVariant

TOLERANCE = 5e-3
"""Relative error allowed against float32 of the same bf16 inputs: rounding hidden and output gives 2.4e-3."""

READ_TBPS = 4.5  # reading alone, an H200
TOKENS = (1, 8, 16, 32, 64)
LAYER = (128, 8, 2048, 768)  # experts, top-k, hidden, inner: Qwen3-30B-A3B
K3 = (896, 16, 3584, 3072)
SITU = (4.0, 25.0)  # Kimi-K3's activation
ROUTERS: dict[str, dict[str, Any]] = {
    "qwen3": {"dtype": "bfloat16", "experts": 128, "top_k": 8},
    "odd": {"dtype": "bfloat16", "experts": 60, "top_k": 4, "renormalize": False},
    "k3": {"dtype": "float32", "experts": 896, "top_k": 16, "scores": "sigmoid", "bias": True},
    "deepseek": {
        "dtype": "float32", "experts": 256, "top_k": 8, "scores": "sigmoid", "bias": True, "groups": 8, "top_groups": 4
    },
    "groups": {"dtype": "float32", "experts": 160, "top_k": 6, "groups": 8, "top_groups": 3},
}  # fmt: skip
LAYERS, CALLS = 3, 6  # copies of the weights (bf16: 1.2 GB each), calls in a graph
BITS = {"plain": 16.0, "fp8": 8.0 + 32 / 128**2, "mxfp4": 4.25}  # of a weight, with its share of the scales
KINDS = tuple(BITS)
SMALL = ((128, 8), (8, 2), (4, 1), (60, 4), (256, 8))  # (experts, top-k) of random cases
PEERS = ("triton", "grouped", "vllm")
ROUTING = ("random", "uniform", "one", "ties", "few", "edges", "edges", "elsewhere", "none")
EDGES = (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64)  # tokens of an expert: products have 8, 16 or 32 columns

CONFIGS: dict[str, dict[str, Any]] = {
    "two": {},  # what `run.choose` gives: two CTAs on a multiprocessor, each with half of its memory
    "half": {"units": 1},  # one, so that the next kernel's CTA is there beside it
    "one": {"units": 1, "memory": 224 * 1024},
    "two no pdl": {"pdl": False},
}
"""units: CTAs for each multiprocessor; memory: for the ring of one."""

K3_TOKENS = (8, 64)
SECONDS = {"peer": 25.0, "k3": 15.0}
JOB_SECONDS = 8.0


def variants(
    config: str, tokens: int, experts: int, top_k: int, kind: str = "plain", situ: bool = False
) -> tuple[ExpertsVariant, ExpertsVariant]:
    import torch

    from verify_kernels.cute.moe.run import choose, stages

    first, second = choose(torch.bfloat16, tokens, experts, top_k, kind, SITU if situ else None)
    changes = dict(CONFIGS[config])
    changes.pop("units", None)
    if memory := changes.pop("memory", 0):
        deep = [stages(v.tokens, experts, top_k, v.down, kind, memory) for v in (first, second)]
        first, second = (dataclasses.replace(v, stages=n) for v, n in zip((first, second), deep))
    return dataclasses.replace(first, **changes), dataclasses.replace(second, **changes)


def variants_of(job: Job) -> tuple[ExpertsVariant | RouteVariant, ...]:
    """What a job runs; nothing of ours for a peer."""
    if job["job"] in ("peer", "read"):
        return ()
    if job["job"] == "route":
        return (RouteVariant(**{"renormalize": True} | ROUTERS[job["config"]]),)
    shape = K3[:2] if job["job"] == "k3" else (job.get("experts", LAYER[0]), job.get("top_k", LAYER[1]))
    situ = job["job"] == "k3" or job.get("situ", False)
    return variants(job["config"], job["tokens"], *shape, job.get("kind", "plain"), situ)


def all_variants() -> list[ExpertsVariant | RouteVariant]:
    return list(dict.fromkeys(v for job in jobs(0) for v in variants_of(job)))


def jobs(cases: int) -> list[Job]:
    """What a run does, in order: a first look, some random cases of every kernel, the times, then the other cases."""
    found: list[Job] = [{"job": "peer", "config": "triton", "tokens": 8}]
    found += [{"job": "smoke", "config": "two", "tokens": t, "experts": 8, "top_k": 2} for t in (8, 16, 64)]
    found += [{"job": "smoke", "config": "two no pdl", "tokens": 8, "experts": LAYER[0], "top_k": LAYER[1]}]
    found += [
        {"job": "smoke", "config": "two", "tokens": t, "experts": 8, "top_k": 2, "kind": kind}
        for kind in KINDS[1:]
        for t in (8, 64)
    ]
    found += [
        {"job": "op", "config": "two", "tokens": t, "experts": e, "top_k": k, "kind": kind, "situ": kind == "mxfp4"}
        for kind, t, (e, k) in (("plain", 8, LAYER[:2]), ("fp8", 64, SMALL[1]), ("mxfp4", 64, SMALL[1]))
    ]
    found += [{"job": "route", "config": name} for name in ROUTERS]
    kinds = [("two", t, e, k, "plain") for e, k in SMALL[:3] for t in (8, 16, 32, 64)]
    kinds += [("two", t, *SMALL[1], kind) for kind in KINDS[1:] for t in (8, 16, 32, 64)]
    kinds += [("two", t, e, k, "plain") for e, k in SMALL[3:] for t in (8, 64)]
    kinds += [("two", t, *LAYER[:2], kind) for kind in KINDS[1:] for t in (8, 16, 32, 64)]
    kinds += [(c, t, *LAYER[:2], "plain") for c in CONFIGS if c not in ("two", "half") for t in (8, 64)]

    kinds += [("two", t, *SMALL[1], "mxfp4", True) for t in (8, 64)]

    def check(at: int, seeds: range) -> Job:
        names = ("config", "tokens", "experts", "top_k", "kind", "situ")
        return {"job": "check", **dict(zip(names, kinds[at % len(kinds)])), "seeds": list(seeds)}

    found += [check(i, range(2 * i, 2 * i + 2)) for i in range(len(kinds))]
    found += [{"job": "time", "config": "two", "tokens": t, "kind": kind} for kind in KINDS for t in TOKENS]
    found += [{"job": "peer", "config": "triton", "tokens": t} for t in TOKENS if t != 8]
    found += [{"job": "peer", "config": "triton", "tokens": t, "kind": "fp8"} for t in TOKENS]
    found += [{"job": "k3", "config": "two", "tokens": t, "kind": "mxfp4"} for t in K3_TOKENS]
    found += [{"job": "time", "config": c, "tokens": t} for t in TOKENS for c in CONFIGS if c != "two"]
    found += [
        {"job": "time", "config": c, "tokens": t, "kind": kind}
        for kind in KINDS[1:]
        for c, t in (("one", 8), ("one", 64), ("half", 1), ("half", 8), ("half", 64))
    ]
    found += [{"job": "split", "config": "two", "tokens": t, "kind": kind} for kind in KINDS for t in (1, 8, 64)]
    found += [{"job": "peer", "config": p, "tokens": t} for p in PEERS[1:] for t in TOKENS]
    found += [{"job": "peer", "config": "vllm", "tokens": t, "kind": "fp8"} for t in TOKENS]
    found += [{"job": "time", "config": "two", "tokens": t, "routing": r} for r in ("zipf", "one") for t in (8, 64)]
    rest = max(cases - 2 * len(kinds), 0)
    found += [check(i // 4 * 7, range(1000 + i, 1000 + i + 4)) for i in range(0, rest, 4)]
    found.append({"job": "read"})
    return found


def edges(tokens: int, experts: int, top_k: int, rng: random.Random) -> list[list[int]]:
    """Picks under which experts have numbers of tokens from `EDGES`, as far as they go: [tokens, top_k], in any order."""
    picks: list[list[int]] = [[] for _ in range(tokens)]
    order = rng.sample(range(experts), experts)
    some, others = order[: experts // 2], order[experts // 2 :]
    for e, count in zip(some, rng.sample(EDGES, len(EDGES))):
        free = sorted((t for t in range(tokens) if len(picks[t]) < top_k), key=lambda t: (len(picks[t]), rng.random()))
        for t in free[:count] if count <= len(free) else []:
            picks[t].append(e)
    for own in picks:
        free = rng.sample(others, len(others)) + some
        own += [e for e in free if e not in own][: top_k - len(own)]
        rng.shuffle(own)
    return picks


class Bench:
    """Runs jobs; weights stay on the GPU between them."""

    def __init__(self, folder: Path | None, tell: Any) -> None:
        import torch

        self.torch, self.folder, self.tell = torch, folder, tell
        torch.backends.cuda.matmul.allow_tf32 = False

    @functools.cache
    def pair(
        self, config: str, tokens: int, experts: int, top_k: int, kind: str = "plain", situ: bool = False
    ) -> tuple[Any, Any]:
        """(kernels, variants)"""
        both = variants(config, tokens, experts, top_k, kind, situ)
        first, second = (kernels.load(kernels.build(v, self.folder)) for v in both)
        return (first, second), both

    def units(self, config: str) -> int:
        return CONFIGS[config].get("units", 1) * self.torch.cuda.get_device_properties(0).multi_processor_count

    # --- picks and weights

    def picks(self, kind: str, tokens: int, experts: int, top_k: int, seed: int) -> tuple[Any, Any]:
        """(weights [T, k] float32, ids [T, k]). kind: "random" logits; the laws "uniform" and "zipf" with exponent 1; all
        tokens to the same experts: "one"; logits with ties; "few" experts between them; experts with numbers of tokens of
        `EDGES`; most of them held "elsewhere", ids below 0 and past the last, or all: "none"."""
        import numpy as np

        from dspark_runtime.cost.routing import inclusion
        from dspark_runtime.forced_routing import systematic
        from verify_kernels.reference.moe import moe_route

        torch = self.torch
        g = torch.Generator("cuda").manual_seed(seed)
        logits = torch.randn(tokens, experts, device="cuda", generator=g)
        if kind in ("uniform", "zipf"):
            draw = np.random.default_rng(seed)
            chances = draw.permutation(np.array(inclusion(experts, top_k, 1.0 if kind == "zipf" else 0.0)))
            ids = torch.from_numpy(systematic(chances, tokens, draw)).cuda()
            weights = logits.gather(1, ids).softmax(-1)
            return weights, ids
        if kind in ("elsewhere", "none"):
            weights, ids = moe_route(torch.randn(tokens, 3 * experts, device="cuda", generator=g), top_k, True)
            ids = ids - experts  # a third is held here
            return weights, torch.where(ids < 0, ids, ids + experts) if kind == "none" else ids
        if kind == "edges":
            ids = torch.tensor(edges(tokens, experts, top_k, random.Random(seed)), device="cuda")
            return logits.gather(1, ids).softmax(-1), ids
        if kind == "one":
            logits = logits[:1].expand(tokens, -1)
        if kind == "ties":
            logits = logits.round()
        if kind == "few":
            logits[:, torch.randperm(experts, device="cuda", generator=g)[max(top_k, experts // 8) :]] -= 50
        return moe_route(logits, top_k, True)

    def matrices(self, experts: int, hidden: int, inner: int) -> tuple[Any, Any]:
        torch = self.torch
        gate_up = torch.randn(experts, 2 * inner, hidden, device="cuda", dtype=torch.bfloat16).mul_(hidden**-0.5)
        return gate_up, torch.randn(experts, hidden, inner, device="cuda", dtype=torch.bfloat16).mul_(inner**-0.5)

    def stored(self, kind: str, experts: int, hidden: int, inner: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """(what the kernels read, the same as plain matrices) of random weights."""
        from verify_kernels.cute.moe.pack import pack
        from verify_kernels.quantized import quantize_fp8, quantize_mxfp4

        both = self.matrices(experts, hidden, inner)
        if kind == "plain":
            return both, both
        quantize = quantize_fp8 if kind == "fp8" else quantize_mxfp4
        first, second = (quantize(w) for w in both)
        plain = tuple(q.dequantize(self.torch.float32) for q in (first, second))
        return (pack(first, True), pack(second, False)), plain

    def random_packed(self, kind: str, experts: int, hidden: int, inner: int) -> tuple[Any, Any]:
        """Packed weights without the matrices they come from: for times of large layers."""
        from verify_kernels.cute.moe.pack import PART_BYTES, rows_of, scale_bytes

        torch = self.torch
        found = []
        for rows, depth, gate_up in ((2 * inner, hidden, True), (hidden, inner, False)):
            shape = (experts, -(-rows // rows_of(gate_up)), -(-depth // 128), rows_of(gate_up) // 64, PART_BYTES[kind])
            tiles = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)
            if kind == "fp8":
                tiles.bitwise_and_(0xBF)  # no NaN, moderate size
                tiles[..., -16:] = torch.full((4,), depth**-0.5, device="cuda").view(torch.uint8)
            else:
                exponent = 127 - round(math.log2(depth) / 2) - 2
                tiles[..., 4096:] = scale_bytes(torch.tensor(exponent, dtype=torch.uint8, device="cuda"))
            found.append(tiles.flatten(-2))
        return found[0], found[1]

    def float32(
        self, x: Any, gate_up: Any, down: Any, weights: Any, ids: Any, situ: bool = False
    ) -> tuple[Any, Any]:
        """(hidden rows with their weights, output), of the same bf16 inputs. Ids of no expert add nothing."""
        from verify_kernels.reference.latent_moe import situ_and_mul

        torch = self.torch
        between = torch.zeros(ids.numel(), down.shape[2], device="cuda")
        out = torch.zeros(x.shape, device="cuda")
        for e in ids[(ids >= 0) & (ids < len(gate_up))].unique().tolist():
            pairs = (ids.flatten() == e).nonzero().flatten()
            rows = pairs // ids.shape[1]
            both = x[rows].float() @ gate_up[e].float().T
            gate, up = both.chunk(2, dim=-1)
            value = situ_and_mul(both, *SITU) if situ else torch.nn.functional.silu(gate) * up
            between[pairs] = value * weights.flatten()[pairs, None]
            out.index_add_(0, rows, between[pairs] @ down[e].float().T)
        return between, out

    # --- jobs

    def smoke(self, config: str, tokens: int, experts: int, top_k: int, kind: str = "plain") -> Job:
        """Both kernels apart, from one tile to a split of the k tiles, so that one that hangs or errs says at what."""
        from verify_kernels.cute.moe.run import experts as run

        torch = self.torch
        both, pair = self.pair(config, tokens, experts, top_k, kind)
        found: dict[str, Any] = {}
        for name, t, hidden, inner, units, routing in (
            ("one token, one tile", 1, 64, 64, 1, "random"),
            ("all tokens, one tile", tokens, 64, 64, 1, "random"),
            ("many k tiles", tokens, 2048, 1024, 1, "random"),
            ("ragged", tokens - 3, 200, 88, 1, "random"),
            ("a CTA for a tile or two", tokens, 512, 256, 64, "random"),
            ("split row tiles", tokens, 2048, 768, 132, "random"),
            ("all to one, split", tokens, 2048, 768, 132, "one"),
        ):
            self.tell(name)
            torch.manual_seed(0)
            hidden, inner = self.fitting(kind, hidden, inner)
            x = torch.randn(t, hidden, device="cuda", dtype=torch.bfloat16)
            stored, plain = self.stored(kind, experts, hidden, inner)
            weights, ids = self.picks(routing, t, experts, top_k, 0)
            between, out = self.float32(x, *plain, weights, ids)
            wanted = between[ids.flatten().argsort(stable=True)], out
            got = [torch.full(w.shape, float("nan"), device="cuda", dtype=torch.bfloat16) for w in wanted]
            run(both, pair, x, *stored, weights, ids, got[1], units, got[0])
            torch.cuda.synchronize()
            for what, g, w in zip(("hidden", "out"), got, wanted):
                wrong = ~((g.float() - w).abs() <= 0.02 + 0.02 * w.abs())
                found[f"{name}, {what}"] = round(((g.float() - w).norm() / w.norm()).item(), 5)
                if wrong.any():
                    at = wrong.nonzero()
                    found[f"{name}, {what}, wrong"] = [
                        int(wrong.sum()), wrong.numel(), at[:4].tolist(), at[-2:].tolist(),
                        [g[tuple(i)].item() for i in at[:4].tolist()], [w[tuple(i)].item() for i in at[:4].tolist()],
                    ]  # fmt: skip
        return {"errors": found, "bad": [name for name in found if name.endswith("wrong")]}

    def fitting(self, kind: str, hidden: int, inner: int) -> tuple[int, int]:
        """The next sizes that a kind of weights can have."""
        if kind == "mxfp4":
            return -(-hidden // 32) * 32, -(-inner // 32) * 32
        return hidden, -(-inner // 128) * 128 if kind == "fp8" else inner

    def op(self, config: str, tokens: int, experts: int, top_k: int, kind: str = "plain", situ: bool = False) -> Job:
        """The operation as an engine would call it, weights packed as at its load, and one captured call under other
        picks."""
        from verify_kernels.cute import implementations
        from verify_kernels.quantized import quantize_fp8, quantize_mxfp4

        torch = self.torch
        ops = implementations(self.folder, unmeasured=True)
        gate_up, down = self.matrices(experts, 512, 256)
        stored = [gate_up, down]
        if kind != "plain":
            stored = [(quantize_fp8 if kind == "fp8" else quantize_mxfp4)(w) for w in stored]
            gate_up, down = (w.dequantize(torch.float32) for w in stored)
        packed = ops["pack_experts"](*stored)

        def op(x: Any, weights: Any, ids: Any) -> Any:
            if situ:
                return ops["situ_experts"](x, *packed, weights, ids, *SITU)
            return ops["moe_experts"](x, *packed, weights, ids)

        x = torch.randn(2 * tokens - 1, 512, device="cuda", dtype=torch.bfloat16)
        weights, ids = (p.clone() for p in self.picks("random", len(x), experts, top_k, 0))
        errors = []

        def error(got: Any) -> float:
            want = self.float32(x, gate_up, down, weights, ids, situ)[1]
            return ((got.float() - want).norm() / want.norm()).item()

        errors.append(error(op(x, weights, ids)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = op(x, weights, ids)
        for routing, seed in (("random", 1), ("one", 2), ("uniform", 3), ("elsewhere", 4)):
            for old, new in zip((weights, ids), self.picks(routing, len(x), experts, top_k, seed)):
                old.copy_(new)
            out.fill_(float("nan"))
            graph.replay()
            errors.append(error(out))
        return {"errors": errors, "bad": [f"error {e:.2e}" for e in errors if not e <= TOLERANCE]}

    def route(self, config: str) -> Job:
        """Choices and weights against the reference's, and microseconds of 8 and 64 tokens."""
        from verify_kernels.cute.moe.run import route
        from verify_kernels.reference.moe import moe_route

        torch = self.torch
        (variant,) = variants_of({"job": "route", "config": config})
        kernel = kernels.load(kernels.build(variant, self.folder))
        errors, bad, us = [], [], {}
        for t, kind in itertools.product((1, 8, 64, 300), ("random", "ties", "large")):
            self.tell(f"{config} {t} {kind}")
            logits = torch.randn(t, variant.experts, device="cuda") * (8.0 if kind == "large" else 1.0)
            logits = (logits.round() if kind == "ties" else logits).to(getattr(torch, variant.dtype))
            bias = torch.randn(variant.experts, device="cuda").round(decimals=1) * 0.3 if variant.bias else None
            scale = 2.5 if variant.scores == "sigmoid" else 1.0
            got, ids = route(kernel, variant, logits, bias, scale)
            want, wanted = moe_route(
                logits, variant.top_k, variant.renormalize, scores=variant.scores, bias=bias,
                num_groups=variant.groups, top_groups=variant.top_groups, scale=scale,
            )  # fmt: skip
            # Scores that differ by rounding alone may change places.
            same = ids == wanted if kind == "ties" else (got - want).abs() <= 1e-5 * want.abs() + 1e-9
            errors.append(((got - want).norm() / want.norm()).item())
            if not same.all() or not errors[-1] <= 1e-5 or ids.sort(-1).values.diff(dim=-1).eq(0).any():
                bad.append(f"{t} {kind}: {int((~same).sum())} of {same.numel()} differ, error {errors[-1]:.1e}")
            if t in (8, 64) and kind == "random":
                us[t] = graph_us(lambda: [route(kernel, variant, logits, bias, scale) for _ in range(20)]) / 20
        return {"errors": errors, "bad": bad, "router_us": us}

    def check(
        self,
        config: str,
        tokens: int,
        experts: int,
        top_k: int,
        seeds: list[int],
        kind: str = "plain",
        situ: bool = False,
    ) -> Job:
        cases = [self.case(config, tokens, experts, top_k, kind, situ, seed) for seed in seeds]
        return {"cases": len(cases), "worst": max(c["error"] for c in cases), "bad": [c for c in cases if c["why"]]}

    def case(self, config: str, tokens: int, experts: int, top_k: int, kind: str, situ: bool, seed: int) -> Job:
        """One random layer against float32."""
        from verify_kernels.cute.moe.run import experts as run

        torch = self.torch
        rng = random.Random(seed)
        torch.manual_seed(seed)
        t = rng.choice([tokens, rng.randint(1, tokens), rng.randint(tokens // 2 + 1, tokens)])
        hidden = rng.choice([2048, 8 * rng.randint(1, 30), 64 * rng.randint(1, 20), 8 * rng.randint(1, 200)])
        inner = rng.choice([768, 8 * rng.randint(1, 30), 64 * rng.randint(1, 12), 8 * rng.randint(1, 100)])
        hidden, inner = self.fitting(kind, hidden, inner)
        routing = rng.choice(ROUTING)
        both, pair = self.pair(config, tokens, experts, top_k, kind, situ)
        self.tell(f"{pair[0].name} seed {seed} T {t} hidden {hidden} inner {inner} {routing}")
        x = torch.randn(t, hidden + 8 * rng.choice([0, 0, 1, 5]), device="cuda", dtype=torch.bfloat16)[:, :hidden]
        stored, plain = self.stored(kind, experts, hidden, inner)
        weights, ids = self.picks(routing, t, experts, top_k, seed)
        _, want = self.float32(x, *plain, weights, ids, situ)
        outs = []
        default = self.units(config)
        for units in (default, rng.choice([1, 7, 131, 300]), default):
            around = torch.full((t + 2, hidden + 3), float("nan"), device="cuda", dtype=torch.bfloat16)
            between = torch.full((t * top_k, inner), float("nan"), device="cuda", dtype=torch.bfloat16)
            out = around[1:-1, 1 : hidden + 1]
            run(both, pair, x, *stored, weights, ids, out, units, between)
            outs.append(out.clone())
            out.fill_(float("nan"))
            if not around.isnan().all():
                return {"seed": seed, "error": float("inf"), "why": "wrote outside the output"}
        size = want.norm().clamp(min=1e-30)  # where no expert is held here, all is zero
        error = max(((o.float() - want).norm() / size).item() for o in outs)
        why = ""
        if not error <= TOLERANCE:
            why = f"error {error:.2e}" if error == error else "not written"
        elif not torch.equal(outs[0].view(torch.int16), outs[2].view(torch.int16)):
            why = "two runs differ"
        shape = [t, hidden, inner, routing]
        return {"seed": seed, "shape": shape, "error": error if error == error else float("inf"), "why": why}

    @functools.cache
    def layers(self, kind: str) -> list[tuple[Any, Any]]:
        self.torch.manual_seed(0)
        shape = (LAYER[0], *LAYER[2:])
        return [self.matrices(*shape) if kind == "plain" else self.random_packed(kind, *shape) for _ in range(LAYERS)]

    def setting(self, tokens: int, routing: str, shape: tuple[int, ...] = LAYER) -> tuple[Any, list[tuple[Any, Any]], float]:
        """(x, picks of every call, mean number of different experts)."""
        torch = self.torch
        torch.manual_seed(1)
        x = torch.randn(tokens, shape[2], device="cuda", dtype=torch.bfloat16)
        picks = [self.picks(routing, tokens, *shape[:2], seed) for seed in range(CALLS)]
        picks = [(w.contiguous(), i.contiguous()) for w, i in picks]
        return x, picks, statistics.fmean(len(i.unique()) for _, i in picks)

    def report(self, us: float, experts: float, kind: str = "plain", shape: tuple[int, ...] = LAYER) -> Job:
        _, _, hidden, inner = shape
        size = experts * 3 * hidden * inner * BITS[kind] / 8
        floor = size / READ_TBPS / 1e6
        return {"us": us, "tbps": size / us / 1e6, "floor_us": floor, "experts": experts, "over_floor": us / floor}

    def time(self, config: str, tokens: int, routing: str = "uniform", kind: str = "plain") -> Job:
        torch = self.torch
        x, picks, experts = self.setting(tokens, routing)
        us, out = self.calls_us(config, tokens, LAYER, kind, x, picks, self.layers(kind))
        if kind != "plain":
            return self.report(us, experts, kind) | {"off": 0.0, "bad": [] if out.isfinite().all() else ["not finite"]}
        want = self.float32(x, *self.layers("plain")[0], *picks[0])[1]
        off = ((out.float() - want).norm() / want.norm()).item()
        return self.report(us, experts) | {"off": off, "bad": [] if off <= TOLERANCE else [f"error {off:.2e}"]}

    def calls_us(
        self,
        config: str,
        tokens: int,
        shape: tuple[int, ...],
        kind: str,
        x: Any,
        picks: list[Any],
        layers: list[Any],
        situ: bool = False,
    ) -> tuple[float, Any]:
        """(microseconds of a call, output of the first)."""
        from verify_kernels.cute.moe.run import experts as run

        torch = self.torch
        both, pair = self.pair(config, tokens, *shape[:2], kind, situ)
        outs = [torch.full_like(x, float("nan")) for _ in picks]
        between = torch.empty(tokens * shape[1], shape[3], device="cuda", dtype=torch.bfloat16)
        units = self.units(config)

        def call() -> None:
            for i, (weights, ids) in enumerate(picks):
                run(both, pair, x, *layers[i % len(layers)], weights, ids, outs[i], units, between)

        return graph_us(call) / len(picks), outs[0]

    def k3(self, config: str, tokens: int, kind: str) -> Job:
        """A layer of Kimi-K3's shape, one copy: 15.7 GB, far past L2."""
        x, picks, experts = self.setting(tokens, "uniform", K3)
        if not hasattr(self, "_k3"):
            self._k3 = [self.random_packed(kind, K3[0], *K3[2:])]
        us, out = self.calls_us(config, tokens, K3, kind, x, picks, self._k3, True)
        return self.report(us, experts, kind, K3) | {"off": 0.0, "bad": [] if out.isfinite().all() else ["not finite"]}

    def split(self, config: str, tokens: int, kind: str = "plain") -> Job:
        """Each of the two kernels by itself."""
        torch = self.torch
        both, pair = self.pair(config, tokens, *LAYER[:2], kind)
        x, picks, experts = self.setting(tokens, "uniform")
        _, top_k, hidden, inner = LAYER
        from verify_kernels.cute.moe.run import _workspace

        units = self.units(config)
        partial, counters = _workspace(x.device, units, pair[0].tokens)
        between = torch.randn(tokens * top_k, inner, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(x)

        def first() -> None:
            for i, (weights, ids) in enumerate(picks):
                both[0](x, self.layers(kind)[i % LAYERS][0], ids, weights, between, partial, counters, units)

        def second() -> None:
            for i, (_, ids) in enumerate(picks):
                both[1](between, self.layers(kind)[i % LAYERS][1], ids, None, out, partial, counters, units)

        found = {}
        for name, call, share in (("gate_up", first, 2), ("down", second, 1)):
            self.tell(name)
            us = graph_us(call) / CALLS
            found[name] = {"us": us, "tbps": experts * share * hidden * inner * BITS[kind] / 8 / us / 1e6}
        return found

    @functools.cached_property
    def fp8_layers(self) -> list[tuple[Any, Any]]:
        from verify_kernels.quantized import quantize_fp8

        return [tuple(quantize_fp8(w) for w in layer) for layer in self.layers("plain")]

    def peer(self, config: str, tokens: int, kind: str = "plain") -> Job:
        from eval.moe_peers import PEERS

        x, picks, experts = self.setting(tokens, "uniform")
        layers = self.layers("plain") if kind == "plain" else self.fp8_layers
        calls = [PEERS[config](*layers[i % LAYERS], *p) for i, p in enumerate(picks)]
        self.tell("first call")
        got = calls[0](x)
        plain = layers[0] if kind == "plain" else [w.dequantize(self.torch.float32) for w in layers[0]]
        want = self.float32(x, *plain, *picks[0])[1]
        off = ((got.float() - want).norm() / want.norm()).item()
        self.tell("graph")

        def call() -> None:
            for one in calls:
                one(x)

        return self.report(graph_us(call) / CALLS, experts, kind) | {"off": off}

    def read(self) -> Job:
        from eval.bench_attention import read_rate

        return {"tbps": read_rate()}


def run(folder: Path | None, file: Path | None, cases: int, seconds: float) -> list[Job]:
    def save(device: str, results: list[Job]) -> None:
        if file:
            file.write_text(json.dumps({"schema_version": 1, "device": device, "results": results}, indent=0) + "\n")

    def uses(job: Job) -> set[str]:
        """A kernel that failed is left out; a peer is not."""
        return {f"{job['config']} {v.name}" for v in variants_of(job)[:1]}

    def limit(job: Job) -> float:
        return SECONDS.get(job["job"], 20.0 if job["job"] == "read" else JOB_SECONDS)

    command = [sys.executable, "-m", "eval.bench_moe", "work", *(["--kernels", str(folder)] if folder else [])]
    return gpu_jobs.run(jobs(cases), command, uses, limit, seconds, save)


def summary(results: list[Job]) -> str:
    """Checks in a line; microseconds by config and tokens, in brackets time over floor; the ratio to the best peer."""
    checks = [r for r in results if r["job"] == "check"]
    done, bad = sum(r.get("cases", 0) for r in checks), sum(len(r.get("bad", [])) for r in checks)
    failed, skipped = sum("failed" in r for r in results), sum("skipped" in r for r in results)
    worst = max((r["worst"] for r in checks if "worst" in r), default=0.0)
    lines = [f"{done} random cases, {bad} bad, largest relative error {worst:.2e}; jobs failed {failed}, skipped {skipped}"]
    for r in results:
        if r["job"] == "smoke" and "errors" in r:
            number = max(v for v in r["errors"].values() if isinstance(v, float))
            lines.append(f"smoke {r['config']} {r.get('kind', '')} T={r['tokens']} E={r['experts']}: worst {number}")
        if r["job"] == "route" and "router_us" in r:
            times = ", ".join(f"T={t} {us:.1f} us" for t, us in r["router_us"].items())
            lines.append(f"router {r['config']}: worst {max(r['errors']):.1e}, {len(r['bad'])} bad, {times}")
        if r["job"] == "read" and "tbps" in r:
            lines.append(f"read rate without dependent launch {r['tbps']:.2f} TB/s")
        if r["job"] == "peer" and "failed" in r and r["tokens"] == 8:
            lines.append(f"peer {r['config']}: {r['failed'][:120]}")
    timed = {
        (r.get("kind", "plain"), r["config"], r["tokens"]): r
        for r in results
        if "over_floor" in r and r["job"] != "k3" and r.get("routing", "uniform") == "uniform"
    }
    lines.append("us (x floor) for T = " + " ".join(map(str, TOKENS)) + "; E128 top-8 2048 x 768, uniform routing")
    for kind in KINDS:
        for config in (*CONFIGS, *PEERS):
            cells = []
            for t in TOKENS:
                r = timed.get((kind, config, t))
                mark = " OFF" if r and r["off"] > 0.05 else ""
                cells.append(f"{r['us']:.1f} ({r['over_floor']:.2f}){mark}" if r else "-")
            if any(c != "-" for c in cells):
                lines.append(f"  {kind:6} {config:16}" + " ".join(f"{c:>14}" for c in cells))
        for t in TOKENS:
            peers = [timed[kind, p, t]["us"] for p in PEERS if (kind, p, t) in timed]
            own = [timed[kind, c, t]["us"] for c in CONFIGS if (kind, c, t) in timed]
            if peers and own:
                ratio = min(peers) / min(own)
                lines.append(f"  {kind} T={t}: best peer {min(peers):.1f}, own {min(own):.1f}, {ratio:.2f} x as fast")
    for r in results:
        if r["job"] == "split" and "down" in r:
            parts = ", ".join(f"{n} {r[n]['us']:.1f} us {r[n]['tbps']:.2f} TB/s" for n in ("gate_up", "down"))
            lines.append(f"  {r['kind']} T={r['tokens']} apart: {parts}")
        if "over_floor" in r and (r["job"] == "k3" or "routing" in r):
            what = f"K3 layer {r['kind']}" if r["job"] == "k3" else r["routing"]
            lines.append(f"  T={r['tokens']} {what}: {r['experts']:.1f} experts, {r['us']:.1f} us ({r['over_floor']:.2f})")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["build", "run", "work"])
    parser.add_argument("--kernels", type=Path, help="folder of compiled kernels")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--cases", type=int, default=120, help="random cases")
    parser.add_argument("--seconds", type=float, default=80.0, help="what does not fit is left out")
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
