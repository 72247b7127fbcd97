"""Rows to text: one table a person can read, and csv, json, jsonl; the results table of the README; plots.

`python -m eval.report README.md` rewrites the README's results table from eval/results/**/*.json.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dspark_runtime.errors import ConfigError
from eval.schema import BenchRow, Run, load_run

RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def num(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An aligned markdown table: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = cells
        padded = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:]))]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:])]) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def shape(row: BenchRow) -> str:
    return f"tree {row.tree}" if row.tree != "chain" else f"k={row.num_speculative_tokens}"


def name(row: BenchRow) -> str:
    """What a line is called: "plain", "ngram k=3", "SYNTHETIC AL 3.00 k=7", "ngram k=7 async:curve.json"."""
    if row.method == "plain":
        return "plain"
    acceptance = row.acceptance.removesuffix(" (min_variance)") if row.synthetic else row.method
    return " ".join(filter(None, (acceptance, shape(row), row.scheduler)))


def full_name(row: BenchRow) -> str:
    """As `name`, and which engine where it is not this project's."""
    return name(row) if row.engine == "dspark" else f"{row.engine}: {name(row)}"


def lead(rows: Sequence[BenchRow]) -> tuple[tuple[str, ...], Callable[[BenchRow], tuple[str, ...]]]:
    """(header, cells of a row) of the columns that say what a line is; the engine only where there is another one."""
    if all(r.engine == "dspark" for r in rows):
        return ("line", "b"), lambda r: (name(r), str(r.num_requests))
    return ("line", "engine", "b"), lambda r: (name(r), r.engine, str(r.num_requests))


def title(run: Run) -> str:
    """The first line of every report; a synthetic run says so before anything else."""
    c, e = run.config, run.environment
    synthetic = "SYNTHETIC ACCEPTANCE in the lines marked so (text is meaningless there) · " if run.synthetic else ""
    vllm = f" · vLLM {e.vllm}" if e.vllm else ""
    return f"{synthetic}{c.target} · {run.results[0].drafter} drafter · {run.results[0].dtype}{vllm} · {e.gpu or e.cpu}"


def speed_table(rows: Sequence[BenchRow]) -> str:
    first, who = lead(rows)
    header = (
        *first, "AL", "tok/s/user", "tok/s", "x plain", "break-even AL", "TPOT ms", "step ms", "± repeats", "± prompts",
    )  # fmt: skip
    body = [
        (
            *who(r),
            num(r.spec_decode_acceptance_length),
            num(r.output_throughput_per_user, 1),
            num(r.output_throughput, 1),
            num(r.speedup),
            num(r.break_even_acceptance_length),
            num(r.tpot_ms),
            num(r.step_ms.total),
            percent(r.spread.repeats),
            percent(r.spread.prompts),
        )
        if r.ran
        else (*who(r), "not run", *[""] * (len(header) - len(first) - 1))
        for r in rows
    ]
    return table(header, body)


def step_table(rows: Sequence[BenchRow]) -> str:
    """Where a step's milliseconds go, and how far it is from the floor; empty where no engine says."""
    header = ("line", "b", "step ms", "draft", "verify", "accept", "other", "floor ms", "x floor", "prefill ms")
    moe = any(r.unique_experts_per_layer for r in rows)
    body = []
    for r in rows:
        if r.ran and r.step_ms.verify is not None:
            s = r.step_ms
            parts = (s.total, s.draft, s.verify, s.accept, s.other, r.floor_ms)
            cells = (*map(num, parts), num(r.time_over_floor, 1), num(r.prefill_ms, 1))
            experts = (num(r.unique_experts_per_layer, 1), num(r.expected_experts_per_layer, 1)) if moe else ()
            body.append((name(r), str(r.num_requests), *cells, *experts))
    if not body:
        return ""
    return table((*header, "experts/layer", "expected") if moe else header, body)


def acceptance_table(rows: Sequence[BenchRow]) -> str:
    """Where the drafts of each line were accepted; empty without a speculative line."""
    first, who = lead(rows)
    body = [
        (
            *who(r),
            num(r.spec_decode_acceptance_length),
            num(r.spec_decode_acceptance_length_per_request),
            num(r.accepted_per_step),
            num(r.proposed_per_step),
            percent(r.draft_acceptance_rate),
            " ".join(num(x) for x in r.spec_decode_per_position_acceptance_rates),
            " ".join(num(x) or "-" for x in r.spec_decode_conditional_acceptance_rates),
            " ".join(map(str, r.emitted_histogram)),
        )
        for r in rows
        if r.ran and r.num_speculative_tokens
    ]
    if not body:
        return ""
    header = (
        *first, "AL pooled", "AL by request", "accepted", "proposed", "draft rate", "rate by position",
        "conditional rate", "emitted 1 2 3 ...",
    )  # fmt: skip
    return table(header, body)


