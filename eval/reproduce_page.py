"""`dspark reproduce` as pictures: the plots of one entry, and one self-contained HTML page of everything."""

from __future__ import annotations

import html
import io
import re
from pathlib import Path
from typing import Any

from dspark_runtime.configs import names
from dspark_runtime.cost.facts import load_hardware
from dspark_runtime.errors import ConfigError
from eval.reproduce import (
    HEADER,
    LAYERS,
    Row,
    WhatIf,
    changed,
    evaluate,
    explanations,
    find_row,
    ladder,
    own_measurements,
    speed,
    summary,
    table_rows,
    verdict,
)

# The groups of operations in a fixed order, so that a colour means the same in every bar.
GROUPS = (
    "draft", "attention projections", "attention", "routed experts", "shared experts", "moe front and tail",
    "dense mlp", "communication", "norms", "head and sampling",
)  # fmt: skip
COLOURS = ("#7a7a7a", "#4477aa", "#66ccee", "#cc3311", "#ee7733", "#ddaa33", "#228833", "#aa3377", "#bbbbbb", "#000000")


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "font.family": "sans-serif"})
    return plt


def stacked(axes: Any, rows: list[Row]) -> None:
    """One bar a result: groups of the achievable layer; the floor, the fitted and the reported step as marks."""
    labels = [r.name for r in rows]
    left = [0.0] * len(rows)
    groups = [r.step.groups() for r in rows]
    for name, colour in zip(GROUPS, COLOURS):
        widths = [g[name].mid if name in g else 0.0 for g in groups]
        if any(widths):
            axes.barh(labels, widths, left=left, color=colour, label=name, height=0.6)
        left = [a + b for a, b in zip(left, widths)]
    marks = (("floor", "|", "black", [r.step.floor.mid for r in rows]),
             ("fitted", "d", "white", [r.fitted_ms for r in rows]),
             ("reported", "o", "black", [r.reported_ms for r in rows]))  # fmt: skip
    for name, mark, colour, values in marks:
        found = [(v, label) for v, label in zip(values, labels) if v]
        if found:
            size = 12 if mark == "|" else 5
            axes.plot(*zip(*found), mark, color=colour, markeredgecolor="black", markersize=size, label=name)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a step; bars: achievable, kernel by kernel")
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)


def over_al(axes: Any, row: Row) -> None:
    """tokens/s/user against AL, one line a number of requests, at the constant of the software."""
    top = row.point.tokens
    for b in (1, 4, 16, 64):
        step = changed(row, WhatIf(requests=b)).step
        value = max(step.floor.mid, (row.constant or 1.0) * step.achievable.mid)
        als = [1 + i * (top - 1) / 20 for i in range(21)]
        axes.plot(als, [1e3 * al / value for al in als], label=f"{b} requests")
    if row.reported_ms:
        axes.plot([row.point.acceptance_length], [speed(row.point, row.reported_ms)], "ko", label="reported")
    axes.set_xlabel("AL (bonus token included)")
    axes.set_ylabel("tokens/s/user")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def over_nodes(axes: Any, row: Row) -> None:
    """AL that a tree of N nodes needs to pay against plain decoding."""
    found = ladder(row)
    axes.plot([n for n, *_ in found], [al for *_, al in found], "o-")
    axes.set_xscale("log", base=2)
    axes.set_xticks([n for n, *_ in found], [str(n) for n, *_ in found])
    axes.set_xlabel("verified nodes a request")
    axes.set_ylabel("AL to beat plain decoding")
    axes.grid(alpha=0.3)


def figure_of(row: Row) -> Any:
    plt = pyplot()
    figure = plt.figure(figsize=(11, 7), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(0.35, 1.6))
    bar = figure.add_subplot(grid[0, :])
    stacked(bar, [row])
    bar.legend(fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.9), frameon=False)
    stamp = "SYNTHETIC acceptance · " if row.point.synthetic else ""
    bar.set_title(f"{stamp}{row.entry.title}", fontsize=10)
    over_al(figure.add_subplot(grid[1, 0]), row)
    over_nodes(figure.add_subplot(grid[1, 1]), row)
    return figure


