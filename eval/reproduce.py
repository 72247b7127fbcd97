"""Reported tokens/s held against the cost model: a table of all, one taken apart, the same claim elsewhere. No
torch."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from dspark_runtime.configs import load_tree, names
from dspark_runtime.cost.facts import BYTES, load_architecture, load_hardware
from dspark_runtime.cost.kernels import ZERO, Interval, load_kernels
from dspark_runtime.cost.routing import Routing
from dspark_runtime.cost.step import Load, Parallelism, StepTime, prefill_ms, step_time, transfer_ms
from dspark_runtime.errors import ConfigError
from dspark_runtime.validation import read_json
from eval.report import RESULTS, table
from eval.reported import Point, Reported, all_reported, entry_name, load_reported

LAYERS = (
    "floor: datasheet bandwidth and rates only, everything spread evenly and overlapped, no latency, no communication; "
    "experts as uniform routing touches them.",
    "achievable: every operation as its class was measured, one after another (configs/kernels); no report was used.",
    "fitted: achievable x one constant of the software, the geometric mean of reported / achievable over its points "
    "marked fit; points marked held were not used. A point alone in its software is only fitted on itself (marked =).",
    "[low to high]: worst case, errors of all operations agreeing: spread of the kernel measurements, of borrowed "
    "kernels, of disputed datasheet values; for fitted, the constant's own error over the held points.",
)


@dataclass(frozen=True)
class Row:
    """One reported point beside the model. reported_ms: its step, None where the metric gives none. constant: of its
    software, None without a fitted point; alone: no point of its software is held."""

    name: str
    entry: Reported
    point: Point
    step: StepTime
    constant: float | None = None
    alone: bool = True
    supposed: bool = False  # something was changed: nobody reported this

    @property
    def reported_ms(self) -> float | None:
        return None if self.supposed else self.point.step_ms

    @property
    def fitted_ms(self) -> float | None:
        """Never below the floor: a constant fitted on one machine can be too good for another."""
        return max(self.step.floor.mid, self.constant * self.step.achievable.mid) if self.constant else None

    @property
    def error(self) -> float | None:
        """fitted / reported - 1."""
        return self.fitted_ms / self.reported_ms - 1 if self.fitted_ms and self.reported_ms else None

    @property
    def share(self) -> float | None:
        """Floor / reported: the share of the machine's limit that was reached."""
        return self.step.floor.mid / self.reported_ms if self.reported_ms else None

    @property
    def is_k3(self) -> bool:
        return self.entry.model == "kimi-k3"


def predict(entry: Reported, point: Point) -> StepTime:
    return step_time(
        entry.architecture,
        entry.machine,
        entry.split(point),
        entry.load(point),
        entry.drafts(point),
        entry.routing(point),
    )


def constants(rows: list[Row]) -> dict[str, float]:
    """The constant of each software: geometric mean of reported / achievable over its points marked fit."""
    logs: dict[str, list[float]] = {}
    for row in rows:
        if row.point.use == "fit":
            logs.setdefault(row.entry.stack, []).append(math.log(row.reported_ms / row.step.achievable.mid))
    return {stack: math.exp(sum(values) / len(values)) for stack, values in logs.items()}


@lru_cache(maxsize=1)
def _shipped() -> tuple[Row, ...]:
    return tuple(Row(f"{name}/{p.name}", e, p, predict(e, p)) for name, e in all_reported().items() for p in e.points)


def evaluate(entries: dict[str, Reported] | None = None) -> list[Row]:
    """All points of configs/reported, or of some entries, with constants fitted on all."""
    rows = [r for r in _shipped() if r.name.rpartition("/")[0] not in (entries or {})]
    rows += [Row(f"{name}/{p.name}", e, p, predict(e, p)) for name, e in (entries or {}).items() for p in e.points]
    by_stack = constants(rows)
    held = {row.entry.stack for row in rows if row.point.use == "held"}
    rows = [replace(r, constant=by_stack.get(r.entry.stack), alone=r.entry.stack not in held) for r in rows]
    return [r for r in rows if entries is None or r.name.rpartition("/")[0] in entries]


def held_errors(rows: list[Row], k3: bool = True) -> list[tuple[Row, float]]:
    return [(r, r.error) for r in rows if r.point.use == "held" and r.error is not None and (r.is_k3 or not k3)]


@lru_cache(maxsize=1)
def constant_error() -> float:
    """How far a software's constant carries: the 80th percentile of |error| over all held points."""
    errors = sorted(abs(e) for _, e in held_errors(evaluate(), k3=False))
    return errors[min(len(errors) - 1, math.ceil(0.8 * len(errors)) - 1)]


