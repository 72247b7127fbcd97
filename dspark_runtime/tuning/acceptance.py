"""What is known of acceptance: survival by position, how many steps it rests on, and what else it could have been.

survival[i - 1]: share of steps whose first i drafts were all accepted (unconditional, as in vLLM). It comes from an
evaluation's JSON, from a trace of steps, or typed. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from drafters.topology import MAX_NODES
from drafters.tree_search import assumed_profile
from dspark_runtime.errors import ConfigError
from dspark_runtime.validation import read_json

MIN_STEPS = 100
"""Fewer steps than this say too little: the AL's standard error is then up to a quarter of a token at 7 drafts."""

MOST_STEPS = 10**12

MIN_REQUESTS = 8
"""A trace of at least this many requests is resampled by request: the steps of one request resemble each other."""


@dataclass(frozen=True)
class Suite:
    """Acceptance on one kind of text. num_steps: None where it is taken as exact. accepted, drafted,
    requests [S] int64, confidence [S, n] float64 (nan where nothing was drafted; None where the trace has none): the
    steps of a trace. profile: measured rank acceptances,
    where there are any. pair: (target, drafter), where the file says."""

    name: str
    survival: tuple[float, ...]
    num_steps: int | None = None
    profile: tuple[float, ...] | None = None
    pair: tuple[str, str] | None = None
    accepted: np.ndarray | None = field(default=None, compare=False)
    drafted: np.ndarray | None = field(default=None, compare=False)
    requests: np.ndarray | None = field(default=None, compare=False)
    confidence: np.ndarray | None = field(default=None, compare=False)

    @property
    def depth(self) -> int:
        return len(self.survival)

    @property
    def acceptance_length(self) -> float:
        return 1.0 + sum(self.survival)


def checked_suite(
    name: str,
    survival: object,
    num_steps: object = None,
    profile: object = None,
    acceptance_length: object = None,
    where: str = "",
    **trace: np.ndarray | None,
) -> Suite:
    """A suite that can be right. Raises ConfigError naming where, the field, found and allowed."""
    where = f"{where}: " if where else ""
    rates = _numbers(survival, f"{where}survival")
    if not 1 <= len(rates) < MAX_NODES:
        raise ConfigError(f"{where}survival: found {len(rates)} positions, allowed: 1 to {MAX_NODES - 1}")
    for i, rate in enumerate(rates):
        if not 0 <= rate <= 1:
            raise ConfigError(f"{where}survival[{i}]: found {rate:g}, allowed: 0 to 1")
        if i and rate > rates[i - 1]:
            raise ConfigError(
                f"{where}survival[{i}]: found {rate:g} after {rates[i - 1]:g}, allowed: never more than before (a step "
                "that accepts position i accepted all before it; conditional rates go in --rates)"
            )
    if num_steps is not None:
        if type(num_steps) is not int or not 1 <= num_steps <= MOST_STEPS:
            raise ConfigError(f"{where}num_steps: found {num_steps!r}, allowed: a number of steps, 1 to {MOST_STEPS}")
    if acceptance_length is not None:
        length = _numbers([acceptance_length], f"{where}acceptance_length")[0]
        if length > len(rates) + 1:
            raise ConfigError(
                f"{where}acceptance_length: found {length:g}, allowed: at most {len(rates) + 1} at {len(rates)} drafts"
            )
        if abs(length - 1 - sum(rates)) > 0.02 * length:
            raise ConfigError(
                f"{where}acceptance_length: found {length:g}, allowed: 1 + the sum of survival, {1 + sum(rates):.3f}"
            )
    ranks = None
    if profile is not None:
        ranks = tuple(_numbers(profile, f"{where}profile"))
        if not ranks or any(not 0 <= p <= 1 for p in ranks) or sum(ranks) > 1 + 1e-6:
            raise ConfigError(
                f"{where}profile: found {list(ranks)}, allowed: shares of 0 to 1 that add up to at most 1"
            )
    return Suite(name, tuple(rates), num_steps, ranks, **trace)


def _numbers(values: object, field: str) -> list[float]:
    if not isinstance(values, (list, tuple)) or any(
        isinstance(v, bool) or not isinstance(v, (int, float)) or v != v for v in values
    ):
        raise ConfigError(f"{field}: found {values!r}, allowed: a list of numbers")
    return [float(v) for v in values]


def typed(text: str, conditional: bool, num_steps: int | None) -> Suite:
    """From "0.8,0.7,0.6": rates given that all before were accepted, or unconditional survival."""
    field = "rates" if conditional else "survival"
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{field}: found {text!r}, allowed: numbers separated by commas") from None
    if not conditional:
        return checked_suite("typed", values, num_steps)
    bad = next((v for v in values if not 0 <= v <= 1), None)
    if bad is not None:
        raise ConfigError(
            f"rates: found {bad:g}, allowed: 0 to 1 (share of drafts, given that all before were accepted)"
        )
    return checked_suite("typed", np.cumprod(values).tolist(), num_steps)


