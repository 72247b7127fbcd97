"""The GPU's step check without a GPU: what it counts, and how it takes a trace apart."""

from __future__ import annotations

import pytest
import torch

from dspark_runtime.configs import load_model_config
from eval import gpu_step_check as room
from verify_kernels import ops


def test_the_check_counts_what_differs_beyond_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    config, cpu = load_model_config("tiny"), torch.device("cpu")
    found = room.check(config, cpu, tokens=200)
    assert found["tokens"] >= 200 and found["clear"] > 0.3 * found["tokens"]
    assert found["differ_beyond_rounding"] == 0
    assert [run["tokens"] >= 50 for run in found["runs"].values()] == [True] * 4

    # A backend that is off by more than rounding is caught.
    real = ops._table("cpu")["greedy_logits"]
    monkeypatch.setitem(ops._loaded, "cpu", dict(ops._table("cpu"), greedy_logits=lambda x, w: real(x.roll(1, -1), w)))
    monkeypatch.setattr(ops, "use", lambda mode: None)
    found = room.check(config, cpu, tokens=40)
    assert found["differ_beyond_rounding"] > 0.3 * found["clear"]


def event(name: str, ts: float, dur: float, correlation: int, cat: str = "kernel") -> dict[str, object]:
    return {"name": name, "cat": cat, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


LINEAR = "kernel_cutlass_kernel_verify_kernelscutelinearkernelLinear_object_at__Copy_Atom"
ATTEND = "kernel_cutlass_kernel_verify_kernelscuteattentionverifyVerifyAttention_object_at__CopyAtom"
COMBINE = "kernel_cutlass_combine_verify_kernelscuteattentionverifyVerifyAttention_object_at__tensor"


def trace() -> list[dict[str, object]]:
    """Two steps of three graphs; the second linear of the verify pass starts before the first has ended."""
    events = []
    for step in range(2):
        t, c = 1000.0 * step, 10 * step
        events += [event("cudaGraphLaunch", t + i, 1, c + i, "cuda_runtime") for i in range(3)]
        events += [
            event("void at::native::fill<int>(int*)", t + 10, 5, c),
            event(ATTEND, t + 35, 5, c + 1),
            event(LINEAR, t + 15, 10, c + 1),
            event(LINEAR, t + 20, 15, c + 1),
            event(COMBINE, t + 42, 3, c + 1),
            event("_commit_tokens", t + 45, 1, c + 2),
            event("Memcpy DtoH", t + 50, 1, c + 7, "gpu_memcpy"),  # not of a graph
        ]
    return events


def test_a_trace_is_taken_apart_by_phase_and_kernel() -> None:
    steps = room.steps_of(trace())
    assert [[e["phase"] for e in step] for step in steps] == [["draft", *["verify"] * 4, "accept"]] * 2
    calls = {"linear": [("linear 8 x 4", 40e6), ("linear 4 x 8", 20e6)], "attention": [("attention 32/8 heads", 8e6)]}
    rows = {(r["phase"], r["kernel"]): r for r in room.take_apart(steps, calls, read_tbps=4.0)}
    assert [(k, r["launches"], r["us"]) for k, r in rows.items()] == [
        (("draft", "torch fill"), 1, 5), (("draft", "gap"), 0, 0),
        (("verify", "linear 8 x 4"), 1, 10), (("verify", "gap"), 1, 2), (("verify", "linear 4 x 8"), 1, 10),
        (("verify", "attention 32/8 heads"), 1, 5), (("verify", "attention, combine"), 1, 3),
        (("accept", "torch _commit_tokens"), 1, 1), (("accept", "gap"), 0, 0),
    ]  # fmt: skip
    first = rows["verify", "linear 8 x 4"]
    assert first["floor_us"] == 10 and first["over_floor"] == 1 and first["tbps"] == 4
    assert rows["verify", "linear 4 x 8"]["resident_us"] == 15
    span = steps[0][-1]["end"] - steps[0][0]["ts"]
    assert sum(r["us"] for r in rows.values()) == span

    # Calls that were not all recorded say nothing of any.
    short = room.take_apart(steps, calls | {"linear": calls["linear"][:1]}, 4.0)
    assert {r["kernel"]: r.get("bytes") for r in short}["linear"] is None
    assert "| verify" in room.summary({"timelines": [dict(
        target="t", drafter="d", num_requests=1, acceptance="plain", step_ms={"async": 1.0, "not async": 2.0},
        output_throughput=1.0, launches=6, profiled_step_us=span, kernels=list(rows.values()),
    )]})  # fmt: skip
