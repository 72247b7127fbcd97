"""A decode step on a GPU: right, and where its time goes.

    python -m eval.gpu_step_check --json FILE [--target qwen3-8b] [--drafter qwen3-8b-dspark] [-b 1]

check: four layers of the target with random bf16 weights write 2000 greedy tokens through the engine's captured steps
(plain, chains and a tree, from 8 to 64 tokens a pass); each is compared with the float32 reference on the same prefix.
A token that differs counts as an error where the reference's two best logits lie further apart than rounding moves
them: six times the root mean square of what torch's own bf16 logits are off by at that position.

timeline: a step of the whole target with a drafter at a fixed acceptance length, kernel by kernel as CUPTI saw them:
bytes, floor and time over floor. A kernel's time is what it adds, from the end of the one before: kernels of dependent
launches overlap. Under a minute.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from dspark_runtime.engine import Engine
    from dspark_runtime.models.config import ModelConfig
    from dspark_runtime.models.transformer import Transformer

LAYERS, TOKENS = 4, 2000
ROUNDING = 6.0
"""Bound on what rounding does to the difference of two logits, in root mean squares of one logit's error."""

PHASES = ("draft", "verify", "accept")


# ---------------------------------------------------------------------------------------------------------- the check


def make(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int) -> Transformer:
    """The same random weights, rounded to bf16, in any dtype."""
    import torch

    from dspark_runtime.models.transformer import Transformer
    from dspark_runtime.weights import DummyTensors

    tensors = DummyTensors(config, seed, torch.bfloat16, device)
    return Transformer(config, tensors, name="random", dtype=dtype, device=device, max_model_len=512)


