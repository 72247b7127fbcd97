"""`dspark eval`: how much of a drafter's work is accepted on prompts, whether its confidence knows, and what it brings.

Acceptance is counted with many requests at once and real stops. Nothing is cut by --max-tokens: a request is ended when
it has that many tokens, and its last step counts in full. Speed is measured with one request at a time, each prompt
decoded plainly and with every shape before the next, so that a slow minute of the machine falls on all alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from drafters.dspark import calibration
from drafters.topology import TreeSpec
from dspark_runtime.configs import FOLDER
from dspark_runtime.errors import ConfigError, DsparkError
from dspark_runtime.prompts import PromptSet, encode, load_prompts
from eval.bench import Progress, load, make_drafter, make_scheduler, relative_std
from eval.schema import EvalConfig, EvalRow

if TYPE_CHECKING:
    from dspark_runtime.engine import Engine
    from dspark_runtime.records import StepRecord
    from dspark_runtime.scheduling.scheduler import Scheduler

SUITES = [str(FOLDER / "prompts" / f"{name}.jsonl") for name in ("math", "code", "chat", "repeat")]
DRAFTS = 7
"""Chain length of a drafter that has none of its own."""
MATCHES = 4
"""Earlier occurrences that a hybrid tree looks at."""


@dataclass(frozen=True)
class Shape:
    """kind: chain, tree or hybrid. Hybrid trees are deterministic at every temperature (earlier text has no law to draw
    from) and verified by node sampling; what else is drafted above temperature 0 is drawn, where the drafter can."""

    kind: str
    name: str
    spec: TreeSpec

    @property
    def rule(self) -> str:
        return "node" if self.kind == "hybrid" else "auto"


@dataclass
class Evaluation:
    """fitted: the calibration that this run wrote. trace: every request's step of the chains, as `read_trace` of
    `dspark_runtime.tuning.acceptance` takes them; None where a scheduler trimmed them."""

    rows: list[EvalRow]
    fitted: calibration.Calibration | None
    facts: dict[str, object]
    trace: list[dict[str, object]] | None = None


class Timed(NamedTuple):
    """One decoded prompt: tokens, and the seconds of its decode steps (prefill is not in them)."""

    tokens: int
    seconds: float


@dataclass
class Steps:
    """N steps, one entry for each of their requests. judged: drafts that were accepted or rejected; behind a stop
    token there is neither. logits [N, depth] of the confidence, NaN where nothing was judged; None without a head."""

    emitted: NDArray[np.int64]
    accepted: NDArray[np.int64]
    judged: NDArray[np.int64]
    logits: NDArray[np.float64] | None


# ------------------------------------------------------------------------------------------------------ before loading


def suite_of(prompts: PromptSet) -> str:
    return Path(prompts.name).stem


def read_suites(config: EvalConfig) -> tuple[list[PromptSet], PromptSet | None]:
    """The suites, cut to `limit`, and the prompts to fit on. Raises ConfigError if the two share a prompt."""
    suites = [load_prompts(path) for path in config.prompts or SUITES]
    names = [suite_of(s) for s in suites]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"prompts: found two files named {name}, allowed: suites of different names")
    if config.fit_calibration is None:
        return [cut(s, config.limit) for s in suites], None
    fit = load_prompts(config.fit_calibration)
    for suite in suites:
        shared = len(set(fit.texts) & set(suite.texts))
        if shared:
            raise ConfigError(
                f"fit_calibration: found {shared} prompts of {fit.name} in {suite.name}, which is evaluated, "
                "allowed: a file with other prompts"
            )
    return [cut(s, config.limit) for s in suites], cut(fit, config.limit)


def cut(prompts: PromptSet, limit: int | None) -> PromptSet:
    return PromptSet(prompts.name, prompts.sha256, prompts.texts[:limit])


def budget(nodes: int, depth: int) -> TreeSpec:
    """A topology of so many nodes, no deeper than depth: what a grown tree may use, whatever shape it takes."""
    depth = min(depth, nodes - 1)
    wide = nodes - depth  # children of the root; the first of them heads a chain
    return TreeSpec((-1, *[0] * wide, *([1] if depth > 1 else []), *range(wide + 1, nodes - 1)))


def shapes(config: EvalConfig, drafter: Any) -> list[Shape]:
    """Every shape to evaluate. Raises ConfigError for a tree that the drafter does not grow."""
    from drafters.dspark.drafter import BlockDrafter
    from drafters.dspark.eagle3 import Eagle3Drafter

    grows = isinstance(drafter, (BlockDrafter, Eagle3Drafter))
    depth = drafter.max_depth if isinstance(drafter, BlockDrafter) else min(DRAFTS, drafter.max_depth)
    trees = [t for t in config.trees if t != "chain"]
    if trees and not grows:
        if "trees" in config.model_fields_set:
            raise ConfigError(f"trees: found {trees[0]} with {drafter.name}, allowed: chain (it grows no trees)")
        trees = []
    if config.hybrid and not trees:
        raise ConfigError("hybrid: found without a grown tree, allowed: with trees that the drafter grows")
    found = [Shape("chain", "chain", TreeSpec.chain(depth))] if "chain" in config.trees else []
    for kind in ("tree", "hybrid") if config.hybrid else ("tree",):
        found += [Shape(kind, f"{kind}-{n}", budget(n, depth)) for n in trees]
    return found


# ------------------------------------------------------------------------------------------------------ one run


def roll_out(
    engine: Engine,
    shape: Shape,
    prompts: Sequence[list[int]],
    config: EvalConfig,
    temperature: float,
    finished: Callable[[], None] = lambda: None,
    scheduler: Scheduler | None = None,
) -> list[StepRecord]:
    """Every prompt to its stop or to `max_tokens` tokens. Raises DsparkError if a request fails."""
    from dspark_runtime.sampling import SamplingParams

    engine.configure(shape.spec, None, shape.rule, scheduler)
    engine.records.clear()
    for i, prompt in enumerate(prompts):
        # Room for one whole step more than is asked for: a step is never cut, the request is ended here instead.
        tokens = config.max_tokens + shape.spec.depth + 1
        seed = (config.seed << 32) + i
        engine.submit(prompt, SamplingParams(temperature=temperature, max_tokens=tokens, seed=seed))
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason == "error":
                raise DsparkError(f"request {output.request_id}: {output.error}")
            if output.finish_reason or len(output.token_ids) >= config.max_tokens:
                engine.abort(output.request_id)
                finished()
    return list(engine.records)


def steps_of(records: Sequence[StepRecord], depth: int, head: bool) -> Steps:
    """What the records say of every request's step. head: their confidences are a confidence head's."""
    emitted = np.array([e for r in records for e in r.emitted])
    accepted = np.array([a for r in records for a in r.accepted])
    # Fewer tokens than accepted drafts and a bonus: the last of them is a draft that stopped the request.
    stopped = emitted <= accepted
    judged = np.where(stopped, emitted, depth)
    logits = None
    if head:
        c = np.full((len(emitted), depth), np.nan)
        for row, drafts in zip(c, (line for r in records for line in r.confidence)):
            row[: len(drafts)] = drafts
        c[np.arange(depth) >= judged[:, None]] = np.nan
        c = c.clip(2.0**-24, 1 - 2.0**-24)  # they are float32
        logits = np.log(c) - np.log1p(-c)
    return Steps(emitted, np.where(stopped, emitted, accepted), judged, logits)


def trace_of(
    records: Sequence[StepRecord], suite: str, head: bool, temperatures: Sequence[float] | None
) -> list[dict[str, object]]:
    """A line for each request's step: what was judged of its drafts, with the scaled confidence of a head."""
    lines = []
    for r in records:
        for i, request in enumerate(r.request_ids):
            stopped = r.emitted[i] <= r.accepted[i]
            drafted = r.emitted[i] if stopped else r.drafted[i]
            line = dict(request=request, suite=suite, accepted=r.emitted[i] if stopped else r.accepted[i])
            if head:
                c = np.array(r.confidence[i][:drafted]).clip(2.0**-24, 1 - 2.0**-24)
                t = np.array(temperatures[:drafted]) if temperatures else 1.0
                c = 1 / (1 + np.exp(-(np.log(c) - np.log1p(-c)) / t))
                line["confidence"] = [round(x, 5) for x in c.tolist()]
            else:
                line["drafted"] = drafted
            lines.append(line)
    return lines