def fitted_interval(row: Row) -> Interval:
    e = constant_error()
    return Interval.exact(row.fitted_ms).widen(1 - e, 1 + e)


def speed(point: Point, ms: float) -> float:
    """tokens/s of one user at a step time."""
    return 1e3 * point.acceptance_length / ms


# ------------------------------------------------------------------------------------------- other metrics


def throughput_floor(entry: Reported, point: Point) -> float:
    """Most total tokens/s/GPU of disaggregated serving: the slower of the prefill pool, the decode pool and the
    transfer between them, at their floors, over all GPUs of both."""
    model, machine = entry.architecture, entry.machine
    prefill = 1e3 / prefill_ms(model, machine, point.prefill_gpus, entry.prompt).mid
    step = predict(entry, point).floor.mid
    decode = 1e3 * point.requests * point.acceptance_length / step / entry.output
    moved = transfer_ms(model, machine, min(point.prefill_gpus, point.decode_gpus), entry.prompt, entry.kv)
    rate = min(prefill, decode, 1e3 / moved if moved else math.inf)
    return rate * (entry.prompt + entry.output) / (point.prefill_gpus + point.decode_gpus)


def ratio_of_floors(entry: Reported, point: Point) -> float:
    """How much faster the machine's floor is than that of the machine it is held against."""
    other = entry.model_copy(
        update={"hardware": entry.against.hardware, "gpus": entry.against.gpus, "parallelism": None}
    )
    return predict(other, point).floor.mid / predict(entry, point).floor.mid


# --------------------------------------------------------------------------------------------------- verdicts


def explanations(row: Row) -> list[tuple[str, str]]:
    """What could make a mixture of experts as fast as reported, one cause at a time, with the rest of the step as the
    software before ran it. How much of that software's step was its experts is not known: between the measured kernels
    as they are (then the rest was short) and the same share of them as of everything else (then it was long)."""
    entry, point, model, machine = row.entry, row.point, row.entry.architecture, row.entry.machine
    moe = model.ffn.moe
    if moe is None or machine.kernels is None or entry.before is None or row.reported_ms is None:
        return []
    constant = constants(evaluate())[entry.before]
    tp, step = Parallelism(tp=point.gpus or entry.gpus), row.reported_ms
    load, drafter = entry.load(point), entry.drafts(point)

    def parts(p: Parallelism, routing: Routing) -> tuple[float, float]:
        groups = step_time(model, machine, p, load, drafter, routing).groups()
        experts = groups["routed experts"].mid
        return experts, sum((v for k, v in groups.items() if k != "routed experts"), ZERO).mid

    def layer(ms: float) -> str:
        return f"{1e3 * ms / moe.layers:.0f} us a layer"

    measured, rest = parts(tp, Routing())
    short, long = sorted((constant * (measured + rest) - measured, constant * rest))
    size = moe.expert_params(model.hidden_size) * BYTES[model.weights.experts]
    size *= Routing().unique(moe.num_experts, moe.num_experts_per_tok, load.requests, load.total)
    least = 1e3 * moe.layers * size / tp.gpus / machine.bandwidth()[1]

    def enough(experts: float) -> str:
        low, high = experts + short, experts + long
        word = "enough" if high <= step else "perhaps enough" if low <= step else "not enough alone"
        return f"with the rest as in {entry.before} ({short:.2f} to {long:.2f} ms) {low:.2f} to {high:.2f} ms: {word}"

    def left(experts: float) -> str:
        if experts >= step:
            return "more than the whole step"
        room = step - experts
        return f"{room:.2f} ms left for the rest, {short / room:.1f} to {long / room:.1f} x faster than before"

    out = []
    for p in (tp, replace(tp, ep=tp.tp)):
        experts, _ = parts(p, Routing())
        name = f"TP{p.tp}" if p.ep == 1 else f"EP{p.ep}"
        what = f"{experts:.2f} ms of experts ({layer(experts)}); {left(experts)}; {enough(experts)}"
        out.append((f"{name} with the measured expert kernels", what))
    what = f"at their HBM floor {least:.2f} ms ({layer(least)}, measured {layer(measured)}); {enough(least)}"
    out.append((f"faster expert kernels at TP{tp.tp}", what))
    if load.tokens > 1:
        same, _ = parts(tp, Routing(overlap=1.0))
        out.append((
            f"correlated routing at TP{tp.tp}",
            f"if all {load.total} tokens picked the same {moe.num_experts_per_tok} experts {same:.2f} ms "
            f"({layer(same)}); "
            + enough(same),
        ))  # fmt: skip
    experts, rest = parts(replace(tp, ep=tp.tp), Routing(overlap=0.5))
    out.append((
        f"together: EP{tp.tp}, half of the experts shared between neighbouring tokens, and a faster rest",
        f"{experts:.2f} ms of experts, so the rest, {rest:.2f} ms kernel by kernel, has to run in "
        f"{step - experts:.2f} ms: "
        f"{(step - experts) / rest:.2f} of that sum, where {entry.before} ran the whole at {constant:.2f}",
    ))  # fmt: skip
    return out


