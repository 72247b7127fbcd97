"""Rendering of runs: hand-made rows in, exact text out."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from dspark_runtime.errors import ConfigError
from eval import report
from eval.compare import beyond_spread, compare
from eval.schema import BenchRow, Spread, load_run
from tests.eval.rows import environment, row, run

ROOT = Path(report.__file__).resolve().parent.parent


SYNTHETIC = "SYNTHETIC AL 1.50 (min_variance)"


def test_table_is_aligned() -> None:
    lines = report.table(("name", "n"), [("a", "1"), ("long name", "1000")]).splitlines()
    assert lines == ["| name      |    n |", "|-----------|-----:|", "| a         |    1 |", "| long name | 1000 |"]


def cells(text: str, line: str) -> list[list[str]]:
    """The cells of every table row that starts with this name."""
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines() if row.startswith("|")]
    return [row[1:] for row in rows if row[0] == line]


def test_markdown_holds_every_number_of_a_line() -> None:
    text = report.render(run(row(0, 100.0), row(3, 150.0)), "md")
    speed, step, acceptance = cells(text, "ngram k=3")
    assert speed == ["1", "1.50", "150.0", "150.0", "1.50", "1.25", "6.67", "10.00", "1.0 %", "20.0 %"]
    assert step == ["1", "10.00", "1.00", "7.00", "1.00", "1.00", "5.00", "2.0", "1.0"]
    assert acceptance == [
        "1", "1.50", "1.40", "0.50", "1.00", "50.0 %", "0.50 0.00 0.00", "0.50 0.00 -", "5 5 0 0",
    ]  # fmt: skip
    assert "SYNTHETIC" not in text and max(map(len, text.splitlines()[:8])) <= 200


@pytest.mark.parametrize("form", ["md", "csv", "json", "jsonl"])
def test_synthetic_is_stamped_in_every_output(form: str) -> None:
    text = report.render(run(row(0, 100.0), row(3, 150.0, SYNTHETIC)), form)
    if form == "md":
        assert text.splitlines()[0].startswith("SYNTHETIC")
        assert len(cells(text, "SYNTHETIC AL 1.50 k=3")) == 3 and f"synthetic laws: {SYNTHETIC};" in text
    elif form == "json":
        data = json.loads(text)
        assert data["synthetic"] and [r["synthetic"] for r in data["results"]] == [False, True]
        assert data["results"][1]["acceptance"] == SYNTHETIC
    else:
        assert SYNTHETIC in text.splitlines()[-1] and "SYNTHETIC" not in text.splitlines()[-2]


def test_json_reads_back_and_other_versions_are_refused(tmp_path: Path) -> None:
    original = run(row(0, 100.0), row(3, 150.0))
    path = tmp_path / "run.json"
    path.write_text(report.render(original, "json"))
    assert load_run(path) == original
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(ConfigError, match="schema_version: found 2, allowed: 1"):
        load_run(path)
    path.write_text(report.render(original, "json").replace('"tpot_ms": 10.0', '"tpot_ms": "slow"'))
    with pytest.raises(ConfigError, match="results.0.tpot_ms: found 'slow'"):
        load_run(path)


def test_csv_has_one_flat_line_a_row() -> None:
    lines = list(csv.DictReader(io.StringIO(report.render(run(row(0, 100.0), row(3, 150.0)), "csv"))))
    assert [line["num_speculative_tokens"] for line in lines] == ["0", "3"]
    assert lines[1]["step_ms.verify"] == "7.0" and lines[1]["emitted_histogram"] == "5 5 0 0"
    assert lines[1]["spread.prompts"] == "0.2" and lines[1]["commit"] == "abc123"


def test_a_point_that_could_not_run_is_a_line_that_says_so() -> None:
    missing = BenchRow(
        target="tiny", drafter="ngram", method="ngram", acceptance="SYNTHETIC AL 3.24", synthetic=True, num_requests=1,
        num_speculative_tokens=2, tree="chain", dtype="float32", max_tokens=8, error="AL 3.24 needs k >= 3",
    )  # fmt: skip
    for form in ("md", "csv", "json", "jsonl"):
        assert "AL 3.24 needs k >= 3" in report.render(run(row(0, 100.0), missing), form)


def test_an_unsteady_machine_is_one_line() -> None:
    shaky = dict(warning="unsteady machine: the repeats' step times spread by 20 %")
    text = report.render(run(row(0, 100.0, **shaky), row(3, 150.0, **shaky), row(4, 1.0)), "md")
    assert text.count("WARNING") == 1 and "in 2 of 3 lines" in text


def test_compare_names_ratio_verdict_and_machine() -> None:
    a = run(row(0, 100.0), row(3, 150.0))
    b = run(row(0, 101.0), row(3, 180.0), environment=environment(machine="other"))
    text = compare(a, b)
    (plain,), (drafted,) = cells(text, "plain"), cells(text, "ngram k=3")
    assert (plain[5], plain[8], drafted[5], drafted[8]) == ("1.010", "within spread", "1.200", "B faster")
    assert "DIFFERENT MACHINES" in text and "machine: box | other" in text
    assert "DIFFERENT MACHINES" not in compare(a, a)
    with pytest.raises(ConfigError, match="share no point"):
        compare(a, run(row(3, 1.0, b=8)))


def test_a_difference_counts_beyond_twice_the_joint_spread() -> None:
    noisy = dict(spread=Spread(repeats=0.03, prompts=0.0))
    a = row(3, 100.0, **noisy)  # joint spread of 100 and 108.5: sqrt(3.000^2 + 3.255^2) = 4.43; twice: 8.85
    assert not beyond_spread(a, row(3, 108.5, **noisy))
    assert beyond_spread(a, row(3, 109.5, **noisy))


def test_plot_draws_both_formats(tmp_path: Path) -> None:
    sweep = run(row(0, 100.0), row(1, 120.0), row(3, 150.0), row(3, 160.0, SYNTHETIC))
    for name in ("out.svg", "out.png"):
        report.plot(sweep, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    assert "SYNTHETIC" in report.plot_title(sweep) and "SYNTHETIC" not in report.plot_title(run(row(0, 1.0)))
    report.plot(run(row(0, 100.0)), tmp_path / "plain.svg")


def test_results_table_goes_between_the_markers(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "a.json").write_text(report.render(run(row(0, 100.0), row(3, 150.0, SYNTHETIC)), "json"))
    (tmp_path / "kernels.json").write_text('{"schema_version": 1, "results": [{"op": "linear", "us": 3}]}')
    text = f"head\n{report.BEGIN}\nstale\n{report.END}\ntail\n"
    new = report.with_results(text, tmp_path)
    assert new.startswith(f"head\n{report.BEGIN}\n| machine") and new.endswith(f"{report.END}\ntail\n")
    assert "stale" not in new and "SYNTHETIC AL 1.50 k=3" in new and "cpu/a.json" in new and "linear" not in new
    assert report.with_results(new, tmp_path) == new
    with pytest.raises(ConfigError, match="markers"):
        report.with_results("no markers", tmp_path)


def test_readme_results_are_current() -> None:
    text = (ROOT / "README.md").read_text()
    assert report.with_results(text) == text, "run: python -m eval.report README.md"
