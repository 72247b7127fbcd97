"""`dspark reproduce`: the floor is a floor, held points were held, broken files name their field, the page is whole."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from dspark_runtime.configs import find, names, read_yaml
from dspark_runtime.validation import checked
from dspark_runtime.errors import ConfigError
from eval import reproduce
from eval.cli import main
from eval.reported import Reported, all_reported, load_reported
from eval.reproduce import (
    WhatIf,
    changed,
    evaluate,
    find_row,
    held_errors,
    own_measurements,
    ratio_of_floors,
    throughput_floor,
)

ROOT = Path(__file__).resolve().parents[2]
CLAIM = "kimi-k3-gb300-vllm-2026-09"
ROWS = evaluate()
STEPS = [r for r in ROWS if r.reported_ms]


def dspark(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code


# ------------------------------------------------------------------------------------------------ the model


@pytest.mark.parametrize("row", STEPS, ids=lambda r: r.name)
def test_no_report_is_faster_than_its_floor(row) -> None:
    assert 0 < row.step.floor.high <= row.reported_ms
    assert row.fitted_ms is None or row.fitted_ms >= row.step.floor.mid


def test_no_throughput_is_above_its_floor() -> None:
    (row,) = (r for r in ROWS if r.point.metric == "total_throughput_per_gpu")
    assert row.point.value < throughput_floor(row.entry, row.point)


def test_no_own_measurement_is_faster_than_its_floor() -> None:
    own = own_measurements()
    assert len(own) >= 12
    for o in own:
        assert 0 < o.floor_ms <= o.measured_ms, o.name


def test_the_five_systems_of_the_announcement_are_entered() -> None:
    entries = all_reported()
    assert {
        CLAIM,
        "kimi-k3-mi355x-parity",
        "qwen3.8-gb300-pd",
        "vera-rubin-7.8x",
        "kimi-k3-tpu-v7",
        "kimi-k3-gb200",
    } <= set(entries)
    for entry in entries.values():
        assert entry.sources and entry.title


def test_implied_steps() -> None:
    """AL / (tokens/s), by hand."""
    implied = {r.name: r.reported_ms for r in STEPS}
    assert implied[f"{CLAIM}/al6"] == pytest.approx(1000 * 6 / 840)
    assert implied["kimi-k3-tpu-v7/al6"] == pytest.approx(8.4626, rel=1e-4)
    assert implied["kimi-k3-tpu-v7/plain-b8"] == pytest.approx(8000 / 865)
    assert implied["kimi-k3-gb200/plain-b2"] == pytest.approx(8.8106, rel=1e-4)
    assert implied["kimi-k3-b300-aiconfigurator-day0/accept6"] == pytest.approx(7 * 2.83)
    assert implied["qwen3-8b-h200-vllm/al6-b32"] == pytest.approx(1000 * 6 * 32 / 16269)


def test_held_points_of_k3_are_predicted() -> None:
    """At most half of the points set constants. What falls out of 15 % is known by name, so that another would be
    seen."""
    k3 = [r for r in ROWS if r.is_k3 and r.point.use in ("fit", "held")]
    assert sum(r.point.use == "fit" for r in k3) <= len(k3) / 2
    errors = dict((r.name, abs(e)) for r, e in held_errors(ROWS))
    assert median(errors.values()) <= 0.08
    assert {name for name, e in errors.items() if e > 0.15} == {"kimi-k3-mi350x-tokenspeed-131k/dspark"}


def test_the_choice_of_fitted_points_matters_little() -> None:
    middle, high, share = reproduce.random_halves(ROWS)
    assert middle <= high <= 0.08 and share > 0.85


def test_held_points_enter_no_constant() -> None:
    entry = load_reported("kimi-k3-gb200")
    points = tuple(p.model_copy(update={"value": p.value * 3}) if p.use == "held" else p for p in entry.points)
    moved = evaluate({"kimi-k3-gb200": entry.model_copy(update={"points": points})})
    constants = {r.name: r.constant for r in ROWS}
    assert all(r.constant == constants[r.name] for r in moved)
    points = tuple(p.model_copy(update={"value": p.value * 2}) if p.use == "fit" else p for p in entry.points)
    moved = evaluate({"kimi-k3-gb200": entry.model_copy(update={"points": points})})
    assert all(r.constant == pytest.approx(constants[r.name] / 2) for r in moved)


def test_one_request_on_the_h200_from_kernels_alone() -> None:
    """Where the kernels of a run were timed, their sum is the step: one request of Qwen3-8B, within 10 %."""
    own = {o.name: o for o in own_measurements()}
    for name in (
        "torch_qwen3_8b_ngram: plain chain, b=1",
        "torch_qwen3_8b_draft_0.6b: SYNTHETIC AL 6.00 (min_variance) chain, b=1",
    ):
        assert own[name].achievable.mid == pytest.approx(own[name].measured_ms, rel=0.10)
    rows = {r.name: r for r in STEPS}
    for name in ("qwen3-8b-h200-vllm/plain", "qwen3-8b-h200-vllm/al6", "qwen3-8b-h200-vllm/al6-b8"):
        assert rows[name].step.achievable.mid == pytest.approx(rows[name].reported_ms, rel=0.10), name


def test_ratios_of_machines() -> None:
    (row,) = (r for r in ROWS if r.name.startswith("vera-rubin"))
    assert ratio_of_floors(row.entry, row.point) == pytest.approx(22 / 8, rel=1e-6)  # same bytes, other bandwidth


# ------------------------------------------------------------------------------------------------ one entry


def test_the_verdict_on_the_claim_names_its_explanations() -> None:
    text = reproduce.verdict(find_row(CLAIM))
    for part in (
        "at most 7.14 ms", "TP16 with the measured expert kernels: 6.39 ms",
        "EP16 with the measured expert kernels: 4.58 ms",
        "Faster expert kernels", "16 us a layer", "Correlated routing", "Together: EP16", "Parallelism unknown",
        "Not stated:",
    ):  # fmt: skip
        assert part in text, part


def test_what_if() -> None:
    row = find_row(CLAIM)
    base = row.fitted_ms
    assert changed(row, WhatIf(al=3)).fitted_ms == base  # a step does not know how many of its drafts were accepted
    assert changed(row, WhatIf(gpus=8)).step.floor.mid == pytest.approx(2 * row.step.floor.mid)
    assert changed(row, WhatIf(hardware="rubin")).step.floor.mid == pytest.approx(row.step.floor.mid * 8 / 22)
    assert changed(row, WhatIf(tree="tree-16")).step.unique_experts > row.step.unique_experts
    assert changed(row, WhatIf(requests=8)).fitted_ms > base
    assert changed(row, WhatIf(al=3)).reported_ms is None
    assert "DOES NOT FIT" in reproduce.capacity_note(changed(row, WhatIf(gpus=4)))
    steps = [value for _, _, value, _ in reproduce.ladder(row)]
    assert steps == sorted(steps) and reproduce.ladder(row)[0][3] == 1.0
    assert reproduce.al_to_match(row, base) == row.point.acceptance_length


def test_fewer_tokens_than_the_reports_length_say_what_is_left_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("reproduce", CLAIM, "--tokens", "4") == 0
    out = capsys.readouterr().out
    assert dspark("reproduce", CLAIM, "--tokens", "4", "-o", "json") == 0
    (one,) = json.loads(capsys.readouterr().out)["results"]
    assert (one["acceptance_length"], one["verified_tokens"], one["num_requests"]) == (4, 4, 1)
    assert "What if tokens 4 (AL 4, as far as 4 tokens can carry it)" in out
    assert f"= {4e3 / one['fitted_ms']:.0f} tokens/s/user" in out


def test_one_result_in_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("reproduce", CLAIM, "--al", "3") == 0
    out = capsys.readouterr().out
    for part in (
        "What if al 3",
        "420 tokens/s/user",
        "routed experts",
        "AL to beat plain decoding",
        "tpu-v7",
        "Sources:",
    ):
        assert part in out, part


def test_the_table_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("reproduce") == 0
    out = capsys.readouterr().out
    assert out.startswith("SYNTHETIC")
    for row in ROWS:
        assert f"| {row.name} " in out
        assert (f"{row.point.acceptance_length:g} SYNTHETIC" in out) or not row.point.synthetic
    for part in ("outside 15 %", "held: ", "fitted: ", "no CUDA graph"):
        assert part in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("reproduce", "-o", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [r["result"] for r in found["results"]] == [r.name for r in ROWS]
    assert dspark("reproduce", CLAIM, "--al", "3", "-o", "json") == 0
    (one,) = json.loads(capsys.readouterr().out)["results"]
    assert one["what_if"] == {"al": 3.0} and one["reported_step_ms"] is None and one["fitted_ms"]


@pytest.mark.parametrize(
    "arguments",
    [["reproduce"], ["reproduce", "--help"], ["reproduce", CLAIM], ["config", f"configs/reported/{CLAIM}.yaml"]],
)
def test_no_heavy_library(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom eval.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'cutlass', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "reported: found 'nothing', allowed: a .yaml file or one of"),
        ([f"{CLAIM}/al7"], "point: found 'al7', allowed: al6"),
        (["--al", "3"], "al: found without a name"),
        (["--run"], "run: found without a name"),
        ([CLAIM, "--al", "9"], "al: found 9, allowed: 1 to 8"),
        ([CLAIM, "--gpus", "0"], "gpus: found 0"),
        ([CLAIM, "--hardware", "abacus"], "hardware: found 'abacus'"),
        ([CLAIM, "--tree", "oak"], "tree: found 'oak'"),
        ([CLAIM, "--tree", "tree-8", "--tokens", "4"], "tree: found together with tokens"),
        (["-o", "xml"], "output: found 'xml', allowed: md, json"),
        ([CLAIM, "--plot", "x.pdf"], "plot: found 'x.pdf'"),
        ([CLAIM, "--tokens", "4", "--al", "6"], "al: found 6, allowed: 1 to 4 (the verified tokens)"),
        (["--report", "no/folder/x.html"], "report: found 'no/folder/x.html', allowed: a file that can be written"),
        (["--report", "."], "report: found '.', allowed: a file that can be written"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("reproduce", *arguments) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


# ---------------------------------------------------------------------------------------------------- data


BROKEN = [
    (lambda v: v.pop("points"), "sources: points: no such field"),
    (lambda v: v.update(gpu=3), "gpu: no source"),
    (lambda v: v["points"][0].update(value=-1), "points.0.value: found -1"),
    (lambda v: v["points"][0].update(metric="speed"), "points.0.metric: found 'speed'"),
    (lambda v: v["points"][0].update(acceptance_length=9), "acceptance_length: found 9, allowed: at most tokens (8)"),
    (lambda v: v["points"][0].update(metric="ratio"), "use: found fit with metric ratio, allowed: shown"),
    (lambda v: v["points"][0].update(metric="ratio", use="shown"), "against: missing"),
    (lambda v: v["points"].append(dict(v["points"][0])), "points: found al6 twice"),
    (lambda v: v.pop("not_stated"), "not_stated: missing"),
]


@pytest.mark.parametrize(("spoil", "message"), BROKEN, ids=[m for _, m in BROKEN])
def test_a_broken_result_names_the_field(spoil, message: str) -> None:
    values = read_yaml(find("reported", CLAIM))
    spoil(values)
    with pytest.raises(ConfigError) as error:
        checked(Reported, values, "x.yaml")
    assert str(error.value).startswith("x.yaml: ") and message in str(error.value) and "\n" not in str(error.value)


def test_a_result_of_ones_own_is_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = find("reported", CLAIM).read_text().replace("value: 840", "value: 700")
    (tmp_path / "mine.yaml").write_text(text)
    assert dspark("config", str(tmp_path / "mine.yaml")) == 0
    assert "reported result" in capsys.readouterr().out
    assert dspark("reproduce", str(tmp_path / "mine.yaml")) == 0
    assert "8.57 ms" in capsys.readouterr().out
    (tmp_path / "mine.yaml").write_text(text.replace("hardware: gb300", "hardware: gb999"))
    assert dspark("reproduce", str(tmp_path / "mine.yaml")) == 2
    assert "found 'gb999'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["reported", "hardware", "models"])
def test_config_says_what_a_file_is(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in names(kind):
        assert dspark("config", str(find(kind, name))) == 0
        assert name in capsys.readouterr().out


def test_only_measured_ceilings_reach_the_bench() -> None:
    from eval.floor import known_hardware

    assert known_hardware("NVIDIA H200")["read_bandwidth_gbps"] == 4500
    assert known_hardware("NVIDIA B300 SXM6 AC") is None  # a datasheet is no measured ceiling


# ---------------------------------------------------------------------------------------------------- page


def test_the_page_is_whole_and_self_contained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dspark("reproduce", "--report", str(tmp_path / "page.html")) == 0
    page = (tmp_path / "page.html").read_text()
    for row in ROWS:
        assert f"<td>{row.name}</td>" in page
    for entry in all_reported().values():
        assert entry.title.replace("&", "&amp;") in page
    assert page.count("<svg") == 3 and "outside 15 %" in page
    assert not re.search(r"(src|href)=\"(?!#)", page) and "<script" not in page and "@import" not in page
    assert "nan" not in page.lower().replace("finance", "") or not re.search(r"\bnan\b", page.lower())


def test_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one.svg", "one.png"):
        assert dspark("reproduce", CLAIM, "--al", "3", "--plot", str(tmp_path / name)) == 0
        assert (tmp_path / name).stat().st_size > 10_000
    assert "SYNTHETIC" in (tmp_path / "one.svg").read_text()