def dominating(step: StepTime, count: int = 3) -> list[tuple[str, float]]:
    """The largest groups of operations, with their share of the achievable time."""
    total = step.achievable.mid or 1.0
    groups = sorted(step.groups().items(), key=lambda item: -item[1].mid)
    return [(name, ms.mid / total) for name, ms in groups[:count]]


def verdict(row: Row) -> str:
    """One paragraph: implied step, what dominates it, what it implies, what is left out."""
    e, p, step = row.entry, row.point, row.step
    text = []
    if p.metric == "ratio":
        ratio = ratio_of_floors(e, p)
        text.append(
            f"Reported {p.value:g} x {e.against.gpus} {e.against.hardware}; the floors of a step differ {ratio:.2f} x."
        )
        rest = p.value / ratio
        text.append(
            f"The other {rest:.2f} x must come from software, precision or the point of comparison."
            if rest > 1.05 else "Memory bandwidth alone would give at least that."
        )  # fmt: skip
    elif p.metric == "total_throughput_per_gpu":
        top = throughput_floor(e, p)
        pre = prefill_ms(e.architecture, e.machine, p.prefill_gpus, e.prompt).mid
        moved = transfer_ms(e.architecture, e.machine, min(p.prefill_gpus, p.decode_gpus), e.prompt, e.kv)
        text.append(
            f"Reported {p.value:g} total tokens/s/GPU; at the floors of {p.prefill_gpus} prefill GPUs ({pre:.1f} ms a "
            f"prompt of {e.prompt}), {p.decode_gpus} decode GPUs ({step.floor.mid:.1f} ms a step of {p.requests}) and "
            f"the transfer ({moved:.2f} ms) at most {top:.0f}: {p.value / top:.0%} of it."
        )
    else:
        al = f" at AL {p.acceptance_length:g}" if p.acceptance_length > 1 else ""
        implied = (
            "" if p.metric == "step_ms" else f" is a step of {'at most ' if e.at_least else ''}{row.reported_ms:.2f} ms"
        )
        text.append(
            f"{p.value:g} {UNITS[p.metric]}{al}{implied}; the floor is {step.floor.mid:.2f} ms "
            f"({row.share:.0%} reached)."
        )
        top = ", ".join(f"{name} {share:.0%}" for name, share in dominating(step))
        a = step.achievable
        text.append(f"Kernel by kernel: {a.mid:.2f} ms [{a.low:.2f} to {a.high:.2f}], of which {top}.")
        if row.constant:
            if p.use == "fit":
                how = "fitted on itself, no prediction" if row.alone else "one of the fitted points"
            else:
                how = "predicted" if p.use == "held" else "not counted as a prediction"
            f = fitted_interval(row)
            text.append(
                f"With the constant of {e.stack} ({row.constant:.2f}): {f.mid:.2f} ms [{f.low:.2f} to {f.high:.2f}], "
                f"{row.error:+.1%}; {how}."
            )
        if row.constant and row.constant < 0.95 and p.use == "fit":
            text.append(f"So the software overlaps, fuses or speeds up {1 - row.constant:.0%} of that sum.")
        for name, what in explanations(row):
            text.append(f"{name[0].upper()}{name[1:]}: {what}.")
    if e.parallelism is None:
        text.append(f"Parallelism unknown; {e.split(p)} assumed.")
    if step.notes:
        notes = "; ".join(step.notes)
        text.append(notes[0].upper() + notes[1:] + ".")
    if e.not_stated:
        text.append("Not stated: " + "; ".join(e.not_stated) + ".")
    weak = e.fields_of("unresolved", "inferred")
    if weak:
        text.append("Assumed or inferred inputs: " + ", ".join(weak) + ".")
    weak = [f for f in e.machine.fields_of("unresolved") if not f.startswith("interval")]
    if weak:
        text.append(f"Unresolved on {e.hardware}: " + ", ".join(weak) + ".")
    return " ".join(text)


UNITS = {
    "output_throughput": "tokens/s",
    "output_throughput_per_user": "tokens/s/user",
    "tpot_ms": "ms a token",
    "step_ms": "ms a step",
    "total_throughput_per_gpu": "total tokens/s/GPU",
    "ratio": "x",
}


# ------------------------------------------------------------------------------------------------------- table


def ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def table_rows(rows: list[Row]) -> list[tuple[str, ...]]:
    out = []
    for r in rows:
        e, p = r.entry, r.point
        reported = f"{p.value:g} {UNITS[p.metric]}"
        shape = f"{p.gpus or e.gpus} {e.hardware} {e.split(p)}" + ("" if e.parallelism else "?")
        al = (
            f"{p.acceptance_length:g}{' SYNTHETIC' if p.synthetic else ''}"
            if p.tokens > 1 and p.acceptance_length > 1
            else ""
        )
        if r.reported_ms is None:
            if p.metric == "ratio":
                limit, share = f"{ratio_of_floors(e, p):.2f} x", ""
            else:
                top = throughput_floor(e, p)
                limit, share = f"{top:.0f} tok/s/GPU", f"{p.value / top:.0%}"
            out.append((r.name, shape, str(p.requests), al, reported, "", limit, "", "", "", share, p.use))
            continue
        fitted = ms(r.fitted_ms) + (" =" if r.fitted_ms and r.alone and p.use == "fit" else "")
        error = "" if r.error is None or (r.alone and p.use == "fit") else f"{r.error:+.1%}"
        a = r.step.achievable
        out.append((
            r.name, shape, str(p.requests), al, reported, ms(r.reported_ms), ms(r.step.floor.mid),
            f"{a.mid:.2f} [{a.low:.1f}-{a.high:.1f}]" if a.mid else "", fitted, error, f"{r.share:.0%}", p.use,
        ))  # fmt: skip
    return out


HEADER = (
    "result",
    "machine",
    "b",
    "AL",
    "reported",
    "step ms",
    "floor ms",
    "achievable ms",
    "fitted ms",
    "error",
    "floor/step",
    "use",
)


def random_halves(rows: list[Row], trials: int = 200) -> tuple[float, float, float]:
    """How much the choice of fitted points matters: for random halves of each software's Kimi K3 points, (median, 90th
    percentile) over the trials of the held half's median |error|, and the mean share of held points within 15 %."""
    draw = random.Random(0)
    stacks: dict[str, list[float]] = {}
    for row in rows:
        if row.is_k3 and row.point.use in ("fit", "held"):
            stacks.setdefault(row.entry.stack, []).append(math.log(row.reported_ms / row.step.achievable.mid))
    medians, inside = [], []
    for _ in range(trials):
        errors = []
        for logs in (list(values) for values in stacks.values() if len(values) > 1):
            draw.shuffle(logs)
            half = len(logs) // 2
            constant = sum(logs[:half]) / half
            errors += [abs(math.exp(constant - value) - 1) for value in logs[half:]]
        medians.append(median(errors))
        inside.append(sum(e <= 0.15 for e in errors) / len(errors))
    return median(medians), sorted(medians)[int(0.9 * trials)], sum(inside) / trials


def summary(rows: list[Row]) -> list[str]:
    """The honest part: how good the held points are, which were fitted, what fell out."""
    k3 = [r for r in rows if r.is_k3 and r.point.use in ("fit", "held")]
    fit = [r for r in k3 if r.point.use == "fit"]
    errors = [(abs(e), r) for r, e in held_errors(rows)]
    out = []
    if errors:
        inside = [r for e, r in errors if e <= 0.15]
        out.append(
            f"Kimi K3: fitted on {len(fit)} of {len(k3)} points, {len(errors)} held; of those {len(inside)} within "
            f"15 %, median error {median(e for e, _ in errors):.1%}."
        )
        out.append("fitted: " + ", ".join(r.name + (" (alone)" if r.alone else "") for r in fit) + ".")
        out.append("held: " + ", ".join(f"{r.name} {r.error:+.1%}" for _, r in errors) + ".")
        outside = [f"{r.name} ({r.error:+.1%})" for e, r in errors if e > 0.15]
        middle, high, share = random_halves(rows)
        out.append(
            f"Over 200 random halves of the same points: median error {middle:.1%} (nine in ten below {high:.1%}), "
            f"{share:.0%} of the held points within 15 %."
        )
        out.append("outside 15 %: " + (", ".join(outside) or "none") + ".")
        others = [f"{r.name} {e:+.1%}" for r, e in held_errors(rows, k3=False) if not r.is_k3]
        out.append("held, other models: " + ", ".join(others) + ".")
    return out


# -------------------------------------------------------------------------------------- own measurements


@dataclass(frozen=True)
class Own:
    """A measured step of this project beside the model. note: why there is no prediction, or what it rests on."""

    name: str
    measured_ms: float
    floor_ms: float
    achievable: Interval | None
    note: str


