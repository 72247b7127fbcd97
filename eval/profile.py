"""`dspark profile`: what a step of this target and drafter costs, by tokens, requests and context, as a curve for
`dspark tune`.

The steps are those of `dspark bench`: the real drafter, the real verify pass, acceptance and commit, captured as on any
other run, with a synthetic law that accepts one draft a step so that no acceptance enters the times. Chains have every
asked length; the trees are best ones of an ordinary profile, filled to the asked size.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from drafters.topology import MAX_NODES
from dspark_runtime.errors import ConfigError
from dspark_runtime.tuning.curve import Curve, Point

if TYPE_CHECKING:
    from drafters.topology import TreeSpec
    from eval import bench
    from eval.bench import Progress
    from eval.schema import BenchConfig

ORDINARY = 0.7
"""First-choice acceptance of the profile whose best trees are timed."""
ACCEPTED = 2.0
"""AL of every timed speculative step."""
DEPTH = 7
"""Chains that are timed where none are asked for, and the deepest timed tree."""
SIZES = (4, 8, 16, 24, 32, 48, 64)
"""Trees of a predicted curve, which cost no time."""


@dataclass(frozen=True)
class Options:
    """What `dspark profile` was asked for, checked. tree_tokens, chain: None where not said."""

    contexts: list[int]
    tree_tokens: list[int] | None
    requests: list[int]
    chain: list[int] | None
    target: str
    drafter: str


def options(
    flags: Mapping[str, object], hardware: str | None, context: str, tree_tokens: str | None, between: str, tp: int
) -> Options:
    """Raises ConfigError naming the field."""
    if between not in ("auto", "step", "linear"):
        raise ConfigError(f"between: found {between!r}, allowed: auto, step, linear")
    if hardware is None and tp > 1:
        raise ConfigError(f"tp: found {tp} without --hardware, allowed: 1 (this engine runs on one GPU)")
    if hardware is not None:
        measuring = ("device", "dtype", "weights", "backend", "cuda_graph", "seed", "repeats", "warmup")
        idle = next((name for name in measuring if flags.get(name) is not None), None)
        if idle is not None:
            raise ConfigError(f"{idle}: found with --hardware, allowed: without it (nothing is measured)")
        if between == "step":
            raise ConfigError("between: found step with --hardware, allowed: linear (the model knows every size)")
    contexts = numbers("context", context, 1)
    sizes = None if tree_tokens is None else [n for n in numbers("tree_tokens", tree_tokens, 0) if n]
    wrong = next((n for n in sizes or () if not 3 <= n <= MAX_NODES), None)
    if wrong is not None:
        raise ConfigError(f"tree_tokens: found {wrong}, allowed: 3 to {MAX_NODES}, or 0 for no trees")
    chain = flags.get("num_speculative_tokens")
    return Options(
        contexts,
        sizes,
        numbers("num_requests", flags.get("num_requests") or "1", 1),
        None if chain is None else numbers("num_speculative_tokens", chain, 0),
        str(flags.get("target") or "smollm2"),
        str(flags.get("drafter") or "ngram"),
    )


def numbers(field: str, text: object, least: int) -> list[int]:
    """ "1,8,32" or "0-7" as a sorted list. Raises ConfigError naming the field."""
    from eval.schema import int_list

    try:
        found = int_list(text)
    except ValueError as error:
        raise ConfigError(f"{field}: {error}") from None
    low = next((n for n in found if n < least), None)
    if low is not None:
        raise ConfigError(f"{field}: found {low}, allowed: {least} or more")
    return sorted(found)


def predicted(asked: Options, hardware: str, tp: int, command: str) -> Curve:
    """The performance model's curve; trees of `SIZES` tokens unless others are asked for."""
    from dspark_runtime.cost.step import Parallelism
    from dspark_runtime.tuning.predicted import predicted_curve

    sizes = SIZES if asked.tree_tokens is None else asked.tree_tokens
    target = "smollm2-135m" if asked.target == "smollm2" else asked.target
    return predicted_curve(
        target, asked.drafter, hardware, Parallelism(tp=tp), asked.requests, asked.contexts, sizes, asked.chain, command
    )


def trees(sizes: Sequence[int], depth: int) -> list[TreeSpec]:
    """One tree for each size (tokens, root included). Raises ConfigError for sizes that branch nowhere."""
    from drafters.tree_search import assumed_profile, best_trees

    if not sizes or depth < 1:
        return []
    best = best_trees([assumed_profile(ORDINARY)] * depth, MAX_NODES)
    found = [best[size - 1] for size in sizes]
    straight = next((size for size, spec in zip(sizes, found) if spec.is_chain), None)
    if straight is not None:
        least = next(spec.num_nodes for spec in best if not spec.is_chain)
        raise ConfigError(f"tree_tokens: found {straight}, allowed: {least} or more (smaller best trees are chains)")
    return found


