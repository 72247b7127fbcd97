"""Correctness and speed of the CuTe DSL kernels of Kimi delta attention (KDA) on a GPU.

    python -m eval.bench_recurrence build --kernels DIR            # any machine with the DSL, no GPU
    python -m eval.bench_recurrence run --kernels DIR --json FILE  # the GPU machine; needs torch and tvm-ffi

`run` compares random cases (chains and trees, poisoned outputs and records, NaN in every state nobody may read, tokens
past the last request, every call twice) of verify, commit and gated norm with the reference in float64, then times one
layer of a TP16 rank of Kimi-K3 (6 heads): CUDA graphs of calls over states larger than L2, beside floor, prediction,
other numbers of columns, the torch reference, and the recurrences of flash-linear-attention and vLLM where they import
(Triton, chains, without the convolution; vLLM's writes a state a token). The commit is timed over all 69 layers.

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
from verify_kernels.cute.variants import AnyVariant, KdaVerifyVariant

TOLERANCE = 4e-3
"""Relative error allowed of outputs and records: rounding outputs to bf16 gives 1.7e-3, and a query, key or value between
two numbers may be rounded otherwise."""
STATE_TOLERANCE = 2e-6
"""Relative error allowed of a committed state against the same records in float64."""

READ_TBPS, FLOAT_TFLOPS = 4.5, 60.0  # an H200: reading alone, float32 without tensor cores
MULTIPROCESSORS, MHZ = 132, 1755
HEADS, DIM, LAYERS, BOUND = 6, 128, 69, -5.0
STATE_BYTES = HEADS * DIM * DIM * 4  # of a request in a layer
REQUESTS, NODES = (1, 8, 32), (1, 8, 16, 32)
KEPT = 6  # nodes of the path that is committed
COLUMNS = ((1, 8, 16), (1, 8, 32), (8, 8, 16), (8, 8, 64), (32, 8, 32), (1, 32, 32))  # requests, nodes, columns
CASES = [(n, tree, c) for n in (8, 16, 32) for tree in (True, False) for c in (8, 16, 32, 64)]
PEERS = ("fla", "vllm")
SECONDS = {"time": 15.0, "commit_time": 15.0, "reference": 25.0, "peer": 40.0, "check": 12.0, "norm": 12.0}
ROTATED = 320e6  # bytes of states that calls in a graph go through


def variant_of(requests: int, nodes: int, tree: bool = True, columns: int | None = None) -> KdaVerifyVariant:
    import torch

    from verify_kernels.cute.recurrence.run import choose

    variant = choose(torch.bfloat16, requests, HEADS, nodes, tree)
    return variant if columns is None else dataclasses.replace(variant, columns=columns)


def variants_of(job: Job) -> tuple[AnyVariant, ...]:
    """What a job runs; nothing of ours for a peer."""
    import torch

    from verify_kernels.cute.recurrence.run import choose_commit, choose_norm

    kind = job["job"]
    if kind in ("peer", "reference"):
        return ()
    if kind == "norm":
        return (choose_norm(torch.bfloat16, DIM),)
    if kind == "commit_time":
        return (choose_commit(torch.bfloat16, KEPT),)
    if kind == "check":
        nodes, tree, columns = CASES[job["case"]]
        return KdaVerifyVariant("bfloat16", nodes, columns, tree), choose_commit(torch.bfloat16, nodes)
    return (variant_of(job["requests"], job["nodes"], columns=job.get("columns")),)


def all_variants() -> list[AnyVariant]:
    return list(dict.fromkeys(v for job in jobs(0) for v in variants_of(job)))


def jobs(cases: int) -> list[Job]:
    """What a run does, in order: some random cases of every kernel, the times, then the other cases."""
    found: list[Job] = [{"job": "check", "case": i, "seeds": [2 * i, 2 * i + 1]} for i in range(len(CASES))]
    found.append({"job": "norm"})
    shapes = [(r, n) for r in REQUESTS for n in NODES]
    found += [{"job": "time", "requests": r, "nodes": n} for r, n in shapes]
    found += [{"job": "commit_time", "requests": r} for r in REQUESTS]
    found += [{"job": "time", "requests": r, "nodes": n, "columns": c} for r, n, c in COLUMNS]
    found += [{"job": "reference", "requests": r, "nodes": n} for r, n in shapes]
    found += [{"job": "peer", "name": p, "requests": r, "nodes": n} for p in PEERS for r, n in shapes]
    for i in range(max(cases - 2 * len(CASES), 0) // 4):
        found.append({"job": "check", "case": i * 7 % len(CASES), "seeds": list(range(1000 + 4 * i, 1004 + 4 * i))})
    return found


def floor_us(requests: int, nodes: int) -> tuple[float, int, int]:
    """(microseconds, bytes, flops): states read once; keys and queries of every node with every element of them."""
    moved = requests * STATE_BYTES
    flops = moved // 4 * nodes * 4
    return max(moved / READ_TBPS, flops / FLOAT_TFLOPS) / 1e6, moved, flops


def predicted_us(requests: int, nodes: int, columns: int | None = None) -> float:
    """As stated before any measurement: 2.2 us of launch, ways from L2 and barriers, and of instructions, counted in what
    was compiled: 600 + 5 nodes a warp for a node's keys and queries, 350 for 4 rows (1350 for 16) with 8 nodes, 300 for
    each 8 nodes' system and outputs. A scheduler issues 0.45 a cycle with one warp, 0.65 with two, 0.8 with more."""
    columns = columns or variant_of(requests, nodes).columns
    padded = max(8, 1 << (nodes - 1).bit_length())
    chunks = math.ceil(nodes / 8)
    warps = 4 if columns == 64 else min(padded, 16)
    state = 4 * chunks * 1350 if columns == 64 else columns // 4 * chunks * 350
    keys = sum(chunks - j // 2 for j in range(math.ceil(nodes / 4))) * 350
    work = nodes * (600 + 5 * nodes) + state + keys + chunks * 300
    each = math.ceil(requests * HEADS * DIM // columns / MULTIPROCESSORS)
    resident = min(each, 16 // warps if columns < 64 else 3 if padded == 8 else 2)
    rate = {1: 0.45, 2: 0.65}.get(resident * warps // 4, 0.8)
    compute = each * work / 4 / rate / MHZ
    return 2.2 + max(compute, 0.8, requests * STATE_BYTES / 4.0e6)


def commit_us(requests: int) -> tuple[float, float]:
    """(floor, prediction) of the commit of all layers: states read and written, at 4.5 TB/s; at 4.0, and 3 us."""
    moved = 2 * requests * LAYERS * STATE_BYTES
    return moved / READ_TBPS / 1e6, 3 + moved / 4.0e6


class Bench:
    """Runs jobs."""

    def __init__(self, folder: Path | None, tell: Callable[[str], None]) -> None:
        import torch

        self.torch, self.folder, self.tell = torch, folder, tell
        torch.backends.cuda.matmul.allow_tf32 = False

    def kernel(self, variant: AnyVariant) -> Any:
        return kernels.load(kernels.build(variant, self.folder))

    # --- layers and passes

    def weights(self, heads: int, copies: int = 1) -> list[tuple[Any, Any, Any]]:
        """(conv, a_log, dt_bias) of layers."""
        torch = self.torch
        conv = torch.randn(copies, 3 * heads * DIM, 4, device="cuda") * 0.5
        a_log = torch.randn(copies, heads, device="cuda") * 0.5
        bias = torch.randn(copies, heads, DIM, device="cuda") - 2
        return list(zip(conv, a_log, bias))

    def tokens(self, count: int, heads: int) -> tuple[Any, Any, Any]:
        """(x, raw_gate, raw_beta), slices of products as in the model."""
        torch = self.torch
        wide = 3 * heads * DIM
        product = torch.randn(count, wide + DIM + heads, device="cuda", dtype=torch.bfloat16)
        gate = torch.randn(count, heads * DIM, device="cuda", dtype=torch.bfloat16)
        return product[:, :wide], gate, product[:, wide + DIM :]

    def batch(self, counts: list[int], contexts: list[int], rows: list[int], tree: bool, rng: random.Random) -> Any:
        from verify_kernels.batch import PassBatch

        torch = self.torch
        masks = []
        for n in counts:
            lines = []
            for t in range(n):
                parent = rng.randrange(max(0, t - 3), t) if t else -1
                lines.append((lines[parent] if t else 0) | 1 << t)
            masks += lines
        total = sum(counts)
        one = torch.zeros(total, dtype=torch.int64, device="cuda")
        return PassBatch(
            token_ids=one,
            positions=one,
            request_offsets=torch.tensor([0, *counts], device="cuda").cumsum(0).to(torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32, device="cuda"),
            page_table=torch.zeros(len(counts), 1, dtype=torch.int32, device="cuda"),
            slot_mapping=one,
            ancestor_masks=torch.tensor(masks, device="cuda") if tree else None,
            max_query_len=max(counts),
            max_kv_len=max(counts) + max(contexts),
            state_rows=torch.tensor(rows, device="cuda"),
            speculative=True,
        )

    # --- checks

    def check(self, case: int, seeds: list[int]) -> Job:
        found: Job = {"cases": len(seeds), "bad": [], "worst": 0.0, "worst_state": 0.0}
        for seed in seeds:
            self.tell(f"seed {seed}")
            error, state, why = self.one_check(case, seed)
            if not (error <= TOLERANCE and state <= STATE_TOLERANCE):
                found["bad"].append({"seed": seed, "error": str(error), "state": str(state), "why": why})
            else:
                found["worst"] = max(found["worst"], error)
                found["worst_state"] = max(found["worst_state"], state)
        return found

    def one_check(self, case: int, seed: int) -> tuple[float, float, str]:
        """(error of outputs and records, of committed states, at what)."""
        from verify_kernels.batch import Records
        from verify_kernels.cute.recurrence.run import RecurrencePlan, choose_commit, commit, verify
        from verify_kernels.reference import recurrence

        torch, (nodes, tree, columns) = self.torch, CASES[case]
        rng = random.Random(seed)
        torch.manual_seed(seed)
        heads, requests = rng.choice([1, 2, HEADS, HEADS]), rng.choice([1, 1, 2, 5, 9])
        counts = [rng.choice([1, nodes, rng.randint(1, nodes)]) for _ in range(requests)]
        contexts = [rng.choice([0, 1, 5000]) for _ in range(requests)]
        rows = rng.sample(range(requests + 2), requests)
        batch = self.batch(counts, contexts, rows, tree, rng)
        layer = self.weights(heads)[0]
        if rng.random() < 0.2:
            layer[2].fill_(rng.choice([50.0, -50.0]))  # the strongest decay, or none
        tokens = self.tokens(sum(counts), heads)
        state = torch.randn(2, requests + 2, heads, DIM, DIM, device="cuda")
        window = torch.randn(2, requests + 2, 3, 3 * heads * DIM, device="cuda", dtype=torch.bfloat16)
        for row in {*range(requests + 2)} - {row for row, context in zip(rows, contexts) if context}:
            state[:, row], window[:, row] = float("nan"), float("nan")
        wide = tuple(t.double() for t in layer)
        plain = recurrence.plan_recurrence(batch, 4)
        want, kept = recurrence.kda_verify(*tokens, *wide, BOUND, state[0].double(), window[0], plain)
        kernel, before = self.kernel(KdaVerifyVariant("bfloat16", nodes, columns, tree)), state.clone()
        results, plan = [], None
        for _ in range(2):
            plan = RecurrencePlan(batch)
            plan.records(state[0], tokens[0].shape[1], torch.bfloat16)
            for t in (plan.stack.inputs, plan.stack.keys, plan.stack.log_decay, plan.stack.updates):
                t.fill_(float("nan"))
            plan.used = 0
            both = [verify(kernel, plan, *tokens, *layer, BOUND, state[i], window[i]) for i in range(2)]
            results.append(both)
        (y, records), second = results[0][0], results[1][0]
        if not all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in ((y, second[0]),)):
            return float("nan"), 0.0, "two runs differ"
        if not torch.equal(state.view(torch.int32), before.view(torch.int32)):
            return float("nan"), 0.0, "the state was written"

        def off(found: Any, right: Any) -> float:
            return ((found.double() - right.double()).norm() / right.double().norm().clamp(min=1e-30)).item()

        errors = {"outputs": off(y, want)}
        valid = torch.arange(max(counts), device="cuda") < batch.request_offsets.diff()[:, None]
        for name in ("inputs", "keys", "log_decay", "updates"):
            got = getattr(records, name)
            if not got[~valid].isnan().all():
                return float("nan"), 0.0, f"wrote {name} past a request's nodes"
            errors[name] = off(got[valid], getattr(kept, name)[valid])
        why = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))

        paths = []
        for r, n in enumerate(counts):
            first = sum(counts[:r])
            leaf = rng.randrange(n)
            line = [t for t in range(n) if not tree or int(batch.ancestor_masks[first + leaf]) >> t & 1]
            paths.append([t for t in line if t <= leaf] if rng.random() < 0.9 else [])
        depth = max(1, *map(len, paths))
        path = torch.tensor([p + [-1] * (depth - len(p)) for p in paths], device="cuda")
        exact = state.double(), window.clone()
        both = [r for _, r in results[0]]
        clean = [
            Records(*(getattr(r, n).nan_to_num(0.0) for n in ("inputs", "keys", "log_decay", "updates"))) for r in both
        ]
        for r in clean:
            r.keys, r.log_decay, r.updates = r.keys.double(), r.log_decay.double(), r.updates.double()
        lengths = batch.context_lens.long()
        recurrence.commit_states(*exact, clean, batch.state_rows, lengths, path)
        commit(self.kernel(choose_commit(torch.bfloat16, nodes)), state, window, both, batch.state_rows, lengths, path)
        if not torch.equal(window.view(torch.int16), exact[1].view(torch.int16)):
            return errors[why], float("nan"), "window"
        idle = [row for row in range(requests + 2) if row not in rows]
        if not state[:, idle].isnan().all():
            return errors[why], float("nan"), "wrote the state of another request"
        return errors[why], off(state[:, rows], exact[0][:, rows]), why

    def norm(self) -> Job:
        """The gated norm against float64, and its time for some numbers of tokens."""
        from verify_kernels.cute.recurrence.run import choose_norm, gated_norm
        from verify_kernels.reference.recurrence import gated_rms_norm

        torch = self.torch
        kernel, bad, times = self.kernel(choose_norm(torch.bfloat16, DIM)), [], {}
        weight = torch.rand(DIM, device="cuda")
        for n in (1, 8, 33, 256, 1024):
            x = torch.randn(n, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
            gate = torch.randn(n, HEADS * DIM + 6, device="cuda", dtype=torch.bfloat16)[:, 6:].view(n, HEADS, DIM)
            want = gated_rms_norm(x.double(), weight.double(), gate.double(), 1e-5)
            off = ((gated_norm(kernel, x, weight, gate, 1e-5).double() - want).norm() / want.norm()).item()
            bad += [f"{n} tokens: {off:.1e}"] if not off <= TOLERANCE else []
            times[n] = graph_us(lambda: [gated_norm(kernel, x, weight, gate, 1e-5) for _ in range(50)]) / 50
        return {"bad": bad, "norm_us": times}

    # --- times

    def setting(self, requests: int, nodes: int, tree: bool) -> tuple[Any, Any, Any, Any, list[Any]]:
        """(batch, tokens, states, windows, layers' weights): as many layers as L2 does not hold."""
        torch = self.torch
        copies = max(2, math.ceil(ROTATED / (requests * STATE_BYTES)))
        batch = self.batch([nodes] * requests, [100] * requests, list(range(requests)), tree, random.Random(0))
        states = torch.randn(copies, requests, HEADS, DIM, DIM, device="cuda")
        windows = torch.randn(copies, requests, 3, 3 * HEADS * DIM, device="cuda", dtype=torch.bfloat16)
        return batch, self.tokens(requests * nodes, HEADS), states, windows, self.weights(HEADS, copies)

    def report(self, us: float, requests: int, nodes: int) -> Job:
        floor, moved, flops = floor_us(requests, nodes)
        rates = {"tbps": moved / us / 1e6, "tflops": flops / us / 1e6}
        return {"us": us, "bytes": moved, "flops": flops, "floor_us": floor, "over_floor": us / floor, **rates}

    def time(self, requests: int, nodes: int, columns: int | None = None) -> Job:
        from verify_kernels.cute.recurrence.run import RecurrencePlan, verify

        batch, tokens, states, windows, layers = self.setting(requests, nodes, True)
        kernel = self.kernel(variant_of(requests, nodes, columns=columns))
        plan = RecurrencePlan(batch, fresh=False)
        plan.records(states[0].clone(), tokens[0].shape[1], self.torch.bfloat16)  # one room for all

        def call() -> None:
            for layer, state, window in zip(layers, states, windows):
                plan.used = 0
                verify(kernel, plan, *tokens, *layer, BOUND, state, window)

        found = self.report(graph_us(call) / len(layers), requests, nodes)
        return found | {"predicted_us": predicted_us(requests, nodes, columns)}

    def commit_time(self, requests: int) -> Job:
        from verify_kernels.batch import Records
        from verify_kernels.cute.recurrence.run import LayerRecords, choose_commit, commit

        torch, nodes = self.torch, 8
        copies = max(1, math.ceil(ROTATED / (LAYERS * requests * STATE_BYTES)))
        shape = (LAYERS, requests, nodes, HEADS, DIM)
        channels = 3 * HEADS * DIM
        inputs = torch.randn(*shape[:3], channels, device="cuda", dtype=torch.bfloat16)
        keys = torch.nn.functional.normalize(torch.randn(shape, device="cuda"), dim=-1)
        stack = Records(inputs, keys, -torch.rand(shape, device="cuda"), torch.randn(shape, device="cuda"))
        parts = zip(stack.inputs, stack.keys, stack.log_decay, stack.updates)
        records = [LayerRecords(*part, stack, i) for i, part in enumerate(parts)]
        states = [torch.randn(LAYERS, requests, HEADS, DIM, DIM, device="cuda") for _ in range(copies)]
        window = torch.zeros(LAYERS, requests, 3, channels, device="cuda", dtype=torch.bfloat16)
        rows = torch.arange(requests, device="cuda")
        path = torch.arange(KEPT, device="cuda").expand(requests, KEPT).contiguous()
        kernel = self.kernel(choose_commit(torch.bfloat16, KEPT))

        def call() -> None:
            for state in states:
                commit(kernel, state, window, records, rows, rows + 100, path)

        us = graph_us(call) / copies
        floor, predicted = commit_us(requests)
        return {"commit_us": us, "floor_us": floor, "predicted_us": predicted, "x_floor": us / floor}

    def reference(self, requests: int, nodes: int) -> Job:
        from verify_kernels.reference import recurrence

        batch, tokens, states, windows, layers = self.setting(requests, nodes, True)
        plan, few = recurrence.plan_recurrence(batch, 4), min(8, len(layers))

        def call() -> None:
            for layer, state, window in list(zip(layers, states, windows))[:few]:
                recurrence.kda_verify(*tokens, *layer, BOUND, state, window, plan)

        return self.report(graph_us(call) / few, requests, nodes)

    def peer(self, name: str, requests: int, nodes: int) -> Job:
        """A chain, which is what they know; after the convolution."""
        torch = self.torch
        _, (x, gate, beta), states, _, layers = self.setting(requests, nodes, False)
        q, k, v = (t.contiguous() for t in x.view(1, requests * nodes, 3, HEADS, DIM).unbind(2))
        parts = (q, k, v, gate.view(1, requests * nodes, HEADS, DIM), beta[None].contiguous())
        ends = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * nodes
        try:
            call = (self.fla if name == "fla" else self.vllm)(parts, states, layers, ends, nodes)
        except ImportError as error:
            return {"absent": str(error)[:120]}
        return self.report(graph_us(call) / len(states), requests, nodes)

    def fla(self, parts: Any, states: Any, layers: Any, ends: Any, nodes: int) -> Callable[[], None]:
        from fla.ops.kda import fused_recurrent_kda

        def call() -> None:
            for state, (_, a_log, bias) in zip(states, layers):
                fused_recurrent_kda(
                    *parts, A_log=a_log, dt_bias=bias.flatten(), initial_state=state, output_final_state=False,
                    use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                    lower_bound=BOUND, cu_seqlens=ends.long(), state_v_first=True,
                )  # fmt: skip

        return call

    def vllm(self, parts: Any, states: Any, layers: Any, ends: Any, nodes: int) -> Callable[[], None]:
        from vllm.models.kimi_k3.nvidia.ops.third_party.kda.fused_recurrent import fused_recurrent_kda_fwd

        torch, requests = self.torch, len(ends) - 1
        one = torch.ones(requests, dtype=torch.int32, device="cuda")
        few = max(2, math.ceil(ROTATED / (requests * nodes * STATE_BYTES)))
        pools = torch.randn(few, requests * nodes + 1, HEADS, DIM, DIM, device="cuda")  # row 0 is nobody's
        slots = torch.arange(1, requests * nodes + 1, dtype=torch.int32, device="cuda").view(requests, nodes)

        def call() -> None:
            for i, (_, a_log, bias) in enumerate(layers):
                fused_recurrent_kda_fwd(
                    *parts, initial_state=pools[i % few], cu_seqlens=ends, ssm_state_indices=slots,
                    num_accepted_tokens=one, A_log=a_log, dt_bias=bias.flatten(), lower_bound=BOUND,
                    use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                )  # fmt: skip

        return call


def run(folder: Path | None, file: Path | None, cases: int, seconds: float) -> list[Job]:
    def save(device: str, results: list[Job]) -> None:
        if file:
            file.write_text(json.dumps({"schema_version": 1, "device": device, "results": results}, indent=0) + "\n")

    command = [sys.executable, "-m", "eval.bench_recurrence", "work", *(["--kernels", str(folder)] if folder else [])]
    uses = lambda job: {v.name for v in variants_of(job)[:1]}  # noqa: E731
    return gpu_jobs.run(jobs(cases), command, uses, lambda job: SECONDS[job["job"]], seconds, save)


def summary(results: list[Job]) -> str:
    """Checks in a line; then a line a shape: microseconds, floor, prediction, rates."""
    checks = [r for r in results if r["job"] == "check"]
    done, bad = sum(r.get("cases", 0) for r in checks), sum(len(r.get("bad", [])) for r in checks)
    failed, skipped = sum("failed" in r for r in results), sum("skipped" in r for r in results)
    worst, state = (max((r[n] for r in checks if n in r), default=0.0) for n in ("worst", "worst_state"))
    lines = [
        f"{done} random cases, {bad} bad, largest error {worst:.2e}, of a state {state:.2e};"
        f" jobs failed {failed}, skipped {skipped}"
    ]
    absent = {r["name"]: r["absent"] for r in results if "absent" in r}
    lines += [f"peer {name} is absent: {why}" for name, why in absent.items()]
    broken = {r["name"]: r["failed"] for r in results if r["job"] == "peer" and "failed" in r}
    lines += [f"peer {name} failed: {why[:120]}" for name, why in broken.items()]
    for r in results:
        if "norm_us" in r:
            lines.append("gated norm: " + ", ".join(f"{n} tokens {us:.1f} us" for n, us in r["norm_us"].items()))
        if "commit_us" in r:
            lines.append(
                f"  commit of {LAYERS} layers R={r['requests']:2}: {r['commit_us']:8.1f} us (floor {r['floor_us']:.1f}, "
                f"x {r['x_floor']:.2f}, predicted {r['predicted_us']:.1f})"
            )
        if "over_floor" in r:
            who = r.get("name") or ("torch" if r["job"] == "reference" else f"columns {r.get('columns', 'as chosen')}")
            told = f", predicted {r['predicted_us']:.1f}" if "predicted_us" in r else ""
            lines.append(
                f"  {who:18} R={r['requests']:2} T={r['nodes']:2}: {r['us']:8.1f} us (floor {r['floor_us']:.2f}, "
                f"x {r['over_floor']:.1f}{told}), {r['tbps']:.2f} TB/s, {r['tflops']:.1f} TFLOP/s"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["build", "run", "work"])
    parser.add_argument("--kernels", type=Path, help="folder of compiled kernels")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--cases", type=int, default=120, help="random cases")
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
