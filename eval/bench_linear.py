"""Correctness and speed of the CuTe DSL small-T linear on a GPU.

    python -m eval.bench_linear build --kernels DIR            # any machine with the DSL, no GPU
    python -m eval.bench_linear run --kernels DIR --json FILE  # the GPU machine; needs torch and tvm-ffi

`run` compares random cases (poisoned outputs, rows of W past the last tile, every call twice) with a float32 product,
then times what a decode step runs, beside torch's own product in the same job: one CUDA graph of the matrices of three
Qwen3-8B layers, each reading the output of the one before; the same with norms, residual adds and activation fused; and
each matrix, and the LM head, alone. TB/s are bytes of weights over time.

The GPU's work is done by a second process that is started anew when it hangs or dies (`eval.gpu_jobs`).
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
from pathlib import Path
from typing import Any

from eval import gpu_jobs
from eval.gpu_jobs import Job, graph_us
from verify_kernels.cute import compile as kernels
from verify_kernels.cute.variants import LinearVariant
from verify_kernels.cute.linear.schedule import SLACK, plan, stages

TOLERANCE = 5e-3
"""Relative error allowed against float32 of the same bf16 inputs: rounding the output once gives 1.7e-3."""

LAYER = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
HEAD = (151936, 4096)
LAYERS = 3  # 1.16 GB of weights, far past L2
PAST_L2 = 160 << 20  # bytes
TOKENS = (1, 8, 16, 32, 64)
JOB_SECONDS = 6.0
READ_SECONDS = 20.0  # with the compilation of its kernel

# Rows and k of a tile, CTAs of an SM at a time, further constants. A ring takes all of its CTA's shared memory.
CONFIGS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "m64": (64, 128, 1, {}),
    "m64 no pdl": (64, 128, 1, {"pdl": False}),
    "m128": (128, 128, 1, {}),
    "m192": (192, 128, 1, {}),
    "m48": (48, 128, 1, {}),
    "m48 half": (48, 128, 2, {}),
    "m32": (32, 128, 1, {}),
    "m32 k256": (32, 256, 1, {}),
    "fp8 m64": (64, 256, 1, {"kind": "fp8"}),
    "fp8 m48": (48, 256, 1, {"kind": "fp8"}),
    "fp8 m32": (32, 256, 1, {"kind": "fp8"}),
    "fp8 m32 k512": (32, 512, 1, {"kind": "fp8"}),
}
WHOLE = 0.34
"""Slack that gives every unit whole row tiles of 64, if that leaves a quarter of the multiprocessors idle."""

BY_MATRIX: dict[str, tuple[str, ...]] = {
    "qkv": ("m64", "m64 no pdl", *(c for c in CONFIGS if "m48" in c)),
    "o": ("m64", "m128", *(c for c in CONFIGS if "m32" in c)),
    "gate_up": ("m64", "m64 no pdl", "m128", "m192", "fp8 m64"),
    "down": ("m64", "m128", *(c for c in CONFIGS if "m32" in c)),
    "head": ("m64", "m128", "m192", "fp8 m64"),
}

# What each matrix of a layer runs with, in the order of LAYER.
MIXES: dict[str, tuple[str, str, str, str]] = {
    "m64": ("m64", "m64", "m64", "m64"),
    "whole": ("m48", "m32", "m192", "m32"),
    "whole low": ("m48", "m32", "m64", "m32"),
    "fp8": ("fp8 m48", "fp8 m32", "fp8 m64", "fp8 m32"),
    "fp8 k512": ("fp8 m48", "fp8 m32 k512", "fp8 m64", "fp8 m32 k512"),
}
FUSED_MIXES = ("m64", "whole", "whole low", "fp8", "fp8 k512")
EPILOGUES: tuple[dict[str, bool], ...] = (
    {"bias": True},
    {"residual": True},
    {"bias": True, "residual": True},
    {"swiglu": True},
    {"rms_in": True},
    {"rms_in": True, "swiglu": True},
    {"residual": True, "rms_out": True},
)
FUSED = {"qkv": {"rms_in": True}, "o": EPILOGUES[-1], "gate_up": EPILOGUES[-2], "down": EPILOGUES[-1]}
"""A layer's matrices with its norms, residual adds and activation inside."""

