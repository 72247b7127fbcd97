"""`dspark profile` and `dspark tune` from outside. The target is scripted."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import eval.bench
import eval.floor
from drafters.ngram import NgramDrafter
from dspark_runtime.configs import load_model_config, load_tree, read_yaml
from dspark_runtime.models.scripted import ScriptedModel
from dspark_runtime.tuning.curve import load_curve
from eval.cli import main
from eval.environment import cores, cpu_name
from eval.floor import Ceilings
from eval.schema import bench_config
from eval.tune import NGRAM
from tests.dspark_runtime.tuning.curves import curve, point

ROOT = Path(__file__).resolve().parents[2]
V = 64
QUICK = ["--repeats", "2", "--warmup", "0", "--tokens", "8", "--context", "16", "--quiet"]


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(name: str, *_: object) -> SimpleNamespace:
        model = ScriptedModel(V, lambda prefix: np.eye(V)[(prefix[-1] + 5) % 20].tolist(), max_model_len=512)
        return SimpleNamespace(model=model, tokenizer=None, name="scripted", config=load_model_config("tiny"))

    monkeypatch.setattr(eval.bench, "load", load)
    monkeypatch.setattr(eval.floor, "measure_ceilings", lambda device, dtype: Ceilings(10.0, 0.1, "fixed by the test"))
    monkeypatch.chdir(tmp_path)


def dspark(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code


def steps(b: int, free: int, slope: float) -> list:
    """Steps that cost 10 ms up to `free` tokens and slope a token beyond; trees of 8 and 16."""
    cost = lambda t: 10.0 + slope * max(0, b * t - free)  # noqa: E731
    chains = [point(b, t, t - 1, cost(t), draft=0.1 * (t > 1), spread=0.01) for t in range(1, 9)]
    return chains + [point(b, t, 6, cost(t), draft=0.2, spread=0.01) for t in (8, 16)]


def here(name: str = "curve.json", **fields: object) -> str:
    """A curve of this machine: 1 request is latency-bound, 8 are in doubt, 64 pay for every token."""
    environment = {"cpu": cpu_name(), "cores": cores(), "gpu": None, "cuda_graph": False}
    points = [p for b in (1, 8, 64) for p in steps(b, 32, 0.4)]
    pair = dict(target="smollm2", drafter="draft:qwen3-0.6b", method="draft")
    made = curve(points, **dict(environment=environment) | pair | fields)
    Path(name).write_text(made.model_dump_json())
    return name


RATES = ["--rates", "0.8,0.75,0.7,0.7,0.65,0.65,0.6", "--steps", "2000"]


# ---------------------------------------------------------------------------------------------------------- profile


def test_profile_measures_every_shape_and_writes_the_curve(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["-k", "0-3", "--tree-tokens", "8,16", "-b", "1,2", "--json", "c.json"]
    assert dspark("profile", *shape, *QUICK) == 0
    out = capsys.readouterr().out
    c = load_curve(Path("c.json"))
    assert {(p.num_requests, p.num_tokens) for p in c.points} == {(b, t) for b in (1, 2) for t in (1, 2, 3, 4, 8, 16)}
    assert all(p.is_chain == (p.num_tokens < 8) for p in c.points) and c.method == "ngram" and c.between == "linear"
    assert all(p.draft_ms == 0 for p in c.points if not p.depth) and all(p.verify_ms > 0 for p in c.points)
    assert c.environment["commit"] and c.environment["cpu"] == cpu_name() and c.command.startswith("dspark profile -k")
    assert out.count("\n| 1 |") == 6 and "SPS" in out and "a straight line" in out


def test_a_model_that_fits_no_memory_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["profile", "--hardware", "h200", "--target", "kimi-k3", "--context", "1024", "-k", "0-1", "--tree-tokens", "0"]
    assert dspark(*call, "--json", "c.json") == 0
    assert "DOES NOT FIT: " in capsys.readouterr().out
    assert dspark("tune", "c.json", "--rates", "0.5") == 0
    assert "Note: DOES NOT FIT: " in capsys.readouterr().out
    assert dspark(*call, "--tp", "16") == 0
    assert "DOES NOT FIT" not in capsys.readouterr().out


def test_one_repeat_claims_nothing_of_its_spread(capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("profile", "-k", "0-1", "--json", "c.json", *QUICK, "--repeats", "1") == 0
    out = capsys.readouterr().out
    assert "One repeat: nothing is known of drift and ±." in out and "drifted" not in out
    assert dspark("tune", "c.json", "--rates", "0.5") == 0
    assert "Note: the curve has one repeat: nothing is known of its spread" in capsys.readouterr().out


def test_profile_predicts_without_torch() -> None:
    arguments = (
        "profile --hardware h200 --target qwen3-8b --drafter qwen3-8b-dspark -b 1,64 --context 1024 --json c.json"
    )
    assert not heavy_modules(arguments.split())
    c = load_curve(Path("c.json"))
    assert c.source == "model" and c.max_depth == 7 and {p.context_len for p in c.points} == {1024}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "none"], "drafter: found none, allowed: a drafter"),
        (["-k", "0-70"], "num_speculative_tokens: found 64, allowed: 0 to 63"),
        (["--tree-tokens", "2"], "tree_tokens: found 2, allowed: 3 to 64, or 0 for no trees"),
        (["--tree-tokens", "4"], "tree_tokens: found 4, allowed: 7 or more (smaller best trees are chains)"),
        (["--tree-tokens", "x"], "tree_tokens: found 'x', allowed: numbers"),
        (["--context", "0"], "context: found 0, allowed: 1 or more"),
        (["--context", "600"], "context_len: prompts of up to 600 tokens"),
        (["--between", "smooth"], "between: found 'smooth', allowed: auto, step, linear"),
        (["--tp", "2"], "tp: found 2 without --hardware"),
        (["--json", "no/c.json"], "json: found 'no/c.json', allowed: a file that can be written"),
        (["--hardware", "abacus"], "hardware: found 'abacus', allowed"),
        (["--hardware", "h200", "--dtype", "float32"], "dtype: found with --hardware, allowed: without it"),
        (["--hardware", "h200", "--cuda-graph"], "cuda_graph: found with --hardware, allowed: without it"),
        (["--hardware", "h200", "--between", "step"], "between: found step with --hardware, allowed: linear"),
        (["--hardware", "h200", "--context", "64,8193"], "context: found 8193, allowed: at most 8192, the context limit"),
        (
            ["--hardware", "h200", "--target", "qwen3-8b", "--drafter", "qwen3-8b"],
            "drafter: found 'qwen3-8b', allowed: ngram",
        ),
    ],
)
def test_profile_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("profile", "--quiet", *arguments) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


# ------------------------------------------------------------------------------------------------------------- tune


def test_tune_prints_choices_regrets_and_vllms_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("tune", here(), *RATES, "--latency", "3", "--json", "t.json", "--plot", "t.png") == 0
    out = capsys.readouterr().out
    result = json.loads(Path("t.json").read_text())
    one, eight, many = result["choices"]
    assert one["best"]["shape"].startswith("tree 16") and one["speculate"] == "yes" and one["meets_latency"]
    assert many["best"]["shape"] == "plain" and many["speculate"] == "no" and not many["meets_latency"]
    assert many["regret"]["highest AL"] > 0.5 > many["regret"]["plain"] == 0 and one["regret"]["plain"] > 0.5
    assert many["break_even_acceptance_length"] > 1 and 0 <= one["expected_loss"] < 0.1
    low, high = one["best"]["interval"]
    assert low < one["best"]["output_throughput"] < high
    assert "Do not speculate at b = 64." in out and "Within 3 ms per token:" in out
    assert (
        "rank acceptances are assumed" in out
        and "break-even AL" in out
        and "Tokens/s lost by choosing otherwise" in out
    )
    assert Path("t.png").stat().st_size > 20_000

    pasted = json.loads(shlex.split(re.search(r"--speculative-config (.*)", out)[1])[0])
    assert pasted == result["speculative_config"]
    best = {c["num_requests"]: c["best_chain"]["num_speculative_tokens"] for c in result["choices"]}
    check_vllm(pasted, best)
    assert pasted["method"] == "draft_model" and pasted["num_speculative_tokens_per_batch_size"][-1] == [9, 64, 0]


VLLM_FIELDS = {  # of speculative_config in vLLM 0.33 (config/speculative.py)
    "method", "model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "prompt_lookup_max",
    "prompt_lookup_min",
}  # fmt: skip


def check_vllm(config: dict, best: dict[int, int]) -> None:
    """vLLM's own rules, and that every tuned number of requests gets its length."""
    assert set(config) <= VLLM_FIELDS and config["num_speculative_tokens"] >= 1
    table = config.get("num_speculative_tokens_per_batch_size", [[1, max(best), config["num_speculative_tokens"]]])
    assert table[0][0] == 1
    for (_, end, _), (start, _, _) in zip(table, table[1:]):
        assert start == end + 1
    for b, k in best.items():
        (found,) = [k for first, last, k in table if first <= b <= last]
        assert found == k <= config["num_speculative_tokens"]


