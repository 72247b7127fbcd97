"""The card of a trained drafter: what it is, what it learnt from, and how well it drafts.

    python -m eval.card CHECKPOINT --run RUN --eval FILE [--eval FILE ...]

Writes CHECKPOINT/README.md from the run's folder (`dspark train --out RUN`) and from files of `dspark eval --json`.
Nothing in it is typed by hand, so it says nothing that was not measured, but for a "note" in RUN/summary.json on the data.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark_runtime.errors import ConfigError
from eval.environment import git_state
from eval.schema import EvalRow


def card(checkpoint: Path, run: Path, evaluations: Sequence[Path]) -> str:
    """The text. Raises ConfigError for a file that is missing or is something else."""
    config, state = _read(checkpoint / "config.json"), _read(run / "training" / "state.json")
    summary = _read(run / "summary.json")
    recipe, last = state["config"], state["curve"][-1]
    rows, machines = _rows(evaluations)
    shape, plan, answers = recipe["drafter"], recipe["training"], recipe["answers"]
    commit, dirty = git_state()
    made = f" Card made at commit {commit[:12]}{' with changes' if dirty else ''}." if commit else ""
    layers = "[" + ", ".join(map(str, config["target_layer_ids"])) + "]"
    size = sum(f.stat().st_size for f in checkpoint.glob("*.safetensors"))
    lines = [
        f"# DSpark drafter for {recipe['target']}",
        "",
        f"{shape['num_hidden_layers']} Qwen3-style layers of width {config['hidden_size']}, features of target layers "
        f"{layers}, blocks of {shape['block_size']}, {shape['markov_head_type']} Markov head of rank "
        f"{shape['markov_rank']}, {'a' if shape['enable_confidence_head'] else 'no'} confidence head; DeepSpec dialect, "
        f"bf16, {size / 1e6:.0f} MB.",
        "",
        "```bash",
        f"dspark eval {checkpoint} --target {recipe['target']}",
        "```",
        "",
        "## Data",
        "",
        f"{summary['answers']:,} answers of the target itself ({summary['answer_tokens'] / 1e6:.1f}M tokens, up to "
        f"{answers['max_tokens']} each) at temperatures {', '.join(map(str, answers['temperatures']))}, to:",
        "",
        *table(["prompts", "source"], [[f"{n:,}", _source(name)] for name, n in summary["prompts"].items()]),
        "",
        "Prompts that share 13 words in a row with an evaluation prompt were left out.",
        *(["", summary["note"]] if "note" in summary else []),
        "",
        "## Training",
        "",
        f"{state['step']:,} steps of {plan['rows']} rows of {plan['row_length']} tokens with {plan['anchors']} blocks each, "
        f"{state['seconds'] / 60:.0f} minutes; learning rates {plan['lr']:g} (AdamW) and {plan['muon_lr']:g} (Muon), cosine; "
        f"losses: {plan['ce']:g} cross-entropy, {plan['tv']:g} total variation, {plan['confidence']:g} confidence; "
        f"seed {recipe['seed']}. At the end: {last['tau']:.2f} tokens a step at T = 1 under the real prefix.",
        "",
        "## Acceptance",
        "",
        "Tokens a verify step, the bonus token included.",
        "",
        *_acceptance(rows),
        "",
        *_confidence(checkpoint, rows),
        f"Measured on {' and '.join(machines)}.{made}",
    ]
    return "\n".join(lines) + "\n"


def _acceptance(rows: Sequence[EvalRow]) -> list[str]:
    """One line a temperature and shape, one column a suite, and their mean."""
    suites = list(dict.fromkeys(r.suite for r in rows))
    found = {(r.temperature, r.shape, r.suite): r.spec_decode_acceptance_length for r in rows}
    body = []
    for t, shape in dict.fromkeys((r.temperature, r.shape) for r in rows):
        cells = [found.get((t, shape, suite)) for suite in suites]
        known = [x for x in cells if x is not None]
        mean = f"{sum(known) / len(known):.2f}" if len(known) == len(cells) else ""
        body.append([f"{t:g}", shape, *("" if x is None else f"{x:.2f}" for x in cells), mean])
    return table(["T", "shape", *suites, "mean"], body)


def _confidence(checkpoint: Path, rows: Sequence[EvalRow]) -> list[str]:
    """How well the head knows, where it was measured."""
    known = [r for r in rows if r.ece_before is not None]
    if not known:
        return []

    def percent(x: float | None) -> str:
        return "" if x is None else f"{100 * x:.1f} %"

    def number(x: float | None) -> str:
        return "" if x is None else f"{x:.3f}"

    body = [
        [r.suite, f"{r.temperature:g}", percent(r.ece_before), percent(r.ece_after), number(r.auc_after or r.auc_before)]
        for r in known
    ]
    lines = ["## Confidence", ""]
    path = checkpoint / "calibration.json"
    if path.is_file():
        fit = _read(path)
        lines += [f"Calibrated on {fit['num_samples']:,} steps of {fit['dataset']}, which is none of the suites below.", ""]
    return [*lines, *table(["suite", "T", "ECE", "calibrated", "AUC"], body), ""]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _source(name: str) -> str:
    return f"written by the target: {name.removeprefix('self:')}" if name.startswith("self:") else name


def _rows(files: Sequence[Path]) -> tuple[list[EvalRow], list[str]]:
    rows, machines = [], []
    for path in files:
        values = _read(path)
        try:
            rows += [EvalRow.model_validate(row) for row in values["results"]]
            machines.append(values["environment"]["machine"])
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"eval: {path}: not a file of `dspark eval --json`") from None
    return rows, list(dict.fromkeys(machines))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--run", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--eval", type=Path, action="append", default=[], help="file of dspark eval --json")
    args = parser.parse_args()
    try:
        (args.checkpoint / "README.md").write_text(card(args.checkpoint, args.run, args.eval))
    except ConfigError as error:
        raise SystemExit(f"card: {error}") from None


if __name__ == "__main__":
    main()