# ------------------------------------------------------------------------------------------------------ the numbers


def acceptance_numbers(steps: Steps, depth: int) -> dict[str, object]:
    """Length and rates. See `EvalRow` for what each name means."""
    positions = np.arange(1, depth + 1)
    reached = (steps.accepted[:, None] >= positions).sum(0)
    judged = steps.judged[:, None] >= positions
    before = (judged & (steps.accepted[:, None] >= positions - 1)).sum(0)

    def share(part: NDArray, of: NDArray) -> list[float | None]:
        return [float(p / n) if n else None for p, n in zip(part, of)]

    return dict(
        steps=len(steps.emitted),
        tokens=int(steps.emitted.sum()),
        spec_decode_acceptance_length=float(steps.emitted.mean()),
        spec_decode_per_position_acceptance_rates=share(reached, judged.sum(0)),
        spec_decode_conditional_acceptance_rates=share(reached, before),
    )


def confidence_numbers(steps: Steps, temperatures: Sequence[float] | None) -> dict[str, object]:
    """ECE and AUC before scaling, and after it where there are temperatures; nothing without a confidence head."""
    if steps.logits is None:
        return {}
    happened = calibration.prefixes(steps.accepted, steps.logits.shape[1])
    found: dict[str, object] = {}
    for when, t in (("before", 1.0), ("after", temperatures)):
        if t is not None:
            predicted = calibration.survival(steps.logits, t)
            for name, score in (("ece", calibration.ece), ("auc", calibration.auc)):
                found[f"{name}_{when}"] = score(predicted, happened)
                found[f"{name}_{when}_by_position"] = [score(p, y) for p, y in zip(predicted.T, happened.T)]
    return found


