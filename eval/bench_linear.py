"""Correctness and speed of the CuTe DSL small-T linear on a GPU.

    python -m eval.bench_linear build --kernels DIR            # any machine with the DSL, no GPU
    python -m eval.bench_linear run --kernels DIR --json FILE  # the GPU machine; needs torch and tvm-ffi

`run` compares random cases (poisoned outputs, rows of W past the last tile, every call twice) with a float32 product,
then times what a decode step runs: one CUDA graph of the matrices of three Qwen3-8B layers, each reading the output of
the one before, and the LM head, beside torch's own product in the same job. TB/s are bytes of weights over time.

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
from verify_kernels.cute.linear.schedule import SLACK, plan

TOLERANCE = 5e-3
"""Relative error allowed against float32 of the same bf16 inputs: rounding the output once gives 1.7e-3."""

LAYER = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
HEAD = (151936, 4096)
LAYERS = 3  # 1.16 GB of weights, far past L2
TOKENS = (1, 8, 16, 32, 64)
JOB_SECONDS = 6.0
READ_SECONDS = 20.0  # with the compilation of its kernel

# rows, tile_k, stages for 8, 16, 32, 64 tokens, further constants. The first is what `run.choose` gives.
CONFIGS: dict[str, tuple[int, int, tuple[int, int, int, int], dict[str, bool]]] = {
    "m128": (128, 64, (12, 12, 11, 9), {}),
    "m128 half": (128, 64, (6, 6, 5, 4), {}),
    "m128 half early": (128, 64, (6, 6, 5, 4), {"early": True}),
    "m64": (64, 128, (12, 11, 9, 7), {}),
    "m64 half": (64, 128, (6, 5, 4, 3), {}),
    "m64 half early": (64, 128, (6, 5, 4, 3), {"early": True}),
    "m128 k128": (128, 128, (6, 6, 5, 4), {}),
    "m256": (256, 64, (6, 6, 6, 5), {}),
    "m128 no pdl": (128, 64, (12, 12, 11, 9), {"pdl": False}),
    "m64 no pdl": (64, 128, (12, 11, 9, 7), {"pdl": False}),
}
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

FUSED_CONFIGS = ("m128", "m128 half", "m64 half")
EPS = 1e-6


def variant(config: str, tokens: int, **epilogue: bool) -> LinearVariant:
    rows, tile_k, stages, flags = CONFIGS[config]
    at = 0 if tokens <= 8 else (tokens - 1).bit_length() - 3
    return LinearVariant("bfloat16", 8 << at, rows, tile_k, stages[at], **flags, **epilogue)


def variants() -> list[LinearVariant]:
    found = [variant(config, t) for config in CONFIGS for t in TOKENS]
    found += [variant("m128", t, **epilogue) for epilogue in EPILOGUES for t in TOKENS]
    found += [variant(config, t, **epilogue) for config in FUSED_CONFIGS for epilogue in EPILOGUES[-3:] for t in TOKENS]
    return list(dict.fromkeys(found))


def jobs(cases: int) -> list[Job]:
    """What a run does, in order: a first look at every kernel, the times, then all random cases."""
    first = [(c, t, {}) for t in TOKENS[1:] for c in CONFIGS] + [("m128", t, e) for t in TOKENS[1:] for e in EPILOGUES]
    found: list[Job] = [{"job": "chain", "config": "torch", "tokens": t} for t in TOKENS]
    found += [
        {"job": "smoke", "config": c, "tokens": t}
        for c, t in (("m128 no pdl", 8), ("m128", 8), ("m64", 8), ("m256", 64))
    ]
    found.append({"job": "op", "config": "m128", "tokens": 8})
    found += [
        {"job": "check", "config": c, "tokens": t, "epilogue": e, "seeds": [s, s + 1]}
        for s, (c, t, e) in enumerate(first)
    ]
    found += [{"job": "chain", "config": c, "tokens": t} for t in TOKENS for c in CONFIGS]
    found += [{"job": "layer", "config": c, "tokens": t} for t in TOKENS for c in ("torch", *FUSED_CONFIGS)]
    found += [
        {"job": "matrix", "config": c, "tokens": t, "matrix": m}
        for m in (*LAYER, "head")
        for t in TOKENS
        for c in ("torch", *CONFIGS)
    ]
    found += [{"job": "chain", "config": c, "tokens": t, "slack": 0.0} for t in TOKENS for c in ("m128", "m64")]
    rest = max(cases - 2 * len(first), 0)
    for i in range(0, rest, 5):
        c, t, e = first[i // 5 * 7 % len(first)]
        found.append(
            {"job": "check", "config": c, "tokens": t, "epilogue": e, "seeds": list(range(1000 + i, 1000 + i + 5))}
        )
    found.append({"job": "read"})
    return found


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

    def smoke(self, config: str, tokens: int) -> Job:
        """From one tile to a split of the k tiles, so that a kernel that hangs says at what."""
        from verify_kernels.cute.linear.run import linear

        torch = self.torch
        v = variant(config, tokens)
        found = {}
        for name, n, k, units in (
            ("one tile", v.rows, v.tile_k, 1),
            ("one turn of the ring", v.rows, v.tile_k * v.stages, 1),
            ("many turns", v.rows, v.tile_k * v.stages * 5, 1),
            ("two row tiles", 2 * v.rows - 3, v.tile_k * v.stages * 3 - 8, 1),
            ("a CTA for each row tile", 50 * v.rows, 4096, 50),
            ("two CTAs for a row tile", v.rows, 4096, 2),
            ("seven CTAs for four row tiles", 4 * v.rows, 4096, 7),
        ):
            self.tell(name)
            torch.manual_seed(0)
            x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
            w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
            out = torch.full((tokens, n), float("nan"), device="cuda", dtype=torch.bfloat16)
            total = -(-n // v.rows) * -(-k // v.tile_k)
            linear(self.kernel(v), v, x, w, out, schedule=(units, -(-total // units)))
            want = x.float() @ w.float().T
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
        from verify_kernels.cute.linear.run import linear, rows_after

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
        apart = 8 * rng.choice([0, 0, 1, 5])  # rows of x may lie apart
        x = torch.randn(t, k + apart, device="cuda", dtype=torch.bfloat16)[:, :k]
        w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16) if v.bias else None
        residual = torch.randn(t, n, device="cuda", dtype=torch.bfloat16) if v.residual else None
        squares = torch.rand(rng.randint(1, 70), t, device="cuda") * k / 30 if v.rms_in else None
        norm = torch.randn(n, device="cuda", dtype=torch.bfloat16) if v.rms_out else None
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

    @functools.cached_property
    def layers(self) -> list[dict[str, Any]]:
        torch = self.torch
        torch.manual_seed(0)
        return [
            {
                name: torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[1] ** -0.5
                for name, shape in LAYER.items()
            }
            for _ in range(LAYERS)
        ]

    @functools.cached_property
    def heads(self) -> list[Any]:
        torch = self.torch
        return [torch.randn(HEAD, device="cuda", dtype=torch.bfloat16).mul_(HEAD[1] ** -0.5) for _ in range(2)]

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
        return lambda x, w, out: linear(kernel, v, x, w, out, schedule=self.schedule(v, *w.shape, slack))

    def chain(self, config: str, tokens: int, slack: float = SLACK) -> Job:
        """All matrices of the layers, each reading what the one before wrote."""
        torch = self.torch
        product = self.product(config, tokens, slack)
        torch.manual_seed(1)
        start = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
        outs = [
            {m: torch.full((tokens, s[0]), float("nan"), device="cuda", dtype=torch.bfloat16) for m, s in LAYER.items()}
            for _ in range(LAYERS)
        ]

        def call() -> None:
            x = start
            for weights, out in zip(self.layers, outs, strict=True):
                for name, (rows, k) in LAYER.items():
                    product(x[:, :k], weights[name], out[name])
                    x = out[name]

        us = graph_us(call) / LAYERS
        want = start
        for weights in self.layers:
            for name, (rows, k) in LAYER.items():
                want = torch.nn.functional.linear(want[:, :k], weights[name])
        got = outs[-1]["down"].float()
        off = ((got - want.float()).norm() / want.float().norm()).item()
        size = sum(2 * rows * k for rows, k in LAYER.values())
        bits = int(outs[-1]["down"].view(torch.int16).long().mul_(torch.arange(1, 4097, device="cuda")).sum())
        return {"us": us, "tbps": size / us / 1e6, "off": off, "bits": bits}

    def layer(self, config: str, tokens: int) -> Job:
        """The layers without attention: norms, residual adds and activation inside the products, or as torch has them."""
        torch = self.torch
        torch.manual_seed(1)
        stream = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
        weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
        ends: list[Any] = []

        def norm(x: Any) -> Any:
            return torch.nn.functional.rms_norm(x, (4096,), weight, EPS)

        def plain() -> None:
            h = stream
            for w in self.layers:
                h = torch.addmm(h, (norm(h) @ w["qkv"].T)[:, :4096], w["o"].T)
                # Gate and up lie interleaved in the fused product; here the halves stand for them.
                gate, up = (norm(h) @ w["gate_up"].T).unflatten(1, (-1, 2, 8)).unbind(2)
                h = torch.addmm(h, (torch.nn.functional.silu(gate) * up).flatten(1), w["down"].T)
            ends[:] = [h]

        if config == "torch":
            us = graph_us(plain) / LAYERS
            return {"us": us, "tbps": sum(2 * rows * k for rows, k in LAYER.values()) / us / 1e6}
        from verify_kernels.cute.linear.run import Rows, linear, rows_after

        chosen = {m: variant(config, tokens, **epilogue) for m, epilogue in FUSED.items()}
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
            for w, out, then in zip(self.layers, room, after, strict=True):
                for m in LAYER:
                    v, schedule = chosen[m], self.schedule(chosen[m], *w[m].shape, SLACK)
                    if v.rms_in:
                        linear(loaded[m], v, rows.values, w[m], out[m], None, None, rows.squares, EPS, schedule=schedule)
                    else:
                        x = out["qkv"][:, :4096] if m == "o" else out["gate_up"]
                        linear(loaded[m], v, x, w[m], out[m], None, h, None, 0.0, weight, then[m], schedule)
                        h, rows = out[m], then[m]
            ends[:] = [h]

        us = graph_us(fused) / LAYERS
        got = ends[0].float()
        plain()
        off = ((got - ends[0].float()).norm() / ends[0].float().norm()).item()
        return {"us": us, "off": off, "tbps": sum(2 * rows * k for rows, k in LAYER.values()) / us / 1e6}

    def matrix(self, config: str, tokens: int, matrix: str) -> Job:
        """One matrix alone, distinct copies back to back."""
        torch = self.torch
        weights = self.heads if matrix == "head" else [layer[matrix] for layer in self.layers]
        rows, k = weights[0].shape
        product = self.product(config, tokens)
        x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(tokens, rows, device="cuda", dtype=torch.bfloat16)
        repeats = 1 if matrix == "head" else 4

        def call() -> None:
            for _ in range(repeats):
                for w in weights:
                    product(x, w, out)

        us = graph_us(call) / repeats / len(weights)
        return {"us": us, "tbps": 2 * rows * k / us / 1e6}

    def read(self) -> Job:
        from eval.bench_attention import read_rate

        return {"tbps": read_rate()}


def run(folder: Path | None, file: Path | None, cases: int, seconds: float) -> list[Job]:
    """Every job that fits into the time, each {job..., result...}; the file is written after each."""

    def save(device: str, results: list[Job]) -> None:
        if file:
            file.write_text(json.dumps({"schema_version": 1, "device": device, "results": results}, indent=0) + "\n")

    def uses(job: Job) -> str | None:
        if job.get("config") in (None, "torch"):
            return None
        return variant(job["config"], job["tokens"], **job.get("epilogue", {})).name

    command = [sys.executable, "-m", "eval.bench_linear", "work", *(["--kernels", str(folder)] if folder else [])]
    return gpu_jobs.run(
        jobs(cases), command, uses, lambda job: READ_SECONDS if job["job"] == "read" else JOB_SECONDS, seconds, save
    )


def summary(results: list[Job]) -> str:
    """Checks in a line; TB/s by config and tokens, and in brackets the ratio to torch's product."""
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
            if r["job"] == "chain"
            and "bits" in r
            and r["tokens"] == t
            and r["config"].startswith("m128")
            and "slack" not in r
        }
        if len(same) > 1:
            lines.append(f"T={t}: chains of the same sums differ bit by bit with ring and launch")
    lines += [
        f"read rate without dependent launch {r['tbps']:.2f} TB/s"
        for r in results
        if r["job"] == "read" and "tbps" in r
    ]
    kinds = dict.fromkeys(
        (r["job"], r.get("matrix", ""), r.get("slack", ""))
        for r in results
        if r["job"] in ("chain", "layer", "matrix")
    )
    for job, matrix, slack in kinds:
        rows = {
            (r["config"], r["tokens"]): r
            for r in results
            if (r["job"], r.get("matrix", ""), r.get("slack", "")) == (job, matrix, slack)
        }
        lines.append(
            f"{job} {matrix} {'even' if slack == 0 else ''}".rstrip() + ", TB/s for T = " + " ".join(map(str, TOKENS))
        )
        for config in dict.fromkeys(c for c, _ in rows):
            cells = []
            for t in TOKENS:
                r, peer = (
                    rows.get((config, t), {}),
                    next(
                        (
                            p
                            for p in results
                            if (p["job"], p.get("matrix", ""), p.get("config"), p.get("tokens"))
                            == (job, matrix, "torch", t)
                        ),
                        {},
                    ),
                )
                cell = f"{r['tbps']:.2f}" if "tbps" in r else "-"
                if "tbps" in r and "tbps" in peer and config != "torch":
                    cell += f"({r['tbps'] / peer['tbps']:.2f})"
                if r.get("off", 0.0) > 0.03:
                    cell += f" OFF {r['off']:.1e}"
                cells.append(cell)
            lines.append(f"  {config:16}" + " ".join(f"{c:>11}" for c in cells))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["build", "run", "work"])
    parser.add_argument("--kernels", type=Path, help="folder of compiled kernels")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--cases", type=int, default=240, help="random cases")
    parser.add_argument("--seconds", type=float, default=75.0, help="what does not fit is left out")
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
