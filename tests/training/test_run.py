"""A whole run on a tiny target: stages, what resumes after a kill, what is refused, and the command."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from drafters.dspark.load import load_drafter
from drafters.tree import TreeSpec
from dspark_runtime.engine import Engine
from dspark_runtime.errors import ConfigError
from dspark_runtime.sampling import SamplingParams
from dspark_runtime.targets import load_target
from eval.card import card
from tests.eval.test_cli import dspark
from tests.training import tiny
from training.run import train

ROOT = Path(__file__).resolve().parents[2]
CPU: dict[str, Any] = dict(device="cpu", dtype="float32")


def nothing(*_: Any) -> None:
    pass


def contents(folder: Path) -> dict[str, bytes]:
    """Files, but for the summary, which every call writes anew."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "summary.json")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def curve(folder: Path) -> list[dict[str, float]]:
    """Without the times, which are the machine's."""
    points = json.loads((folder / "training" / "state.json").read_text())["curve"]
    return [{name: x for name, x in point.items() if name != "seconds"} for point in points]


@pytest.fixture(scope="module")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("finished")
    train(tiny.config(checkpoint), folder, nothing, **CPU)
    return folder


@pytest.fixture
def answered(finished: Path, tmp_path: Path) -> Path:
    """A folder with the same prompts and answers, not yet trained."""
    folder = tmp_path / "answered"
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("training"))
    return folder


# ------------------------------------------------------------------------------------------------ stages


def test_each_stage_adds_to_the_folder_and_leaves_the_rest(checkpoint: Path, finished: Path, tmp_path: Path) -> None:
    config, whole = tiny.config(checkpoint), contents(finished)
    stages = {
        "prompts": {"recipe.json", "prompts.jsonl"},
        "answers": {name for name in whole if name.startswith("answers/")},
        "training": {name for name in whole if name.startswith("training/")},
    }
    assert set(whole) == set.union(*stages.values())
    have: dict[str, bytes] = {}
    for stage, added in stages.items():
        reported: list[tuple[str, int, int]] = []
        summary = train(config, tmp_path / "run", lambda *x: reported.append(x), stop_after=stage, **CPU)
        now = contents(tmp_path / "run")
        assert set(now) == set(have) | added and have.items() <= now.items()
        assert {text.split(",")[0] for text, _, _ in reported} == {stage} and reported[-1][1] == reported[-1][2]
        have = now
    assert {n: x for n, x in have.items() if n.endswith("safetensors")} == {
        n: x for n, x in whole.items() if n.endswith("safetensors")
    }
    assert sum(summary["prompts"].values()) == len((tmp_path / "run" / "prompts.jsonl").read_text().splitlines())
    assert summary["step"] == 8 and summary["last"]["step"] == 8 and summary["answer_tokens"] > summary["answers"] > 0
    assert set(summary["held_out"]) >= {"ce", "tv", "confidence", "tau", "survival_4"}
    again = train(config, tmp_path / "run", nothing, **CPU)
    assert again | {"seconds": 0} == summary | {"seconds": 0}
    assert (tmp_path / "run" / "training" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_of_files_are_answered_as_often_as_the_recipe_says(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"turns": ["red river?"]}\n{"turns": ["blue cloud"]}\n')
    config = tiny.config(checkpoint, prompts=dict(self_written=0))
    summary = train(config, tmp_path / "run", nothing, prompts=[tmp_path / "own.jsonl"], stop_after="answers", **CPU)
    assert summary["prompts"] == {"own.jsonl": 2} and summary["answers"] == 6


def test_workers_write_the_same_answers(checkpoint: Path, finished: Path, tmp_path: Path) -> None:
    summary = train(tiny.config(checkpoint), tmp_path, nothing, workers=2, stop_after="answers", **CPU)
    own, alone = contents(tmp_path), contents(finished)
    assert set(own) == {name for name in alone if not name.startswith("training/")}
    assert own["prompts.jsonl"] == alone["prompts.jsonl"]
    assert summary["answers"] == train(tiny.config(checkpoint), finished, nothing, stop_after="answers", **CPU)["answers"]


def test_the_mistake_of_a_worker_is_one_line(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="^dtype: found 'int9', allowed: auto, float32"):
        train(tiny.config(checkpoint), tmp_path, nothing, workers=2, device="cpu", dtype="int9")
    assert not capfd.readouterr().err


def test_the_drafter_of_a_run_drafts_for_its_target(checkpoint: Path, finished: Path) -> None:
    target = load_target(str(checkpoint), **CPU)
    drafter = load_drafter(finished / "training" / "drafter", target.model)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [[19, 26, 8], [5, 6]]
    engine = Engine(target.model, drafter, spec=TreeSpec.chain(4), max_model_len=128)
    outputs = engine.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in Engine(target.model, max_model_len=128).generate(prompts, params)]
    assert sum(o.num_drafted for o in outputs)


