"""Tables and plot of `dspark eval`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from dspark_runtime.errors import ConfigError
from eval.evaluate import Evaluation
from eval.report import num, percent
from eval.schema import EvalRow


def series(values: Sequence[float | None] | None) -> str:
    return " ".join(num(v) or "-" for v in values or ())


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    found = Table(title=title, box=MARKDOWN, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        found.add_column(column, justify="left" if i in (0, 2) else "right", no_wrap=True)
    for row in rows:
        found.add_row(*row)
    return found


def tables(found: Evaluation) -> list[Table]:
    rows = found.rows

    def line(r: EvalRow, *cells: str) -> tuple[str, ...]:
        return (r.suite, f"{r.temperature:g}", r.shape, *cells)

    key = ("suite", "T", "shape")
    main = [
        line(
            r, str(r.num_prompts), str(r.steps), str(r.tokens), num(r.spec_decode_acceptance_length),
            num(r.output_throughput, 1), num(r.plain_throughput, 1), num(r.speedup), percent(r.spread),
        )
        for r in rows
    ]  # fmt: skip
    columns = ("prompts", "steps", "tokens", "AL", "tok/s", "plain tok/s", "x plain", "± prompts")
    out = [table("Acceptance and speed", (*key, *columns), main)]
    rates = [
        line(
            r,
            series(r.spec_decode_per_position_acceptance_rates),
            series(r.spec_decode_conditional_acceptance_rates),
        )
        for r in rows
    ]
    out.append(table("Acceptance by position", (*key, "survival", "conditional"), rates))
    judged = [
        line(
            r, num(r.ece_before, 3), num(r.ece_after, 3), num(r.auc_before, 3), num(r.auc_after, 3),
            series(r.ece_before_by_position), series(r.ece_after_by_position), series(r.auc_before_by_position),
        )
        for r in rows
        if r.ece_before is not None
    ]  # fmt: skip
    if judged:
        columns = ("ECE", "after STS", "AUC", "after STS", "ECE by position", "after STS", "AUC by position")
        out.append(table("Confidence", (*key, *columns), judged))
    return out


def show(found: Evaluation, console: Console | None = None) -> None:
    """Print everything. Off a terminal lines are as long as they need to be."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=400)
    first = found.rows[0]
    scheduled = f" · drafts trimmed by {first.scheduler}" if first.scheduler else ""
    console.print(
        f"{first.target} · {first.drafter} · {first.dtype} · up to {first.max_tokens} tokens a prompt{scheduled}"
    )
    console.print(
        f"AL: tokens per verify step, bonus token included, {first.num_requests} requests at once; "
        f"tok/s: one request, {first.num_timed} prompts, beside plain decoding in turns\n"
    )
    for part in tables(found):
        console.print(part)
    if found.fitted is not None:
        f = found.fitted
        console.print(
            f"calibration.json: temperatures {' '.join(num(t) for t in f.temperatures)}, "
            f"ECE {f.ece_before:.3f} before and {f.ece_after:.3f} after on the {f.num_samples} steps of {f.dataset}"
        )


def plot(found: Evaluation, path: Path) -> None:
    """Survival by position above, AL below; a column for each suite, a colour for each shape."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = found.rows
    suites, kinds, heats = (list(dict.fromkeys(x)) for x in zip(*((r.suite, r.shape, r.temperature) for r in rows)))
    colours = {kind: f"C{i}" for i, kind in enumerate(kinds)}
    styles = {t: ("-", "--", ":", "-.")[i % 4] for i, t in enumerate(heats)}
    width = 0.8 / len(heats)
    figure, axes = plt.subplots(
        2, len(suites), figsize=(1.5 + 3.2 * len(suites), 6.5), sharey="row", squeeze=False, layout="constrained"
    )
    for (above, below), suite in zip(axes.T, suites):
        for r in (r for r in rows if r.suite == suite):
            rates = [1.0, *r.spec_decode_per_position_acceptance_rates]
            above.plot(
                range(len(rates)), [float("nan") if y is None else y for y in rates],
                color=colours[r.shape], linestyle=styles[r.temperature], marker="o", markersize=3,
            )  # fmt: skip
            at = kinds.index(r.shape) + (heats.index(r.temperature) - (len(heats) - 1) / 2) * width
            al = r.spec_decode_acceptance_length
            below.bar(
                at, al, width, color=colours[r.shape], edgecolor="black", linewidth=0.8, alpha=0.85,
                linestyle=styles[r.temperature],
            )  # fmt: skip
            below.text(at, al, f"{al:.2f}", ha="center", va="bottom", fontsize=6)
        above.set_title(f"{suite}, {next(r.num_prompts for r in rows if r.suite == suite)} prompts", fontsize=10)
        above.set_xlabel("position")
        above.xaxis.get_major_locator().set_params(integer=True)
        above.set_ylim(0, 1.02)
        below.set_xticks(range(len(kinds)), kinds, rotation=45, ha="right", fontsize=8)
        below.margins(y=0.1)
        for axis in (above, below):
            axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("survival")
    axes[1, 0].set_ylabel("AL (bonus token included)")
    marks = [plt.Line2D([], [], color=colours[kind], label=kind, linewidth=3) for kind in kinds]
    marks += [plt.Line2D([], [], color="black", linestyle=styles[t], label=f"T={t:g}") for t in heats]
    figure.legend(handles=marks, loc="outside right upper", fontsize=8)
    figure.suptitle(f"{rows[0].target}, {rows[0].drafter}", fontsize=10)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot: {path}: {error}") from None
    finally:
        plt.close(figure)