def logits_of(model: Transformer, ids: Sequence[int], last: int) -> torch.Tensor:
    """float32 [last, V]: logits after each of the `last` last ids."""
    import torch

    from verify_kernels.batch import PassBatch

    n, page = len(ids), 16
    width = -(-n // page)
    cache = model.allocate(width + 1, page)
    at = torch.arange(n, device=model.device)
    batch = PassBatch(
        token_ids=torch.tensor(ids, device=model.device),
        positions=at,
        request_offsets=torch.tensor([0, n], dtype=torch.int32, device=model.device),
        context_lens=torch.zeros(1, dtype=torch.int32, device=model.device),
        page_table=torch.arange(1, width + 1, dtype=torch.int32, device=model.device)[None],
        slot_mapping=at + page,
        ancestor_masks=None,
        max_query_len=n,
        max_kv_len=n,
    )
    return model.logits(model.forward(batch, cache)[0][-last:])


def check(
    config: ModelConfig, device: torch.device, tokens: int = TOKENS, seed: int = 0, backend: str = "auto"
) -> dict[str, Any]:
    """Greedy tokens of captured steps by these kernels against the float32 reference. See the module."""
    import torch

    from drafters.draft_model import DraftModel
    from drafters.tree import TreeSpec
    from dspark_runtime.engine import Engine
    from dspark_runtime.sampling import SamplingParams
    from verify_kernels import ops

    config = config.model_copy(update={"num_hidden_layers": min(LAYERS, config.num_hidden_layers)})
    half = make(config, torch.bfloat16, device, seed)
    tree = TreeSpec((-1, 0, 0, 1, 1, 2, 3, 4, 4, 5, 7, 7, 8, 10, 10, 13))
    runs = {
        "plain, 8 requests": (8, TreeSpec.chain(0)),
        "chain of 7": (1, TreeSpec.chain(7)),
        "chain of 7, 8 requests": (8, TreeSpec.chain(7)),
        "tree of 16, 2 requests": (2, tree),
    }
    written: list[tuple[str, list[int], list[int]]] = []
    ops.use(backend)
    draw = torch.Generator().manual_seed(seed)
    for name, (requests, spec) in runs.items():
        drafter = DraftModel(half) if spec.num_drafts else None
        engine = Engine(half, drafter, spec=spec, max_num_requests=requests, cuda_graph=device.type == "cuda")
        each = -(-tokens // (len(runs) * requests))
        # Prompts short enough for one context bucket, so that each run is captured once.
        lengths = torch.randint(5, 40, (-(-each // 300) * requests,), generator=draw).tolist()
        prompts = [torch.randint(config.vocab_size, (n,), generator=draw).tolist() for n in lengths]
        params = SamplingParams(temperature=0.0, max_tokens=min(each, 300), ignore_eos=True)
        for prompt, output in zip(prompts, engine.generate(prompts, params)):
            written.append((name, prompt, output.token_ids))

    ops.use("reference")
    exact = make(config, torch.float32, device, seed)
    found = dict(tokens=0, clear=0, differ=0, differ_beyond_rounding=0, torch_bf16_differs=0, worst_gap_over_rms=0.0)
    by_run = {name: dict(tokens=0, differ=0) for name in runs}
    for name, prompt, output in written:
        ids, chosen = [*prompt, *output[:-1]], torch.tensor(output, device=device)
        want = logits_of(exact, ids, len(output))
        rounded = logits_of(half, ids, len(output))
        rms = (rounded - want).square().mean(1).sqrt()
        best = want.topk(2).values
        gap = best[:, 0] - best[:, 1]
        clear = gap > ROUNDING * rms
        wrong = want.argmax(1) != chosen
        found["tokens"] += len(output)
        found["clear"] += int(clear.sum())
        found["differ"] += int(wrong.sum())
        found["differ_beyond_rounding"] += int((wrong & clear).sum())
        found["torch_bf16_differs"] += int((rounded.argmax(1) != want.argmax(1)).sum())
        if wrong.any():
            found["worst_gap_over_rms"] = max(found["worst_gap_over_rms"], (gap / rms)[wrong].max().item())
        by_run[name]["tokens"] += len(output)
        by_run[name]["differ"] += int(wrong.sum())
    ops.use(backend)
    return found | {"runs": by_run}


# ------------------------------------------------------------------------------------------------------- the timeline


class Recorder:
    """What the captured calls of products and attention read, in the order of their launches."""

    def __init__(self, context_tokens: int) -> None:
        self.context_tokens = context_tokens
        self.calls: dict[str, list[tuple[str, float]]] = {"linear": [], "attention": []}

    def __enter__(self) -> Recorder:
        import torch

        from verify_kernels.cute.attention import run as attention
        from verify_kernels.cute.linear import run as linear

        self._undo = (linear, "linear", linear.linear), (attention, "run", attention.run)
        product, attend = linear.linear, attention.run

        def noted_product(kernel: Any, variant: Any, x: Any, weight: Any, *rest: Any, **options: Any) -> Any:
            if torch.cuda.is_current_stream_capturing():
                n, k = weight.shape
                self.calls["linear"].append((f"linear {n} x {k}", weight.nbytes))
            return product(kernel, variant, x, weight, *rest, **options)

        def noted_attention(kernel: Any, plan: Any, q: Any, k_pages: Any, v_pages: Any, *rest: Any, **options: Any) -> Any:
            if torch.cuda.is_current_stream_capturing():
                size = 2 * k_pages[0, 0].nbytes * self.context_tokens
                self.calls["attention"].append((f"attention {q.shape[1]}/{k_pages.shape[2]} heads", size))
            return attend(kernel, plan, q, k_pages, v_pages, *rest, **options)

        linear.linear, attention.run = noted_product, noted_attention
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, value in self._undo:
            setattr(module, name, value)


def kind_of(kernel: str) -> str:
    """A short name for a kernel of a trace."""
    for part, name in (
        ("kernelLinear_", "linear"), ("combine_verify_kernelscuteattention", "attention, combine"),
        ("kernelscuteattentionverify", "attention"), ("AppendKV", "append_kv"), ("attentionplanPlan", "attention, plan"),
        ("CommitPath", "commit_path"),
    ):  # fmt: skip
        if part in kernel:
            return name
    name = re.sub(r"<.*|\(.*", "", kernel.removeprefix("void ")).split("::")[-1]
    functor = re.search(r"(\w+)(?:Functor|_kernel_cuda|Ops?)\b", kernel)
    return f"torch {name}" + (f" ({functor[1]})" if "elementwise" in name and functor else "")


def steps_of(events: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Device work of each step of a trace, in time order: {name, phase, ts, end} in microseconds. A step is three graph
    launches, and what is copied after them."""
    launches = sorted(
        (e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and "GraphLaunch" in e["name"]),
        key=lambda e: e["ts"],
    )
    place = {e["args"]["correlation"]: divmod(i, len(PHASES)) for i, e in enumerate(launches)}
    steps: list[list[dict[str, Any]]] = [[] for _ in range(len(launches) // len(PHASES))]
    for e in events:
        at = place.get(e.get("args", {}).get("correlation"))
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and at is not None and at[0] < len(steps):
            steps[at[0]].append({"name": e["name"], "phase": PHASES[at[1]], "ts": e["ts"], "end": e["ts"] + e["dur"]})
    return [sorted(step, key=lambda e: e["ts"]) for step in steps]


def take_apart(
    steps: Sequence[Sequence[dict[str, Any]]], calls: dict[str, list[tuple[str, float]]], read_tbps: float
) -> list[dict[str, Any]]:
    """Rows by phase and kernel: launches, median microseconds over the steps, and bytes, floor and time / floor where the
    bytes are known. gap: from the end of a kernel to the start of the next, where nothing runs."""
    tables: list[dict[tuple[str, str], list[float]]] = []
    for step in steps:
        table: dict[tuple[str, str], list[float]] = {}
        seen = dict.fromkeys(calls, 0)
        counts = {kind: sum(kind_of(e["name"]) == kind for e in step) for kind in calls}
        before = step[0]["ts"]
        for e in step:
            kind, size = kind_of(e["name"]), 0.0
            if kind in calls and counts[kind] == len(calls[kind]):  # else some were not recorded, and none is known
                label, size = calls[kind][seen[kind]]
                seen[kind] += 1
            else:
                label = kind
            gap = max(e["ts"] - before, 0.0)
            own = max(e["end"] - max(before, e["ts"]), 0.0)
            before = max(before, e["end"])
            row = table.setdefault((e["phase"], label), [0.0] * 4)
            row[:] = row[0] + 1, row[1] + own, row[2] + size, row[3] + e["end"] - e["ts"]
            row = table.setdefault((e["phase"], "gap"), [0.0] * 4)
            row[:] = row[0] + (gap > 0), row[1] + gap, 0.0, row[3] + gap
        tables.append(table)
    rows = []
    for phase, label in dict.fromkeys(key for table in tables for key in table):
        each = [table[phase, label] for table in tables if (phase, label) in table]
        count, us, size, resident = (statistics.median(column) for column in zip(*each))
        row: dict[str, Any] = dict(phase=phase, kernel=label, launches=count, us=us, resident_us=resident)
        if size:
            floor = size / read_tbps / 1e6
            row |= dict(bytes=size, floor_us=floor, over_floor=us / floor, tbps=size / us / 1e6)
        rows.append({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    return rows


def timeline(
    target: str, drafter: str, num_requests: int, k: int, context: int, al: float, device: torch.device, backend: str
) -> dict[str, Any]:
    """Milliseconds of a step with and without asynchronous scheduling, and its kernels."""
    import torch

    from drafters.tree import TreeSpec
    from dspark_runtime.engine import Engine
    from dspark_runtime.prompts import random_ids
    from dspark_runtime.sampling import SamplingParams
    from dspark_runtime.synthetic import SyntheticLaw
    from eval.bench import load, make_drafter
    from eval.bench_attention import read_rate
    from eval.schema import BenchConfig

    config = BenchConfig(
        target=target, drafter=drafter, weights="dummy", dtype="bfloat16", device=str(device), backend=backend
    )
    loaded = load(target, config)
    spec = TreeSpec.chain(k if drafter != "none" else 0)
    law = SyntheticLaw.make(spec.depth, acceptance_length=al) if spec.depth else None
    engine = Engine(
        loaded.model, make_drafter(drafter, loaded, config), spec=spec, synthetic=law, max_num_requests=num_requests,
        max_model_len=min(context + 511, loaded.model.max_model_len), cuda_graph=True,
    )  # fmt: skip
    with Recorder(context * num_requests) as recorder:
        for prompt in random_ids(num_requests, context, loaded.model.vocab_size, 0):
            engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True, seed=0))
        start = time.perf_counter()
        while len(engine.records) < 8:
            engine.step()
        first_s = time.perf_counter() - start
    ms = {}
    for name, on in (("async", True), ("not async", False)):
        engine.async_scheduling = on
        for _ in range(2):
            engine.step()
        torch.cuda.synchronize()
        at, start = len(engine.records), time.perf_counter()
        for _ in range(24):
            engine.step()
        ms[name] = 1e3 * (time.perf_counter() - start) / 24
        emitted = sum(sum(r.emitted) for r in engine.records[at:]) / 24
    phases = {p: round(statistics.median(r.ms[p] for r in engine.records[-20:]), 4) for p in (*PHASES, "other")}
    steps = profiled(engine, 5)
    rate = read_rate()
    rows = take_apart(steps, recorder.calls, rate)
    spans = [step[-1]["end"] - step[0]["ts"] for step in steps]
    return dict(
        target=target, drafter=drafter, num_requests=num_requests, num_speculative_tokens=spec.num_drafts, context=context,
        backend=backend,
        acceptance=f"SYNTHETIC AL {al:g}" if law else "plain", emitted_per_step=emitted, step_ms=ms, phase_ms=phases,
        output_throughput=1e3 * emitted / ms["async"], prefill_and_capture_s=first_s, read_tbps=rate,
        profiled_step_us=statistics.median(spans), launches=statistics.median(map(len, steps)),
        floor_us=sum(r.get("floor_us", 0.0) for r in rows), kernels=rows,
    )  # fmt: skip


def profiled(engine: Engine, count: int) -> list[list[dict[str, Any]]]:
    """Device work of `count` steps."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(count + 1):
            engine.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        steps = steps_of(json.loads(path.read_text())["traceEvents"])
    return [step for step in steps[1:] if step]  # the first one pays for the profiler's start


def summary(result: dict[str, Any]) -> str:
    """Two tables for people."""
    from eval.report import table

    lines = []
    if (c := result.get("check")) is not None:
        lines.append(
            f"{c['tokens']} greedy tokens, {c['differ']} differ from float32 (torch's bf16: {c['torch_bf16_differs']}), "
            f"{c['differ_beyond_rounding']} of them beyond rounding; the two best lie further apart than that at {c['clear']}"
        )
    for t in result.get("timelines", []):
        lines.append(
            f"{t['target']} + {t['drafter']}, {t['num_requests']} request(s), {t['acceptance']}: "
            f"{t['step_ms']['async']:.3f} ms a step ({t['step_ms']['not async']:.3f} without asynchronous scheduling), "
            f"{t['output_throughput']:.0f} tok/s, {t['launches']:.0f} launches, profiled {t['profiled_step_us']:.0f} us"
        )
        rows = [
            (r["phase"], r["kernel"], f"{r['launches']:.0f}", f"{r['us']:.1f}", f"{r.get('floor_us', 0):.1f}",
             f"{r.get('over_floor', 0):.2f}", f"{r.get('tbps', 0):.2f}")
            for r in t["kernels"]
        ]  # fmt: skip
        lines.append(table(("phase", "kernel", "launches", "us", "floor us", "x floor", "TB/s"), rows))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where to write the result")
    parser.add_argument("--target", default="qwen3-8b", help="an architecture of configs/models")
    parser.add_argument("--drafter", default="qwen3-8b-dspark", help="as dspark bench takes it")
    parser.add_argument("-b", "--num-requests", default="1", help="requests at once: 1,8")
    parser.add_argument("-k", type=int, default=7, help="drafts of a chain")
    parser.add_argument("--al", type=float, default=6.0, help="acceptance length")
    parser.add_argument("--context", type=int, default=1024, help="tokens in each request's cache")
    parser.add_argument("--backend", default="auto", choices=("auto", "unmeasured"), help="kernels, as dspark bench takes it")
    parser.add_argument("--only", choices=("check", "timeline"), help="one of the two")
    args = parser.parse_args()
    import torch

    from dspark_runtime.configs import load_model_config
    from eval.environment import write_result

    device = torch.device("cuda")
    result: dict[str, Any] = {}
    command = "python -m eval.gpu_step_check " + " ".join(sys.argv[1:])

    def save() -> None:
        write_result(args.json, command, [result], "cuda")

    if args.only != "timeline":
        result["check"] = check(load_model_config(args.target), device, backend=args.backend)
        save()
        print(summary({"check": result["check"]}), flush=True)
        torch.cuda.empty_cache()
    if args.only != "check":
        result["timelines"] = []
        for b in map(int, args.num_requests.split(",")):
            shape = (args.target, args.drafter, b, args.k, args.context, args.al)
            result["timelines"].append(timeline(*shape, device, args.backend))
            save()
            print(summary({"timelines": result["timelines"][-1:]}), flush=True)
            torch.cuda.empty_cache()
    if result.get("check", {}).get("differ_beyond_rounding"):
        raise SystemExit("some tokens differ from the float32 reference beyond rounding")


if __name__ == "__main__":
    main()