def own_measurements(folder: Path = RESULTS / "h200") -> list[Own]:
    """Every bench row of Qwen3-8B on the H200, predicted from kernels alone. These runs used the torch reference
    operations, of which few were timed one by one: the append of keys, and attention with a boolean mask as a range."""
    machine, out = load_hardware("h200"), []
    kernels = load_kernels("h200")
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text())
        for row in run["results"]:
            if row.get("target") not in ("qwen3-8b", "qwen3-30b-a3b") or not row.get("step_ms"):
                continue
            model = load_architecture(row["target"])
            load = Load(row["num_requests"], round(row["verified_tokens"] / row["num_requests"]), row["context_len"])
            step = step_time(model, machine, Parallelism(), load)
            name = f"{path.stem}: {row['acceptance'] if row['synthetic'] else 'plain'} {row['tree']}, b={load.requests}"
            total, floor = row["step_ms"]["total"], step.floor.mid
            if not run["environment"]["cuda_graph"]:
                out.append(Own(name, total, floor, None, "no CUDA graph: bound by the host, which is not modelled"))
                continue
            reference = "reference" in run["environment"]["ops"].get("paged_tree_attention", "")
            achievable, note = step.achievable, "kernels of this project"
            if reference:
                achievable, note = _with_torch(step, kernels), "torch reference operations"
                if load.requests > 1:
                    note += "; their attention was timed at other shapes only"
            if str(row["drafter"]).startswith("draft:") and row["num_speculative_tokens"]:
                draft = load_architecture(row["drafter"].partition(":")[2])
                one = step_time(draft, machine, Parallelism(), replace(load, tokens=1))
                passes = row["num_speculative_tokens"]
                achievable = achievable + (_with_torch(one, kernels) if reference else one.achievable) * passes
                floor += one.floor.mid * passes
                note += f", {passes} passes of {draft.name}"
            out.append(Own(name, total, floor, achievable, note))
    return out


def _with_torch(step: StepTime, kernels: Any) -> Interval:
    """Achievable milliseconds with the torch operations in the place of the fused ones."""
    total = ZERO
    for op, value in step.counted:
        if op.name == "norms, rotary embedding, cache write":
            value = Interval.exact(kernels.torch.append_us * op.count * 1e-3)
        elif op.name == "cache":
            low, mid, high = kernels.torch.attention_gbps
            value = Interval(*(1e3 * op.bytes * op.count / (rate * 1e9) for rate in (high, mid, low)))
        total = total + value
    return total


@dataclass(frozen=True)
class Rank:
    """One rank of a system measured by `dspark bench --rank-of`, a row of eval/results. reported: the point of an entry
    with as many requests, verified tokens and the same acceptance length."""

    name: str
    machine: str
    row: dict[str, Any]
    reported: Point | None


def ranks_measured(entry: Reported, folder: Path = RESULTS) -> list[Rank]:
    """Every measured rank of an entry's model."""
    out = []
    for path in sorted(folder.rglob("*.json")):
        run = read_json(path)
        for row in run.get("results") or ():
            if "rank_of" not in row or row["target"] != entry.model:
                continue
            found = (row["num_requests"], round(row["verified_tokens"] / row["num_requests"]))
            al = row["spec_decode_acceptance_length"]
            same = (p for p in entry.points if (p.requests, p.tokens) == found and abs(p.acceptance_length - al) < 0.1)
            where = run["environment"]
            out.append(Rank(path.relative_to(folder).as_posix(), where["gpu"] or where["cpu"], row, next(same, None)))
    return out


def rank_text(entry: Reported, ranks: list[Rank]) -> list[str]:
    """Measured ranks beside what was reported, as lines of text."""
    if not ranks:
        return []

    def span(values: list[float] | None, digits: int = 2) -> str:
        if values is None:
            return "not counted"
        low, mid, high = (f"{x:.{digits}f}" for x in values)
        return f"{mid} [{low}-{high}]"

    body = []
    for r in ranks:
        row, p = r.row, r.reported
        said = "" if p is None else f"{'> ' if entry.at_least else ''}{p.value:g} {UNITS[p.metric]}"
        what = f"1 of {row['rank_of']} {row['parallel']}, {row['communication_source'].partition(':')[0]}"
        body.append((
            r.name, r.machine, what, str(row["num_requests"]), f"{row['verified_tokens']:.0f}",
            f"{row['spec_decode_acceptance_length']:.2f}{' SYNTHETIC' if row['synthetic'] else ''}",
            ms(row["step_ms"]["total"]), span(row["communication_ms"]), span(row["implied_step_ms"]),
            span(row["implied_output_throughput"], 0), said,
        ))  # fmt: skip
    stamps = "; ".join(dict.fromkeys(r.row["stamp"] for r in ranks))
    header = (
        "result", "measured on", "rank, fabric", "b", "verified", "AL", "its step ms", "communication ms",
        "implied step ms", "implied tokens/s", "reported",
    )  # fmt: skip
    return [f"Measured by this project ({stamps}):", "", table(header, body), ""]