# ------------------------------------------------------------------------------------------------ kills


@pytest.mark.parametrize("kill", [1, 3, 4, 7, 8])
def test_a_killed_training_run_resumes_with_the_same_curve(kill: int, checkpoint: Path, finished: Path, answered: Path) -> None:
    def report(what: str, done: int, total: int) -> None:
        if done == kill:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny.config(checkpoint), answered, report, **CPU)
    steps: list[int] = []
    train(tiny.config(checkpoint), answered, lambda _, done, __: steps.append(done), **CPU)
    assert steps == list(range((kill - 1) // 3 * 3 + 1, 9))  # from the last state that was saved, every third step
    assert curve(answered) == curve(finished)
    for name, data in contents(finished / "training").items():
        if name.endswith(".safetensors") or name == "held_out.json":
            assert contents(answered / "training")[name] == data, name


def test_a_process_that_is_killed_goes_on(checkpoint: Path, finished: Path, tmp_path: Path) -> None:
    """SIGKILL while answering, and again while training; then the rest in one go."""
    recipe = tiny.recipe(checkpoint, training=dict(steps=400, save_every=20))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    environment = {"PYTHONPATH": str(ROOT), "HOME": str(Path.home()), "OMP_NUM_THREADS": "1"}
    run = tmp_path / "run"
    shards = len(list((finished / "answers").glob("*.safetensors")))
    for until in ("answers/*.safetensors", "training/state.json"):
        command = [sys.executable, "-m", "eval.cli", "train", "recipe.yaml", "--out", "run", "--device", "cpu", "--dtype", "float32"]
        process = subprocess.Popen(command, cwd=tmp_path, env=environment)
        while not list(run.glob(until)):
            assert process.poll() is None, "ended before it was killed"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert len(list((run / "answers").glob("*.safetensors"))) == shards
    state = json.loads((run / "training" / "state.json").read_text())
    assert 20 <= state["step"] < 400
    config = tiny.config(checkpoint, training=dict(steps=400, save_every=20))
    summary = train(config, run, nothing, **CPU)
    assert summary["step"] == 400 and [point["step"] for point in curve(run)] == list(range(1, 401))


# ------------------------------------------------------------------------------------------------ refusals


def test_what_does_not_fit_together_is_refused(checkpoint: Path, answered: Path, tmp_path: Path) -> None:
    def refused(words: str, config: Any, folder: Path, **options: Any) -> None:
        with pytest.raises(ConfigError) as error:
            train(config, folder, nothing, **(CPU | options))
        assert words in str(error.value) and "\n" not in str(error.value)

    config = tiny.config(checkpoint)
    refused("stop_after: found 'rest', allowed: prompts, answers, training", config, tmp_path / "a", stop_after="rest")
    empty = tiny.config(checkpoint, prompts=dict(self_written=0))
    refused("prompts: found none", empty, tmp_path / "b")
    refused("holds prompts and answers of another recipe", empty, answered)
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*", "special*"))
    refused("has no tokenizer", tiny.config(bare), tmp_path / "c")
    (tmp_path / "one.jsonl").write_text('{"turns": ["red"]}\n')
    once = tiny.config(checkpoint, prompts=dict(self_written=0), answers=dict(file_answers=1))
    refused("found 1 answers, allowed: 2 or more", once, tmp_path / "d", prompts=[tmp_path / "one.jsonl"])
    (tmp_path / "evaluated.jsonl").write_text('{"turns": ["Red!"]}\n')
    names = dict(prompts=[tmp_path / "one.jsonl"], evaluation=[tmp_path / "evaluated.jsonl"])
    refused("evaluation prompts are never trained on", once, tmp_path / "e", **names)
    assert not (tmp_path / "e" / "prompts.jsonl").exists()

    # Before the data is made; files that are named later; a start for a run that has begun.
    far = tiny.config(checkpoint, drafter=dict(target_layer_ids=[0, 5]))
    refused("drafter.target_layer_ids: found [0, 5], allowed: 0 to 1", far, tmp_path / "f")
    assert not (tmp_path / "f" / "prompts.jsonl").exists()
    turn = json.loads((answered / "prompts.jsonl").read_text().splitlines()[0])
    (tmp_path / "late.jsonl").write_text(json.dumps(turn) + "\n")
    refused("shares 13 words with an evaluation prompt", config, answered, evaluation=[tmp_path / "late.jsonl"])
    refused("one.jsonl is not part of the run", config, answered, prompts=[tmp_path / "one.jsonl"])
    train(config, answered, nothing, **CPU, prompts=[tmp_path / "late.jsonl"], seconds=0.0)
    refused("holds a run already", config, answered, init=answered / "training" / "drafter")
    refused("init: " + str(tmp_path / "g") + ": config.json: missing", config, tmp_path / "g", init=tmp_path / "g")
    assert not (tmp_path / "g" / "prompts.jsonl").exists()
    hollow = tmp_path / "hollow"
    shutil.copytree(answered / "training" / "drafter", hollow)
    for file in hollow.glob("*.safetensors*"):
        file.unlink()
    shutil.rmtree(answered / "training")
    refused("init: " + str(hollow), config, answered, init=hollow)
    (tmp_path / "file").write_text("")
    refused(f"out: {tmp_path / 'file'}: File exists", config, tmp_path / "file")


@pytest.mark.parametrize("name, words", [
    ("recipe.json", "recipe.json: not JSON"),
    ("prompts.jsonl", "prompts.jsonl:1: not JSON"),
    ("answers/0000.safetensors", "answers/0000.safetensors: not a readable safetensors file"),
    ("training/state.json", "training/state.json: not JSON"),
])  # fmt: skip
def test_a_damaged_file_of_a_run_is_named(name: str, words: str, checkpoint: Path, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(finished, folder)
    (folder / name).write_bytes((folder / name).read_bytes()[:7])
    with pytest.raises(ConfigError) as error:
        train(tiny.config(checkpoint), folder, nothing, **CPU)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name, words", [
    ("prompts.jsonl", "prompts.jsonl:1: turns: missing"), ("training/state.json", "state.json: config: missing"),
])  # fmt: skip
def test_an_incomplete_file_of_a_run_is_named(name: str, words: str, checkpoint: Path, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "incomplete"
    shutil.copytree(finished, folder)
    (folder / name).write_text('{"version": 2, "source": "x"}')
    with pytest.raises(ConfigError) as error:
        train(tiny.config(checkpoint), folder, nothing, **CPU)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_another_schedule_on_the_same_answers_needs_its_own_training_folder(checkpoint: Path, finished: Path, answered: Path) -> None:
    shorter = tiny.config(checkpoint, training=dict(steps=2))
    with pytest.raises(ConfigError, match="holds a run of another recipe"):
        train(shorter, finished, nothing, **CPU)
    assert train(shorter, answered, nothing, **CPU)["step"] == 2


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_trains_and_evaluates(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command; another for the rest of a run that was told to stop; then AL and calibration of what it wrote."""
    monkeypatch.chdir(tmp_path)
    recipe = tiny.recipe(checkpoint)
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    Path("own.jsonl").write_text('{"turns": ["red river?"]}\n')
    Path("test.jsonl").write_text('{"turns": ["green cloud"]}\n{"turns": ["stone river"]}\n')
    Path("fit.jsonl").write_text('{"turns": ["winter number"]}\n')
    here = ["--device", "cpu", "--dtype", "float32", "--quiet"]
    call = ["train", "recipe.yaml", "--out", "run", "--prompts", "own.jsonl", "--evaluation", "test.jsonl", *here]
    assert dspark(*call, "--minutes", "0") == 0
    stopped = json.loads(capsys.readouterr().out)
    assert stopped["step"] == 1 and stopped["held_out"]["tau"] > 1
    assert dspark(*call) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["step"] == 8 and summary["prompts"]["own.jsonl"] == 1 and summary["held_out"]["tau"] > 1
    drafter = "run/training/drafter"
    assert dspark("check", "--target", str(checkpoint), "--drafter", drafter, "--context", "64", "--min-al", "1", "--device", "cpu") in (0, 1)
    assert "outputs equal plain decoding" in capsys.readouterr().out
    evaluation = ["--target", str(checkpoint), "--prompts", "test.jsonl", "--trees", "chain,8", "--max-tokens", "8", "--speed", "0"]
    assert dspark("eval", drafter, *evaluation, "--fit-calibration", "fit.jsonl", "--json", "e.json", *here) == 0
    assert [r["shape"] for r in json.loads(Path("e.json").read_text())["results"]] == ["chain", "tree-8"] * 2
    assert len(json.loads((Path(drafter) / "calibration.json").read_text())["temperatures"]) == 4
    capsys.readouterr()

    text = card(Path(drafter), Path("run"), [Path("e.json")])
    rows = json.loads(Path("e.json").read_text())["results"]
    for row in rows:
        al = f"{row['spec_decode_acceptance_length']:.2f}"
        assert f"| {row['temperature']:g} | {row['shape']} | {al} | {al} |" in text
    assert f"{summary['answers']:,} answers" in text and "| 1 | own.jsonl |" in text and " steps of fit" in text
    with pytest.raises(ConfigError, match="recipe.yaml: not JSON|not a file of `dspark eval --json`"):
        card(Path(drafter), Path("run"), [Path("run/summary.json")])

    again = ["--init", drafter]
    assert dspark("train", "recipe.yaml", "--out", "second", "--prompts", "own.jsonl", *again, *here) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 8


@pytest.mark.parametrize("changes, words", [
    (dict(trainer=dict(steps=1)), "trainer: unknown field"),
    (dict(training=dict(steps=0)), "training.steps: found 0, allowed: input should be greater than or equal to 1"),
    (dict(training=dict(anchors=97)), "training: anchors: found 97, allowed: at most row_length (96)"),
    (dict(training=dict(save_every=5, log_every=3)), "training: save_every: found 5, allowed: multiples of log_every (3)"),
    (dict(answers=dict(file_answers=65)), "answers.file_answers: found 65"),
    (dict(drafter=dict(markov_head_type="lstm")), "drafter.markov_head_type: found 'lstm'"),
    (dict(drafter=dict(target_layer_ids=[0, 5])), "drafter.target_layer_ids: found [0, 5], allowed: 0 to 1, -1 for embeddings"),
    (dict(prompts=dict(domains=[dict(title="x", examples=["y"], template="none")])), "template: found 'none', allowed: a text with one <turn>"),
    (dict(answers=dict(temperatures=[])), "answers.temperatures"),
    (dict(answers=dict(temperatures=[float("inf")])), "answers.temperatures.0: found inf"),
    (dict(training=dict(lr=float("inf"))), "training.lr: found inf"),
    (dict(seed=1 << 30), "seed: found 1073741824, allowed: input should be less than 1073741824"),
    (dict(target="nobody"), "target: found 'nobody', allowed: smollm2, a folder"),
])  # fmt: skip
def test_a_recipe_that_cannot_be_meant_is_one_line(
    changes: dict[str, Any], words: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny.recipe(checkpoint)
    for section, fields in changes.items():
        recipe[section] = recipe.get(section, {}) | fields if isinstance(fields, dict) else fields
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "p.jsonl").write_text('{"turns": ["red"]}\n')
    assert dspark("train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "run"), "--device", "cpu") == 2
    out, err = capsys.readouterr()
    assert words in err and err.count("\n") == 1 and not out


def test_recipes_are_found_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert dspark("train", "nobody", "--out", str(tmp_path)) == 2
    assert "train: found 'nobody', allowed: a .yaml file or one of " in capsys.readouterr().err
