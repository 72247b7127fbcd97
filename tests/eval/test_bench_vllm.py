"""What `bench --engine vllm` decides and computes without vLLM: options, its configuration, counters to numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from drafters.dspark.dialects import parse
from drafters.tree import TreeSpec
from dspark_runtime.errors import ConfigError, DsparkError
from dspark_runtime.records import StepRecord
from dspark_runtime.synthetic import SyntheticLaw
from dspark_runtime.targets import target_config
from eval import bench, bench_vllm, cli, report
from eval.bench_vllm import ACCEPTED, BY_POSITION, DRAFTED, DRAFTS
from eval.schema import bench_config
from tests.eval import rows
from tests.vllm.test_bench import commands

TUNED = {"method": "dspark", "model": "smollm2-135m-dspark", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(tree="tree-16"), "tree: found 'tree-16' with engine vllm, allowed: chains"),
        (dict(scheduler="fixed:2"), "scheduler: found 'fixed:2' with engine vllm, allowed: none"),
        (dict(backend="reference"), "backend: found 'reference' with engine vllm, allowed: auto"),
        (dict(device="cpu"), "device: found 'cpu' with engine vllm, allowed: auto"),
        (dict(synthetic_acceptance_trace="t.json"), "synthetic_acceptance_trace: found 't.json' with engine vllm"),
        (dict(routing="zipf:1", weights="dummy"), "routing: found 'zipf:1' with engine vllm, allowed: model, uniform"),
        (dict(rejection_sample_method="node"), "rejection_sample_method: found 'node' with engine vllm, allowed: auto, "),
        (
            dict(rejection_sample_method="block", acceptance_length="2"),
            "rejection_sample_method: found 'block' with synthetic acceptance, allowed: auto",
        ),
        (dict(speculative_config={"method": "dspark"}), "speculative_config: num_speculative_tokens: missing"),
        (
            dict(speculative_config=TUNED | {"synthetic_acceptance_length": 2.0}),
            "speculative_config: found synthetic_acceptance_length, allowed: --al or --rates",
        ),
        (
            dict(speculative_config=TUNED | {"rejection_sample_method": "synthetic"}),
            "speculative_config: found rejection_sample_method, allowed: --al or --rates",
        ),
    ],
)
def test_what_vllm_cannot_serve_is_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        bench_vllm.refuse(bench_config(dict(engine="vllm") | changes))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--engine", "sglang"], "engine: found 'sglang', allowed: 'dspark' or 'vllm'"),
        (["--speculative-config", "{}"], "speculative_config: found with engine dspark, allowed: with vllm"),
        (["--engine", "vllm", "--rank-of", "8", "--weights", "dummy"], "rank_of: found with engine vllm, "),
        (["--engine", "vllm", "--speculative-config", "{"], "speculative_config: found '{', allowed: a JSON object"),
        (["--engine", "vllm", "--speculative-config", "[1]"], "speculative_config: found [1], allowed:"),
        (
            ["--engine", "vllm", "--speculative-config", json.dumps(TUNED), "-k", "2"],
            "speculative_config: found together with num_speculative_tokens, allowed: one of them",
        ),
        (["--engine", "vllm", "--al", "9", "-k", "3"], "acceptance_length: found 9, allowed: 1 to 4 with up to 3 drafts"),
        (["--engine", "vllm", "-k", "3"], "engine: found vllm, which "),
    ],
)
def test_the_command_line_refuses(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_vllm.plugin, "_installed", lambda: None)
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", *arguments])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith(f"dspark: {message}") and said.count("\n") == 1
    if "which" in message:
        assert "pip install 'dspark-runtime[vllm]'" in said


def test_the_commands_of_the_page_lack_nothing_but_vllm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM is, tests/vllm/test_bench.py runs them."""
    monkeypatch.setattr(bench_vllm.plugin, "_installed", lambda: None)
    found = commands()
    assert len(found) == 2
    for arguments in found:
        with pytest.raises(SystemExit):
            cli.main(arguments)
        assert capsys.readouterr().err.startswith("dspark: engine: found vllm, which ")


