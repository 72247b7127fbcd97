"""The commands of docs/vllm.md that need vLLM, `dspark bench --engine vllm`, on a tiny pair in place of theirs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from dspark_runtime.vllm import SWITCH
from eval.schema import BenchRow, Run, load_run
from tests.vllm import cases

ROOT = Path(__file__).parents[2]
TOKENS, REPEATS = 14, 2


def commands() -> list[list[str]]:
    text = "".join(re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "vllm.md").read_text(), re.S)).replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("dspark bench")]


def bench(arguments: list[str], target: Path, folder: Path) -> tuple[Run, str]:
    """Switched off outside: the command decides, each of its children for itself."""
    small = ["--target", str(target), "--context", "6", "--tokens", str(TOKENS), "--dtype", "float32", "--warmup", "0"]
    command = ["-m", "eval.cli", *arguments, *small, "--repeats", str(REPEATS), "--json", "run.json"]
    done = cases.python(command, folder, **{SWITCH: "0", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    run = load_run(folder / "run.json")
    assert run.environment.vllm == "0.33.0+cpu" and not run.environment.ops
    assert all(r.ran and r.error is None for r in run.results)
    return run, done.stdout


def check(plain: BenchRow, stock: BenchRow, ours: BenchRow) -> None:
    """Three lines of one number of requests."""
    assert [r.engine for r in (plain, stock, ours)] == ["vllm", "vllm", "vllm+plugin"]
    assert (plain.method, plain.speedup, plain.vllm_metrics) == ("plain", 1.0, None)
    # A vanilla drafter drafts the same in both, so vLLM counts the same.
    assert ours.vllm_metrics == stock.vllm_metrics
    counts = {name.removeprefix("vllm:spec_decode_num_"): n for name, n in stock.vllm_metrics.items()}
    drafts, accepted = counts["drafts"], counts["accepted_tokens"]
    assert drafts and counts["draft_tokens"] == 3 * drafts and accepted == sum(counts["accepted_tokens_per_pos"])
    assert stock.spec_decode_acceptance_length == pytest.approx(1 + accepted / drafts)
    # Every request has its tokens, of which the first is its prefill's, and no step is cut short.
    emitted = sum((i + 1) * n for i, n in enumerate(stock.emitted_histogram))
    requests = REPEATS * stock.num_requests
    assert requests * (TOKENS - 1) <= emitted <= requests * (TOKENS - 1 + 3)
    assert all(r.warning is None or r.warning.startswith("unsteady") for r in (plain, stock, ours))


def test_stock_and_plugged_vllm_at_a_synthetic_length(tmp_path: Path) -> None:
    target, drafter = cases.planted_pair(tmp_path / "pair")
    arguments = [*commands()[0], "--drafter", str(drafter), "--al", "2.5", "-b", "1,2"]
    run, text = bench(arguments, target, tmp_path)
    assert text.startswith("SYNTHETIC ACCEPTANCE") and re.search(r"\| line +\| +engine \|", text)
    assert [r.num_requests for r in run.results] == [1, 1, 1, 2, 2, 2]
    for lines in (run.results[:3], run.results[3:]):
        check(*lines)
        for line in lines[1:]:
            assert line.synthetic and line.acceptance == "SYNTHETIC AL 2.50 (min_variance)"
            none, one, two, three = line.emitted_histogram
            assert none == three == 0 < one + two  # 1 or 2 drafts accepted, as the law says


def test_what_dspark_tune_prints_goes_in(tmp_path: Path) -> None:
    target, drafter = cases.planted_pair(tmp_path / "pair")
    arguments = commands()[1]
    at = arguments.index("--speculative-config") + 1
    arguments[at] = json.dumps(json.loads(arguments[at]) | {"model": str(drafter)})
    run, text = bench(arguments, target, tmp_path)
    check(*run.results)
    stock = run.results[1]
    assert (stock.method, stock.drafter, stock.synthetic) == ("dspark:drafter", str(drafter), False)
    assert stock.spec_decode_acceptance_length > 1.2 and "SYNTHETIC" not in text
