"""`dspark simulate` for people: a table and the frontier."""

from __future__ import annotations

from pathlib import Path

from dspark_runtime.errors import ConfigError
from eval.simulate import Row, Simulated
from eval.tune_report import rate, share, table


def text(found: Simulated) -> str:
    """Everything that was found, stamps first."""
    curve = found.curve
    rule = "the next measured size's cost" if curve.between == "step" else "a straight line"
    gpus = f", {found.gpus} GPUs" if found.gpus > 1 else ""
    parts = [
        *found.stamps,
        f"Step-cost curve: {curve.label}; between sizes {rule}{gpus}.",
        f"Acceptance: {found.acceptance}.",
        *(f"Note: {note}." for note in found.notes),
        "",
    ]
    header = (
        "load", "line", "tok/s/GPU", "tok/s/user P50", "P90", "P99", "TTFT ms P50", "P90 ", "P99 ", "queue ms P50",
        "P99  ", "running", "AL", "tokens/request", "step ms", "prefill", "idle",
    )  # fmt: skip
    rows = []
    for row in found.rows:
        m = row.measures
        rows.append((
            row.load.workload.name, row.line.name, rate(m.output_throughput / found.gpus),
            *(rate(m.output_throughput_per_user[p]) for p in (50, 90, 99)),
            *(rate(m.ttft_ms[p]) for p in (50, 90, 99)),
            *(rate(m.queue_ms[p]) for p in (50, 99)), f"{m.num_running:.1f}",
            f"{m.spec_decode_acceptance_length:.2f}", f"{m.verified_tokens:.2f}", f"{m.step_ms:.2f}",
            share(m.prefill_share), share(m.idle_share),
        ))  # fmt: skip
    title = "P90: nine of ten requests are at least so fast, or wait no longer; tokens/request: verified in a step"
    return "\n".join(parts) + "\n" + table(header, rows, title)


def by_line(found: Simulated) -> dict[str, list[Row]]:
    lines: dict[str, list[Row]] = {}
    for row in found.rows:
        lines.setdefault(row.line.name, []).append(row)
    return lines


def plot(found: Simulated, path: Path) -> None:
    """Left: tokens/s of a GPU against tokens/s of a user, a point a load. Right: tokens that are verified of a request,
    by requests at once."""
    from eval.reproduce_page import pyplot

    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    lines = by_line(found)
    for name, rows in lines.items():
        style = dict(label=name, alpha=0.9, ms=4, lw=2.2 if rows[0].line.scheduler else 1.2)
        mark = "*-" if rows[0].line.scheduler else "s--" if not rows[0].line.k else "o-"
        m = [row.measures for row in rows]
        x = [one.output_throughput_per_user[50] for one in m]
        y = [one.output_throughput / found.gpus for one in m]
        (drawn,) = left.plot(x, y, mark, **style)
        right.plot([one.num_running for one in m], [one.verified_tokens for one in m], mark, **style)
        if rows is list(lines.values())[-1]:
            for row, at in zip(rows, zip(x, y)):
                where = dict(xytext=(5, 4), textcoords="offset points", fontsize=7, color=drawn.get_color())
                left.annotate("" if row.load.value is None else f"{row.load.value:g}", at, **where)
    unit = "requests/s" if found.asked.rate is not None else "users"
    left.set(xlabel="tokens/s of one user (median)", ylabel="tokens/s of one GPU", title=f"numbers: {unit}")
    left.set_xlim(left=0)
    left.set_ylim(bottom=0)
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter("{x:g}")
    right.set(
        xlabel="requests at once (mean)", ylabel="tokens verified of a request and step, root included",
        title="verification budget",
    )  # fmt: skip
    right.set_ylim(bottom=0)
    for axis in (left, right):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    stamp = "".join(f"\n{line}" for line in found.stamps)
    figure.suptitle(f"{found.curve.target} with {found.curve.drafter}, {found.curve.machine}{stamp}", fontsize=10)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot: {path}: {error}") from None
    finally:
        plt.close(figure)
