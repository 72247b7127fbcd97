"""`dspark simulate`: serving on a cost curve, plain, with fixed draft lengths and with schedules, under the same load.

The simulation is in `dspark_runtime.simulation`; here are options, the sweep and what is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dspark_runtime.errors import ConfigError
from dspark_runtime.scheduling.names import label, split
from dspark_runtime.simulation.acceptance import BETWEEN_DRAFTS, BETWEEN_REQUESTS, Acceptance, Rates, Recorded
from dspark_runtime.simulation.workload import Lengths, Workload, closed_loop, poisson, read_trace
from dspark_runtime.tuning.acceptance import Suite, pooled
from dspark_runtime.tuning.curve import Curve, load_curve
from eval import tune
from eval.profile import numbers

if TYPE_CHECKING:
    from dspark_runtime.scheduling.policies import Policy
    from dspark_runtime.simulation.measures import Measures
    from eval.bench import Progress

OWN_CURVE = ("early-stop", "async")
"""Schedulers that take the simulation's curve where they name no other."""
ROUNDS, LEAST = 20, 400
"""Requests of a closed loop: for each user, and in any case."""
MANY = 2000
"""Requests at a rate."""
OUTPUT = "64-448"


@dataclass(frozen=True)
class Asked:
    """The options of one call; names as on the command line."""

    curve: Path
    acceptance: tune.Asked
    spread_requests: float = BETWEEN_REQUESTS
    spread_drafts: float = BETWEEN_DRAFTS
    confidence: str = "head"
    k: str | None = None
    scheduler: str = "async"
    num_requests: str | None = None
    rate: str | None = None
    trace: Path | None = None
    requests: int | None = None
    prompt: str | None = None
    output: str = OUTPUT
    max_num_requests: int | None = None
    prefill_rate: float | None = None
    max_prefill_tokens: int = 1024
    gpus: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Line:
    """What serves: k drafts, and what chooses among them (None: all are verified)."""

    name: str
    k: int
    scheduler: str | None = None


@dataclass(frozen=True)
class Load:
    """A workload, and the rows that it is served with. value: users or requests a second; None for a trace."""

    workload: Workload
    rows: int
    value: float | None


@dataclass(frozen=True)
class Row:
    load: Load
    line: Line
    measures: Measures


@dataclass(frozen=True)
class Simulated:
    command: str
    asked: Asked
    curve: Curve
    acceptance: str
    gpus: int
    prefill_rate: float
    rows: list[Row]
    stamps: list[str]
    notes: list[str]


def simulate(asked: Asked, command: str, progress: Progress) -> Simulated:
    """Every line under every load. Raises ConfigError with one line for input that cannot be right."""
    curve = load_curve(asked.curve)
    suites = tune.read_suites(asked.acceptance)
    model = acceptance_of(asked, suites)
    lines = lines_of(asked, curve, model)
    loads = loads_of(asked, curve)
    rate, notes = prefill_of(asked, curve)
    stamps = ["SIMULATED: nothing was run"]
    if curve.source == "model":
        stamps.append(f"PREDICTED: the curve is a model's of {curve.machine}, nothing was measured")
    notes = [*curve.notes, *notes, *context_notes(loads, curve)]
    if isinstance(model, Rates) and suites[0].num_steps is None:
        notes.append("acceptance is typed: taken as exact")

    from dspark_runtime.simulation.measures import measures
    from dspark_runtime.simulation.simulator import System, simulate as run

    rows = []
    for load in loads:
        for line in lines:
            progress(f"{load.workload.name}, {line.name}", len(rows), len(loads) * len(lines))
            policy = None if line.scheduler is None else policy_of(line.scheduler, curve)
            system = System(curve, line.k, policy, load.rows, rate, asked.max_prefill_tokens)
            rows.append(Row(load, line, measures(run(system, load.workload, model, asked.seed))))
    gpus = asked.gpus or int(curve.environment.get("gpus") or 1)
    return Simulated(command, asked, curve, model.label, gpus, rate, rows, stamps, notes)


def acceptance_of(asked: Asked, suites: Sequence[Suite]) -> Acceptance:
    if asked.confidence not in ("head", "none"):
        raise ConfigError(f"confidence: found {asked.confidence!r}, allowed: head, none (estimated while it runs)")
    head = asked.confidence == "head"
    if all(s.accepted is not None for s in suites):
        return Recorded(suites, head)
    return Rates(pooled(suites).survival, asked.spread_requests, asked.spread_drafts, head)


def lines_of(asked: Asked, curve: Curve, model: Acceptance) -> list[Line]:
    """Plain decoding, every fixed length, every scheduler on the longest of them."""
    longest = min(curve.longest_chain(b, c) for b in curve.num_requests for c in curve.contexts)
    most = min(model.depth, longest, curve.max_depth)
    ks = [k for k in numbers("num_speculative_tokens", asked.k or f"1,{most}", 0) if k]
    if ks and ks[-1] > most:
        why = "what the curve measured" if longest < model.depth else "where acceptance is known"
        raise ConfigError(f"num_speculative_tokens: found {ks[-1]}, allowed: at most {most}, {why}")
    lines = [Line("plain", 0), *(Line(f"k={k}", k) for k in ks)]
    for name in [] if asked.scheduler == "none" else asked.scheduler.split(","):
        if not ks:
            raise ConfigError(f"scheduler: found {name!r} without drafts, allowed: none")
        if name not in OWN_CURVE:
            split(name)
        lines.append(Line(f"{name if name in OWN_CURVE else label(name)}, k={ks[-1]}", ks[-1], name))
    return lines