@pytest.mark.parametrize(
    ("drafter", "method", "want"),
    [
        ("ngram", "ngram", {"method": "ngram", **NGRAM}),
        ("draft:qwen3-0.6b", "draft", {"method": "draft_model", "model": "qwen3-0.6b"}),
        ("draft:self", "draft", {"method": "draft_model", "model": "smollm2"}),
        ("some/dspark_block7", "dspark", {"method": "dspark", "model": "some/dspark_block7"}),
        ("some/eagle3", "eagle3", {"method": "eagle3", "model": "some/eagle3"}),
    ],
)
def test_vllm_methods(drafter: str, method: str, want: dict, capsys: pytest.CaptureFixture[str]) -> None:
    path = here(drafter=drafter, method=method)
    assert dspark("tune", path, *RATES, "-b", "1") == 0
    line = re.search(r"--speculative-config (.*)", capsys.readouterr().out)[1]
    assert json.loads(shlex.split(line)[0]) == {**want, "num_speculative_tokens": 7}


def test_ngram_looks_up_as_the_drafter_does() -> None:
    drafter = NgramDrafter()
    assert NGRAM == {"prompt_lookup_max": drafter.max_ngram, "prompt_lookup_min": drafter.min_ngram}


def test_plain_everywhere_leaves_vllms_option_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("tune", here(), "--rates", "0.01", "-b", "64", "--json", "t.json") == 0
    assert "vLLM: leave --speculative-config out." in capsys.readouterr().out
    assert json.loads(Path("t.json").read_text())["speculative_config"] is None