# ------------------------------------------------------------------------------------------------ one entry


@dataclass(frozen=True)
class WhatIf:
    """Changes to a point: acceptance length, GPUs, machine, verified tokens or a tree of configs/trees."""

    al: float | None = None
    gpus: int | None = None
    hardware: str | None = None
    tokens: int | None = None
    tree: str | None = None
    requests: int | None = None

    @property
    def changes(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if v is not None}


def beginning(name: str) -> list[str]:
    """Entries whose names go on after `name`, the last first; none for the whole name of one."""
    return [n for n in reversed(all_reported()) if n.startswith(f"{name}-")] if name not in all_reported() else []


def find_row(name: str) -> Row:
    """A point by "entry" (its last, most telling point) or "entry/point"; an entry may be a YAML file of its own, or
    the beginning of a name: the last entry that begins so."""
    file, wanted = entry_name(name)
    file = next(iter(beginning(file)), file)
    entry = all_reported().get(file) or load_reported(file)
    rows = evaluate({file: entry})
    if wanted is None:
        return max(rows, key=lambda r: (r.reported_ms is not None, r.point.acceptance_length, r.point.requests == 1))
    for row in rows:
        if row.point.name == wanted:
            return row
    raise ConfigError(f"point: found {wanted!r}, allowed: {', '.join(p.name for p in entry.points)}")


def changed(row: Row, what: WhatIf) -> Row:
    """The row in other circumstances, with the constant of its software. Raises ConfigError for impossible ones."""
    entry, point = row.entry, row.point
    if what.tree and what.tokens:
        raise ConfigError("tree: found together with tokens, allowed: one of them")
    for field in ("gpus", "tokens", "requests"):
        if (value := getattr(what, field)) is not None and value < 1:
            raise ConfigError(f"{field}: found {value}, allowed: 1 or more")
    tokens = load_tree(what.tree).num_nodes if what.tree else what.tokens or point.tokens
    al = what.al if what.al is not None else point.acceptance_length
    if what.al is None:
        al = min(al, tokens)  # the report's, as far as fewer tokens can carry it
    if not 1 <= al <= tokens:
        raise ConfigError(f"al: found {al:g}, allowed: 1 to {tokens} (the verified tokens)")
    update: dict[str, Any] = {"tokens": tokens, "acceptance_length": al, "requests": what.requests or point.requests}
    if what.gpus:
        update["gpus"] = what.gpus
        old = entry.split(point)
        split = {"tp": what.gpus, "ep": what.gpus if old.ep == old.gpus and old.ep > 1 else 1}
        entry = entry.model_copy(
            update={"gpus": what.gpus, "parallelism": type(entry.parallelism)(**split) if entry.parallelism else None}
        )
    if what.hardware:
        load_hardware(what.hardware)
        entry = entry.model_copy(update={"hardware": what.hardware})
    point = point.model_copy(update=update)
    return replace(
        row, entry=entry, point=point, step=predict(entry, point), supposed=row.supposed or bool(what.changes)
    )


def capacity_note(row: Row) -> str:
    """Whether the weights fit at all."""
    e = row.entry
    need, have = e.architecture.checkpoint_bytes / 1e9, (row.point.gpus or e.gpus) * e.machine.datasheet.memory_gb
    return "" if need < have else f"DOES NOT FIT: {need:.0f} GB of weights, {have:.0f} GB of memory."


def ladder(row: Row, nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)) -> list[tuple[int, float, float, float]]:
    """(verified tokens N, experts touched a layer, fitted step ms, AL at which N tokens pay against plain decoding)."""
    k = row.constant or 1.0
    out, plain = [], 0.0
    for n in nodes:
        step = changed(row, WhatIf(tokens=n, al=1.0)).step
        value = max(step.floor.mid, k * step.achievable.mid)
        plain = plain or value
        out.append((n, step.unique_experts, value, value / plain))
    return out


def al_to_match(row: Row, step_ms: float) -> float:
    """The AL at which a step of this length gives as many tokens/s as the result itself (fitted, else achievable)."""
    return row.point.acceptance_length * step_ms / (row.fitted_ms or row.step.achievable.mid or row.step.floor.mid)