def notes(run: Run) -> list[str]:
    """Errors and warnings of the rows, one line each."""
    lines = []
    for kind in ("error", "warning"):
        for r in run.results:
            text = getattr(r, kind)
            if text and not text.startswith("unsteady"):
                lines.append(f"{kind.upper() if r.ran else 'NOT RUN'}: {full_name(r)}, b={r.num_requests}: {text}")
    if run.interrupted:
        done = max(r.repeats for r in run.results)
        lines.append(f"WARNING: stopped by hand after {done} of {run.config.repeats} repeats of every line")
    unsteady = [r for r in run.results if r.warning and r.warning.startswith("unsteady")]
    if unsteady:
        lines.append(
            f"WARNING: unsteady machine (see ± repeats) in {len(unsteady)} of {len(run.results)} lines: is it busy?"
        )
    return lines


def markdown(run: Run) -> str:
    c, e = run.config, run.environment
    ran = [r for r in run.results if r.ran]
    parts = [
        title(run),
        "",
        f"b: requests at once; every request gives {c.max_tokens} tokens, end of sequence ignored; {context_of(run)}; "
        f"temperature {c.temperature:g}; median of {c.repeats} repeats after {c.warmup} warm-up, seed {c.seed}.",
        "AL: tokens emitted per request and verify step, bonus token included. Step: median over full batches.",
        *laws(run),
        *(["engine: vllm is stock, vllm+plugin has this package; AL and rates are vLLM's counters."] if e.vllm else []),
        "",
    ]
    for part in (speed_table(run.results), step_table(run.results), acceptance_table(run.results)):
        parts += [part, ""] if part else []
    parts += notes(run)
    if ran and e.read_bandwidth_gbps:
        parts.append(
            f"floor: max(bytes / {e.read_bandwidth_gbps:.1f} GB/s, flops / {e.matmul_tflops:.2f} TFLOP/s), {e.ceilings}"
        )
    dirty = ", uncommitted changes" if e.dirty else ""
    graphs = "on" if e.cuda_graph else "off"
    kernels = f"vLLM {e.vllm}" if e.vllm else e.cpu_kernels or "no CPU kernels"
    parts += [
        f"machine: {e.machine}, {e.cpu}, {e.cores} cores, {e.gpu or 'no GPU'}; torch {e.torch}; "
        f"commit {e.commit or 'unknown'}{dirty}; CUDA graphs {graphs}; {kernels}",
        "config: " + json.dumps(c.model_dump(exclude_defaults=True)),
    ]
    return "\n".join(parts) + "\n"


def laws(run: Run) -> list[str]:
    """The synthetic laws of a run, in full."""
    found = dict.fromkeys(r.acceptance for r in run.results if r.synthetic and r.ran)
    lines = [f"synthetic laws: {', '.join(found)}; only the number of accepted drafts is forced."] if found else []
    for routing in dict.fromkeys(r.routing for r in run.results if r.routing):
        if routing != "model":
            lines.append(f"FORCED ROUTING: {routing}; which experts a token meets is drawn, not the router's choice.")
        elif run.config.weights == "dummy":
            lines.append("routing: the router's own choices with DUMMY WEIGHTS, which send all tokens to the same experts.")
    return lines


def context_of(run: Run) -> str:
    c, e = run.config, run.environment
    if c.context_len is not None:
        return f"prompts of {c.context_len} RANDOM token ids"
    return f"prompts {e.prompts} ({e.prompts_sha256[:12]})"


def flat(row: BenchRow) -> dict[str, object]:
    """A row as one level of columns: step_ms.draft, spread.repeats; lists joined by blanks."""
    out: dict[str, object] = {}
    for name in BenchRow.model_fields:
        value = getattr(row, name)
        nested = {"step_ms": ("draft", "verify", "accept", "other", "total"), "spread": ("repeats", "prompts")}.get(
            name
        )
        if nested:
            out |= {f"{name}.{key}": None if value is None else getattr(value, key) for key in nested}
        else:
            out[name] = " ".join(map(str, value)) if isinstance(value, list) else value
    return out


