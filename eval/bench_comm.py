"""Correctness and speed of the collectives of a divided model, on the GPUs of one host.

    python -m eval.bench_comm --gpus 8 --json FILE
    python -m eval.bench_comm --gpus 2 --device cpu      # torch.distributed over gloo: the script itself, no GPU

A process a GPU. Every collective of `verify_kernels.comm` is called with the messages of a verify pass of 1 to 64
tokens, as rank mode sends them: by `Symmetric` (all-reduces once in one shot and once in two) and by torch.distributed
(NCCL). What each gives is compared with float64 on random data, with memory that held NaN before, called once by itself
and as the last call of a CUDA graph; all-reduces must give all ranks the same bits. Then replays of a graph of many calls
are timed: of each replay the slowest rank counts; median, least and most of the replays. No multicast is used.

A job that hangs or dies counts as failed, no other of its implementation and operation is tried, and the rest goes on
with new processes. The last lines are the measured latencies as a file of configs/kernels holds them; a machine of
configs/hardware whose `kernels` names that file has them in `dspark bench --rank-of N --collectives modelled`.
"""

from __future__ import annotations

import argparse
import math
import os
import queue
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from verify_kernels.comm import Group

HIDDEN, LATENT = 7168, 3584  # of Kimi-K3
TOKENS = (1, 2, 4, 8, 16, 32, 64)
MOST_GPUS = 8
EPS = 1e-5
ONE_SHOT, TWO_SHOT = "one shot", "two shots"
OPS = ("all_reduce", "all_reduce_norm", "reduce_scatter", "all_gather", "all_to_all")
REDUCES = OPS[:2]
CALLS = {"cuda": 32, "cpu": 2}  # in a replay, on two messages by turns
REPLAYS = {"cuda": 21, "cpu": 3}
SECONDS = 60.0  # that a job may take, the processes' start with the first
MESSAGE = 32768
"""Bytes up to which a message is a matter of latency, as in configs/kernels/gb300.yaml."""


@dataclass(frozen=True)
class Job:
    """One operation of one implementation. width: columns of what is whole on all ranks in the end (of reduce_scatter:
    in the beginning; of all_to_all: of a row)."""

    op: str
    variant: str
    tokens: int
    width: int
    dtype: str = "bfloat16"


def jobs(variants: Sequence[str], ranks: int, tokens: Sequence[int], widths: Sequence[int]) -> list[Job]:
    """What a run does, in order: of every shape all implementations, beside one another."""
    shapes = [(op, t, w, "bfloat16") for w in widths for op in OPS for t in tokens]
    shapes += [("all_gather", t, 2 * ranks, "float64") for t in tokens]  # every rank's best token and its logit
    own = [v for v in variants if v not in (ONE_SHOT, TWO_SHOT)]
    shots = [v for v in variants if v in (ONE_SHOT, TWO_SHOT)]
    found = []
    for op, t, w, dtype in shapes:
        ours = shots if op in REDUCES else ["symmetric"] * bool(shots)
        found += [Job(op, variant, t, w, dtype) for variant in (*ours, *own)]
    return found


# ------------------------------------------------------------------------------------------------------ what is right