def policy_of(name: str, curve: Curve) -> Policy:
    from dspark_runtime.scheduling import policies
    from dspark_runtime.scheduling.names import make_policy

    if name in OWN_CURVE:
        return policies.EarlyStop(curve) if name == "early-stop" else policies.Lagged(curve)
    return make_policy(name)


def loads_of(asked: Asked, curve: Curve) -> list[Load]:
    given = {"num_requests": asked.num_requests, "rate": asked.rate, "trace": asked.trace}
    given = [name for name, value in given.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{given[1]}: found together with {given[0]}, allowed: one of them")
    if asked.requests is not None and asked.requests < 1:
        raise ConfigError(f"requests: found {asked.requests}, allowed: 1 or more")
    most = curve.num_requests[-1]
    rows = asked.max_num_requests if asked.max_num_requests is not None else most
    if not 1 <= rows <= most:
        raise ConfigError(f"max_num_requests: found {rows}, allowed: 1 to {most}, what the curve measured")
    if asked.trace is not None:
        for name in ("requests", "prompt"):
            if getattr(asked, name) is not None:
                raise ConfigError(f"{name}: found with a trace, allowed: without (the trace says it)")
        return [Load(read_trace(asked.trace), rows, None)]
    prompt = lengths("prompt", asked.prompt or str(curve.contexts[-1]))
    output = lengths("output", asked.output)
    if asked.rate is not None:
        from eval.schema import float_list

        try:
            rates = float_list(asked.rate)
        except ValueError as error:
            raise ConfigError(f"rate: {error}") from None
        count = asked.requests or MANY
        return [Load(poisson(r, count, prompt, output, np.random.default_rng(asked.seed)), rows, r) for r in rates]
    users = curve.num_requests if asked.num_requests is None else numbers("num_requests", asked.num_requests, 1)
    if users[-1] > most and asked.max_num_requests is None:
        raise ConfigError(
            f"num_requests: found {users[-1]}, allowed: at most {most}, what the curve measured, or more users with "
            "--max-num-requests"
        )
    return [
        Load(
            closed_loop(b, asked.requests or max(LEAST, ROUNDS * b), prompt, output, np.random.default_rng(asked.seed)),
            min(b, rows), b,
        )
        for b in users
    ]  # fmt: skip


def lengths(field: str, text: str) -> Lengths:
    """ "64-448" or "256"."""
    low, dash, high = text.partition("-")
    high = high if dash else low
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high) <= 10**7):
        raise ConfigError(f"{field}: found {text!r}, allowed: a number of tokens, 1 or more, or a range such as 64-448")
    return int(low), int(high)


def prefill_of(asked: Asked, curve: Curve) -> tuple[float, list[str]]:
    """Prompt tokens a second, and what is to be said of them. A curve times no prefill: its largest pass stands in."""
    if asked.max_prefill_tokens < 1:
        raise ConfigError(f"max_prefill_tokens: found {asked.max_prefill_tokens}, allowed: 1 or more")
    if asked.prefill_rate is not None:
        if not asked.prefill_rate > 0:
            raise ConfigError(
                f"prefill_rate: found {asked.prefill_rate:g}, allowed: more than 0 tokens a second, or inf (elsewhere)"
            )
        return asked.prefill_rate, []
    widest = max(curve.points, key=lambda p: (p.num_requests * p.num_tokens, -p.context_len))
    tokens = widest.num_requests * widest.num_tokens
    rate = 1e3 * tokens / (widest.verify_ms + widest.other_ms)
    return rate, [
        f"prefill is not in the curve: taken at {rate:.0f} tokens/s, as its largest pass of {tokens} (--prefill-rate)"
    ]


def context_notes(loads: Sequence[Load], curve: Curve) -> list[str]:
    low = min(int(load.workload.prompt.min()) for load in loads)
    high = max(int((load.workload.prompt + load.workload.output).max()) for load in loads)
    known = curve.contexts
    if low >= known[0] and high <= known[-1]:
        return []
    return [
        f"contexts are {low} to {high} tokens, the curve's {known[0]} to {known[-1]}: beyond these the nearest counts"
    ]


def as_json(found: Simulated) -> str:
    """Everything, for scripts."""
    asked = found.asked
    rows = []
    for row in found.rows:
        m = row.measures
        rows.append(dict(
            load=row.load.workload.name, value=row.load.value, max_num_requests=row.load.rows, line=row.line.name,
            num_speculative_tokens=row.line.k, scheduler=row.line.scheduler,
            output_throughput_per_gpu=m.output_throughput / found.gpus, **asdict(m),
        ))  # fmt: skip
    result = dict(
        schema_version=1, kind="simulation", command=found.command, stamps=found.stamps, notes=found.notes,
        curve=found.curve.label, environment=found.curve.environment, gpus=found.gpus, acceptance=found.acceptance,
        confidence=asked.confidence, prefill_rate=None if math.isinf(found.prefill_rate) else found.prefill_rate,
        max_prefill_tokens=asked.max_prefill_tokens, seed=asked.seed, results=rows,
    )  # fmt: skip
    return json.dumps(result, indent=1, allow_nan=False) + "\n"


