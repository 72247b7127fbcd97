"""`dspark tune` for people: tables, plots, and the line to paste into vLLM."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from dspark_runtime.errors import ConfigError
from dspark_runtime.tuning.acceptance import pooled
from dspark_runtime.tuning.search import Scored
from eval.tune import Measured, Tuned, regrets, vllm_config


def table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    """A table in markdown, so that it can be pasted; rich finds the widths."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    drawn = Table(*header, box=box.MARKDOWN, pad_edge=True)
    for column in drawn.columns[1:]:
        column.justify = "right"
    for column in drawn.columns:
        column.no_wrap = True
    for row in rows:
        drawn.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=1000, color_system=None, highlight=False, markup=False).print(drawn)
    body = "\n".join(line.rstrip() for line in out.getvalue().splitlines() if line.strip())
    return f"{title}\n\n{body}\n" if title else body + "\n"


def share(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f} %"


def rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def text(tuned: Tuned) -> str:
    """Everything that was found, stamps first."""
    curve, suite = tuned.curve, pooled(tuned.suites)
    survival = " ".join(f"{p:.3f}" for p in suite.survival)
    steps = f"{suite.num_steps} steps" if suite.num_steps else "taken as exact"
    rule = "the next measured size's cost" if curve.between == "step" else "a straight line"
    parts = [
        *tuned.stamps,
        f"Step-cost curve: {curve.label}; between sizes {rule}; context {tuned.context}.",
        f"Acceptance: {suite.name}, {steps}: survival {survival}, "
        f"AL {suite.acceptance_length:.2f} at {suite.depth} drafts.",
        *(f"Note: {note}." for note in tuned.notes),
        "",
        choices(tuned),
        regret(tuned),
    ]
    if any(p is not None for p in tuned.policies):
        parts.append(policies(tuned))
    if tuned.apart:
        parts.append(suites(tuned))
    parts += [advice(tuned), ""]
    return "\n".join(parts)


def choices(tuned: Tuned) -> str:
    header = (
        "b", "do", "speculate", "AL", "draft ms", "verify ms", "tok/s", "90 %", "tok/s/user", "ms/token", "x plain",
        "90 % ", "break-even AL",
    )  # fmt: skip
    rows = []
    for c in tuned.choices:
        b = c.best
        late = "" if c.within else " (too slow)"
        rows.append((
            str(c.num_requests), b.shape.name + late, c.speculate, f"{b.shape.acceptance_length:.2f}",
            f"{b.draft_ms:.2f}", f"{b.verify_ms:.2f}", rate(b.goodput), f"{rate(b.low)}-{rate(b.high)}",
            f"{b.goodput / c.num_requests:.1f}", f"{b.tpot_ms:.2f}", f"{b.goodput / c.plain.goodput:.2f}", f"{c.ratio[0]:.2f}-{c.ratio[1]:.2f}",
            "" if c.break_even is None else f"{c.break_even:.2f}",
        ))  # fmt: skip
    return table(
        header, rows, "Best shape by tokens/s (b: requests at once; intervals: acceptance and curve resampled)"
    )


def regret(tuned: Tuned) -> str:
    kinds, losses = [], []
    for c in tuned.choices:
        tied = ", ".join(s.shape.name for s in c.tied[:2]) + (f" and {len(c.tied) - 2} more" if len(c.tied) > 2 else "")
        tree = (c.tree.shape.name, rate(c.tree.goodput)) if c.tree else ("", "")
        kinds.append(
            (
                str(c.num_requests),
                rate(c.plain.goodput),
                c.chain.shape.name,
                rate(c.chain.goodput),
                *tree,
                tied or "none",
            )
        )
        losses.append((str(c.num_requests), *(share(loss) or "-" for _, loss in regrets(tuned, c)), share(c.loss, 2)))
    first = table(
        ("b", "plain tok/s", "best chain", "tok/s", "best tree", "tok/s ", "not told apart from the best"),
        kinds,
        "Each kind",
    )
    names = [name for name, _ in regrets(tuned, tuned.choices[0])]
    return first + "\n" + table(("b", *names, "the best, if it is not"), losses, "Tokens/s lost by choosing otherwise")


