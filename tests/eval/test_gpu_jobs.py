"""Jobs in a process that hangs and dies, with a stand-in for it; what the expert bench asks for."""

from __future__ import annotations

import json
import sys

from eval import bench_moe, gpu_jobs

# It hangs at one kernel, dies at another, reports a wrong result of a third, and answers the rest.
STAND_IN = """
import json, sys, time
print(json.dumps({"ready": "none"}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    print(json.dumps({"at": "a place"}), flush=True)
    if job["kernel"] == "hangs":
        time.sleep(60)
    if job["kernel"] == "dies":
        sys.exit(3)
    print(json.dumps({"bad": ["off"]} if job["kernel"] == "errs" else {"us": 1.0}), flush=True)
"""


def test_a_kernel_that_hangs_dies_or_errs_costs_only_itself(tmp_path) -> None:
    jobs = [{"job": "time", "kernel": k} for k in ("fine", "hangs", "dies", "errs", "fine", "hangs", "dies", "errs", "fine")]
    saved = []
    results = gpu_jobs.run(
        jobs, [sys.executable, "-c", STAND_IN], lambda job: {job["kernel"]}, lambda job: 1.0, 30.0,
        lambda device, results: saved.append((device, json.dumps(results))),
    )  # fmt: skip
    assert [r.get("failed") or r.get("skipped") or r.get("bad") for r in results] == [
        None, "took too long", "the process died with 3", ["off"], None, *["its kernel failed before"] * 3, None,
    ]  # fmt: skip
    assert results[1]["at"] == "a place"
    assert saved[-1] == ("none", json.dumps(results)) and len(saved) == 7


def test_a_process_that_does_not_come_up_is_said_and_tried_again() -> None:
    jobs = [{"job": "a"}, {"job": "b"}]
    results = gpu_jobs.run(jobs, [sys.executable, "-c", "pass"], lambda job: set(), lambda job: 1.0, 30.0, lambda *_: None)
    assert [r["failed"] for r in results] == ["no process came up on the GPU"] * 2


def test_time_that_is_up_skips_the_rest() -> None:
    results = gpu_jobs.run([{"job": "a"}], ["true"], lambda job: set(), lambda job: 1.0, 0.5, lambda *_: None)
    assert results == [{"job": "a", "skipped": "out of time"}]


def test_the_expert_bench_builds_what_it_runs() -> None:
    built = set(bench_moe.all_variants())
    assert len({v.name for v in built}) == len(built)
    for job in bench_moe.jobs(120):
        if job["job"] not in ("peer", "read", "route"):
            shape = job.get("experts", bench_moe.LAYER[0]), job.get("top_k", bench_moe.LAYER[1])
            if job["job"] == "k3":
                shape = bench_moe.K3[:2]
            rows = 2 * job["tokens"] - 1 if job["job"] == "op" else job["tokens"]
            situ = job["job"] == "k3" or job.get("situ", False)
            for tokens in (min(rows - at, 64) for at in range(0, rows, 64)):  # as the operation cuts a call
                assert set(bench_moe.variants(job["config"], tokens, *shape, job.get("kind", "plain"), situ)) <= built
    assert sum(len(j["seeds"]) for j in bench_moe.jobs(120) if j["job"] == "check") >= 100


def test_the_summary_says_what_matters() -> None:
    results = [
        {"job": "check", "config": "half", "tokens": 8, "cases": 4, "worst": 2e-3, "bad": []},
        {"job": "check", "config": "half", "tokens": 8, "failed": "took too long"},
        {"job": "time", "config": "half", "tokens": 8, "us": 110.0, "over_floor": 1.05, "off": 0.002, "experts": 51.0},
        {"job": "peer", "config": "triton", "tokens": 8, "us": 132.0, "over_floor": 1.26, "off": 0.002},
    ]
    text = bench_moe.summary(results)
    assert text.startswith("4 random cases, 0 bad, largest relative error 2.00e-03; jobs failed 1, skipped 0")
    assert "110.0 (1.05)" in text and "plain T=8: best peer 132.0, own 110.0, 1.20 x as fast" in text