def plot(row: Row, path: Path) -> None:
    """Draw one entry into an .svg or .png file."""
    figure = figure_of(row)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot: {path}: {error}") from None
    finally:
        pyplot().close(figure)


def svg(figure: Any, label: str, kind: str = "") -> str:
    """A figure as inline SVG that scales with the page; kind "big" scrolls on a narrow one instead."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    pyplot().close(figure)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'<svg ([^>]*?)height="[^"]*"([^>]*?)width="[^"]*"', r"<svg \1\2", text, count=1)
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', "", text, count=1)
    label = html.escape(label)
    return f'<figure class="{kind}" role="img" aria-label="{label}">{text}<figcaption>{label}</figcaption></figure>'


def held_figure(rows: list[Row]) -> Any:
    """Predicted over reported of all points that can be told: filled if held, hollow if fitted."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 4.5), layout="constrained")
    k3 = [r for r in rows if r.is_k3 and r.fitted_ms and r.reported_ms and r.point.use in ("fit", "held")]
    stacks = list(dict.fromkeys(r.entry.stack for r in k3))
    for i, stack in enumerate(stacks):
        for use in ("held", "fit"):
            mine = [r for r in k3 if r.entry.stack == stack and r.point.use == use]
            if mine:
                axes.plot(
                    [r.reported_ms for r in mine], [r.fitted_ms for r in mine], "osD^vP*Xh"[i % 9], color=f"C{i}",
                    fillstyle="full" if use == "held" else "none", markersize=7, linestyle="",
                    label=f"{stack}{'' if use == 'held' else ' (fitted)'}",
                )  # fmt: skip
    low, high = 3.0, 45.0
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    axes.fill_between([low, high], [low * 0.85, high * 0.85], [low * 1.15, high * 1.15], color="black", alpha=0.08)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        ylim=(low, high),
        xlabel="reported step, ms",
        ylabel="fitted step, ms",
    )
    ticks = [3, 5, 10, 20, 40]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(plt.FixedLocator(ticks))
        axis.set_minor_locator(plt.NullLocator())
        axis.set_major_formatter(plt.FuncFormatter(lambda v, _: f"{v:g}"))
    axes.legend(fontsize=6.5, loc="upper left")
    axes.grid(alpha=0.3)
    return figure


STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1240px;margin:0 auto;padding:1rem;color:#1a1a1a;background:#fff}
h1{font-size:1.5rem;margin:.4rem 0}
h2{font-size:1.15rem;margin:2rem 0 .5rem;border-bottom:1px solid #ddd}
h3{font-size:1rem;margin:1.2rem 0 .2rem}
p{max-width:80ch} ul{padding-left:1.2rem} li{margin:.2rem 0}
.stamp{background:#fff3cd;padding:.4rem .6rem} .status{color:#666;font-size:12.5px}
.wide,.big{overflow-x:auto}
table{border-collapse:collapse;font-size:11.5px;white-space:nowrap}
td,th{padding:.18rem .35rem;text-align:right;border-bottom:1px solid #eee} th{border-bottom:2px solid #888}
td:first-child,th:first-child{text-align:left;background:#fff}
@media(min-width:700px){td:first-child,th:first-child{position:sticky;left:0}}
tr.held td{background:#eef6ff} tr.shown td{color:#777}
.text table{white-space:normal;font-size:13.5px} .text td,.text th{text-align:left;vertical-align:top}
figure{margin:1rem 0} figure svg{max-width:100%;height:auto;display:block} figcaption{font-size:12.5px;color:#555}
.big svg{min-width:680px}
.pair{display:flex;flex-wrap:wrap;gap:1rem} .pair>figure{flex:1 1 440px;min-width:0}
"""


def cells(header: tuple[str, ...], rows: list[tuple[str, ...]], classes: list[str] | None = None) -> str:
    head = "".join(f"<th>{html.escape(c)}</th>" for c in header)
    lines = []
    for i, row in enumerate(rows):
        kind = f' class="{classes[i]}"' if classes else ""
        lines.append(f"<tr{kind}>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def page() -> str:
    """Everything as one HTML page without outside references."""
    plt = pyplot()
    rows = evaluate()
    entries: dict[str, list[Row]] = {}
    for r in rows:
        entries.setdefault(r.name.rpartition("/")[0], []).append(r)
    steps = [r for r in rows if r.reported_ms]
    figure, axes = plt.subplots(figsize=(11, 0.26 * len(steps) + 1.6), layout="constrained")
    stacked(axes, steps)
    axes.legend(fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.4, -0.045), frameon=False)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Reported tokens/s, taken apart</title><style>{STYLE}</style></head><body>",
        "<h1>Reported tokens/s, taken apart</h1>",
        '<p class="stamp">SYNTHETIC marks acceptance lengths that were forced, not earned by a drafter.</p>',
        "<h2>How good the model is</h2><ul>", *(f"<li>{html.escape(line)}</li>" for line in summary(rows)), "</ul>",
        "<h2>What the layers mean</h2><ul>", *(f"<li>{html.escape(line)}</li>" for line in LAYERS), "</ul>",
        "<h2>All reported results</h2><p>Blue rows were held out of every fit; grey rows give no step to fit. "
        "A question mark: parallelism not stated.</p>",
        cells(HEADER, table_rows(rows), [r.point.use for r in rows]),
        svg(figure, "Steps kernel by kernel, with the floor, the fitted and the reported time of each.", "big"),
        '<div class="pair">',
        svg(held_figure(rows), "Kimi K3: fitted against reported steps. Filled: held out; the band is 15 %."),
    ]  # fmt: skip
    claim = find_row("kimi-k3-gb300-vllm-2026-09")
    one, axes = plt.subplots(figsize=(6, 4.5), layout="constrained")
    over_al(axes, claim)
    parts += [
        svg(
            one,
            f"{claim.entry.title}: tokens/s/user by AL and requests, at the constant of its software (SYNTHETIC AL).",
        ),
        "</div>",
    ]
    parts += [
        "<h2>What could explain 840 tokens/s</h2>",
        '<div class="text">',
        cells(("cause", "what follows"), explanations(claim)),
        "</div>",
    ]
    own = own_measurements()
    if own:
        parts += ["<h2>Steps measured by this project on one H200, against kernels alone</h2>"]
        body = [
            (o.name, f"{o.measured_ms:.2f}", f"{o.floor_ms:.2f}", f"{o.achievable.mid:.2f}" if o.achievable else "",
             f"{o.achievable.mid / o.measured_ms - 1:+.1%}" if o.achievable else "", o.note)
            for o in own
        ]  # fmt: skip
        parts.append(cells(("result", "measured ms", "floor ms", "achievable ms", "error", "note"), body))
    parts.append("<h2>Verdicts and sources</h2>")
    for name, group in entries.items():
        row = find_row(name)
        parts += [f"<h3>{html.escape(group[0].entry.title)}</h3><p>{html.escape(verdict(row))}</p><ul class='status'>"]
        for s in row.entry.sources:
            parts.append(f"<li>{html.escape(s.source)} [{s.status}: {html.escape(', '.join(s.fields))}]</li>")
        parts.append("</ul>")
    parts.append("<h2>Machines</h2>")
    body = []
    for name in names("hardware"):
        m = load_hardware(name)
        rates = ", ".join(f"{k} {v / 1e3:g}" for k, v in m.datasheet.tflops.items())
        body.append((
            m.title, f"{m.datasheet.memory_bandwidth_gbps / 1e3:g}", f"{m.datasheet.memory_gb:g}", rates,
            f"{m.datasheet.link_gbps:g}" if m.datasheet.link_gbps else "not found",
            "; ".join(f"{', '.join(s.fields)}: {s.status}" for s in m.sources),
        ))  # fmt: skip
    parts += [cells(("machine", "TB/s", "GB", "dense PFLOP/s", "link GB/s", "status"), body), "</body></html>"]
    return "\n".join(parts) + "\n"