def policies(tuned: Tuned) -> str:
    rows = []
    for p in filter(None, tuned.policies):
        what = f"verify while product >= {p.threshold:.3f}" if p.pays else "none"
        rows.append((
            str(p.num_requests), what, f"k={p.k}", f"{p.verified_tokens:.2f}", f"{p.acceptance_length:.2f}",
            rate(p.goodput), f"{p.gain[0]:.3f}-{p.gain[1]:.3f}",
        ))  # fmt: skip
    header = ("b", "threshold", "best drafts", "tokens verified", "AL", "tok/s", "x best fixed chain, 90 %")
    return table(header, rows, "Confidence: a static threshold against none, valued on steps that did not choose it")


def suites(tuned: Tuned) -> str:
    rows = []
    for suite, own in tuned.apart:
        for joint, alone in zip(tuned.choices, own):
            loss = alone.regret(joint.best.shape)
            rows.append((
                suite.name, f"{suite.acceptance_length:.2f}", str(joint.num_requests), alone.best.shape.name,
                rate(alone.best.goodput), f"{alone.best.goodput / alone.plain.goodput:.2f}",
                "-" if loss != loss else share(loss),
            ))  # fmt: skip
    header = ("suite", "AL, all drafts", "b", "its own best", "tok/s", "x plain", "lost with the joint choice")
    return table(header, rows, "Each suite for itself")


def advice(tuned: Tuned) -> str:
    """The choice under the latency limit, whether to speculate, and vLLM's option."""
    lines = []
    if tuned.latency_ms is not None:
        fit = [c for c in tuned.choices if c.within]
        if fit:
            c = max(fit, key=lambda c: c.best.goodput)
            lines.append(
                f"Within {tuned.latency_ms:g} ms per token: {c.num_requests} requests with {c.best.shape.name}, "
                f"{rate(c.best.goodput)} tok/s in all, {c.best.tpot_ms:.2f} ms per token."
            )
        else:
            c = min(tuned.choices, key=lambda c: c.best.tpot_ms)
            lines.append(
                f"Within {tuned.latency_ms:g} ms per token: nothing; the shortest is {c.best.tpot_ms:.2f} ms, with "
                f"{c.best.shape.name} at {c.num_requests} requests."
            )
    off = [str(c.num_requests) for c in tuned.choices if c.speculate == "no"]
    doubt = [str(c.num_requests) for c in tuned.choices if c.speculate == "in doubt"]
    if off:
        lines.append(f"Do not speculate at b = {', '.join(off)}.")
    if doubt:
        lines.append(f"Speculation is within the noise of plain decoding at b = {', '.join(doubt)}.")
    config = vllm_config(tuned)
    if config is None:
        lines.append("vLLM: leave --speculative-config out.")
    else:
        lines += ["vLLM (chains only):", "  --speculative-config " + shlex.quote(json.dumps(config))]
        if any(p is not None and p.pays for p in tuned.policies):
            lines.append("  (vLLM has no static threshold; its own scheduler is enable_adaptive_verification)")
    return "\n".join(lines)


def measured_text(found: Sequence[Measured]) -> str:
    """Predicted against measured, and whether the measurement agrees with the choice."""
    rows = []
    base = {m.predicted.num_requests: m for m in found if not m.predicted.shape.spec.num_drafts}
    for m in found:
        p, plain = m.predicted, base[m.predicted.num_requests]
        rows.append((
            str(p.num_requests), p.shape.name, f"{p.shape.acceptance_length:.2f}", f"{p.step_ms:.2f}",
            f"{m.step_ms:.2f}",
            f"{100 * (p.step_ms / m.step_ms - 1):+.1f} %", rate(p.goodput), f"{rate(p.low)}-{rate(p.high)}",
            rate(m.goodput), f"{p.goodput / plain.predicted.goodput:.2f}", f"{m.goodput / plain.goodput:.2f}",
            share(m.spread),
        ))  # fmt: skip
    header = (
        "b", "shape", "AL", "step ms", "measured", "error", "tok/s", "90 %", "measured ", "x plain", "measured  ", "±",
    )  # fmt: skip
    lines = [table(header, rows, "SYNTHETIC: predicted against measured, under the acceptance that was tuned for")]
    for b in dict.fromkeys(m.predicted.num_requests for m in found):
        here = [m for m in found if m.predicted.num_requests == b]
        first = max(here, key=lambda m: m.predicted.goodput)
        fastest = max(here, key=lambda m: m.goodput)
        if fastest is first:
            lines.append(f"b={b}: {first.predicted.shape.name} is the fastest measured, as predicted.")
        else:
            noise = 2 * max(first.spread, fastest.spread)
            gap = fastest.goodput / first.goodput - 1
            verdict = "within the spread" if gap <= noise else "beyond the spread"
            lines.append(
                f"b={b}: {fastest.predicted.shape.name} measured {100 * gap:.1f} % faster than the choice "
                f"{first.predicted.shape.name}, {verdict}."
            )
    return "\n".join([*lines, ""])