def noise(rank: int, call: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    """What a rank sends in a call; every rank can make every other's."""
    import torch

    g = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randn(shape, generator=g).mul_(3).to(getattr(torch, dtype))


def worst(*errors: float) -> float:
    """NaN is worse than any."""
    return max(errors, key=lambda e: (e != e, e))


@dataclass
class Case:
    """A job between `size` ranks, seen from one of them."""

    job: Job
    rank: int
    size: int
    device: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a rank's x."""
        tokens, width = self.job.tokens, self.job.width
        part = width // self.size  # of a width that does not divide, as much as does
        shapes = {"all_gather": (tokens, part), "reduce_scatter": (tokens, part * self.size)}
        return (shapes | {"all_to_all": (self.size, tokens, width)}).get(self.job.op, (tokens, width))

    def x(self, call: int, rank: int | None = None) -> Tensor:
        return noise(self.rank if rank is None else rank, call, self.shape, self.job.dtype)

    def counts(self, sender: int) -> list[int]:
        """Rows that a rank sends to every other: from none to all."""
        return [(3 * sender + 5 * to + self.job.tokens) % (self.job.tokens + 1) for to in range(self.size)]

    def bind(self, group: Group) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """The call that is timed, with what all calls share on the device. Same residual and weight on all ranks."""
        import torch

        if self.job.op == "all_reduce_norm":
            residual = noise(MOST_GPUS, 0, self.shape, self.job.dtype).to(self.device)
            weight = noise(MOST_GPUS, 1, self.shape[1:], self.job.dtype).to(self.device)
            return lambda x: group.all_reduce_norm(x, residual, weight, EPS)
        if self.job.op == "all_to_all":
            counts = torch.tensor(self.counts(self.rank), dtype=torch.int32, device=self.device)
            return lambda x: group.all_to_all(x, counts)
        return lambda x: (getattr(group, self.job.op)(x),)

    def error(self, call: int, out: Sequence[Tensor]) -> float:
        """The largest error of a call's results, in roundings that are allowed: right up to 1, NaN where none came.

        A sum may be rounded to its dtype at every addition and is one of float32 at best; a norm is that of the sum as
        it was rounded; what only travels must not change, which counts as infinitely wrong.
        """
        import torch

        every = [self.x(call, r) for r in range(self.size)]
        out = [y.cpu() for y in out]
        roundings = self.size * (torch.finfo(out[0].dtype).eps / 2 + 2.0**-24)

        def off(found: Tensor, want: Tensor, scale: Tensor, allowed: float) -> float:
            if found.shape != want.shape:
                return float("inf")
            return float(((found.double() - want).abs() / (scale + 1e-30)).max()) / allowed

        if self.job.op == "all_gather":
            return 0.0 if torch.equal(out[0], torch.cat(every, 1)) else float("inf")
        if self.job.op == "all_to_all":
            counts = [self.counts(r)[self.rank] for r in range(self.size)]
            right = out[1].tolist() == counts and out[0].shape == self.shape
            right = right and all(torch.equal(out[0][r, :n], every[r][self.rank, :n]) for r, n in enumerate(counts))
            return 0.0 if right else float("inf")
        want, scale = sum(p.double() for p in every), sum(p.double().abs() for p in every)
        if self.job.op == "reduce_scatter":
            own = slice(self.rank * out[0].shape[1], (self.rank + 1) * out[0].shape[1])
            return off(out[0], want[:, own], scale[:, own], roundings)
        if self.job.op == "all_reduce":
            return off(out[0], want, scale, roundings)
        residual = noise(MOST_GPUS, 0, self.shape, self.job.dtype).double()
        weight = noise(MOST_GPUS, 1, self.shape[1:], self.job.dtype).double()
        exact = out[1].double()
        norm = exact * (exact.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
        of_norm = 4 * torch.finfo(out[0].dtype).eps / 2 + self.job.width * 2.0**-24
        of_sum = off(out[1], want + residual, scale + residual.abs(), 2 * roundings)
        return worst(of_sum, off(out[0], norm, norm.abs() + 1e-3, of_norm))


# ------------------------------------------------------------------------------------------------------ one rank


def groups_of(device: str) -> dict[str, Group]:
    """Implementations by name. The first kernels of a GPU are compiled when they are first called."""
    from verify_kernels.comm import Distributed

    rest = Distributed()
    if device == "cpu":
        return {"gloo": rest}
    from verify_kernels.comm.symmetric import Symmetric

    symmetric = Symmetric(rest=rest)
    return {ONE_SHOT: symmetric, TWO_SHOT: symmetric, "symmetric": symmetric, "nccl": rest}


def variants_of(device: str) -> tuple[str, ...]:
    return ("gloo",) if device == "cpu" else (ONE_SHOT, TWO_SHOT, "nccl")


def measured(job: Job, group: Group, device: str, control: Any) -> dict[str, Any]:
    """A job on this rank: the same on all ranks. control: a process group of the hosts' (gloo)."""
    import torch
    from torch import distributed

    if job.variant in (ONE_SHOT, TWO_SHOT):
        from verify_kernels.comm import symmetric

        symmetric.HOP = 1 << 60 if job.variant == ONE_SHOT else -1
    case = Case(job, group.rank, group.size, device)
    call, calls = case.bind(group), CALLS[device]
    source = torch.stack([case.x(0), case.x(1)] * (calls // 2)).to(device)
    x = source.clone()

    def every(value: Any) -> list[Any]:
        found = [None] * group.size
        distributed.all_gather_object(found, value, control)
        return found

    # Memory without values is NaN, or the largest integer, while this is on.
    torch.use_deterministic_algorithms(True, warn_only=True)
    first = call(x[0])
    torch.use_deterministic_algorithms(False)
    errors = [case.error(0, first)]
    bits = [y.cpu().contiguous().view(torch.uint8).numpy().tobytes() for y in first] if job.op in REDUCES else []
    agreed = all(b == bits for b in every(bits))

    def run() -> tuple[Tensor, ...]:
        return [call(row) for row in x][-1]

    times, last = replayed(run, x, source, device, lambda: distributed.barrier(control))
    errors.append(case.error(1, last))
    slowest = [max(us) / calls for us in zip(*every(times))]
    error = worst(*(e for both in every(errors) for e in both))
    return {
        "error": error if math.isfinite(error) else str(error),
        "agreed": agreed,
        "ok": error <= 1 and agreed,
        "bytes": source[0].nbytes,
        "us": statistics.median(slowest),
        "low_us": min(slowest),
        "high_us": max(slowest),
    }


def replayed(
    run: Callable[[], tuple[Tensor, ...]], x: Tensor, source: Tensor, device: str, barrier: Callable[[], None]
) -> tuple[list[float], tuple[Tensor, ...]]:
    """(microseconds of run() on this rank, replay by replay; what the last gave). Each works on a fresh copy of x: sums
    may be made in place."""
    import torch

    times = []
    if device == "cpu":
        for _ in range(REPLAYS[device]):
            x.copy_(source)
            barrier()
            start = time.perf_counter()
            out = run()
            times.append((time.perf_counter() - start) * 1e6)
        return times, out
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    ready = torch.zeros(1, device=device)
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        barrier()
        # NCCL's own threads may ask for events meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            out = run()
        for _ in range(2 + REPLAYS[device]):
            for y in out:
                y.fill_(float("nan") if y.is_floating_point() else -1)
            x.copy_(source)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            barrier()
            torch.distributed.all_reduce(ready)  # the GPUs begin together
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
    return times[2:], out


def one_rank(rank: int, size: int, port: int, device: str, work: Sequence[Job], tell: Any) -> None:
    """A process: goes through the jobs with the others; rank 0 tells what came of each."""
    import torch
    from torch import distributed

    os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast needs rights that not every machine gives
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    where = f"tcp://127.0.0.1:{port}"
    if device == "cuda":
        torch.cuda.set_device(rank)
        distributed.init_process_group("nccl", where, rank=rank, world_size=size, device_id=torch.device(device, rank))
    else:
        torch.set_num_threads(1)
        distributed.init_process_group("gloo", where, rank=rank, world_size=size)
    try:
        control, groups = distributed.new_group(backend="gloo"), groups_of(device)
        for job in work:
            found = measured(job, groups[job.variant], device, control)
            if rank == 0:
                tell.put(found)
    finally:
        distributed.destroy_process_group()


# ------------------------------------------------------------------------------------------------------ all ranks


def stop(ranks: Any, patience: float = 0.0) -> None:
    """patience: seconds for the processes to end by themselves."""
    deadline = time.monotonic() + patience
    for process in ranks.processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()


def answer(ranks: Any, tell: Any, seconds: float) -> dict[str, Any]:
    """What rank 0 tells of the next job, or why it does not; then no process is left."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return tell.get(timeout=0.2)
        except queue.Empty:
            pass
        why = "took too long" if time.monotonic() > deadline else None
        try:
            ranks.join(timeout=0)
        except Exception as error:
            why = str(error).strip().splitlines()[-1]
        if why is not None:
            stop(ranks)
            return {"failed": why}


def run(
    gpus: int, device: str, work: Sequence[Job], seconds: float, say: Callable[[str], None] = lambda text: None
) -> list[dict[str, Any]]:
    """Every job once: {job..., result...}. Those that do not begin within `seconds` are left out. say: hears of what
    failed or was wrong."""
    from torch import multiprocessing

    results: list[dict[str, Any]] = []
    broken: set[tuple[str, str]] = set()
    deadline = time.monotonic() + seconds
    while len(results) < len(work):
        left = work[len(results) :]
        todo = [job for job in left if (job.op, job.variant) not in broken]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        tell = multiprocessing.get_context("spawn").Queue()
        ranks = multiprocessing.spawn(one_rank, (gpus, port, device, todo, tell), gpus, join=False, daemon=True)
        for job in left:
            late = time.monotonic() > deadline
            if late or (job.op, job.variant) in broken:
                why = "out of time" if late else "its implementation failed before"
                results.append(asdict(job) | {"skipped": why})
                continue
            found = answer(ranks, tell, SECONDS)
            results.append(asdict(job) | found)
            if not found.get("ok"):
                say(f"{job}: {found.get('failed', 'wrong')}")
            if "failed" in found:
                broken.add((job.op, job.variant))
                break
        stop(ranks, patience=5.0)
    return results


# ------------------------------------------------------------------------------------------------------ the report


def latencies(results: Sequence[dict], ranks: int, link_gbps: float | None = None) -> dict[str, Any] | None:
    """The measured all-reduces as the fields of a file of configs/kernels: of messages up to MESSAGE bytes the fastest
    replay, the median of the sizes' medians and the slowest replay; of larger ones the slowest less what the link
    takes for the rest (without link_gbps: nothing is taken off). Of every message the faster implementation."""
    best: dict[tuple[int, int], dict] = {}
    for r in results:
        if r["op"] == "all_reduce" and r.get("ok"):
            key = r["tokens"], r["width"]
            best[key] = min(best.get(key, r), r, key=lambda r: r["us"])
    small = [r for r in best.values() if r["bytes"] <= MESSAGE]
    if not small:
        return None
    mid = statistics.median(r["us"] for r in small)
    found = [min(r["low_us"] for r in small), mid, max(r["high_us"] for r in small)]
    wire = 2e6 / (link_gbps * 1e9) if link_gbps else 0.0
    large = [r["high_us"] - wire * (r["bytes"] - MESSAGE) for r in best.values() if r["bytes"] > MESSAGE]
    return {
        "all_reduce": [MESSAGE, *(round(us, 2) for us in found)],
        "all_reduce_ranks": ranks,
        "all_reduce_large_high_us": round(max([found[2], *large]), 2),
    }


def as_yaml(fields: dict[str, Any], gpu: str) -> str:
    """Lines for a file of configs/kernels, with their source."""
    lines = [f"{name}: {value}" for name, value in fields.items()]
    lines += ["sources:", f"  - source: python -m eval.bench_comm on {fields['all_reduce_ranks']} {gpu} of one host"]
    return "\n".join([*lines, "    status: measured", f"    fields: [{', '.join(fields)}]"])


def crossing(results: Sequence[dict]) -> int | None:
    """Bytes of the smallest all-reduce from which on two shots are never slower; None where they always are."""
    us = {(r["bytes"], r["variant"]): r["us"] for r in results if r["op"] == "all_reduce" and r.get("ok")}
    sizes = sorted({size for size, variant in us if variant == TWO_SHOT and (size, ONE_SHOT) in us})
    slower = [size for size in sizes if us[size, TWO_SHOT] > us[size, ONE_SHOT]]
    return next((size for size in sizes if not slower or size > slower[-1]), None)


def table(results: Sequence[dict], title: str) -> Any:
    """A line a message, a column an implementation; errors in roundings that are allowed."""
    from rich.table import Table

    variants = list(dict.fromkeys(r["variant"] for r in results))
    found = Table("collective", "tokens", "width", "bytes a rank", *(f"{v} us" for v in variants), "error", title=title)
    lines: dict[tuple[Any, ...], dict[str, dict]] = {}
    for r in results:
        lines.setdefault((r["op"], r["tokens"], r["width"]), {})[r["variant"]] = r

    def cell(r: dict | None) -> str:
        if r is None or "us" not in r:
            return "" if r is None else "failed" if "failed" in r else "skipped"
        return f"{r['us']:.1f} ({r['low_us']:.1f} to {r['high_us']:.1f})" + ("" if r["ok"] else " WRONG")

    for (op, tokens, width), by in lines.items():
        done = [r for r in by.values() if "us" in r]
        wrong = next((r["error"] for r in done if isinstance(r["error"], str)), None)
        error = wrong or (f"{max(r['error'] for r in done):.2f}" if done else "")
        size = str(done[0]["bytes"]) if done else ""
        found.add_row(op, str(tokens), str(width), size, *(cell(by.get(v)) for v in variants), error)
    return found


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, help="ranks, one a GPU (with --device cpu: processes)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tokens", type=numbers, default=TOKENS, help="of the passes, as 1,8,64")
    parser.add_argument("--widths", type=numbers, default=(HIDDEN, LATENT), help="of the messages, as 7168,3584")
    parser.add_argument("--seconds", type=float, default=400.0, help="what does not fit is left out")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args(arguments)
    import torch
    from rich.console import Console

    from eval.environment import write_result
    from eval.floor import known_hardware

    present = MOST_GPUS if args.device == "cpu" else torch.cuda.device_count()
    if args.device == "cpu" and not 2 <= args.gpus <= MOST_GPUS:
        sys.exit(f"gpus: found {args.gpus}, allowed: 2 to {MOST_GPUS}")
    if not 1 <= args.gpus <= min(present, MOST_GPUS):
        allowed = f"1 to {MOST_GPUS}, as many as there are, or --device cpu"
        sys.exit(f"gpus: found {args.gpus} where this host has {present}, allowed: {allowed}")
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "CPU processes"
    work = jobs(variants_of(args.device), args.gpus, args.tokens, args.widths)
    results = run(args.gpus, args.device, work, args.seconds, lambda text: print(text, file=sys.stderr, flush=True))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table(results, f"{args.gpus} {gpu}: median (least to most) of replays"))
    facts: dict[str, Any] = {"ranks": args.gpus}
    if args.device == "cuda":
        known = known_hardware(gpu) or {}
        fields = latencies(results, args.gpus, known.get("datasheet", {}).get("link_gbps"))
        facts |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "two_shot_from_bytes": crossing(results)}
        facts |= {"kernels": fields, "cuda_graph": True}
        print(f"two shots are faster from {facts['two_shot_from_bytes']} bytes on (None: never)")
        if fields is not None:
            print(as_yaml(fields, gpu))
    if args.json:
        options = f" --tokens {','.join(map(str, args.tokens))} --widths {','.join(map(str, args.widths))}"
        command = f"python -m eval.bench_comm --gpus {args.gpus} --device {args.device}{options}"
        write_result(args.json, command, results, args.device, **facts)
    if not all(r.get("ok") for r in results):
        sys.exit("bench_comm: some collectives failed or were wrong, see the table")


if __name__ == "__main__":
    main()