def read_acceptance(path: Path, temperature: float | None = None) -> list[Suite]:
    """Suites of a file: a trace (.jsonl, see `read_trace`), `dspark eval --json` (its chains at one temperature, the
    first in the file if none is asked for), or {"suites": [{"name", "survival", "num_steps", "profile"?}]}."""
    values = None if path.suffix == ".jsonl" else read_json(path)
    if isinstance(values, dict) and "suites" not in values and isinstance(values.get("results"), list):
        return _suites_of_eval(values["results"], temperature, path)
    if temperature is not None:
        raise ConfigError(f"temperature: found with {path}, allowed: with a file of `dspark eval --json`")
    if path.suffix == ".jsonl":
        return read_trace(path)
    rows = values.get("suites") if isinstance(values, dict) else None
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f'{path}: suites: missing, allowed: {{"suites": [{{"name", "survival", "num_steps"}}, ...]}}')
    suites = []
    for i, row in enumerate(rows):
        where = f"{path}: suites[{i}]"
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: found {row!r}, allowed: name, survival, num_steps")
        for name in ("name", "survival", "num_steps"):
            if name not in row:
                raise ConfigError(f"{where}: {name}: missing")
        length = row.get("acceptance_length")
        suites.append(
            checked_suite(str(row["name"]), row["survival"], row["num_steps"], row.get("profile"), length, where)
        )
    return suites


def _suites_of_eval(rows: list[object], temperature: float | None, path: Path) -> list[Suite]:
    """The chains of an evaluation. Survival is the product of the conditional rates: a step that a stop token ended
    says nothing of the positions behind it, so the unconditional rates there rest on fewer steps."""
    chains = [r for r in rows if isinstance(r, dict) and r.get("shape") == "chain" and "suite" in r]
    for row in chains:
        t = row.get("temperature")
        if isinstance(t, bool) or not isinstance(t, (int, float)) or not t >= 0:
            raise ConfigError(f"{path}: results: temperature: found {t!r}, allowed: a number, 0 or more")
    found = list(dict.fromkeys(r["temperature"] for r in chains))
    if not chains:
        raise ConfigError(
            f"{path}: results: found no chains, allowed: a file of `dspark eval --json` with the shape chain"
        )
    if temperature is None:
        temperature = found[0]
    if temperature not in found:
        raise ConfigError(f"{path}: temperature: found {temperature:g}, allowed: {', '.join(f'{t:g}' for t in found)}")
    suites = []
    for i, row in enumerate(rows):
        if row not in chains or row["temperature"] != temperature:
            continue
        where = f"{path}: results[{i}]"
        for name in ("spec_decode_conditional_acceptance_rates", "steps"):
            if name not in row:
                raise ConfigError(f"{where}: {name}: missing")
        rates = row["spec_decode_conditional_acceptance_rates"]
        rates = [0.0 if r is None else r for r in rates] if isinstance(rates, list) else rates
        survival = np.cumprod(_numbers(rates, f"{where}: spec_decode_conditional_acceptance_rates")).tolist()
        suite = checked_suite(str(row["suite"]), survival, row["steps"], where=where)
        suites.append(replace(suite, pair=(str(row.get("target")), str(row.get("drafter")))))
    return suites