def render(run: Run, form: str) -> str:
    """The run as "md", "csv", "json" or "jsonl" text."""
    if form == "md":
        return markdown(run)
    if form == "json":
        return run.model_dump_json(indent=1) + "\n"
    if form == "jsonl":
        shared = {"schema_version": run.schema_version, "command": run.command}
        environment = run.environment.model_dump()
        lines = [json.dumps(shared | r.model_dump() | {"environment": environment}) for r in run.results]
        return "\n".join(lines) + "\n"
    if form == "csv":
        out = io.StringIO()
        rows = [flat(r) | {"commit": run.environment.commit, "gpu": run.environment.gpu} for r in run.results]
        writer = csv.DictWriter(out, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()
    raise ConfigError(f"output: found {form!r}, allowed: md, csv, json, jsonl")


# ------------------------------------------------------------------------------------------------------ plot


def plot_title(run: Run) -> str:
    heading = f"{run.config.target}, {run.environment.gpu or run.environment.cpu}"
    return f"SYNTHETIC AL in the lines marked so · {heading}" if run.synthetic else heading


def plot(run: Run, path: Path) -> None:
    """tokens/s/user over k (or over AL where only AL varies), one line per acceptance and number of requests."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in run.results if r.ran]
    plain = {r.num_requests: r for r in rows if r.method == "plain"}
    drafted = [r for r in rows if r.method != "plain"]
    over_al = len({(r.num_speculative_tokens, r.tree) for r in drafted}) == 1 and len(drafted) > len(plain)
    lines: dict[tuple[str, int], list[BenchRow]] = {}
    for r in drafted:
        label = r.acceptance if not over_al else ("SYNTHETIC" if r.synthetic else "real")
        label = f"{label}, {r.scheduler}" if r.scheduler else label
        label = f"{r.engine}: {label}" if r.engine != "dspark" else label
        lines.setdefault((label, r.num_requests), []).append(r)
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    colours = {b: f"C{i}" for i, b in enumerate(plain)}
    dashes = {label: ("-", "--", ":", "-.")[i % 4] for i, label in enumerate(dict.fromkeys(k[0] for k in lines))}
    marks = {label: "osD^v"[i % 5] for i, label in enumerate(dashes)}
    for (label, b), points in lines.items():

        def x_of(r: BenchRow) -> float:
            return r.spec_decode_acceptance_length if over_al else r.num_speculative_tokens

        points = sorted([plain[b], *points] if b in plain and not over_al else points, key=x_of)
        y = [r.output_throughput_per_user for r in points]
        error = [r.output_throughput_per_user * r.spread.repeats for r in points]
        axes.errorbar(
            [x_of(r) for r in points], y, yerr=error, label=f"{label}, b={b}", color=colours.get(b),
            linestyle=dashes[label], marker=marks[label], markersize=4, capsize=2,
        )  # fmt: skip
    for b, r in plain.items():
        label = f"plain, b={b}" if lines else None
        axes.axhline(r.output_throughput_per_user, color=colours[b], linewidth=0.8, alpha=0.5, label=label)
    if not lines:
        axes.bar([f"b={b}" for b in plain], [r.output_throughput_per_user for r in plain.values()], color="C0")
    axes.set_xlabel("" if not lines else "AL (bonus token included)" if over_al else "drafted tokens k (0: plain)")
    axes.set_ylabel("tokens/s/user")
    if lines and not over_al:
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0)
    axes.set_title(plot_title(run), fontsize=10)
    if lines:
        axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot: {path}: {error}") from None
    finally:
        plt.close(figure)


# ---------------------------------------------------------------------------------------------------- README


def is_bench(path: Path) -> bool:
    rows = json.loads(path.read_text()).get("results") or [{}]
    return "time_over_floor" in rows[0]  # a simulation has rates too


def results_table(folder: Path = RESULTS) -> str:
    """The README's results: every measured bench row under `folder`, one table."""
    body = []
    for path in sorted(folder.rglob("*.json")):
        if not is_bench(path):
            continue
        run = load_run(path)
        where = run.environment.gpu or f"{run.environment.cpu}, {run.environment.cores} cores"
        for r in run.results:
            if r.ran:
                body.append(
                    (
                        where,
                        f"{r.target} {r.dtype}",
                        full_name(r),
                        str(r.num_requests),
                        num(r.spec_decode_acceptance_length),
                        num(r.output_throughput_per_user, 1),
                        num(r.output_throughput, 1),
                        num(r.step_ms.total),
                        num(r.time_over_floor, 1),
                        num(r.speedup),
                        percent(r.spread.repeats),
                        path.relative_to(folder).as_posix(),
                    )
                )
    header = (
        "machine", "target", "line", "b", "AL", "tok/s/user", "total tok/s", "step ms", "x floor",
        "x plain", "±", "file",
    )  # fmt: skip
    return table(header, body) if body else "No results recorded yet."


def with_results(text: str, folder: Path = RESULTS) -> str:
    """README text with the table between its markers replaced. Raises ConfigError where the markers are missing."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"README: markers missing, expected {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{results_table(folder)}\n{END}{tail}"


if __name__ == "__main__":
    readme = Path(sys.argv[1])
    readme.write_text(with_results(readme.read_text()))
