"""`dspark simulate` from outside, and what the committed figures say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import eval.bench
import eval.floor
from dspark_runtime.models.scripted import ScriptedModel
from dspark_runtime.tuning.curve import load_curve
from eval import simulate_check
from eval.cli import main
from eval.floor import Ceilings
from eval.reported_curve import reported_curve
from eval.schema import bench_config
from tests.dspark_runtime.tuning.curves import curve, point

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "results" / "simulate"
RATES = ["--rates", "0.8,0.7,0.6"]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A curve of another machine that 1 to 8 requests were measured on."""
    monkeypatch.chdir(tmp_path)
    points = [point(b, t, t - 1, 10 + 0.5 * b * t, draft=0.1 * (t > 1)) for b in (1, 8) for t in range(1, 5)]
    environment = {"cpu": "another", "cores": 64, "gpu": "NVIDIA H200"}
    made = curve(points, environment=environment, max_depth=3)
    Path("curve.json").write_text(made.model_dump_json())
    Path("model.json").write_text(made.model_copy(update={"source": "model"}).model_dump_json())


def dspark(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    return ended.value.code


def results(name: str) -> list[dict]:
    return json.loads(Path(name).read_text())["results"]


def test_every_line_under_every_load(capsys: pytest.CaptureFixture[str]) -> None:
    policies = "async,early-stop:curve.json,threshold:0.4"
    asked = ["-b", "1,8", "--requests", "40", "--output", "8-40", "--prompt", "60", "--scheduler", policies]
    assert dspark("simulate", "curve.json", *RATES, *asked, "--json", "s.json", "--plot", "s.png", "--quiet") == 0
    out = capsys.readouterr().out
    rows = results("s.json")
    lines = ["plain", "k=1", "k=3", "async, k=3", "early-stop:curve.json, k=3", "threshold:0.4, k=3"]
    assert [(r["value"], r["line"]) for r in rows] == [(b, line) for b in (1, 8) for line in lines]
    assert out.startswith("SIMULATED: nothing was run\n") and "NVIDIA H200" in out and out.count("\n| 8 users") == 6
    assert "prefill is not in the curve: taken at" in out
    assert Path("s.png").read_bytes()[:4] == b"\x89PNG"
    plain = rows[0]
    assert plain["verified_tokens"] == plain["spec_decode_acceptance_length"] == 1.0
    assert plain["output_throughput_per_user"]["50"] == pytest.approx(1000 / 10.5)
    assert rows[2]["spec_decode_acceptance_length"] > 2 and rows[2]["verified_tokens"] > rows[3]["verified_tokens"]
    for r in rows:
        assert r["output_throughput_per_gpu"] == r["output_throughput"] and 0 <= r["prefill_share"] < 1
        for name, sign in (("output_throughput_per_user", -1), ("ttft_ms", 1), ("queue_ms", 1)):
            p50, p90, p99 = (sign * r[name][p] for p in ("50", "90", "99"))
            assert p50 <= p90 <= p99


def test_the_seed_decides_everything(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--rate", "5", "--requests", "60", "--output", "20", "--quiet"]
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert dspark("simulate", "curve.json", *RATES, *asked, "--seed", seed, "--json", f"{name}.json") == 0
    assert results("a.json") == results("b.json") != results("c.json")
    assert "5 requests/s" in capsys.readouterr().out


def test_more_users_than_rows_queue(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["-b", "20", "--max-num-requests", "4", "-k", "2", "--scheduler", "none", "--output", "20", "--quiet"]
    assert dspark("simulate", "curve.json", *RATES, *asked, "--gpus", "2", "--json", "s.json") == 0
    for r in results("s.json"):
        assert r["num_running"] <= 4 and r["queue_ms"]["50"] > 4 * 20 / 3 * 10
        assert r["output_throughput_per_gpu"] == r["output_throughput"] / 2


def test_a_trace_of_sessions_and_a_recorded_trace(capsys: pytest.CaptureFixture[str]) -> None:
    sessions = [
        {"arrival": 0.1 * i, "prompt": 60, "output": 10, "session": i} if not turn
        else {"delay": 0.2, "prompt": 60 + 30 * turn, "output": 10, "session": i}
        for turn in range(3) for i in range(5)
    ]  # fmt: skip
    Path("w.jsonl").write_text("\n".join(map(json.dumps, sessions)))
    steps = [{"accepted": i % 4, "confidence": [0.9, 0.6, 0.3], "request": i // 10} for i in range(200)]
    Path("t.jsonl").write_text("\n".join(map(json.dumps, steps)))
    both = ["--acceptance", "t.jsonl", "--trace", "w.jsonl"]
    assert dspark("simulate", "curve.json", *both, "--json", "s.json") == 0
    out = capsys.readouterr().out
    assert "200 recorded steps of 20 requests, AL 2.50 at 3 drafts" in out and "trace w.jsonl" in out
    assert all(r["num_requests"] == 15 and r["value"] is None for r in results("s.json"))
    assert dspark("simulate", "model.json", *both, "--confidence", "none") == 0
    assert "PREDICTED: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.json", *RATES], "none.json: No such file"),
        (["curve.json"], "acceptance: found nothing, allowed: one of"),
        (["curve.json", "--rates", "1,1,1,1", "-k", "4"], "found 4, allowed: at most 3, what the curve measured"),
        (["curve.json", "--rates", "0.5", "-k", "2"], "found 2, allowed: at most 1, where acceptance is known"),
        (["curve.json", *RATES, "-b", "9"], "num_requests: found 9, allowed: at most 8, what the curve measured"),
        (["curve.json", *RATES, "-b", "0"], "num_requests: found 0, allowed: 1 or more"),
        (["curve.json", *RATES, "-b", "1", "--rate", "3"], "rate: found together with num_requests, allowed: one"),
        (["curve.json", *RATES, "--rate", "0"], "rate: found 0, allowed: more than 0"),
        (["curve.json", *RATES, "--rate", "x"], "rate: found 'x', allowed: numbers"),
        (["curve.json", *RATES, "--requests", "0"], "requests: found 0, allowed: 1 or more"),
        (["curve.json", *RATES, "--prompt", "9-3"], "prompt: found '9-3', allowed: a number of tokens"),
        (["curve.json", *RATES, "--output", "0"], "output: found '0', allowed: a number of tokens"),
        (["curve.json", *RATES, "--max-num-requests", "9"], "max_num_requests: found 9, allowed: 1 to 8"),
        (["curve.json", *RATES, "--prefill-rate", "0"], "prefill_rate: found 0, allowed: more than 0"),
        (["curve.json", *RATES, "--prefill-rate", "nan"], "prefill_rate: found nan, allowed: more than 0"),
        (["curve.json", *RATES, "--max-prefill-tokens", "0"], "max_prefill_tokens: found 0, allowed: 1 or more"),
        (["curve.json", *RATES, "--scheduler", "magic"], "scheduler: found 'magic', allowed: none, fixed:"),
        (["curve.json", *RATES, "--scheduler", "budget:4", "-b", "8"], "found a budget of 4 tokens, allowed: 8"),
        (["curve.json", *RATES, "-k", "0"], "scheduler: found 'async' without drafts, allowed: none"),
        (["curve.json", *RATES, "--confidence", "some"], "confidence: found 'some', allowed: head, none"),
        (["curve.json", *RATES, "--spread-drafts", "11"], "spread_drafts: found 11, allowed: 0 to 10"),
        (["curve.json", *RATES, "--trace", "w.jsonl"], "w.jsonl:1: output: missing"),
        (["curve.json", *RATES, "--trace", "w.jsonl", "--prompt", "5"], "prompt: found with a trace, allowed: without"),
        (["curve.json", *RATES, "--plot", "s.pdf"], "plot: found 's.pdf', allowed: a file that ends in"),
        (["curve.json", *RATES, "--json", "no/s.json"], "json: found 'no/s.json', allowed: a file that can be"),
    ],
)
def test_simulate_refuses_in_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("w.jsonl").write_text('{"arrival": 0, "prompt": 5}')
    assert dspark("simulate", "--quiet", *arguments) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom eval.cli import main\n"
        "try:\n    main(['simulate', '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, cwd=ROOT)


# ------------------------------------------------------------------------------------------------ beside the engine


class Letters:
    """A tokenizer: id = character modulo the vocabulary."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % 64 for c in text[:40]]}


def test_the_check_runs_both_on_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scripted target that repeats itself. No time is asserted: what was emitted and verified is."""
    model = ScriptedModel(64, lambda prefix: np.eye(64)[(prefix[-1] + 5) % 20].tolist(), max_model_len=1024)
    config = SimpleNamespace(num_experts=0)
    target = SimpleNamespace(model=model, tokenizer=Letters(), name="scripted", config=config)
    monkeypatch.setattr(eval.bench, "load", lambda *_: target)
    monkeypatch.setattr(eval.floor, "measure_ceilings", lambda device, dtype: Ceilings(10.0, 0.1, "fixed by the test"))
    asked = dict(num_speculative_tokens=[0, 1, 2], num_requests=[1, 2], max_tokens=24, repeats=2, warmup=0)
    rows = simulate_check.check(bench_config(asked), 2, [2], 4, 1)
    assert [r["line"] for r in rows] == ["plain", "k=2", "async, k=2"]
    assert all(r["num_requests"] == 2 and r["requests"] == 8 for r in rows)
    for r in rows:
        real, model = r["real"], r["simulated"]
        assert set(model) <= set(real) and min(*real.values(), *model.values()) > 0
        assert r["throughput_ratio"] == model["output_throughput"] / real["output_throughput"]
    plain, fixed, scheduled = rows
    assert plain["real"]["acceptance_length"] == plain["simulated"]["acceptance_length"] == 1.0
    assert plain["real"]["verified_tokens"] == plain["simulated"]["verified_tokens"] == 1.0
    assert fixed["real"]["acceptance_length"] > 1.5
    for name in ("acceptance_length", "verified_tokens"):  # the last steps of a request are cut elsewhere
        assert fixed["simulated"][name] == pytest.approx(fixed["real"][name], rel=0.15)
        assert 1 <= scheduled["simulated"][name] <= fixed["simulated"][name] * 1.05


# ---------------------------------------------------------------------------------------------- the committed figures


def test_the_reported_curve_is_the_entrys() -> None:
    """Every reported time is on the curve, and the committed file is what the command in it makes."""
    made = load_curve(RESULTS / "v4_flash_curve.json")
    assert made == reported_curve("deepseek-v4-flash-b300", 3, 5, made.command)
    cost = {p.num_requests * p.num_tokens: p.verify_ms for p in made.points}
    assert [cost[t] for t in (1, 8, 32, 128, 512)] == [5.11, 5.35, 6.26, 9.43, 15.0]
    assert all(cost[a] < cost[b] for a, b in zip(sorted(cost), sorted(cost)[1:]))


def test_the_figures_have_the_papers_shape() -> None:
    """The frontier moves outward, the budget falls with load, and long fixed drafts lose to short ones in the end."""
    result = json.loads((RESULTS / "v4_flash.json").read_text())
    rows = {(r["line"], r["value"]): r for r in result["results"]}
    users = sorted({b for _, b in rows})
    assert users == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]

    def throughput(line: str, b: int) -> float:
        return rows[line, b]["output_throughput_per_gpu"]

    fixed = ("plain", "k=1", "k=5")
    for b in users:
        assert throughput("async, k=5", b) > 0.99 * max(throughput(line, b) for line in fixed)
    assert all(throughput("async, k=5", b) > 1.05 * max(throughput(line, b) for line in fixed) for b in (64, 128, 256))
    budget = [rows["async, k=5", b]["verified_tokens"] for b in users]
    assert all(4 < tokens <= 6 for tokens in budget[:5]) and budget[-1] < 3
    assert all(later < earlier + 0.3 for earlier, later in zip(budget, budget[1:]))  # the curve bends at 128 tokens
    assert throughput("k=5", 32) > 1.2 * throughput("k=1", 32) and throughput("k=5", 256) < throughput("k=1", 256)
    assert throughput("k=5", 512) < throughput("plain", 512)


def test_the_committed_numbers_come_out_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Two loads of the committed sweep, by its own command."""
    committed = json.loads((RESULTS / "v4_flash.json").read_text())
    arguments = committed["command"].split()[1:]
    arguments[arguments.index("-b") + 1] = "1,16"
    arguments[arguments.index("--json") + 1] = "again.json"
    arguments[arguments.index("--plot") + 1] = "again.png"
    arguments[1] = str(ROOT / arguments[1])
    assert dspark(*arguments, "--quiet") == 0
    want = {(r["line"], r["value"]): r for r in committed["results"]}
    for r in results("again.json"):
        assert r["output_throughput"] == pytest.approx(want[r["line"], r["value"]]["output_throughput"], rel=0.01)
        assert r["verified_tokens"] == pytest.approx(want[r["line"], r["value"]]["verified_tokens"], rel=0.01)