def read_trace(path: Path) -> list[Suite]:
    """One suite for each name in a trace: a line a step, {"accepted": 3, "confidence": [0.9, ...], "request": 7,
    "suite": "chat"}. confidence[i]: the drafter's estimate that draft i + 1 is accepted if all before are; its length
    is the number of drafts. A drafter that has no confidence says `drafted`, that number, instead. Without request,
    steps count as independent; without suite, all belong to one."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start})") from None
    found: dict[str, list[tuple[int, int, int, list[float] | None]]] = {}
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        try:
            step = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON ({error})") from None
        if not isinstance(step, dict) or "accepted" not in step or not {"confidence", "drafted"} & set(step):
            raise ConfigError(f"{where}: accepted, confidence: missing")
        confidence = None
        if "confidence" in step:
            confidence = _numbers(step["confidence"], f"{where}: confidence")
            if any(not 0 <= c <= 1 for c in confidence) or len(confidence) >= MAX_NODES:
                raise ConfigError(
                    f"{where}: confidence: found {confidence}, allowed: at most {MAX_NODES - 1} of 0 to 1"
                )
        drafted = step.get("drafted", len(confidence or ()))
        if type(drafted) is not int or not 0 <= drafted < MAX_NODES:
            raise ConfigError(f"{where}: drafted: found {drafted!r}, allowed: 0 to {MAX_NODES - 1}")
        if confidence is not None and drafted != len(confidence):
            raise ConfigError(f"{where}: drafted: found {drafted}, allowed: {len(confidence)}, one for each confidence")
        accepted = step["accepted"]
        if type(accepted) is not int or not 0 <= accepted <= drafted:
            raise ConfigError(f"{where}: accepted: found {accepted!r}, allowed: 0 to {drafted}, the drafts")
        request = step.get("request", -number)
        if type(request) is not int:
            raise ConfigError(f"{where}: request: found {request!r}, allowed: an integer")
        found.setdefault(str(step.get("suite", path.stem)), []).append((accepted, drafted, request, confidence))
    if not found:
        raise ConfigError(f"{path}: found no steps, allowed: {MIN_STEPS} or more")
    return [_suite_of_steps(name, steps, str(path)) for name, steps in found.items()]


def _suite_of_steps(name: str, steps: list[tuple[int, int, int, list[float] | None]], where: str) -> Suite:
    accepted, drafted, requests = np.array([step[:3] for step in steps]).T
    depth = int(drafted.max())
    if not depth:
        raise ConfigError(f"{where}: confidence: found no drafts in suite {name!r}, allowed: at least one a trace")
    given = [values for *_, values in steps]
    if any(values is None for values in given) and not all(values is None for values in given):
        raise ConfigError(f"{where}: confidence: found in some steps of suite {name!r}, allowed: in all or in none")
    confidence = None
    if given[0] is not None:
        confidence = np.full((len(steps), depth), np.nan)
        for row, values in zip(confidence, given):
            row[: len(values)] = values
    survival = [float((accepted >= i).mean()) for i in range(1, depth + 1)]
    return checked_suite(
        name, survival, len(steps), where=where, accepted=accepted, drafted=drafted, requests=requests,
        confidence=confidence,
    )  # fmt: skip


def enough(suites: Sequence[Suite], field: str) -> None:
    """Raises ConfigError where all suites together rest on too few steps."""
    known = [s.num_steps for s in suites if s.num_steps is not None]
    if known and sum(known) < MIN_STEPS:
        raise ConfigError(f"{field}: found {sum(known)} steps in all, allowed: {MIN_STEPS} or more (too few samples)")


# ----------------------------------------------------------------------------------------------- what it could be


def pooled(suites: Sequence[Suite]) -> Suite:
    """All suites as one, each with the weight of its steps (equal weights where one does not say); as deep as the
    shallowest."""
    if len(suites) == 1:
        return suites[0]
    depth = min(s.depth for s in suites)
    steps = [s.num_steps for s in suites]
    known = None not in steps
    weights = np.array(steps if known else [1] * len(suites), dtype=float)
    survival = np.average([s.survival[:depth] for s in suites], axis=0, weights=weights)
    profiles = {s.profile for s in suites}
    return Suite(
        "all suites", tuple(survival.tolist()), sum(steps) if known else None,
        profiles.pop() if len(profiles) == 1 else None,
    )  # fmt: skip


def draws(suites: Sequence[Suite], count: int, rng: np.random.Generator) -> np.ndarray:
    """[count, depth] float64: survival as it could be, given the samples, pooled as in `pooled`. Suites without a
    number of steps are exact."""
    depth = min(s.depth for s in suites)
    known = all(s.num_steps is not None for s in suites)
    out = np.zeros((count, depth))
    total = 0.0
    for s in suites:
        weight = float(s.num_steps) if known else 1.0
        out += weight * _draws_of(s, count, rng)[:, :depth]
        total += weight
    return out / total


def _draws_of(s: Suite, count: int, rng: np.random.Generator) -> np.ndarray:
    if s.num_steps is None:
        return np.tile(s.survival, (count, 1))
    if s.requests is not None and len(names := np.unique(s.requests)) >= MIN_REQUESTS:
        owner = np.searchsorted(names, s.requests)
        size = np.bincount(owner).astype(float)
        hits = np.stack(
            [np.bincount(owner, weights=s.accepted >= i, minlength=len(names)) for i in range(1, s.depth + 1)], axis=1
        )
        if len(names) < len(owner):
            picked = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=count)
            return (picked @ hits) / (picked @ size)[:, None]
    # Steps that accept exactly 0, 1, ... depth drafts, under Jeffreys' prior.
    exactly = -np.diff([1.0, *s.survival, 0.0]) * s.num_steps
    drawn = rng.dirichlet(exactly + 0.5, size=count)
    return 1.0 - np.cumsum(drawn, axis=1)[:, :-1]


def rank_shares(profile: Sequence[float] | None) -> np.ndarray:
    """[ranks - 1] float64: of what the first choice misses, the share that each later choice holds. profile: measured,
    or None for the assumed one of `drafters.tree_search`."""
    ranks = assumed_profile(0.5) if profile is None else list(profile)
    missed = 1.0 - ranks[0]
    return np.array(ranks[1:]) / missed if missed > 0 else np.zeros(len(ranks) - 1)


def profiles(survival: Sequence[float], shares: np.ndarray) -> list[list[float]]:
    """Rank acceptances for each depth: the first is the chain's conditional rate there, the rest share what it
    misses."""
    before = [1.0, *survival[:-1]]
    rates = [p / q if q > 0 else 0.0 for p, q in zip(survival, before)]
    return [[r, *((1 - r) * shares).tolist()] for r in rates]