def speed_numbers(runs: Sequence[Timed], plain: Sequence[Timed]) -> dict[str, object]:
    """Rates over all prompts, and how the prompts' own speed-ups spread. plain: the same prompts, decoded plainly."""

    def rate(runs: Sequence[Timed]) -> float:
        return sum(r.tokens for r in runs) / sum(r.seconds for r in runs)

    speedup = rate(runs) / rate(plain)
    return dict(
        output_throughput=rate(runs),
        plain_throughput=rate(plain),
        speedup=speedup,
        spread=relative_std([rate([r]) / rate([p]) for r, p in zip(runs, plain)], speedup),
        num_timed=len(runs),
    )


# ------------------------------------------------------------------------------------------------------ the command


def evaluate(config: EvalConfig, progress: Progress = lambda text, done, total: None) -> Evaluation:
    """Load, fit the calibration if that is asked for, and measure every suite, temperature and shape."""
    suites, fit = read_suites(config)
    if config.drafter == "none":
        raise ConfigError("drafter: found none, allowed: the drafter to evaluate")
    make_scheduler(config.scheduler, config)  # a bad file is refused before anything slow
    progress(f"loading {config.target}", 0, 1)
    target = load(config.target, config)
    return measure(config, suites, fit, target, make_drafter(config.drafter, target, config), progress)