def plot(tuned: Tuned, path: Path) -> None:
    """Left: tokens/s over plain by verified tokens. Right: all tokens/s against tokens/s of one user."""
    from eval.reproduce_page import pyplot

    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    colours = plt.get_cmap("viridis")
    for i, c in enumerate(tuned.choices):
        colour = colours(0.9 * i / max(1, len(tuned.choices) - 1))
        base = c.plain.goodput
        chains = [s for s in c.scored if s.shape.spec.is_chain]
        x = [s.shape.spec.num_nodes for s in chains]
        left.plot(x, [s.goodput / base for s in chains], "-o", ms=3, color=colour, label=f"b={c.num_requests}")
        left.fill_between(
            x, [s.low / base for s in chains], [s.high / base for s in chains], color=colour, alpha=0.15, lw=0
        )
        grown = best_of_each_size(c.scored)
        left.plot([s.shape.spec.num_nodes for s in grown], [s.goodput / base for s in grown], ":", color=colour)
        left.plot(c.best.shape.spec.num_nodes, c.best.goodput / base, "*", ms=13, color=colour, mec="black", zorder=3)
    left.axhline(1, color="black", lw=0.8)
    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter("{x:.0f}")
    left.set(xlabel="tokens verified for a request (line: chains, dots: best trees)", ylabel="tokens/s, x plain")
    left.legend(fontsize=8, title="star: the choice", title_fontsize=8)
    left.grid(alpha=0.3)

    for name, mark, pick in (
        ("plain", "s--", lambda c: c.plain),
        ("best chain", "o-", lambda c: c.chain),
        ("choice", "*-", lambda c: c.best),
    ):
        found = [pick(c) for c in tuned.choices]
        right.plot(
            [s.goodput / s.num_requests for s in found], [s.goodput for s in found], mark, label=name, alpha=0.85
        )
    for c in tuned.choices:
        at = (c.best.goodput / c.num_requests, c.best.goodput)
        right.annotate(f"b={c.num_requests}", at, xytext=(4, 5), textcoords="offset points", fontsize=8)
    if tuned.latency_ms is not None:
        right.axvline(1e3 / tuned.latency_ms, color="crimson", lw=1, label=f"{tuned.latency_ms:g} ms per token")
    right.set(xlabel="tokens/s of one user", ylabel="tokens/s of all")
    right.set_xlim(left=0)
    right.set_ylim(bottom=0)
    right.legend(fontsize=8)
    right.grid(alpha=0.3)
    stamp = "".join(f"\n{line}" for line in tuned.stamps)
    figure.suptitle(
        f"{tuned.curve.target} with {tuned.curve.drafter}, {tuned.curve.machine}, context {tuned.context}{stamp}",
        fontsize=10,
    )
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot: {path}: {error}") from None
    finally:
        plt.close(figure)


def best_of_each_size(scored: Sequence[Scored]) -> list[Scored]:
    """The best tree of every size."""
    best: dict[int, Scored] = {}
    for s in scored:
        if not s.shape.spec.is_chain:
            n = s.shape.spec.num_nodes
            best[n] = max(best.get(n, s), s, key=lambda s: s.goodput)
    return [best[n] for n in sorted(best)]
