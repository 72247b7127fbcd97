"""`--scheduler` of `dspark bench` and `dspark eval`, from outside, on a scripted target."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import eval.bench
import eval.evaluate
import eval.floor
from dspark_runtime.configs import load_model_config
from dspark_runtime.models.scripted import ScriptedModel
from eval.cli import main
from eval.compare import compare
from eval.environment import cores, cpu_name
from eval.floor import Ceilings
from eval.scheduling_overhead import overhead_us, policies
from eval.schema import bench_config, load_run
from tests.dspark_runtime.tuning.curves import curve, point

V = 64
QUICK = ["--repeats", "2", "--warmup", "0", "--tokens", "24", "--context", "16", "--quiet"]


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(name: str, *_: object) -> SimpleNamespace:
        model = ScriptedModel(V, lambda prefix: np.eye(V)[(prefix[-1] + 5) % 20].tolist(), max_model_len=512)
        return SimpleNamespace(model=model, tokenizer=object(), name="scripted", config=load_model_config("tiny"))

    monkeypatch.setattr(eval.bench, "load", load)
    monkeypatch.setattr(eval.evaluate, "load", load)
    monkeypatch.setattr(eval.evaluate, "encode", lambda tokenizer, text: [ord(c) % V for c in text])
    monkeypatch.setattr(eval.floor, "measure_ceilings", lambda device, dtype: Ceilings(10.0, 0.1, "fixed by the test"))
    monkeypatch.chdir(tmp_path)


def dspark(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code


def here(name: str = "curve.json", **fields: object) -> str:
    """A curve of this machine on which every verified token is dear."""
    points = [point(b, t, t - 1, 12.0 * t - 2) for b in (1, 2) for t in range(1, 5)]
    machine = {"cpu": cpu_name(), "cores": cores(), "gpu": None}
    Path(name).write_text(curve(points, **({"environment": machine, "target": "smollm2"} | fields)).model_dump_json())
    return name


def test_bench_runs_each_shape_with_every_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    policies = f"none,fixed:1,budget:4,threshold:0.5,early-stop:{here()},async:curve.json"
    assert dspark("bench", "-k", "3", "-b", "1,2", "--scheduler", policies, "--json", "run.json", *QUICK) == 0
    out = capsys.readouterr().out
    assert "ngram k=3 async:curve.json" in out and "SYNTHETIC" not in out
    run = load_run(Path("run.json"))
    named = [r.scheduler for r in run.results if r.num_requests == 2]
    assert named == [None, None, *policies.replace("none,", "").split(",")]
    rows = {r.scheduler: r for r in run.results if r.num_requests == 2 and r.method != "plain"}
    assert all(r.error is None and r.ran for r in rows.values())
    assert rows["fixed:1"].proposed_per_step <= 1 < rows[None].proposed_per_step
    assert rows["budget:4"].verified_tokens <= 4 < rows[None].verified_tokens
    assert rows["early-stop:curve.json"].proposed_per_step < rows[None].proposed_per_step
    assert "async:curve.json" in compare(run, run)


def test_a_recipe_may_name_schedulers(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = "target: smollm2\ncontext_len: 16\nscheduler: [none, 'fixed:2']\nnum_speculative_tokens: 3\n"
    Path("recipe.yaml").write_text(recipe)
    quick = ["--repeats", "1", "--warmup", "0", "--tokens", "8", "--quiet"]
    assert dspark("bench", "--config", "recipe.yaml", *quick) == 0
    assert "ngram k=3 fixed:2" in capsys.readouterr().out
    assert bench_config(dict(scheduler="none, fixed:2,none")).scheduler == ["none", "fixed:2"]


def test_eval_counts_what_a_scheduler_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    Path("suite.jsonl").write_text("".join(json.dumps({"turns": [f"text {i} text {i} text"]}) + "\n" for i in range(4)))
    options = ["--prompts", "suite.jsonl", "--temperature", "0", "--max-tokens", "24", "-b", "2", "--speed", "1"]
    found = {}
    for name in ("none", "fixed:2", "threshold:0.3"):
        assert dspark("eval", "ngram", *options, "--scheduler", name, "--json", "eval.json", "--quiet") == 0
        found[name] = json.loads(Path("eval.json").read_text())["results"][0]
    assert "drafts trimmed by threshold:0.3" in capsys.readouterr().out
    assert [row["scheduler"] for row in found.values()] == [None, "fixed:2", "threshold:0.3"]
    assert found["fixed:2"]["spec_decode_per_position_acceptance_rates"][2:] == [0.0] * 5
    assert found["none"]["spec_decode_per_position_acceptance_rates"][2] > 0
    assert found["fixed:2"]["spec_decode_acceptance_length"] < found["none"]["spec_decode_acceptance_length"]
    assert found["fixed:2"]["tokens"] >= 96


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--scheduler", "best"], "scheduler: found 'best', allowed: none, fixed:DRAFTS or a file of dspark tune"),
        (["--scheduler", "fixed:2", "--al", "2"], "scheduler: found 'fixed:2' with acceptance_length, allowed: real"),
        (["--scheduler", "fixed:2", "--drafter", "none"], "scheduler: found 'fixed:2' with drafter none"),
        (["--scheduler", "async:gone.json"], "gone.json: No such file"),
        (["--scheduler", "async:elsewhere.json"], "scheduler: elsewhere.json: measured on another machine (cpu other"),
        (["--scheduler", "async:another.json"], "scheduler: another.json: measured with llama, allowed: smollm2"),
        (["--scheduler", "async:curve.json", "-b", "4"], "scheduler: the curve must reach 1 to 4 requests of 4 tokens"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    here()
    here("elsewhere.json", environment={"cpu": "other", "cores": 2, "gpu": None})
    here("another.json", target="llama")
    assert dspark("bench", "-k", "3", *QUICK, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("dspark: ") and line in error and error.count("\n") == 1


def test_a_predicted_curve_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    here("model.json", source="model", target="smollm2-135m", environment={"machine": "h200"})
    assert dspark("bench", "-k", "3", "-b", "2", "--scheduler", "async:model.json", *QUICK) == 0
    assert "async:model.json (predicted costs)" in capsys.readouterr().out


def test_eval_refuses_to_fit_on_trimmed_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("eval", "ngram", "--scheduler", "fixed:2", "--fit-calibration", "x.jsonl") == 2
    assert "fit_calibration: found with a scheduler, allowed: without" in capsys.readouterr().err


def test_the_overhead_benchmark_schedules_part_of_the_drafts() -> None:
    for name, policy in policies(4, 3).items():
        found = overhead_us(policy, requests=4, drafts=3, rounds=1)
        assert set(found) == {"decision", "whole", "estimated", "verified"}, name
        assert 0 < found["verified"] < 1 and min(found.values()) > 0, name