def measure(
    config: EvalConfig, suites: list[PromptSet], fit: PromptSet | None, target: Any, drafter: Any, progress: Progress
) -> Evaluation:
    from drafters.dspark.drafter import BlockDrafter
    from drafters.dspark.load import locate
    from dspark_runtime.engine import Engine

    lines = shapes(config, drafter)
    head = isinstance(drafter, BlockDrafter) and drafter.network.confidence is not None
    if fit is not None and not head:
        raise ConfigError(f"fit_calibration: found with {drafter.name}, allowed: a drafter with a confidence head")
    temperatures = getattr(drafter, "temperatures", ()) or None
    # Each shape's own, which goes on learning from one suite to the next.
    schedulers = {shape: make_scheduler(config.scheduler, config)[0] for shape in lines}
    scheduled = make_scheduler(config.scheduler, config)[1]
    head = head and scheduled is None
    if head:
        drafter.temperatures = ()  # the head's own confidence is recorded, and scaled afterwards
    model = target.model
    if target.tokenizer is None:
        raise ConfigError(f"prompts: target {target.name} has no tokenizer, allowed: a target with one")
    ids = {s: [encode(target.tokenizer, text) for text in s.texts] for s in [*suites, *([fit] if fit else [])]}
    longest = max(len(prompt) for prompts in ids.values() for prompt in prompts)
    deepest = max(shape.spec.depth for shape in lines)
    room = longest + config.max_tokens + deepest + 1
    if room > model.max_model_len:
        raise ConfigError(
            f"max_tokens: prompts of up to {longest} tokens, {config.max_tokens} new, {deepest + 1} of one step make "
            f"{room}, allowed: at most {model.max_model_len}, the context limit of {target.name}"
        )
    cuda_graph = model.device.type == "cuda"
    options = dict(max_num_requests=config.num_requests, max_model_len=room, cuda_graph=cuda_graph)
    engine = Engine(model, drafter, **options)
    runners = {"plain": engine, "chain": engine, "tree": engine}
    if config.hybrid:
        copy = type(drafter)(drafter.network, model, drafter.name, suffix=MATCHES)
        runners["hybrid"] = Engine(model, copy, **options)

    timed = {s: ids[s][: config.speed] for s in suites}
    runs = len(config.temperature) * len(lines)
    total = runs * sum(len(ids[s]) for s in suites) + len(config.temperature) * (len(ids[fit]) if fit else 0)
    total += (runs + len(config.temperature)) * sum(len(p) + 1 for p in timed.values() if p)
    done = 0

    def tick(text: str) -> Callable[[], None]:
        def finished() -> None:
            nonlocal done
            done += 1
            progress(text, done, total)

        progress(text, done, total)
        return finished

    trace: list[dict[str, object]] | None = [] if scheduled is None else None

    def accepted(
        prompts: list[list[int]], shape: Shape, temperature: float, what: str, suite: str | None = None
    ) -> Steps:
        with_head = head and shape.kind == "chain"
        runner = runners[shape.kind]
        runner.record_confidence = with_head
        records = roll_out(runner, shape, prompts, config, temperature, tick(what), schedulers.get(shape))
        runner.record_confidence = False
        if suite is not None and trace is not None and shape.kind == "chain":
            several = len(config.temperature) > 1
            where = f"{suite}, T={temperature:g}" if several else suite
            trace.extend(trace_of(records, where, with_head, temperatures))
        return steps_of(records, shape.spec.depth, with_head)

    fitted = None
    if fit is not None:
        chain = Shape("chain", "chain", TreeSpec.chain(drafter.max_depth))
        parts = [accepted(ids[fit], chain, t, f"fit on {fit.name}, T={t:g}") for t in config.temperature]
        fitted = fit_calibration(parts, fit.name, locate(config.drafter))
        temperatures = fitted.temperatures
    if head and temperatures:  # drawn trees go where the scaled confidence says
        copy = type(drafter)(drafter.network, model, drafter.name, temperatures=temperatures)
        runners["tree"] = Engine(model, copy, **options)

    rows = []
    for suite in suites:
        name = suite_of(suite)
        for temperature in config.temperature:
            here = f"{name}, T={temperature:g}"
            found = []
            for shape in lines:
                steps = accepted(ids[suite], shape, temperature, f"{here}, {shape.name}", name)
                numbers = acceptance_numbers(steps, shape.spec.depth)
                found.append(numbers | confidence_numbers(steps, temperatures))
            if timed[suite]:
                finished = tick(f"{here}, speed")
                speeds = speed(runners, lines, timed[suite], config, temperature, finished, schedulers)
                found = [a | b for a, b in zip(found, speeds)]
            for shape, numbers in zip(lines, found):
                rows.append(
                    EvalRow(
                        target=target.name,
                        drafter=drafter.name,
                        dtype=str(model.dtype).removeprefix("torch."),
                        suite=name,
                        prompts_sha256=suite.sha256,
                        temperature=temperature,
                        shape=shape.name,
                        scheduler=scheduled,
                        num_speculative_tokens=shape.spec.num_drafts,
                        max_tokens=config.max_tokens,
                        num_requests=config.num_requests,
                        num_prompts=len(ids[suite]),
                        **numbers,
                    )
                )
    facts = dict(device=str(model.device), seed=config.seed, cuda_graph=cuda_graph)
    return Evaluation(rows, fitted, facts, trace)


def speed(
    runners: Mapping[str, Engine],
    lines: Sequence[Shape],
    prompts: Sequence[list[int]],
    config: EvalConfig,
    temperature: float,
    finished: Callable[[], None],
    schedulers: Mapping[Shape, Scheduler | None],
) -> list[dict[str, object]]:
    """Numbers of each shape beside plain decoding, one request at a time. The first prompt warms up and runs again."""
    order = [Shape("plain", "plain", TreeSpec.chain(0)), *lines]
    runs: list[list[Timed]] = [[] for _ in order]
    for prompt in [prompts[0], *prompts]:
        for shape, timed in zip(order, runs):
            runner = runners[shape.kind]
            records = roll_out(runner, shape, [prompt], config, temperature, finished, schedulers.get(shape))
            timed.append(Timed(sum(sum(r.emitted) for r in records), sum(r.ms["total"] for r in records) / 1e3))
    plain, *others = (timed[1:] for timed in runs)
    return [speed_numbers(timed, plain) for timed in others]


def fit_calibration(parts: Sequence[Steps], dataset: str, folder: Path) -> calibration.Calibration:
    """Fit the temperatures on all parts together and write calibration.json into the drafter's folder."""
    logits = np.concatenate([p.logits for p in parts])
    accepted = np.concatenate([p.accepted for p in parts])
    temperatures = calibration.fit(logits, accepted)
    happened = calibration.prefixes(accepted, logits.shape[1])
    before, after = (calibration.ece(calibration.survival(logits, t), happened) for t in (1.0, temperatures))
    found = calibration.Calibration(
        temperatures=temperatures, dataset=dataset, num_samples=len(logits), ece_before=before, ece_after=after
    )
    path = folder / calibration.FILE
    try:
        path.write_text(found.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"fit_calibration: {path}: {error.strerror}") from None
    return found