def test_the_default_recipe_is_the_same_with_another_engine() -> None:
    ours, theirs = cli.recipe(None, {}), cli.recipe(None, dict(engine="vllm"))
    assert theirs == ours.model_copy(update=dict(engine="vllm"))


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_counters_are_what_counting_every_step_gives(depth: int) -> None:
    """Steps drawn at random, counted as vLLM counts them and as this project's engine does."""
    draw = random.Random(depth)
    accepted = [draw.randint(0, depth) for _ in range(200)]
    counts = {
        DRAFTS: len(accepted),
        DRAFTED: depth * len(accepted),
        ACCEPTED: sum(accepted),
        BY_POSITION: [sum(a > i for a in accepted) for i in range(depth)],
    }
    steps = [StepRecord([0], [depth], [a], [a + 1], depth + 1, 0) for a in accepted]
    ours = bench.acceptance_numbers([bench.Repeat(steps, 0.0)], depth)
    for name, value in bench_vllm.acceptance_numbers(counts, depth).items():
        assert value == pytest.approx(ours[name], rel=1e-12), name
    halves = [{n: c if isinstance(c, int) else list(c) for n, c in counts.items()}] * 2
    twice = bench_vllm.summed(halves)
    assert twice == {n: 2 * c if isinstance(c, int) else [2 * x for x in c] for n, c in counts.items()}


def test_counters_of_a_late_position_and_of_nothing() -> None:
    found = bench_vllm.acceptance_numbers({DRAFTS: 4, DRAFTED: 8, ACCEPTED: 0, BY_POSITION: [0, 0]}, 2)
    assert found["spec_decode_acceptance_length"] == 1.0 and found["emitted_histogram"] == [4, 0, 0]
    assert found["spec_decode_conditional_acceptance_rates"] == [0.0, None]
    with pytest.raises(DsparkError, match="no drafts"):
        bench_vllm.acceptance_numbers({DRAFTS: 0}, 2)


EVENTS = [
    (50.0, [1, 0]),  # the first prompt is read, the second is not
    (60.0, [2, 1]),  # the first decodes beside the second's prompt
    (10.0, [3, 1]),
    (12.0, [1, 4]),
    (9.0, [0, 2]),  # the first has ended
]


def test_steps_from_outputs() -> None:
    repeat = bench_vllm.repeat_of(EVENTS, 3)
    assert repeat.prefill_ms == 110.0
    assert [(s.request_ids, s.emitted, s.ms["total"]) for s in repeat.records] == [
        ([0], [2], 60.0), ([0, 1], [3, 1], 10.0), ([0, 1], [1, 4], 12.0), ([1], [2], 9.0)
    ]  # fmt: skip
    counts = {DRAFTS: 6, DRAFTED: 18, ACCEPTED: 7, BY_POSITION: [4, 2, 1]}
    answer = dict(repeats={"2": [dict(events=EVENTS, counts=counts)]})
    found = bench_vllm.line_numbers(answer, 2, 3)
    assert found["output_throughput"] == pytest.approx(1e3 * 9 / 22)  # only where both ran
    assert found["spec_decode_acceptance_length"] == pytest.approx(13 / 6) and "warning" not in found
    assert found["step_ms"].total == 11.0 and found["step_ms"].verify is None
    assert found["vllm_metrics"] == counts
    assert found["spec_decode_acceptance_length_per_request"] == pytest.approx((2 + 7 / 3) / 2)
    # Prompt lookup drafts nothing in some steps, which vLLM leaves out of its count.
    fewer = dict(repeats={"2": [dict(events=EVENTS, counts=counts | {DRAFTS: 4, DRAFTED: 12})]})
    assert bench_vllm.line_numbers(fewer, 2, 3)["warning"] == (
        "vLLM counts 4 drafts in 6 steps of requests, those with drafts only: over all steps AL is 2.17"
    )
    # Plain decoding has no counters.
    plain = [(5.0, [1, 1]), (4.0, [1, 1]), (4.0, [1, 1])]
    found = bench_vllm.line_numbers(dict(repeats={"2": [dict(events=plain, counts={})]}), 2, 0)
    assert (found["spec_decode_acceptance_length"], found["vllm_metrics"]) == (1.0, None)
    assert found["tpot_ms"] == pytest.approx(4.0)