def carried(row: Row) -> list[tuple[str, float, float | None, str]]:
    """(machine, floor tokens/s/user, the same software's tokens/s/user, remark) of the claim on every machine."""
    out = []
    for name in names("hardware"):
        moved = changed(row, WhatIf(hardware=name))
        remark = " ".join(filter(None, (capacity_note(moved), "; ".join(moved.step.notes))))
        low = speed(row.point, moved.step.floor.mid)
        same = moved.step.achievable.mid and (moved.entry.machine.kernels is None) == (
            row.entry.machine.kernels is None
        )
        same = same and "no measured collective" not in remark
        high = (
            speed(row.point, max(moved.step.floor.mid, (row.constant or 1.0) * moved.step.achievable.mid))
            if same
            else None
        )
        out.append((name, low, high, remark))
    return out


def breakdown(row: Row) -> str:
    total = row.step.achievable.mid or 1.0
    body = []
    for op, value in row.step.counted:
        size = op.bytes * op.count / 1e9
        body.append((
            op.name, op.group, str(op.count), f"{size:.2f}", f"{op.flops * op.count / 1e12:.3f}",
            f"{op.collective / 1024:.0f}" if op.collective else "",
            str(op.launches * op.count), f"{value.mid:.3f}" if value.mid else "beside", f"{value.mid / total:.0%}",
        ))  # fmt: skip
    return table(("operation", "group", "times", "GB", "TFLOP", "KiB sent", "launches", "ms", "share"), body)


def one_text(name: str, what: WhatIf) -> str:
    row = find_row(name)
    parts = [f"{row.entry.title} ({row.name})", ""]
    if others := beginning(name.partition("/")[0])[1:]:
        parts += [f"{name} also begins {', '.join(others)}.", ""]
    parts += [verdict(row), ""]
    parts += rank_text(row.entry, ranks_measured(row.entry))
    if what.changes:
        before, row = row, changed(row, what)
        said = ", ".join(f"{k} {v}" for k, v in what.changes.items())
        if what.al is None and row.point.acceptance_length != before.point.acceptance_length:
            said += f" (AL {row.point.acceptance_length:g}, as far as {row.point.tokens} tokens can carry it)"
        f = row.fitted_ms
        line = f"What if {said}: floor {row.step.floor.mid:.2f} ms, achievable {row.step.achievable.mid:.2f} ms"
        if f:
            line += f", with the constant of {row.entry.stack} {f:.2f} ms = {speed(row.point, f):.0f} tokens/s/user"
            if before.fitted_ms and before.reported_ms:
                line += f" ({speed(before.point, before.reported_ms):.0f} reported)"
        line += f"; at the floor {speed(row.point, row.step.floor.mid):.0f} tokens/s/user."
        parts += [line, capacity_note(row), ""] if capacity_note(row) else [line, ""]
        parts += [*row.step.notes, ""] if row.step.notes else []
    parts += [f"Operations of a step, {row.entry.split(row.point)}, achievable:", "", breakdown(row), ""]
    base = "fitted" if row.constant else "achievable"
    parts += [
        f"Verified tokens a request and the AL at which they pay ({base} ms):", "",
        table(
            ("nodes", "experts/layer", "step ms", "AL to beat plain decoding", "AL to match this result"),
            [
                (str(n), f"{u:.1f}", f"{v:.2f}", f"{al:.2f}", f"{al_to_match(row, v):.2f}")
                for n, u, v, al in ladder(row)
            ],
        ), "",
        "The same claim on other machines (tokens/s/user):", "",
        table(
            ("machine", "at the floor", "same software", "remark"),
            [(n, f"{a:.0f}", "" if b is None else f"{b:.0f}", r) for n, a, b, r in carried(row)],
        ), "",
    ]  # fmt: skip
    parts += [
        "Sources:",
        *(f"- {s.source} [{s.status}: {', '.join(s.fields)}]" for s in row.entry.sources),
        "",
        *LAYERS,
    ]
    return "\n".join(parts) + "\n"


def all_text() -> str:
    rows = evaluate()
    parts = [
        "SYNTHETIC marks acceptance lengths that were forced, not earned.",
        "",
        table(HEADER, table_rows(rows)),
        "",
    ]
    parts += summary(rows) + [""]
    own = [
        (o.name, ms(o.measured_ms), ms(o.floor_ms),
         f"{o.achievable.mid:.2f} [{o.achievable.low:.1f}-{o.achievable.high:.1f}]" if o.achievable else "",
         f"{o.achievable.mid / o.measured_ms - 1:+.1%}" if o.achievable else "", o.note)
        for o in own_measurements()
    ]  # fmt: skip
    if own:
        parts += ["Steps that this project measured on one H200, against kernels alone (no constant):", ""]
        parts += [table(("result", "measured ms", "floor ms", "achievable ms", "error", "note"), own), ""]
    parts += [*LAYERS, ""]
    by_entry: dict[str, list[Row]] = {}
    for r in rows:
        by_entry.setdefault(r.name.rpartition("/")[0], []).append(r)
    for name, group in by_entry.items():
        parts += [f"{name}: {verdict(find_row(name))}", ""]
    return "\n".join(parts)


