"""The script that checks and times collectives: between processes on a CPU, and what it makes of its numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from dspark_runtime.configs import find
from dspark_runtime.cost.collectives import fabric
from eval import bench_comm
from eval.bench_comm import ONE_SHOT, OPS, TWO_SHOT, Case, Job, as_yaml, crossing, jobs, latencies, main, run
from verify_kernels.comm import Alone


@pytest.mark.parametrize("size", [2, 3])
def test_processes_from_the_command_to_its_json(size: int, tmp_path: Path, capfd) -> None:
    path = tmp_path / "comm.json"
    main(["--gpus", str(size), "--device", "cpu", "--tokens", "1,3", "--widths", "50", "--json", str(path)])
    out = capfd.readouterr().out
    assert f"{size} CPU processes" in out and "all_to_all" in out and "WRONG" not in out
    found = json.loads(path.read_text())
    assert found["command"].endswith(f"--gpus {size} --device cpu --tokens 1,3 --widths 50")
    assert found["schema_version"] == 1 and found["environment"]["ranks"] == size
    rows = found["results"]
    assert [(r["op"], r["tokens"]) for r in rows] == [(op, t) for op in (*OPS, "all_gather") for t in (1, 3)]
    for r in rows:
        assert r["variant"] == "gloo" and r["ok"] and r["agreed"] and 0 <= r["error"] <= 1
        assert 0 < r["low_us"] <= r["us"] <= r["high_us"]
    part = 50 // size
    assert [r["bytes"] for r in rows[1::2]] == [300, 300, 6 * part * size, 6 * part, 300 * size, 48]


@pytest.mark.parametrize("op", OPS)
def test_wrong_results_are_seen(op: str) -> None:
    """Of one rank, which is all there is: its own message is the sum."""
    case = Case(Job(op, "alone", 5, 64), 0, 1, "cpu")
    right = case.bind(Alone())(case.x(0))
    assert case.error(0, right) <= 1
    assert not case.error(1, right) <= 1  # of another call
    for i, y in enumerate(right):
        for broken in (y * 1.02 if y.is_floating_point() else y + 1, y[:-1]):
            assert not case.error(0, [*right[:i], broken, *right[i + 1 :]]) <= 1
    rows = right[0].clone()
    rows.view(-1)[1] = float("nan")  # as memory that was not written
    assert not case.error(0, [rows, *right[1:]]) <= 1


def test_rows_past_the_counts_may_hold_anything() -> None:
    case = Case(Job("all_to_all", "alone", 8, 16), 0, 1, "cpu")  # 8 of 9 rows at most
    rows, counts = case.bind(Alone())(case.x(0))
    assert counts.tolist() == [8]
    case = Case(Job("all_to_all", "two", 4, 16), 1, 2, "cpu")
    sent = [case.counts(r)[1] for r in range(2)]
    rows = torch.full(case.shape, float("nan"), dtype=torch.bfloat16)
    for r, n in enumerate(sent):
        rows[r, :n] = case.x(0, r)[1, :n]
    assert sent != [4, 4] and case.error(0, [rows, torch.tensor(sent, dtype=torch.int32)]) == 0


def test_what_fails_does_not_stop_the_rest() -> None:
    work = [Job(op, "gloo", t, 8) for op in ("all_reduce", "nothing", "all_gather") for t in (1, 2)]
    told: list[str] = []
    found = run(2, "cpu", work, 60.0, told.append)
    assert [r["op"] for r in found] == [job.op for job in work]
    assert [r.get("ok") for r in found] == [True, True, None, None, True, True]
    assert "nothing" in found[2]["failed"] and found[3]["skipped"] == "its implementation failed before"
    assert len(told) == 1 and "nothing" in told[0]
    assert [r.get("skipped") for r in run(2, "cpu", work[:2], -1.0)] == ["out of time"] * 2


def test_a_job_that_hangs_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(bench_comm, "SECONDS", 0.0)
    found = run(2, "cpu", [Job("all_reduce", "gloo", 1, 8)], 60.0)
    assert found[0]["failed"] == "took too long"


def test_too_few_gpus_are_one_line(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(SystemExit, match="gpus: found 4 where this host has 3, allowed: 1 to 8, as many as there are"):
        main(["--gpus", "4"])
    with pytest.raises(SystemExit, match="gpus: found 9, allowed: 2 to 8"):
        main(["--gpus", "9", "--device", "cpu"])


def test_every_implementation_of_a_shape_is_beside_the_others() -> None:
    found = jobs((ONE_SHOT, TWO_SHOT, "nccl"), 8, (1, 64), (7168,))
    assert [j.variant for j in found[:6]] == [ONE_SHOT, TWO_SHOT, "nccl"] * 2
    assert {j.variant for j in found if j.op not in OPS[:2]} == {"symmetric", "nccl"}
    assert {j.width for j in found if j.dtype == "float64"} == {16}


def row(size: int, variant: str, us: float, ok: bool = True) -> dict:
    shape = {"tokens": size // 1024, "width": 512, "bytes": size}
    return {"op": "all_reduce", "variant": variant, **shape, "us": us, "low_us": us - 1, "high_us": us + 2, "ok": ok}


ROWS = [
    row(8192, ONE_SHOT, 5.0), row(8192, TWO_SHOT, 8.0), row(8192, "nccl", 12.0), row(32768, ONE_SHOT, 6.0),
    row(32768, TWO_SHOT, 2.0, ok=False), row(262144, ONE_SHOT, 20.0), row(262144, TWO_SHOT, 11.0),
    row(524288, ONE_SHOT, 40.0), row(524288, TWO_SHOT, 14.0), row(1048576, "nccl", 30.0),
]  # fmt: skip


def test_latencies_are_what_modelled_collectives_read(tmp_path: Path) -> None:
    """From rows to the printed lines, to a file of configs/kernels, to a collective's time."""
    assert crossing(ROWS) == 262144 and crossing(ROWS[:2]) is None
    assert latencies(ROWS, 4, 450)["all_reduce_large_high_us"] == pytest.approx(32 - 2 * 1015808 / 450e3, abs=0.01)
    assert latencies([], 4) is None
    fields = latencies(ROWS, 4)
    assert fields == {"all_reduce": [32768, 4.0, 5.5, 8.0], "all_reduce_ranks": 4, "all_reduce_large_high_us": 32.0}
    printed = yaml.safe_load(as_yaml(fields, "NVIDIA H200"))
    kernels, machine = (yaml.safe_load(find(kind, "h200").read_text()) for kind in ("kernels", "hardware"))
    sources = kernels["sources"] + printed.pop("sources")
    (tmp_path / "kernels.yaml").write_text(yaml.safe_dump(kernels | printed | {"sources": sources}))
    machine["kernels"] = str(tmp_path / "kernels.yaml")
    (tmp_path / "machine.yaml").write_text(yaml.safe_dump(machine))
    found = fabric(str(tmp_path / "machine.yaml"), 4)
    assert not found.borrowed and found.notes == ("latencies were measured among 4 ranks",)
    assert found.source == "python -m eval.bench_comm on 4 NVIDIA H200 of one host [measured]"
    us = found.us("all_gather", 1000)
    assert (us.low, us.mid, us.high) == (4.0, 5.5, 8.0)
    us = found.us("all_reduce", 32768 + 450_000)
    assert (us.low, us.mid, us.high) == pytest.approx((6.0, 7.5, 34.0))