EPS = 1e-6


def variant(config: str, tokens: int, **epilogue: bool) -> LinearVariant:
    rows, tile_k, resident, flags = CONFIGS[config]
    padded = max(8, 1 << (tokens - 1).bit_length())
    ring = stages(rows, tile_k, padded, resident, flags.get("kind", "plain"))
    return LinearVariant("bfloat16", padded, rows, tile_k, ring, **flags, **epilogue)


def kind_of(config: str) -> str:
    """Of a config's weights."""
    return "plain" if config == "torch" else str(CONFIGS[config][3].get("kind", "plain"))


def checked() -> list[tuple[str, int, dict[str, bool]]]:
    """Every kernel: config, tokens, epilogue."""
    found: list[tuple[str, int, dict[str, bool]]] = [(c, t, {}) for t in TOKENS[1:] for c in CONFIGS]
    found += [("m64", t, e) for t in (8, 64) for e in EPILOGUES[:4]] + [("m64", 8, {"bias": True, **EPILOGUES[-1]})]
    for t in TOKENS[1:]:
        for mix in FUSED_MIXES:
            found += [(c, t, e) for c, e in zip(MIXES[mix], FUSED.values(), strict=True)]
    return [f for i, f in enumerate(found) if f not in found[:i]]


def variants() -> list[LinearVariant]:
    return list(dict.fromkeys(variant(c, t, **e) for c, t, e in checked()))