def test_the_recipe_is_benchs(capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("tune", here(), *RATES, "--yaml", "best.yaml", "--drafter", "ngram") == 0
    config = bench_config(read_yaml(Path("best.yaml")), "best.yaml")
    assert config.target == "smollm2" and config.num_requests == [1, 8, 64] and config.context_len == 64
    assert config.dtype == "float32" and 7 in config.num_speculative_tokens and config.tree
    assert load_tree(config.tree[0]).num_nodes == 16
    assert dspark("config", "best.yaml") == 0
    assert "bench recipe" in capsys.readouterr().out
    assert dspark("bench", "--config", "best.yaml", "-b", "1", "--tokens", "8", "--repeats", "2", "--quiet") == 0
    assert "best-tree-16x" in capsys.readouterr().out


def test_a_file_of_suites_is_tuned_together_and_apart(capsys: pytest.CaptureFixture[str]) -> None:
    suites = [
        {"name": "math", "survival": [0.95, 0.9, 0.85, 0.8], "num_steps": 900},
        {"name": "chat", "survival": [0.3, 0.1, 0.0, 0.0], "num_steps": 900},
        {"name": "tiny", "survival": [0.5, 0.1, 0.0, 0.0], "num_steps": 20},
    ]
    Path("a.json").write_text(json.dumps({"suites": suites}))
    assert dspark("tune", here(), "--acceptance", "a.json") == 0
    out = capsys.readouterr().out
    assert "Each suite for itself" in out and re.search(r"\| math +\| +4.50 \| +1 ", out)
    assert "suites of fewer than 100 steps have no line of their own: tiny" in out
    assert dspark("tune", here(), "--acceptance", "a.json", "--suite", "chat", "-b", "8", "--json", "t.json") == 0
    assert json.loads(Path("t.json").read_text())["survival"] == [0.3, 0.1, 0.0, 0.0]


def test_a_trace_gives_a_threshold(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    lines = []
    for i in range(1200):
        p = 0.95 if rng.random() < 0.5 else 0.1
        accepted = int((rng.random(7) < p).cumprod().sum())
        lines.append(json.dumps({"accepted": accepted, "confidence": [p] * 7, "request": i // 20}))
    Path("trace.jsonl").write_text("\n".join(lines))
    assert dspark("tune", here(), "--acceptance", "trace.jsonl", "-b", "8", "--json", "t.json") == 0
    out = capsys.readouterr().out
    (row,) = json.loads(Path("t.json").read_text())["choices"]
    assert row["confidence"]["pays"] and row["confidence"]["gain"][0] > 1
    assert "verify while product >= " in out


def test_prompt_lookup_gets_trees_from_a_measured_profile_only(capsys: pytest.CaptureFixture[str]) -> None:
    path = here(drafter="ngram", method="ngram")
    assert dspark("tune", path, "--rates", "0.1,0.5", "-b", "1", "--json", "t.json") == 0
    assert "trees: not tried, prompt lookup ranks nothing" in capsys.readouterr().out
    assert json.loads(Path("t.json").read_text())["choices"][0]["best_tree"] is None
    suite = {"name": "a", "survival": [0.1, 0.05], "num_steps": 500, "profile": [0.1, 0.05, 0.02]}
    Path("a.json").write_text(json.dumps({"suites": [suite]}))
    assert dspark("tune", path, "--acceptance", "a.json", "-b", "1", "--json", "t.json") == 0
    assert json.loads(Path("t.json").read_text())["choices"][0]["best_tree"]["acceptance_length"] < 1.3


def test_measure_puts_the_prediction_beside_what_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("profile", "-k", "0-3", "--tree-tokens", "8", *QUICK, "--json", "c.json") == 0
    measured = ["--measure", "--repeats", "2", "--tokens", "8", "--quiet"]
    assert dspark("tune", "c.json", "--rates", "0.8,0.7,0.6", *measured, "--json", "t.json") == 0
    out = capsys.readouterr().out
    rows = json.loads(Path("t.json").read_text())["measured"]
    assert len(rows) == 3 and rows[0]["shape"] == "plain" and all(r["step_ms"] > 0 for r in rows)
    assert "SYNTHETIC: predicted against measured" in out and re.search(r"b=1: .* (as predicted|the spread)\.", out)


# ------------------------------------------------------------------------------------------------- another machine


def test_a_curve_of_another_machine_is_refused_or_stamped_everywhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"cpu": "another", "cores": 1000, "gpu": "NVIDIA H200"}
    path = here(environment=environment)
    assert dspark("tune", path, *RATES) == 2
    out, err = capsys.readouterr()
    assert "curve: measured on another machine (cpu another" in err and "--other-machine" in err and not out
    titles = []
    monkeypatch.setattr("matplotlib.figure.Figure.suptitle", lambda self, text, **_: titles.append(text))
    written = ["--yaml", "o.yaml", "--json", "o.json", "--plot", "o.svg"]
    assert dspark("tune", path, *RATES, "--other-machine", *written) == 0
    stamp = "OTHER MACHINE: the curve was measured elsewhere"
    texts = [
        capsys.readouterr().out,
        *titles,
        *(p.read_text() for p in sorted(Path().glob("o*")) if p.suffix != ".svg"),
    ]
    assert len(texts) >= 5 and all(stamp in text for text in texts)
    assert texts[0].startswith(stamp)


def test_a_predicted_curve_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    path = here(source="model", environment={"gpu": "H200 SXM"})
    assert dspark("tune", path, *RATES) == 0
    assert capsys.readouterr().out.startswith("PREDICTED: the curve is the performance model's of H200 SXM")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.json", "--rates", "0.5"], "none.json: No such file"),
        (["broken.json", "--rates", "0.5"], "broken.json: not a step-cost curve"),
        (["curve.json"], "acceptance: found nothing, allowed: one of --acceptance FILE, --rates, --survival"),
        (["curve.json", "--rates", "0.5", "--survival", "0.5"], "acceptance: found rates and survival"),
        (["curve.json", "--survival", "0.5,0.6"], "survival[1]: found 0.6 after 0.5, allowed: never more"),
        (["curve.json", "--rates", "1.5"], "rates: found 1.5, allowed: 0 to 1"),
        (
            ["curve.json", "--rates", "0.5", "--steps", "50"],
            "steps: found 50 steps in all, allowed: 100 or more (too few",
        ),
        (["curve.json", "--acceptance", "few.json"], "few.json: found 60 steps in all, allowed: 100 or more"),
        (["curve.json", "--acceptance", "few.json", "--steps", "5"], "steps: found with --acceptance"),
        (["curve.json", "--acceptance", "few.json", "--suite", "x"], "suite: found 'x', allowed: a, b"),
        (["curve.json", "--acceptance", "long.json"], "acceptance_length: found 4, allowed: at most 3 at 2 drafts"),
        (["curve.json", "--rates", "0.5", "-b", "65"], "num_requests: found 65, allowed: 1 to 64"),
        (["curve.json", "--rates", "0.5", "-b", "0"], "num_requests: found 0, allowed: 1 or more"),
        (["curve.json", "--rates", "0.5", "--context", "9"], "context: found 9, allowed: 64 to 64"),
        (["curve.json", "--rates", "0.5", "--latency", "-1"], "latency: found -1, allowed: more than 0"),
        (["curve.json", "--rates", "0.5", "--latency", "inf"], "latency: found inf, allowed: more than 0"),
        (["curve.json", "--rates", ""], "rates: found '', allowed: numbers separated by commas"),
        (["curve.json", "--rates", "0.5", "--suite", "a"], "suite: found with --rates, allowed: with --acceptance"),
        (["curve.json", "--survival", "0.5", "--temperature", "1"], "temperature: found with --survival, allowed"),
        (["curve.json", "--acceptance", "few.json", "--temperature", "1"], "temperature: found with few.json, allowed"),
        (["curve.json", "--acceptance", "latin.jsonl"], "latin.jsonl: not UTF-8 (byte 37)"),
        (["curve.json", "--acceptance", "nested.json"], "nested.json: not JSON"),
        (["curve.json", "--acceptance", "nested.jsonl"], "nested.jsonl:1: not JSON"),
        (["curve.json", "--acceptance", "hot.json"], "hot.json: results: temperature: found 'hot', allowed: a number"),
        (["curve.json", "--acceptance", "huge.json"], "suites[0]: num_steps: found 1000"),
        (["endless.json", "--rates", "0.5"], "endless.json: points.0.spread: found inf, allowed"),
        (["curve.json", "--rates", "0.5", "--plot", "x.pdf"], "plot: found 'x.pdf'"),
        (
            ["curve.json", "--rates", "0.5", "--yaml", "no/x.yaml"],
            "yaml: found 'no/x.yaml', allowed: a file that can be",
        ),
        (["curve.json", "--rates", "0.5", "--yaml", "x.yaml", "--drafter", "magic"], "yaml: drafter: found 'magic'"),
        (["model.json", "--rates", "0.5", "--measure"], "measure: found a predicted curve of"),
        (["curve.json", "--rates", "0.5", "--measure", "--other-machine"], "measure: found with --other-machine"),
    ],
)
def test_tune_refuses_in_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    here()
    here("model.json", source="model")
    Path("broken.json").write_text("{}")
    few = [{"name": n, "survival": [0.5], "num_steps": 30} for n in "ab"]
    Path("few.json").write_text(json.dumps({"suites": few}))
    long = {"name": "a", "survival": [0.5, 0.4], "num_steps": 300, "acceptance_length": 4}
    Path("long.json").write_text(json.dumps({"suites": [long]}))
    Path("huge.json").write_text(json.dumps({"suites": [few[0] | {"num_steps": 10**400}]}))
    Path("latin.jsonl").write_bytes(b'{"accepted": 1, "confidence": [0.5]}\n\xff')
    for name in ("nested.json", "nested.jsonl"):
        Path(name).write_text("[" * 100_000)
    row = dict(shape="chain", suite="a", temperature="hot", steps=200, spec_decode_conditional_acceptance_rates=[0.5])
    Path("hot.json").write_text(json.dumps({"results": [row]}))
    spoiled = json.loads(Path("curve.json").read_text())
    spoiled["points"][0]["spread"] = float("inf")
    Path("endless.json").write_text(json.dumps(spoiled))
    assert dspark("tune", *arguments) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


# ------------------------------------------------------------------------------------------------------------ start


def heavy_modules(arguments: list[str]) -> list[str]:
    script = (
        "import sys\nfrom eval.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print('\\nMODULES', *({'torch', 'cutlass', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    )
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize("arguments", [["profile", "--help"], ["tune", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    assert not heavy_modules(arguments)


def test_tune_needs_no_torch_and_little_time() -> None:
    path = here()
    start = time.perf_counter()
    assert not heavy_modules(["tune", path, *RATES, "--latency", "5", "--yaml", "x.yaml", "--json", "x.json"])
    assert time.perf_counter() - start < 6  # 0.6 s alone; the test machine is shared