def as_json(name: str | None, what: WhatIf) -> str:
    """All points, or one with what was changed."""
    rows = [changed(find_row(name), what)] if name else evaluate()
    out = [
        {
            "result": r.name, "title": r.entry.title, "use": r.point.use, "stack": r.entry.stack,
            "synthetic": r.point.synthetic, "parallelism": str(r.entry.split(r.point)),
            "reported": {r.point.metric: r.point.value}, "what_if": what.changes,
            "num_requests": r.point.requests, "verified_tokens": r.point.tokens,
            "acceptance_length": r.point.acceptance_length,
            "reported_step_ms": r.reported_ms, "floor_ms": vars(r.step.floor),
            "achievable_ms": vars(r.step.achievable), "constant": r.constant, "fitted_ms": r.fitted_ms,
            "error": r.error, "floor_share": r.share,
            "unique_experts_per_layer": r.step.unique_experts,
            "groups_ms": {k: v.mid for k, v in r.step.groups().items()},
            "verdict": None if r.supposed else verdict(r),
            "ranks_measured": [{"result": m.name, "measured_on": m.machine} | m.row for m in ranks_measured(r.entry)],
        }
        for r in rows
    ]  # fmt: skip
    return json.dumps({"schema_version": 1, "command": "dspark reproduce", "results": out}, indent=1) + "\n"


def check_options(name: str | None, what: WhatIf, run: bool, output: str, plot_file: Path | None) -> None:
    """Raises ConfigError for options that do not go together, before anything is computed."""
    if output not in ("md", "json"):
        raise ConfigError(f"output: found {output!r}, allowed: md, json")
    if name is None:
        asked = [*what.changes, *(["plot"] if plot_file else []), *(["run"] if run else [])]
        if asked:
            raise ConfigError(f"{asked[0]}: found without a name, allowed: with one of {', '.join(names('reported'))}")
    if plot_file is not None and plot_file.suffix not in (".svg", ".png"):
        raise ConfigError(f"plot: found {str(plot_file)!r}, allowed: a file that ends in .svg or .png")


# -------------------------------------------------------------------------------------------- measured here


def measured(row: Row, command: str) -> str:
    """The claim's synthetic bench on the machine at hand, in the nearest shape that runs here, beside its
    prediction."""
    import torch

    from eval.bench import bench
    from eval.floor import known_hardware
    from eval.schema import bench_config

    cuda = torch.cuda.is_available()
    runnable = row.entry.model in RUNNABLE
    target = row.entry.model if runnable and cuda else "qwen3-8b" if cuda else "tiny"
    point = row.point
    recipe: dict[str, Any] = {
        "target": target, "weights": "dummy", "drafter": "ngram",
        "context_len": min(point.context or row.entry.context, 1024 if cuda else 128),
        "num_speculative_tokens": max(1, point.tokens - 1), "num_requests": point.requests, "max_tokens": 32,
    }  # fmt: skip
    if point.acceptance_length > 1:
        recipe["acceptance_length"] = point.acceptance_length
    run = bench(bench_config(recipe), command, lambda *_: None)
    machine = None
    if cuda and (known := known_hardware(torch.cuda.get_device_name())):
        machine = load_hardware(Path(known["file"]).stem)
    body = []
    for r in run.results:
        if not r.ran:
            continue
        load = Load(r.num_requests, round(r.verified_tokens / r.num_requests), r.context_len or 1)
        ach = step_time(load_architecture(target), machine, Parallelism(), load).achievable if machine else None
        body.append((
            r.acceptance if r.synthetic else r.method, str(r.num_requests), ms(r.step_ms.total), ms(r.floor_ms),
            f"{ach.mid:.2f} [{ach.low:.2f}-{ach.high:.2f}]" if ach else "no kernels measured",
            f"{r.output_throughput_per_user:.1f}",
        ))  # fmt: skip
    whole = (
        "its own shape"
        if target == row.entry.model
        else f"the whole of {target}, not of {row.entry.model}, which does not run here"
    )
    head = (
        f"Measured here: {whole}; random weights, {run.environment.gpu or run.environment.cpu}; SYNTHETIC where marked."
    )
    return "\n".join([head, "", table(("line", "b", "step ms", "floor ms", "achievable ms", "tok/s/user"), body), ""])


# Targets whose random weights fit one GPU and that the engine can decode.
RUNNABLE = ("qwen3-8b", "qwen3-30b-a3b", "qwen3-0.6b", "llama-3.1-8b", "smollm2-135m", "tiny")