def test_vllm_is_told_the_law_by_its_rates() -> None:
    point = bench.Point(1, "chain", TreeSpec.chain(4), SyntheticLaw.make(4, acceptance_length=2.4), 2.4)
    config = bench_config(dict(engine="vllm", acceptance_length="2.4", num_speculative_tokens="4"))
    found = bench_vllm.speculative_config(config, {"method": "ngram"}, point)
    assert found["synthetic_acceptance_rates"] == pytest.approx([1, 0.4, 0, 0])
    plain = {"method": "ngram", "num_speculative_tokens": 4}
    assert {name: found[name] for name in plain} == plain and found["rejection_sample_method"] == "synthetic"
    point.law = None
    assert bench_vllm.speculative_config(config, {"method": "ngram"}, point) == plain


def test_drafters_by_vllms_names(tmp_path: Path) -> None:
    shape = target_config("smollm2-135m")
    target = bench_vllm.Served("smollm2", tmp_path / "target", shape, None, "bfloat16")

    def spoken(**changes: object) -> tuple[dict[str, object], str]:
        return bench_vllm.speculation(bench_config(dict(engine="vllm") | changes), target, tmp_path / "drafter")

    shipped, name = spoken(drafter="smollm2-135m-dspark", temperature=1.0)
    assert shipped["method"] == "dspark" and Path(shipped["model"]).is_dir() and name == "dspark:smollm2-135m-dspark"
    assert shipped["draft_sample_method"] == "probabilistic"
    # What dspark tune prints goes in as it stands; a name that ships becomes its folder.
    assert spoken(speculative_config=TUNED) == (TUNED | {"model": shipped["model"]}, name)
    assert spoken(drafter="draft:self")[0] == {"method": "draft_model", "model": str(tmp_path / "target")}
    assert spoken(drafter="ngram")[0] == {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}


def test_an_architecture_becomes_a_folder_that_reads_back(tmp_path: Path) -> None:
    shape = target_config("qwen3-8b")
    target = bench_vllm.Served("qwen3-8b", tmp_path, shape, None, "bfloat16")
    config = bench_config(dict(engine="vllm", drafter="qwen3-8b-dspark", weights="dummy"))
    found, _ = bench_vllm.speculation(config, target, tmp_path / "drafter")
    assert found == {"method": "dspark", "model": str(tmp_path / "drafter")}
    written = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert parse(written, "written") == bench.drafter_config("qwen3-8b-dspark", shape)
    with pytest.raises(ConfigError, match="add --weights dummy"):
        bench_vllm.speculation(config.model_copy(update=dict(weights="auto")), target, tmp_path / "drafter")


def test_uniform_experts_are_vllms_own_simulation() -> None:
    moe, dense = (SimpleNamespace(name=n, config=target_config(n)) for n in ("qwen3-30b-a3b", "qwen3-8b"))
    config = bench_config(dict(engine="vllm", weights="dummy"))
    assert bench_vllm.routing_name(config, moe) == "uniform" and bench_vllm.routing_name(config, dense) is None
    with pytest.raises(ConfigError, match="routing: found 'uniform' with qwen3-8b"):
        bench_vllm.routing_name(config.model_copy(update=dict(routing="uniform")), dense)


def test_a_process_that_dies_is_an_error_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho one >&2; echo 'out of memory' >&2; exit 7\n")
    fake.chmod(0o755)
    monkeypatch.setattr(bench_vllm.sys, "executable", str(fake))
    assert bench_vllm.in_a_process(dict(plugged=True), tmp_path) == {
        "error": "vLLM's process ended with code 7: out of memory"
    }


def test_the_table_has_a_column_for_the_engine() -> None:
    lines = [
        rows.row(0, 10.0, engine="vllm"),
        rows.row(3, 20.0, "SYNTHETIC AL 2.00", engine="vllm"),
        rows.row(3, 25.0, "SYNTHETIC AL 2.00", engine="vllm+plugin", error="why"),
    ]
    text = report.markdown(rows.run(*lines, environment=rows.environment(vllm="0.33.0")))
    assert "| SYNTHETIC AL 2.00 k=3 | vllm+plugin | 1 |" in text and text.startswith("SYNTHETIC ACCEPTANCE")
    assert "vLLM 0.33.0" in text and "ERROR: vllm+plugin: SYNTHETIC AL 2.00 k=3, b=1: why" in text
    assert "engine" not in report.markdown(rows.run(rows.row(0, 10.0)))