def profile(
    config: BenchConfig,
    contexts: Sequence[int],
    tree_tokens: Sequence[int] | None,
    between: str,
    command: str,
    progress: Progress,
) -> Curve:
    """Measure. tree_tokens: None for 8, 16, 32 where the drafter ranks choices. between: auto, step or linear."""
    from drafters.topology import TreeSpec
    from dspark_runtime.synthetic import SyntheticLaw
    from eval import bench

    if config.drafter == "none":
        raise ConfigError("drafter: found none, allowed: a drafter, whose work is timed too")
    progress(f"loading {config.target}", 0, 1)
    target = bench.load(config.target, config)
    drafter = bench.make_drafter(config.drafter, target, config)
    asked = "num_speculative_tokens" in config.model_fields_set
    ks = config.num_speculative_tokens if asked else range(min(DEPTH, drafter.max_depth) + 1)
    if max(ks) > drafter.max_depth:
        raise ConfigError(
            f"num_speculative_tokens: found {max(ks)}, allowed: at most {drafter.max_depth} for {drafter.name}"
        )
    if tree_tokens and not drafter.can_tree:
        raise ConfigError(f"tree_tokens: found {tree_tokens[0]}, allowed: none ({drafter.name} drafts chains only)")
    grows = drafter.can_tree and drafter.name != "ngram" and max(ks) > 1
    sizes = tree_tokens if tree_tokens is not None else (8, 16, 32) if grows else ()
    specs = [TreeSpec.chain(k) for k in sorted(set(ks)) if k] + trees(sizes, min(DEPTH, max(ks)))

    points: list[Point] = []
    drifts: list[float] = []
    environment: dict[str, object] = {}
    for context in contexts:
        here = config.model_copy(update={"context_len": context, "prompts": None})
        plan = []
        for b in config.num_requests:
            plan.append(bench.Point(b, "chain", TreeSpec.chain(0), None, None))
            for spec in specs:
                law = SyntheticLaw.make(spec.depth, acceptance_length=min(ACCEPTED, spec.depth + 1))
                plan.append(bench.Point(b, "chain" if spec.is_chain else "tree", spec, law, ACCEPTED))
        run = bench.measure(here, plan, bench.Prompts(here, None, target), target, drafter, command, progress)
        environment = run.environment.model_dump()
        wrong = next((row.error for row in run.results if not row.ran), None)
        if wrong is not None:
            raise ConfigError(wrong)
        drift, spreads = spread_of(plan)
        drifts.append(drift)
        for point, row, spread in zip(plan, run.results, spreads):
            ms = row.step_ms
            points.append(
                Point(
                    num_requests=point.num_requests,
                    num_tokens=point.spec.num_nodes,
                    depth=point.spec.depth,
                    context_len=context,
                    draft_ms=ms.draft if point.spec.num_drafts else 0.0,
                    verify_ms=ms.verify,
                    other_ms=ms.total - ms.verify - (ms.draft if point.spec.num_drafts else 0.0),
                    spread=spread,
                )
            )
    if between == "auto":
        between = "step" if environment["cuda_graph"] else "linear"
    return Curve(
        command=command,
        source="measured",
        environment=environment,
        target=config.target,
        drafter=config.drafter,
        method=drafter.name.partition(":")[0],
        dtype=str(target.model.dtype).removeprefix("torch."),
        weights=config.weights,
        max_depth=drafter.max_depth,
        can_tree=drafter.can_tree,
        between=between,
        repeats=config.repeats,
        drift=max(drifts),
        points=points,
    )


def spread_of(plan: Sequence[bench.Point]) -> tuple[float, list[float]]:
    """(drift, spread of each point): relative standard deviations of the repeats' median steps. A repeat visits all
    points, so what it changes for all of them alike is the machine's drift and no reason to doubt their order."""
    medians = np.array(
        [
            [
                np.median([s.ms["total"] for s in repeat.records if s.num_requests == point.num_requests])
                for repeat in point.repeats
            ]
            for point in plan
        ]
    )
    if medians.shape[1] < 2:
        return 0.0, [0.0] * len(plan)
    relative = np.log(medians / np.median(medians, axis=1, keepdims=True))
    shared = np.median(relative, axis=0)
    return float(shared.std(ddof=1)), (relative - shared).std(axis=1, ddof=1).tolist()


def machine_here(curve: Curve) -> dict[str, object]:
    """This machine, as far as a curve names its own. Asks the GPU's driver, not torch, which takes seconds to load."""
    from eval.environment import cores, cpu_name

    gpu = curve.environment.get("gpu")
    if gpu is not None:
        try:
            query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
            names = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.splitlines()
        except (OSError, subprocess.TimeoutExpired):
            names = []
        gpu = next((n.strip() for n in names), None)
    return {"cpu": cpu_name(), "cores": cores(), "gpu": gpu}


def text(curve: Curve) -> str:
    """The curve as a table, with steps a second."""
    from eval.report import num, percent, table

    header = (
        "b",
        "context",
        "shape",
        "tokens",
        "draft ms",
        "verify ms",
        "other ms",
        "step ms",
        "SPS",
        "ms a token",
        "±",
    )
    body = [
        (
            str(p.num_requests),
            str(p.context_len),
            "plain" if not p.depth else f"k={p.depth}" if p.is_chain else f"tree, depth {p.depth}",
            str(p.num_requests * p.num_tokens),
            num(p.draft_ms),
            num(p.verify_ms),
            num(p.other_ms),
            num(p.total_ms),
            num(1e3 / p.total_ms, 1),
            num(p.total_ms / p.num_tokens / p.num_requests),
            percent(p.spread),
        )
        for p in curve.points
    ]
    rule = "the next measured size's cost" if curve.between == "step" else "a straight line"
    lines = [f"Step-cost curve. {curve.label}.", f"Between measured sizes: {rule}.", *curve.notes]
    if curve.source == "measured" and curve.repeats > 1:
        lines.append(
            f"All points drifted together by {percent(curve.drift)} between repeats; ± is what each did beside that."
        )
    if curve.source == "measured" and curve.repeats == 1:
        lines.append("One repeat: nothing is known of drift and ±.")
    lines.append("")
    return "\n".join(lines) + table(header, body) + "\n"