def jobs(cases: int) -> list[Job]:
    """What a run does, in order: a first look at kernels, each of them checked, the times, then more random cases."""
    found: list[Job] = [{"job": "chain", "mix": "torch", "tokens": t} for t in TOKENS]
    found += [
        {"job": "smoke", "config": c, "tokens": t}
        for c, t in (
            ("m64 no pdl", 8), ("m64", 8), ("m48", 8), ("m32 k256", 64), ("fp8 m64", 8), ("fp8 m32 k512", 16),
        )
    ]  # fmt: skip
    found.append({"job": "op", "config": "m48", "tokens": 8})
    found += [
        {"job": "check", "config": c, "tokens": t, "epilogue": e, "seeds": [2 * s, 2 * s + 1]}
        for s, (c, t, e) in enumerate(checked())
    ]
    found += [{"job": "chain", "mix": m, "tokens": t} for t in TOKENS for m in MIXES]
    found += [{"job": "layer", "mix": m, "tokens": t} for t in TOKENS for m in ("torch", *FUSED_MIXES)]
    found += [
        {"job": "matrix", "config": c, "tokens": t, "matrix": m}
        for m, configs in BY_MATRIX.items()
        for t in TOKENS
        for c in ("torch", *configs)
    ]
    found += [{"job": "matrix", "config": "m64", "tokens": t, "matrix": "qkv", "slack": WHOLE} for t in TOKENS]
    rest = max(cases - 2 * len(checked()), 0)
    for i in range(0, rest, 5):
        c, t, e = checked()[i // 5 * 7 % len(checked())]
        found.append(
            {"job": "check", "config": c, "tokens": t, "epilogue": e, "seeds": list(range(1000 + i, 1000 + i + 5))}
        )
    found.append({"job": "read"})
    return found


def uses(job: Job) -> list[LinearVariant]:
    """The kernels that a job runs."""
    if "mix" in job:
        epilogues = FUSED.values() if job["job"] == "layer" else [{}] * len(LAYER)
        pairs = zip(MIXES.get(job["mix"], ()), epilogues, strict=job["mix"] in MIXES)
        return [variant(c, job["tokens"], **e) for c, e in pairs]
    if job.get("config", "torch") == "torch":
        return []
    return [variant(job["config"], job["tokens"], **job.get("epilogue", {}))]


# --- the process that owns the GPU


class Bench:
    """Runs jobs; weights stay on the GPU between them."""

    def __init__(self, folder: Path | None, tell: Any) -> None:
        import torch

        self.torch, self.folder, self.tell = torch, folder, tell
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    @functools.cache
    def kernel(self, v: LinearVariant) -> Any:
        return kernels.load(kernels.build(v, self.folder))

    def weights(self, v: LinearVariant, w: Any) -> tuple[Any, Any]:
        """(what the kernel reads for w [N, K], what that stands for)."""
        if v.kind == "plain":
            return w, w
        from verify_kernels.cute.linear.pack import pack
        from verify_kernels.quantized import quantize_fp8

        quantised = quantize_fp8(w)
        return pack(quantised), quantised.dequantize(w.dtype)

    def smoke(self, config: str, tokens: int) -> Job:
        """From one tile to a split of the k tiles, so that a kernel that hangs says at what."""
        from verify_kernels.cute.linear.run import linear

        torch = self.torch
        v = variant(config, tokens)
        found: Job = {}
        shapes = [  # N, K, CTAs
            ("one tile", v.rows, v.tile_k, 1),
            ("one turn of the ring", v.rows, v.tile_k * v.stages, 1),
            ("many turns", v.rows, v.tile_k * v.stages * 5, 1),
            ("two row tiles", 2 * v.rows - 3, v.tile_k * v.stages * 3 - 8, 1),
            ("a CTA for each row tile", 52 * v.rows, 4096, 52),
            ("two CTAs for a row tile", v.rows, 4096, 2),
            ("seven CTAs for four row tiles", 4 * v.rows, 4096, 7),
        ]
        for name, n, k, units in shapes:
            self.tell(name)
            torch.manual_seed(0)
            x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
            w, plain = self.weights(v, torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5)
            out = torch.full((tokens, n), float("nan"), device="cuda", dtype=torch.bfloat16)
            total = -(-n // v.rows) * -(-k // v.tile_k)
            linear(self.kernel(v), v, x, w, out, schedule=(units, -(-total // units)))
            want = x.float() @ plain.float().T
            torch.cuda.synchronize()
            wrong = (out.float() - want).abs().nan_to_num(1e9) > 0.1
            found[name] = round(((out.float() - want).norm() / want.norm()).item(), 5)
            if wrong.any():
                at = wrong.nonzero()
                found[name + ", wrong"] = [
                    int(wrong.sum()),
                    wrong.numel(),
                    at[:4].tolist(),
                    at[-2:].tolist(),
                    out.flatten()[:4].tolist(),
                    want.flatten()[:4].tolist(),
                ]
        return {"errors": found, "bad": [name for name in found if name.endswith("wrong")]}

    def op(self, config: str, tokens: int) -> Job:
        """The operation as an engine would call it."""
        from verify_kernels.cute import implementations

        torch = self.torch
        linear = implementations(self.folder, unmeasured=True)["linear"]
        x, w = (torch.randn(n, 4096, device="cuda", dtype=torch.bfloat16) / 8 for n in (tokens - 3, 6144))
        want = x.float() @ w.float().T
        error = ((linear(x, w).float() - want).norm() / want.norm()).item()
        return {"error": error, "bad": [] if error <= TOLERANCE else [f"error {error:.2e}"]}

    def check(self, config: str, tokens: int, epilogue: dict[str, bool], seeds: list[int]) -> Job:
        cases = [self.case(variant(config, tokens, **epilogue), seed) for seed in seeds]
        bad = [c for c in cases if c["why"]]
        return {"cases": len(cases), "worst": max(c["error"] for c in cases), "bad": bad}

    def case(self, v: LinearVariant, seed: int) -> Job:
        """One random product against float32."""
        from verify_kernels.cute.linear.pack import pack
        from verify_kernels.cute.linear.run import linear, rows_after
        from verify_kernels.layouts import interleave
        from verify_kernels.quantized import Fp8Blocks, quantize_fp8

        torch = self.torch
        rng = random.Random(seed)
        torch.manual_seed(seed)
        t = rng.choice([v.tokens, rng.randint(1, v.tokens), rng.randint(v.tokens // 2 + 1, v.tokens)])
        n = rng.choice(
            [
                6144,
                4096,
                rng.randint(1, 40),
                rng.randint(1, 300),
                rng.randint(1, 9000),
                8 * rng.randint(1, 1000),
                64 * rng.randint(1, 300),
            ]
        )
        k = rng.choice(
            [
                4096,
                12288,
                8 * rng.randint(1, 20),
                8 * rng.randint(1, 200),
                8 * rng.randint(1, 1000),
                64 * rng.randint(1, 64),
            ]
        )
        if v.swiglu:
            n = -(-n // 16) * 16
        if v.kind != "plain":
            n = -(-n // 8) * 8
        apart = 8 * rng.choice([0, 0, 1, 5])  # rows of x may lie apart
        x = torch.randn(t, k + apart, device="cuda", dtype=torch.bfloat16)[:, :k]
        w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16) if v.bias else None
        residual = torch.randn(t, n, device="cuda", dtype=torch.bfloat16) if v.residual else None
        squares = torch.rand(rng.randint(1, 70), t, device="cuda") * k / 30 if v.rms_in else None
        norm = torch.randn(n, device="cuda", dtype=torch.bfloat16) if v.rms_out else None
        if v.kind == "fp8":
            quantised = quantize_fp8(w)
            spread = torch.exp2(torch.randint(-3, 4, quantised.scales.shape, device="cuda").float())
            quantised = Fp8Blocks(quantised.values, quantised.scales * spread)
            w, plain = pack(quantised, gate_up=v.swiglu), quantised.dequantize(torch.float32)
            if v.swiglu:
                plain = interleave(*plain.chunk(2))
            want = x.float() @ plain.T
        else:
            want = x.float() @ w.float().T
        if v.rms_in:
            want *= torch.rsqrt(squares.sum(0) / k + EPS)[:, None]
        if v.swiglu:
            gate, up = want.view(t, n // 16, 2, 8).unbind(2)
            want = (torch.nn.functional.silu(gate) * up).reshape(t, n // 2)
        for term in (bias, residual):
            want = want if term is None else want + term.float()
        width = want.shape[1]
        outs = []
        self.tell(f"{v.name} seed {seed} T {t} N {n} K {k}")
        for slack in (SLACK, 0.0, SLACK):
            around = torch.full((t + 2, width + 3), float("nan"), device="cuda", dtype=torch.bfloat16)
            out = around[1:-1, 1 : width + 1]
            after = rows_after(v, out) if v.rms_out else None
            for part in after or ():
                part.fill_(float("nan"))
            linear(
                self.kernel(v), v, x, w, out, bias, residual, squares, EPS, norm, after, self.schedule(v, n, k, slack)
            )
            outs.append(out.clone())
            if after is not None:
                values = out.float() * norm.float()
                total = out.float().square().sum(1)
                if not torch.equal(after.values, values.to(out.dtype)):
                    return {"seed": seed, "shape": [t, n, k], "error": float("inf"), "why": "rows of the norm after"}
                if not torch.allclose(after.squares.sum(0), total, rtol=1e-4):
                    return {"seed": seed, "shape": [t, n, k], "error": float("inf"), "why": "squares of the norm after"}
            out.fill_(float("nan"))
            if not around.isnan().all():
                return {"seed": seed, "shape": [t, n, k], "error": float("inf"), "why": "wrote outside the output"}
        error = max(((o.float() - want).norm() / want.norm()).item() for o in outs)
        why = ""
        if not error <= TOLERANCE:
            why = f"error {error:.2e}" if error == error else "not written"
        elif not torch.equal(outs[0].view(torch.int16), outs[2].view(torch.int16)):
            why = "two runs differ"
        return {"seed": seed, "shape": [t, n, k], "error": error if error == error else float("inf"), "why": why}

    @functools.cache
    def layers(self, kind: str) -> list[dict[str, tuple[Any, Any]]]:
        """A layer's matrices, each as kernels of this kind read it and as torch does."""
        torch = self.torch
        torch.manual_seed(0)

        def matrix(shape: tuple[int, int]) -> tuple[Any, Any]:
            w = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[1] ** -0.5
            return self.weights(variant("m64" if kind == "plain" else f"{kind} m64", 8), w)

        return [{name: matrix(shape) for name, shape in LAYER.items()} for _ in range(LAYERS)]

    @functools.cache
    def copies(self, matrix: str, kind: str) -> list[Any]:
        """A matrix as kernels of this kind read it, as often as it takes to be far past L2."""
        if matrix == "head":
            torch = self.torch
            w = torch.randn(HEAD, device="cuda", dtype=torch.bfloat16).mul_(HEAD[1] ** -0.5)
            found = [self.weights(variant("m64" if kind == "plain" else f"{kind} m64", 8), w)[0]]
        else:
            found = [layer[matrix][0] for layer in self.layers(kind)]
        while len(found) < 2 or sum(w.nbytes for w in found) < PAST_L2:
            found.append(found[-1].clone())
        return found

    @functools.cache
    def schedule(self, v: LinearVariant, rows: int, k: int, slack: float) -> tuple[int, int]:
        multiprocessors = self.torch.cuda.get_device_properties(0).multi_processor_count
        return plan(rows, k, v.rows, v.tile_k, multiprocessors, slack)

    def product(self, config: str, tokens: int, slack: float = SLACK) -> Any:
        """call(x, w, out)."""
        torch = self.torch
        if config == "torch":
            return lambda x, w, out: torch.mm(x, w.T, out=out)
        from verify_kernels.cute.linear.run import linear

        v = variant(config, tokens)
        kernel = self.kernel(v)

        def call(x: Any, w: Any, out: Any) -> Any:
            return linear(kernel, v, x, w, out, schedule=self.schedule(v, out.shape[1], x.shape[1], slack))

        return call

    def chain(self, mix: str, tokens: int) -> Job:
        """All matrices of the layers, each reading what the one before wrote."""
        torch = self.torch
        configs = MIXES.get(mix, ("torch",) * len(LAYER))
        products = {m: self.product(c, tokens) for m, c in zip(LAYER, configs, strict=True)}
        layers = self.layers(kind_of(configs[0]))
        torch.manual_seed(1)
        start = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
        outs = [
            {m: torch.full((tokens, s[0]), float("nan"), device="cuda", dtype=torch.bfloat16) for m, s in LAYER.items()}
            for _ in range(LAYERS)
        ]

        def call() -> None:
            x = start
            for weights, out in zip(layers, outs, strict=True):
                for name, (_, k) in LAYER.items():
                    products[name](x[:, :k], weights[name][0], out[name])
                    x = out[name]

        us = graph_us(call) / LAYERS
        want = start
        for weights in layers:
            for name, (_, k) in LAYER.items():
                want = torch.nn.functional.linear(want[:, :k], weights[name][1])
        got = outs[-1]["down"].float()
        off = ((got - want.float()).norm() / want.float().norm()).item()
        size = sum(w.nbytes for w, _ in layers[0].values())
        bits = int(outs[-1]["down"].view(torch.int16).long().mul_(torch.arange(1, 4097, device="cuda")).sum())
        return {"us": us, "tbps": size / us / 1e6, "off": off, "bits": bits}

    def layer(self, mix: str, tokens: int) -> Job:
        """The layers without attention: norms, residual adds and activation inside the products, or as torch has
        them."""
        torch = self.torch
        torch.manual_seed(1)
        stream = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
        weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
        ends: list[Any] = []
        layers = self.layers(kind_of(MIXES[mix][0]) if mix in MIXES else "plain")
        size = sum(w.nbytes for w, _ in layers[0].values())

        def norm(x: Any) -> Any:
            return torch.nn.functional.rms_norm(x, (4096,), weight, EPS)

        def plain() -> None:
            h = stream
            for layer in layers:
                w = {name: plain for name, (_, plain) in layer.items()}
                h = torch.addmm(h, (norm(h) @ w["qkv"].T)[:, :4096], w["o"].T)
                # Gate and up lie interleaved in the fused product; here the halves stand for them.
                gate, up = (norm(h) @ w["gate_up"].T).unflatten(1, (-1, 2, 8)).unbind(2)
                h = torch.addmm(h, (torch.nn.functional.silu(gate) * up).flatten(1), w["down"].T)
            ends[:] = [h]

        if mix == "torch":
            us = graph_us(plain) / LAYERS
            return {"us": us, "tbps": size / us / 1e6}
        from verify_kernels.cute.linear.run import Rows, linear, rows_after

        chosen = {m: variant(c, tokens, **e) for c, (m, e) in zip(MIXES[mix], FUSED.items(), strict=True)}
        loaded = {m: self.kernel(v) for m, v in chosen.items()}
        start = Rows(stream * weight, stream.float().square().sum(1)[None])
        room = [
            {
                m: torch.empty(tokens, s[0] // (2 if m == "gate_up" else 1), device="cuda", dtype=torch.bfloat16)
                for m, s in LAYER.items()
            }
            for _ in range(LAYERS)
        ]
        after = [{m: rows_after(chosen[m], out[m]) for m in ("o", "down")} for out in room]

        def fused() -> None:
            h, rows = stream, start
            for layer, out, then in zip(layers, room, after, strict=True):
                for m, shape in LAYER.items():
                    v, w, schedule = chosen[m], layer[m][0], self.schedule(chosen[m], *shape, SLACK)
                    if v.rms_in:
                        linear(loaded[m], v, rows.values, w, out[m], None, None, rows.squares, EPS, schedule=schedule)
                    else:
                        x = out["qkv"][:, :4096] if m == "o" else out["gate_up"]
                        linear(loaded[m], v, x, w, out[m], None, h, None, 0.0, weight, then[m], schedule)
                        h, rows = out[m], then[m]
            ends[:] = [h]

        us = graph_us(fused) / LAYERS
        got = ends[0].float()
        plain()
        off = ((got - ends[0].float()).norm() / ends[0].float().norm()).item()
        return {"us": us, "off": off, "tbps": size / us / 1e6}

    def matrix(self, config: str, tokens: int, matrix: str, slack: float = SLACK) -> Job:
        """One matrix alone, distinct copies back to back."""
        torch = self.torch
        weights = self.copies(matrix, kind_of(config))
        rows, k = HEAD if matrix == "head" else LAYER[matrix]
        product = self.product(config, tokens, slack)
        x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(tokens, rows, device="cuda", dtype=torch.bfloat16)
        repeats = 1 if matrix == "head" else 4

        def call() -> None:
            for _ in range(repeats):
                for w in weights:
                    product(x, w, out)

        us = graph_us(call) / repeats / len(weights)
        return {"us": us, "tbps": weights[0].nbytes / us / 1e6}

    def read(self) -> Job:
        from eval.bench_attention import read_rate

        return {"tbps": read_rate()}


def run(folder: Path | None, file: Path | None, cases: int, seconds: float) -> list[Job]:
    """Every job that fits into the time, each {job..., result...}; the file is written after each."""

    def save(device: str, results: list[Job]) -> None:
        if file:
            file.write_text(json.dumps({"schema_version": 1, "device": device, "results": results}, indent=0) + "\n")

    command = [sys.executable, "-m", "eval.bench_linear", "work", *(["--kernels", str(folder)] if folder else [])]
    return gpu_jobs.run(
        jobs(cases),
        command,
        lambda job: {v.name for v in uses(job)},
        lambda job: READ_SECONDS if job["job"] == "read" else JOB_SECONDS,
        seconds,
        save,
    )


def summary(results: list[Job]) -> str:
    """Checks in a line; TB/s by config and tokens, and in brackets how much faster than torch's bf16 product it is."""
    checks = [r for r in results if r["job"] == "check"]
    done = sum(r.get("cases", 0) for r in checks)
    bad = sum(len(r.get("bad", [])) for r in checks)
    failed = sum("failed" in r for r in results)
    skipped = sum("skipped" in r for r in results)
    worst = max((r["worst"] for r in checks if "worst" in r), default=0.0)
    lines = [
        f"{done} random cases, {bad} bad, largest relative error {worst:.2e}; jobs failed {failed}, skipped {skipped}"
    ]
    lines += [
        f"smoke {r['config']} T={r['tokens']}: worst {max(v for v in r['errors'].values() if isinstance(v, float))}"
        for r in results
        if r["job"] == "smoke" and "errors" in r
    ]
    for t in TOKENS:
        same = {
            r["bits"]
            for r in results
            if r["job"] == "chain" and "bits" in r and r["tokens"] == t and r["mix"].startswith("whole")
        }
        if len(same) > 1:
            lines.append(f"T={t}: chains of the same sums differ bit by bit")
    lines += [
        f"read rate without dependent launch {r['tbps']:.2f} TB/s"
        for r in results
        if r["job"] == "read" and "tbps" in r
    ]
    tables: dict[str, dict[tuple[str, int], Job]] = {}
    for r in results:
        if r["job"] in ("chain", "layer", "matrix"):
            name = r.get("mix") or r["config"] + (" whole" if "slack" in r else "")
            tables.setdefault(f"{r['job']} {r.get('matrix', '')}".rstrip(), {})[name, r["tokens"]] = r
    for title, rows in tables.items():
        lines.append(f"{title}, TB/s for T = " + " ".join(map(str, TOKENS)))
        for name in dict.fromkeys(name for name, _ in rows):
            cells = []
            for t in TOKENS:
                r, peer = rows.get((name, t), {}), rows.get(("torch", t), {})
                cell = f"{r['tbps']:.2f}" if "tbps" in r else "-"
                if "us" in r and "us" in peer and name != "torch":
                    cell += f"({peer['us'] / r['us']:.2f})"
                if r.get("off", 0.0) > 0.03:
                    cell += f" OFF {r['off']:.1e}"
                cells.append(cell)
            lines.append(f"  {name:18}" + " ".join(f"{c:>11}" for c in cells))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["build", "run", "work"])
    parser.add_argument("--kernels", type=Path, help="folder of compiled kernels")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--cases", type=int, default=240, help="random cases")
    parser.add_argument("--seconds", type=float, default=45.0, help="what does not fit is left out")
    args = parser.parse_args()
    if args.command == "work":
        return gpu_jobs.serve(lambda tell: Bench(args.kernels, tell))
    if args.command == "build":
        for v in variants():
            path = kernels.build(v, args.kernels)
            for stale in path.parent.glob(f"{v.name}-*.so"):
                if stale != path:
                    stale.unlink()
            print(path, flush=True)
        return None
    results = run(args.kernels, args.json, args.cases, args.seconds)
    print(summary(results))
    if any(r.get("bad") or "failed" in r for r in results):
        raise SystemExit("some jobs failed")
    return None


if __name__ == "__main__":
    main()
