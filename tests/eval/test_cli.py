"""The command line from outside: what it imports, how it fails, what it prints. The target is scripted."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import eval.bench
import eval.check
import eval.evaluate
import eval.floor
import eval.generate
from dspark_runtime.configs import load_model_config
from dspark_runtime.models.scripted import ScriptedModel
from eval.cli import main
from eval.floor import Ceilings
from eval.schema import EvalRow, load_run
from tests.drafters.dspark_cases import DEEPSPEC, DIMS, block_tensors, target, write
from tests.training import tiny

ROOT = Path(__file__).resolve().parents[2]
V = 64


class Characters:
    """A tokenizer: id i is character 64 + i; no chat template."""

    chat_template = None

    def __init__(self, vocab_size: int = V) -> None:
        self.vocab_size = vocab_size

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % self.vocab_size for c in text[:24]]}

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(64 + i) for i in ids)


def logits(prefix: tuple[int, ...]) -> list[float]:
    """The stream counts in steps of 5 modulo 20, so an n-gram drafter is right once it has seen a round."""
    row = [0.0] * V
    row[(prefix[-1] + 5) % 20] = 10.0
    return row


CHECKPOINT = "smollm2-135m-dspark"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random drafter."""
    return write(tmp_path_factory.mktemp("drafter"), DEEPSPEC, block_tensors(DEEPSPEC))


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoint: Path) -> None:
    def load(name: str, *_: object) -> SimpleNamespace:
        return SimpleNamespace(
            model=ScriptedModel(V, logits, max_model_len=512), tokenizer=Characters(), name="scripted",
            config=load_model_config("tiny"),
        )

    def load_pair(name: str, config: object) -> SimpleNamespace:
        """A drafter's folder needs a target with layers to tap."""
        if not Path(config.drafter).is_dir():
            return load(name, config)
        return SimpleNamespace(model=target(), tokenizer=Characters(DIMS["vocab_size"]), name="random", config=load_model_config("tiny"))

    for module in (eval.bench, eval.check, eval.generate):
        monkeypatch.setattr(module, "load", load)
    monkeypatch.setattr(eval.evaluate, "load", load_pair)
    monkeypatch.setattr(eval.floor, "measure_ceilings", lambda device, dtype: Ceilings(10.0, 0.1, "fixed by the test"))
    monkeypatch.setenv("DSPARK_KERNEL_CACHE", str(tmp_path / "kernels"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    shutil.copytree(checkpoint, tmp_path / CHECKPOINT)


def dspark(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code


# -------------------------------------------------------------------------------------------------- start and errors


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *([c, "--help"] for c in "bench compare generate check eval train doctor config kernels".split()),
    ],
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    assert not heavy_modules(arguments)


def test_config_checks_import_nothing_heavy() -> None:
    assert not heavy_modules(["config", str(ROOT / "configs/bench/default.yaml")])
    assert not heavy_modules(["config", str(ROOT / "configs/train/smollm2.yaml")])
    assert not heavy_modules(["bench", "--config", "missing.yaml"], code=2)
    assert not heavy_modules(["bench", "-b", "many"], code=2)


def test_recipes_are_utf8_in_every_locale() -> None:
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    call = [sys.executable, "-m", "eval.cli", "config", "configs/train/smollm2.yaml"]
    done = subprocess.run(call, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr


def heavy_modules(arguments: list[str], code: int = 0) -> list[str]:
    script = (
        "import sys\nfrom eval.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    code = end.code\n"
        "print('\\nMODULES', code, *({'torch', 'cutlass', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=ROOT, check=True
    )
    _, found, *modules = done.stdout.splitlines()[-1].split()
    assert int(found) == code
    return modules


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["bench", "-b", "many"], "num_requests: found 'many'"),
        (["bench", "--repeats", "0"], "repeats: found 0"),
        (["bench", "--repeats", "x"], "--repeats"),
        (["bench", "--nonsense"], "--nonsense"),
        (["bench", "-o", "xml"], "output: found 'xml', allowed: md, csv, json, jsonl"),
        (["bench", "--plot", "x.pdf"], "plot: found 'x.pdf'"),
        (["bench", "--json", "no/folder/x.json"], "json: found 'no/folder/x.json', allowed: a file"),
        (["bench", "--al", "0.5"], "acceptance_length: found 0.5"),
        (["bench", "--al", "9", "-k", "0-7"], "acceptance_length: found 9, allowed: 1 to 8"),
        (["bench", "--al", "2", "-k", "0"], "num_speculative_tokens: found 0 with a synthetic acceptance"),
        (["bench", "--drafter", "magic"], "drafter: found 'magic', allowed: none, ngram, draft:NAME"),
        (["bench", "--drafter", ""], "drafter: found '', allowed: none, ngram, draft:NAME"),
        (["kernels", "list", "--target", ""], "target: found '', allowed: smollm2, a folder"),
        (["bench", "--prompts", "missing.jsonl"], "prompts: missing.jsonl: No such file"),
        (["bench", "--context", "510"], "context_len: prompts of up to 510 tokens"),
        (["bench", "--rejection-sample-method", "magic"], "rejection_sample_method"),
        (["bench", "--rates", "0.9,0.5", "--trace", "t.json"], "synthetic_acceptance_trace: found together with"),
        (["bench", "--config", "broken.yaml"], "broken.yaml:3: num_requests: not YAML"),
        (["bench", "--config", "unknown.yaml"], "unknown.yaml: reqests: unknown field"),
        (["config", "unknown.yaml"], "unknown.yaml: reqests: unknown field"),
        (["config", "twice.yaml"], "twice.yaml:3: seed: not YAML (found 'seed' twice)"),
        (["compare", "missing.json", "missing.json"], "missing.json: No such file"),
        (["compare", "other.json", "other.json"], "other.json: command: missing"),
        (["compare", "wide.json", "wide.json"], "wide.json: command: found ['xxxxx"),
        (["generate", "hello", "--temperature", "-1"], "temperature: found -1.0"),
        (["magic"], "magic"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_field(
    arguments: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken.yaml").write_text("target: x\nnum_requests: [1,\n")
    Path("unknown.yaml").write_text("reqests: 3\n")
    Path("twice.yaml").write_text("seed: 1\ntarget: tiny\nseed: 2\n")
    Path("other.json").write_text('{"schema_version": 1}')
    Path("wide.json").write_text(json.dumps({"schema_version": 1, "command": ["x" * 50] * 50}))
    assert dspark(*arguments) == 2
    out, err = capsys.readouterr()
    assert field in err and err.count("\n") == 1 and len(err) < 1000 and not out


# -------------------------------------------------------------------------------------------------------------- bench


FEW = ["--repeats", "2", "--tokens", "12", "--quiet"]


def test_bench_prints_a_table_and_writes_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("bench", "-k", "0-2", "-b", "1,3", "--al", "real,2", *FEW, "--json", "run.json") == 0
    text = capsys.readouterr().out
    run = load_run(Path("run.json"))
    assert text.startswith("SYNTHETIC") and "fixed by the test" in text and run.environment.prompts == "mixed.jsonl"
    assert run.command.startswith("dspark bench -k 0-2 -b 1,3 --al real,2 ")
    lines = [(r.num_requests, r.num_speculative_tokens, r.synthetic) for r in run.results]
    assert lines == [(b, k, s) for b in (1, 3) for k, s in [(0, False), (1, False), (2, False), (1, True), (2, True)]]
    for r in run.results:
        assert r.ran and r.error is None and r.repeats == 2
        assert r.spec_decode_acceptance_length == pytest.approx(1 + sum(r.spec_decode_per_position_acceptance_rates))
        assert r.step_ms.total == pytest.approx(
            r.chunk_gap_ms
        ) and r.tpot_ms * r.output_throughput_per_user == pytest.approx(1e3)
        if r.synthetic:
            assert r.acceptance == "SYNTHETIC AL 2.00 (min_variance)" and r.spec_decode_acceptance_length == 2.0
            assert r.draft_acceptance_rate == pytest.approx(1 / r.num_speculative_tokens)
        assert (r.speedup == 1.0 and r.spec_decode_acceptance_length == 1.0) == (r.num_speculative_tokens == 0)
    # Twelve tokens, one a step; 3 requests: every step of the plain line runs all of them.
    assert run.results[0].emitted_histogram == [24] and run.results[5].emitted_histogram == [72]


def test_the_drafters_own_acceptance_is_measured_without_bias(capsys: pytest.CaptureFixture[str]) -> None:
    """The last step of a request counts in full, although it passes --tokens: with the target as its own draft model
    every step emits k + 1 tokens."""
    assert dspark("bench", "--drafter", "draft:self", "-k", "4", *FEW, "-o", "json") == 0
    row = json.loads(capsys.readouterr().out)["results"][1]
    assert row["spec_decode_acceptance_length"] == 5.0 and row["emitted_histogram"] == [0, 0, 0, 0, 6]


def test_a_sweep_names_the_points_it_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("bench", "-k", "1,3", "--al", "3.5", *FEW, "-o", "jsonl") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["error"] for r in rows] == [None, "AL 3.5 needs k >= 3", None]
    assert all(r["environment"]["torch"] for r in rows)


def test_a_length_that_is_not_realised_is_an_error_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A defect that loses the law: the engine runs on the drafter's own acceptance while the row says SYNTHETIC."""
    from dspark_runtime.engine import Engine

    configure = Engine.configure
    monkeypatch.setattr(Engine, "configure", lambda self, spec, law, method, _: configure(self, spec, None, method))
    assert dspark("bench", "-k", "3", "--al", "4", *FEW) == 1
    out, err = capsys.readouterr()
    assert "ERROR: SYNTHETIC AL 4.00 k=3, b=1: asked for AL 4.00, realised 1." in out and "ERROR" in err


def test_a_drafter_that_proposes_nothing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("one.jsonl").write_text('{"turns": ["x"]}\n')  # one token, then no n-gram repeats within five
    assert dspark("bench", "-k", "3", "--prompts", "one.jsonl", "--repeats", "2", "--tokens", "3") == 0
    assert "WARNING: ngram k=3, b=1: drafter proposed nothing" in capsys.readouterr().out


def test_random_contexts_are_said_to_be_random(capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("bench", "--context", "40", "-k", "2", "--al", "2", *FEW) == 0
    assert "prompts of 40 RANDOM token ids" in capsys.readouterr().out


def test_flags_override_the_recipe_and_the_result_is_echoed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipe.yaml").write_text("num_speculative_tokens: 1\nacceptance_length: 2\nmax_tokens: 10\nrepeats: 2\n")
    assert dspark("bench", "--config", "recipe.yaml", "--rates", "0.5,0.25", "-k", "2", "-o", "json") == 0
    run = json.loads(capsys.readouterr().out)
    config = run["config"]
    assert config["num_speculative_tokens"] == [2] and config["max_tokens"] == 10
    assert config["acceptance_length"] == [] and config["synthetic_acceptance_rates"] == [0.5, 0.25]
    assert run["results"][1]["requested_acceptance_length"] == 1.75


def test_prompts_differ_between_repeats_and_agree_between_points(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, tuple[tuple[int, ...], ...]]] = []
    run_once = eval.bench.run_once

    def spy(engine: object, point: object, prompts: list[list[int]], config: object, repeat: int) -> object:
        seen.append((repeat, point.spec.num_drafts, tuple(map(tuple, prompts))))
        return run_once(engine, point, prompts, config, repeat)

    monkeypatch.setattr(eval.bench, "run_once", spy)
    assert dspark("bench", "-k", "2", "-b", "2", *FEW, "-o", "json") == 0
    by_repeat = {repeat: {p for r, _, p in seen if r == repeat} for repeat, _, _ in seen}
    assert [len(v) for v in by_repeat.values()] == [1, 1, 1]  # warm-up and two repeats, the same for k = 0 and k = 2
    flat = [prompt for (prompts,) in by_repeat.values() for prompt in prompts]
    assert len(set(flat)) == len(flat) == 6
    assert [k for _, k, _ in seen] == [0, 2] * 3  # every repeat visits every point


# -------------------------------------------------------------------------------------------- generate, check, doctor


def test_generate_streams_and_ends_with_length_and_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("generate", "@E", "-k", "3", "--max-tokens", "9", "--drafter", "draft:self") == 0
    text, closing = capsys.readouterr().out.splitlines()
    assert text == "JO@EJO@EJ" and re.fullmatch(r"AL 3\.00 · \d+\.\d tok/s", closing)


def test_check_passes_a_sound_pair(capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("check", "--drafter", "draft:self", "--expect-al", "5", "--tolerance", "0.7") == 0
    out = capsys.readouterr().out
    assert "FAIL" not in out and "chain of 4: 6 of 6 outputs equal plain decoding" in out
    assert re.search(r"target as its own drafter: (\d+) of \1 drafts accepted", out)
    assert "15, 16, 17, 31, 32, 33, 39, 40, 41" in out


def test_check_fails_what_is_expected_and_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("check", "--drafter", "draft:self", "--expect-al", "3") == 1
    assert "expected 3 ± 0.1" in capsys.readouterr().out


def test_check_names_a_dead_drafter(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from drafters.scripted import ScriptedDrafter

    wrong = ScriptedDrafter(lambda prefix, count: [(prefix[-1] + 6) % 20] * count)
    monkeypatch.setattr(eval.check, "make_drafter", lambda *_: wrong)
    assert dspark("check") == 1
    assert "DEAD DRAFTER: almost nothing is accepted" in capsys.readouterr().out
    assert dspark("check", "--min-al", "1") == 0
    silent = ScriptedDrafter(lambda prefix, count: [])
    monkeypatch.setattr(eval.check, "make_drafter", lambda *_: silent)
    assert dspark("check", "--min-al", "1") == 1
    assert "proposed nothing" in capsys.readouterr().out


def test_doctor_names_machine_versions_and_operations(capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("doctor") == 0
    out = capsys.readouterr().out
    import torch

    for fact in (torch.__version__, "GPU", "paged_tree_attention", "verify_kernels."):
        assert fact in out


def test_config_says_what_a_file_is(capsys: pytest.CaptureFixture[str]) -> None:
    for kind, words in (("bench", "bench recipe"), ("train", "training recipe, ")):
        for path in sorted((ROOT / "configs" / kind).glob("*.yaml")):
            assert dspark("config", str(path)) == 0
            assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["generate", "hi", "-k", "3-5"], "found several shapes, allowed: one"),
        (["generate", "hi", "--tree", "tree-8,tree-16"], "found several shapes, allowed: one"),
        (["check", "-k", "0"], "num_speculative_tokens: found 0, allowed: one number from 1 to 63"),
        (["check", "-k", "1-3"], "num_speculative_tokens: found 1-3, allowed: one number from 1 to 63"),
        (["check", "--drafter", "none"], "drafter: found none, allowed: the drafter to check"),
        (["check", "-k", ""], "num_speculative_tokens: found '', allowed: numbers and ranges"),
        (["check", "--tolerance", "-1"], "tolerance: found -1.0, allowed: 0 or more"),
        (["check", "--min-al", "nan"], "min_al: found nan, allowed: 0 to 64"),
        (["check", "--expect-al", "nan"], "expect_al: found nan, allowed: 1 to 64"),
        (["bench", "--al-law", "geometric"], "synthetic_acceptance_law: found without an acceptance_length"),
        (["bench", "-k", "0-9999999999"], "found '0-9999999999', allowed: numbers and ranges"),
        (["bench", "-k", "\u00b2"], "allowed: numbers and ranges"),
        (["bench", "-b", "100000000"], "num_requests: found 100000000, allowed: 1 to 4096"),
        (["bench", "--seed", "99999999999999999999999"], "seed: found"),
        (["bench", "--json", "."], "json: found '.', allowed: a file that can be written"),
        (["bench", "--json", "x.svg", "--plot", "./x.svg"], "plot: found 'x.svg', which is --json too, allowed"),
        (["bench", "--prompts", "latin.jsonl"], "prompts: latin.jsonl: not UTF-8 (byte 15)"),
        (["bench", "--prompts", "nested.jsonl"], "prompts: nested.jsonl:1: expected one JSON object"),
        (["bench", "--prompts", "surrogate.jsonl"], "prompts: surrogate.jsonl:1: expected one JSON object"),
        (["config", "booleans.yaml"], "booleans.yaml: acceptance_length"),
        (["config", "train.yaml"], "train.yaml: training.steps: missing"),
    ],
)
def test_what_cannot_be_meant_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("latin.jsonl").write_bytes(b'{"turns": ["caf\xe9"]}\n')
    Path("nested.jsonl").write_text("[" * 100_000)
    Path("surrogate.jsonl").write_text('{"turns": ["\\ud800"]}\n')
    Path("booleans.yaml").write_text("acceptance_length: [2, true]\n")
    Path("train.yaml").write_text("drafter: {target_layer_ids: [1], mask_token_id: 3}\ntraining: {rows: 2}\n")
    assert dspark(*arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is a device of Linux")
@pytest.mark.parametrize(
    "arguments",
    [
        "bench -k 1 -b 1 --tokens 4 --repeats 1 --warmup 0 --json",
        "check --json",
        "eval ngram --max-tokens 4 --limit 1 --speed 0 --json",
        "profile --hardware h200 --target qwen3-8b --json",
        "reproduce --report",
    ],
)
def test_a_full_disk_is_one_line(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark(*arguments.split(), "/dev/full") == 2
    error = capsys.readouterr().err
    assert error.endswith("/dev/full: No space left on device\n") and error.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is a device of Linux")
def test_output_to_a_full_disk_is_one_line() -> None:
    call = [sys.executable, "-m", "eval.cli", "config", "configs/bench/default.yaml"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(call, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr == "dspark: output: No space left on device\n"


# --------------------------------------------------------------------------------------------------------------- eval


BRIEF = ["--max-tokens", "8", "--limit", "2", "--speed", "1", "--quiet"]


def test_eval_prints_tables_and_writes_rows_and_plot(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = ["--trees", "chain,8", "--hybrid"]
    assert dspark("eval", CHECKPOINT, *shapes, *BRIEF, "--json", "e.json", "--plot", "e.png") == 0
    out = capsys.readouterr().out
    assert "Acceptance and speed" in out and "Confidence" in out and max(map(len, out.splitlines())) < 250
    written = json.loads(Path("e.json").read_text())
    assert written["command"].startswith(f"dspark eval {CHECKPOINT} --trees") and written["environment"]["torch"]
    rows = [EvalRow.model_validate(row) for row in written["results"]]
    suites = ("math", "code", "chat", "repeat")
    assert [(r.suite, r.temperature, r.shape) for r in rows] == [
        (suite, t, shape) for suite in suites for t in (0.0, 1.0) for shape in ("chain", "tree-8", "hybrid-8")
    ]
    for r in rows:
        assert r.num_prompts == 2 and r.spec_decode_acceptance_length >= 1
        al = f"{r.spec_decode_acceptance_length:.2f}"
        assert re.search(rf"\| {r.suite} +\| {r.temperature:g} +\| {r.shape} .* {al} ", out)
    assert Path("e.png").stat().st_size > 10_000


def test_eval_fits_a_calibration_and_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    fit = ["--fit-calibration", "configs/prompts/mixed.jsonl", "--trees", "chain", "--temperature", "1"]
    assert dspark("eval", CHECKPOINT, *fit, *BRIEF) == 0
    out = capsys.readouterr().out
    assert re.search(r"calibration.json: temperatures (\d\.\d\d ){3}\d\.\d\d, ECE 0\.\d+ before", out)
    assert json.loads((Path(CHECKPOINT) / "calibration.json").read_text())["dataset"] == "mixed.jsonl"
    assert dspark("eval", CHECKPOINT, *fit, *BRIEF, "--prompts", "configs/prompts/mixed.jsonl") == 2
    assert "fit_calibration: found 64 prompts of mixed.jsonl in mixed.jsonl" in capsys.readouterr().err


def test_eval_of_the_target_as_its_own_drafter_accepts_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("eval", "draft:self", "--temperature", "0", *BRIEF, "--json", "e.json") == 0
    rows = json.loads(Path("e.json").read_text())["results"]
    assert [r["shape"] for r in rows] == ["chain"] * 4
    assert all(r["spec_decode_acceptance_length"] == 8 and r["ece_before"] is None for r in rows)
    assert "Confidence" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["missing"], "drafter: found 'missing', allowed: none, ngram, draft:NAME"),
        (["none"], "drafter: found none, allowed: the drafter to evaluate"),
        (["ngram", "--trees", "16"], "trees: found 16 with ngram, allowed: chain"),
        (["ngram", "--hybrid"], "hybrid: found without a grown tree"),
        (["ngram", "--fit-calibration", "fit.jsonl"], "fit_calibration: found with ngram"),
        ([CHECKPOINT, "--trees", "chain,65"], "trees: found 65, allowed: chain and numbers of nodes from 2 to 64"),
        ([CHECKPOINT, "--trees", "bush"], "trees: found 'bush', allowed: chain"),
        ([CHECKPOINT, "--temperature", "hot"], "temperature: found 'hot', allowed: numbers"),
        ([CHECKPOINT, "--temperature", "-1"], "temperature: found -1.0, allowed: 0 to 100"),
        ([CHECKPOINT, "--limit", "0"], "limit: found 0"),
        ([CHECKPOINT, "--speed", "-1"], "speed: found -1"),
        ([CHECKPOINT, "--max-tokens", "500"], "max_tokens: prompts of up to 24 tokens, 500 new, 5 of one step make 529"),
        ([CHECKPOINT, "--prompts", "none.jsonl"], "prompts: none.jsonl: No such file"),
        ([CHECKPOINT, "--json", "no/x.json"], "json: found 'no/x.json', allowed: a file that can be written"),
        ([CHECKPOINT, "--plot", "x.pdf"], "plot: found 'x.pdf'"),
        (["broken"], "broken/calibration.json: temperatures.0: found 'warm'"),
    ],
)
def test_eval_refuses_in_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("fit.jsonl").write_text('{"turns": ["a prompt of its own"]}\n')
    shutil.copytree(CHECKPOINT, "broken")
    file = dict(temperatures=["warm"], dataset="x", num_samples=1, ece_before=0, ece_after=0)
    (Path("broken") / "calibration.json").write_text(json.dumps(file))
    assert dspark("eval", *arguments) == 2
    out, err = capsys.readouterr()
    assert words in err and err.count("\n") == 1 and not out


# ------------------------------------------------------------------------------------------------------------ kernels


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder of kernels, and a compiler that only writes a file."""
    from verify_kernels.cute import compile as kernels

    monkeypatch.setattr(kernels, "check_install", lambda: None)
    monkeypatch.setattr(kernels, "dsl_version", lambda: "4.8.1")
    return tmp_path / "kernels"


def test_kernels_lists_what_is_built_and_what_is_not(no_compiler: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from verify_kernels.cute import compile as kernels

    assert dspark("kernels", "list") == 0
    rows = re.findall(r"^\| (\w+) +\| +(yes|no) \|", capsys.readouterr().out, re.M)
    from eval.kernels import variants

    wanted = variants(["qwen3-8b"], None, "bfloat16", 16)
    assert [v.family for v in wanted].count("attention") == 16 and {v.family for v in wanted} == {"attention", "linear"}
    assert [(v.name, "no") for v in wanted] == rows
    no_compiler.mkdir()
    for variant in wanted[:3]:
        kernels.library(variant).touch()
    assert dspark("kernels", "list") == 0
    assert f"3 of {len(wanted)} built" in capsys.readouterr().out


def test_kernels_of_a_drafter_are_listed_with_its_target(no_compiler: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("kernels", "list", "--drafter", "qwen3-8b-dspark") == 0
    out = capsys.readouterr().out
    assert re.search(r"^\| verify_bfloat16_d128_h32_8_p16_full_\w+ +\| +no \|", out, re.M)
    assert "| append_bfloat16_d128_h8_8_norm " in out


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["explain"], "action: found 'explain', allowed: list, build, check, bench"),
        (["list", "--dtype", "float32"], "dtype: found 'float32', allowed: bfloat16, float16"),
        (["list", "--page-size", "24"], "page_size is 24, allowed: 16, 32, 64, 128"),
        (["list", "--target", "tiny"], "head_dim is 16, allowed: 64, 128"),
        (["list", "--target", "nobody"], "target: found 'nobody', allowed"),
        (["list", "--rank-of", "16"], "rank_of: found target qwen3-8b, allowed: architectures of Kimi-K3's form"),
        (["list", "--target", "kimi-k3", "--rank-of", "7"], "rank_of: found 7, allowed: numbers of ranks that divide"),
        (["list", "--quantization", "int4"], "quantization: found int4 with qwen3-8b, allowed: fp8"),
        (["build", "--jobs", "0"], "jobs: found 0, allowed: 1 or more"),
        (["check"], "device: no usable CUDA GPU"),
        (["bench"], "device: no usable CUDA GPU"),
    ],
)
def test_kernels_refuses_in_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available() and "GPU" in words:
        pytest.skip("this machine has a GPU")
    assert dspark("kernels", *arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


# --------------------------------------------------------------------------------------------------------------- docs


SHORT = {
    "bench": ("--tokens", "8", "--repeats", "2"),
    "eval": ("--max-tokens", "6", "--limit", "2", "--speed", "1"),
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


@pytest.fixture
def small_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Recipes are read and checked as they are, then run as the tests' own on a tiny target; so is what they train."""
    import dspark_runtime.targets
    import training.config

    read, load, folder = training.config.load_train_config, dspark_runtime.targets.load_target, tmp_path / "tiny"

    def load_tiny(*_: object, **__: object) -> object:
        return load(str(folder if folder.is_dir() else tiny.write_target(folder)), device="cpu", dtype="float32")

    def shrunk(name: str) -> object:
        sections = {name: getattr(tiny.config(folder), name) for name in ("drafter", "prompts", "answers", "training")}
        return read(name).model_copy(update=sections)

    pair = eval.evaluate.load
    monkeypatch.setattr(training.config, "load_train_config", shrunk)
    monkeypatch.setattr(dspark_runtime.targets, "load_target", load_tiny)
    monkeypatch.setattr(
        eval.evaluate, "load", lambda name, c: load_tiny() if c.drafter.startswith("runs/") else pair(name, c)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_of_a_page_runs(page: Path, small_training: None, capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(blocks(page, "bash")).replace("\\\n", " ")
    commands = [shlex.split(line, comments=True)[1:] for line in text.splitlines() if line.startswith("dspark ")]
    assert commands
    for arguments in commands:
        assert dspark(*arguments, *SHORT.get(arguments[0], ())) == 0, arguments
        assert capsys.readouterr().out


def test_no_arguments_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark() == 0
    out = capsys.readouterr().out
    assert "bench" in out and out.count("\n") > 10


def test_make_commands_of_the_readme_exist() -> None:
    targets = [line.split()[1] for line in "".join(blocks(ROOT / "README.md", "bash")).splitlines() if line.startswith("make ")]
    assert {"bench", "test"} <= set(targets)
    for target in targets:
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_library_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(ROOT / "README.md", "python")
    exec(compile(code, "README.md", "exec"), {})
    assert "drafts accepted" in capsys.readouterr().out


def test_paths_named_by_the_pages_exist() -> None:
    for page in PAGES:
        text = page.read_text()
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
        for module in re.findall(r"python -m ([\w.]+)", text):
            assert importlib.util.find_spec(module) is not None, f"{page.name}: {module}"
