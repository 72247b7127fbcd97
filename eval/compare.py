"""`dspark compare A.json B.json`: the points that two runs share, their ratio, and whether it exceeds the spread."""

from __future__ import annotations

import math

from dspark_runtime.errors import ConfigError
from eval.report import full_name, num, percent, table
from eval.schema import BenchRow, Run


def key(row: BenchRow) -> tuple[object, ...]:
    """What makes two rows the same point. The code, the machine and the measured numbers may differ."""
    return (
        row.engine, row.target, row.drafter, row.method, row.acceptance, row.num_requests, row.context_len,
        row.num_speculative_tokens, row.tree, row.scheduler, row.dtype, row.temperature,
    )  # fmt: skip


def beyond_spread(a: BenchRow, b: BenchRow) -> bool:
    """Whether the difference of two throughputs exceeds twice their joint spread over repeats."""
    joint = math.hypot(
        a.output_throughput * a.spread.repeats,
        b.output_throughput * b.spread.repeats,
    )
    return abs(a.output_throughput - b.output_throughput) > 2 * joint


def differences(a: Run, b: Run) -> list[str]:
    """What besides the code could explain a difference: machine, versions, prompts, seed."""
    lines = []
    for field in (
        "machine",
        "gpu",
        "cpu",
        "cores",
        "driver",
        "torch",
        "vllm",
        "cuda_graph",
        "prompts_sha256",
        "seed",
        "commit",
    ):
        left, right = getattr(a.environment, field), getattr(b.environment, field)
        if left != right:
            lines.append(f"{field}: {left} | {right}")
    for field in ("max_tokens", "repeats"):
        left, right = getattr(a.config, field), getattr(b.config, field)
        if left != right:
            lines.append(f"{field}: {left} | {right}")
    return lines


def compare(a: Run, b: Run, name_a: str = "A", name_b: str = "B") -> str:
    """The comparison as text. Raises ConfigError if the runs share no point."""
    other = {key(r): r for r in b.results if r.ran}
    pairs = [(r, other[key(r)]) for r in a.results if r.ran and key(r) in other]
    if not pairs:
        raise ConfigError(
            f"compare: {name_a} and {name_b} share no point (same target, drafter, acceptance, requests, k)"
        )
    header = ("line", "b", "AL A", "AL B", "tok/s A", "tok/s B", "B / A", "± A", "± B", "verdict")
    body = []
    for x, y in pairs:
        if beyond_spread(x, y):
            verdict = "B faster" if y.output_throughput > x.output_throughput else "A faster"
        else:
            verdict = "within spread"
        body.append(
            (
                full_name(x),
                str(x.num_requests),
                num(x.spec_decode_acceptance_length),
                num(y.spec_decode_acceptance_length),
                num(x.output_throughput, 1),
                num(y.output_throughput, 1),
                num(y.output_throughput / x.output_throughput, 3),
                percent(x.spread.repeats),
                percent(y.spread.repeats),
                verdict,
            )
        )
    stamp = "SYNTHETIC ACCEPTANCE in the lines marked so · " if a.synthetic or b.synthetic else ""
    lines = [f"{stamp}A = {name_a} · B = {name_b}", "", table(header, body), ""]
    changed = differences(a, b)
    if (a.environment.machine, a.environment.gpu) != (b.environment.machine, b.environment.gpu):
        lines.append("DIFFERENT MACHINES: the ratio compares machines, not code.")
    lines += [f"differs: {line}" for line in changed]
    left = len([r for r in a.results if r.ran]) - len(pairs), len(other) - len(pairs)
    if any(left):
        lines.append(f"not shared: {left[0]} points of A, {left[1]} points of B")
    lines.append("verdict: the difference counts where it exceeds twice the joint spread over repeats")
    return "\n".join(lines) + "\n"
