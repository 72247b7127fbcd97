"""`dspark tune`: from a step-cost curve and acceptance to draft lengths and trees; what to paste where; measured again.

Nothing here imports torch but `measure`. The maths is in `dspark_runtime.tuning`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_runtime.errors import ConfigError
from dspark_runtime.tuning.acceptance import MIN_STEPS, Suite, enough, pooled, read_acceptance, typed
from dspark_runtime.tuning.confidence import Policy, best_policy
from dspark_runtime.tuning.curve import Curve, differs, load_curve
from dspark_runtime.tuning.search import Choice, Scored, tune
from eval.profile import machine_here, numbers

if TYPE_CHECKING:
    from eval.bench import Progress


NGRAM = {"prompt_lookup_max": 4, "prompt_lookup_min": 1}
"""What `NgramDrafter` looks up (its module imports torch; a test compares)."""


@dataclass(frozen=True)
class Tuned:
    """What `dspark tune` found. stamps: what every output has to say (another machine, a predicted curve)."""

    command: str
    curve: Curve
    suites: list[Suite]
    context: int
    latency_ms: float | None
    choices: list[Choice]
    policies: list[Policy | None]
    apart: list[tuple[Suite, list[Choice]]]
    drafter: str
    stamps: list[str]
    notes: list[str]


@dataclass(frozen=True)
class Asked:
    """The options of one call; names as on the command line."""

    curve: Path
    acceptance: Path | None = None
    rates: str | None = None
    survival: str | None = None
    steps: int | None = None
    suite: str | None = None
    temperature: float | None = None
    num_requests: Sequence[int] | None = None
    context: int | None = None
    latency: float | None = None
    drafter: str | None = None
    trees: bool = True
    other_machine: bool = False
    measure: bool = False
    seed: int = 0


def find(asked: Asked, command: str) -> Tuned:
    """Read, check and search. Raises ConfigError with one line for input that cannot be right."""
    curve = load_curve(asked.curve)
    if asked.measure and curve.source == "model":
        raise ConfigError(f"measure: found a predicted curve of {curve.machine}, allowed: one measured on this machine")
    if asked.measure and asked.other_machine:
        raise ConfigError("measure: found with --other-machine, allowed: a curve measured on this machine")
    if asked.latency is not None and not 0 < asked.latency < math.inf:
        raise ConfigError(f"latency: found {asked.latency:g}, allowed: more than 0 ms per token, and finite")
    stamps, notes = stamps_of(curve, asked.other_machine), list(curve.notes)
    if curve.source == "measured" and curve.repeats == 1:
        notes.append("the curve has one repeat: nothing is known of its spread, and no interval holds any of it")
    suites = read_suites(asked)
    context = asked.context if asked.context is not None else curve.contexts[-1]
    requests = sorted(set(asked.num_requests or curve.num_requests))
    if not suites[0].num_steps:
        notes.append("acceptance is typed without --steps: taken as exact, so intervals hold the curve's spread only")
    for other in sorted({s.pair for s in suites if s.pair and s.pair != (curve.target, curve.drafter)}):
        notes.append(
            f"acceptance was measured on {other[0]} with {other[1]}, the curve on {curve.target} with {curve.drafter}"
        )
    trees = asked.trees and (curve.method != "ngram" or pooled(suites).profile is not None)
    choices = tune(curve, suites, requests, context, asked.latency, trees, asked.seed)
    if asked.trees and not trees:
        notes.append(
            "trees: not tried, prompt lookup ranks nothing that could be assumed; a suite's profile would tell"
        )
    elif any(c.tree for c in choices) and pooled(suites).profile is None:
        notes.append(
            "trees: rank acceptances are assumed from the chain's rates (ranks 2 to 16 hold 75 % of what the first "
            "misses, each 0.45 of the one before); check a tree with --measure or with real prompts"
        )
    elif asked.trees and not any(c.tree for c in choices):
        notes.append(
            f"trees: none ({'the curve has none' if curve.can_tree else curve.method + ' drafts chains only'})"
        )
    shortest = min(curve.longest_chain(b, context) for b in requests)
    deepest = min(min(s.depth for s in suites), curve.max_depth)
    if shortest < deepest:
        notes.append(
            f"chains: the curve ends at {shortest} drafts, rates are known for {deepest}; longer ones were not tried"
        )
    policies = [
        best_policy(curve, suites, c.chain.shape.spec.num_drafts, c.num_requests, context, asked.seed) for c in choices
    ]
    apart = []
    if len(suites) > 1:
        small = [s.name for s in suites if s.num_steps is not None and s.num_steps < MIN_STEPS]
        if small:
            notes.append(f"suites of fewer than {MIN_STEPS} steps have no line of their own: {', '.join(small)}")
        apart = [
            (s, tune(curve, [s], requests, context, asked.latency, trees, asked.seed))
            for s in suites
            if s.name not in small
        ]
    return Tuned(
        command,
        curve,
        suites,
        context,
        asked.latency,
        choices,
        policies,
        apart,
        asked.drafter or curve.drafter,
        stamps,
        notes,
    )


def requests(text: str | None) -> list[int] | None:
    return None if text is None else numbers("num_requests", text, 1)


def stamps_of(curve: Curve, allowed: bool) -> list[str]:
    """Raises ConfigError for a curve of another machine, unless that is allowed."""
    if curve.source == "model":
        return [f"PREDICTED: the curve is the performance model's of {curve.machine}, nothing was measured"]
    wrong = differs(curve, machine_here(curve))
    if wrong is None:
        return []
    if not allowed:
        raise ConfigError(f"curve: measured on another machine ({wrong}), allowed: this one's, or --other-machine")
    return [f"OTHER MACHINE: the curve was measured elsewhere ({wrong})"]


def read_suites(asked: Asked) -> list[Suite]:
    """Raises ConfigError for rates that cannot be right, or too few steps."""
    given = {"acceptance": asked.acceptance, "rates": asked.rates, "survival": asked.survival}
    given = [name for name, value in given.items() if value is not None]
    if len(given) != 1:
        raise ConfigError(
            f"acceptance: found {' and '.join(given) or 'nothing'}, "
            "allowed: one of --acceptance FILE, --rates, --survival"
        )
    if asked.acceptance is None:
        for name in ("suite", "temperature"):
            if getattr(asked, name) is not None:
                raise ConfigError(f"{name}: found with --{given[0]}, allowed: with --acceptance FILE")
        conditional = asked.rates is not None
        suites = [typed(asked.rates if conditional else asked.survival, conditional, asked.steps)]
        enough(suites, "steps")
        return suites
    if asked.steps is not None:
        raise ConfigError("steps: found with --acceptance, allowed: with --rates or --survival (a file states its own)")
    suites = read_acceptance(asked.acceptance, asked.temperature)
    if asked.suite is not None:
        names = ", ".join(s.name for s in suites)
        suites = [s for s in suites if s.name == asked.suite]
        if not suites:
            raise ConfigError(f"suite: found {asked.suite!r}, allowed: {names}")
    enough(suites, str(asked.acceptance))
    return suites


# ------------------------------------------------------------------------------------------------- for `dspark bench`


def write_recipe(tuned: Tuned, path: Path) -> list[Path]:
    """A recipe that `dspark bench --config` takes: the best shape and the best chain of all numbers of requests, plain
    beside them. Trees become files next to it. Returns what was written; raises ConfigError where bench could not run
    it."""
    from eval.schema import bench_config

    curve = tuned.curve
    best = [s for c in tuned.choices for s in (c.chain, c.best)]
    ks = sorted({s.shape.spec.num_drafts for s in best if s.shape.spec.is_chain})
    trees: dict[Path, Scored] = {}
    for s in best:
        if not s.shape.spec.is_chain:
            name = f"{path.stem}-tree-{s.shape.spec.num_nodes}x{s.shape.spec.depth}.yaml"
            trees[path.with_name(name)] = s
    values: dict[str, object] = {
        "target": curve.target,
        "drafter": tuned.drafter,
        "num_speculative_tokens": [k for k in ks if k] or [0],
        "tree": [str(p) for p in trees],
        "num_requests": [c.num_requests for c in tuned.choices],
        "context_len": tuned.context,
    }
    if curve.source == "measured":
        values["dtype"] = curve.dtype
    if curve.weights != "auto":
        values["weights"] = curve.weights
    if not trees:
        del values["tree"]
    try:
        bench_config(values)
    except ConfigError as error:
        raise ConfigError(f"yaml: {error} (--drafter names another one for the recipe)") from None
    head = [f"# {tuned.command}", *(f"# {line}" for line in tuned.stamps), f"# curve: {curve.label}"]
    _write("yaml", path, "\n".join([*head, *_yaml(values), ""]))
    for file, s in trees.items():
        said = "assumed" if pooled(tuned.suites).profile is None else "measured"
        what = f"{s.shape.spec.num_drafts} drafts, at most {s.shape.spec.depth} deep, {said} rank acceptances"
        lines = [
            *(f"# {line}" for line in tuned.stamps),
            f"description: {json.dumps(f'{what}; {curve.label}')}",
            f"expected_acceptance_length: {s.shape.acceptance_length:.3f}",
            f"parents: {list(s.shape.spec.parents)}",
            "",
        ]
        _write("yaml", file, "\n".join(lines))
    return [path, *trees]


def _yaml(values: dict[str, object]) -> list[str]:
    # JSON is YAML: strings stay quoted, so that no name is read as something else.
    return [f"{name}: {json.dumps(value)}" for name, value in values.items()]


def _write(field: str, path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{field}: {path}: {error.strerror}") from None


# ----------------------------------------------------------------------------------------------------------- for vLLM


def vllm_config(tuned: Tuned) -> dict[str, object] | None:
    """The value of vLLM's --speculative-config, or None where plain decoding is best everywhere.

    vLLM verifies chains only. Where the best length changes with the number of requests, the table says so: entries are
    [first, last, drafts], first and last inclusive; vLLM keeps the last entry for larger batches. A batch between two
    tuned sizes takes the larger one's length.
    """
    lengths = [(c.num_requests, c.chain.shape.spec.num_drafts) for c in tuned.choices]
    longest = max(k for _, k in lengths)
    if not longest:
        return None
    table: list[list[int]] = []
    for b, k in lengths:
        if table and table[-1][2] == k:
            table[-1][1] = b
        else:
            table.append([table[-1][1] + 1 if table else 1, b, k])
    config: dict[str, object] = {**_vllm_method(tuned), "num_speculative_tokens": longest}
    if len(table) > 1:
        config["num_speculative_tokens_per_batch_size"] = table
    return config


def _vllm_method(tuned: Tuned) -> dict[str, object]:
    name, method = tuned.drafter, tuned.curve.method
    if name == "ngram":
        return {"method": "ngram", **NGRAM}
    if name.startswith("draft:"):
        model = name.removeprefix("draft:")
        return {"method": "draft_model", "model": tuned.curve.target if model == "self" else model}
    return {"method": method, "model": name}


# ---------------------------------------------------------------------------------------------------------- measured


@dataclass(frozen=True)
class Measured:
    """A choice beside its measurement on this machine."""

    predicted: Scored
    step_ms: float
    goodput: float
    acceptance_length: float
    spread: float


def rivals(choice: Choice, top: int) -> list[Scored]:
    """Plain, and the `top` most promising different kinds of shape: the best, the best chain, the best tree, then the
    best of the rest."""
    rest = sorted(choice.scored, key=lambda s: -s.goodput)
    wanted = [choice.best, choice.chain, *([choice.tree] if choice.tree else []), *rest]
    found: dict[object, Scored] = {}
    for s in wanted:
        if s.shape.spec.num_drafts and len(found) < top:
            found.setdefault(s.shape.spec, s)
    return [choice.plain, *found.values()]


def measure(tuned: Tuned, top: int, repeats: int, tokens: int, device: str, progress: Progress) -> list[Measured]:
    """The top choices on this machine, under the acceptance that they were chosen for."""
    from dspark_runtime.synthetic import SyntheticLaw
    from eval import bench
    from eval.schema import bench_config

    curve = tuned.curve
    plan, expected = [], []
    for choice in tuned.choices:
        for s in rivals(choice, top):
            spec = s.shape.spec
            law = SyntheticLaw.make(spec.depth, rates=s.shape.survival) if spec.num_drafts else None
            length = s.shape.acceptance_length if law else None
            plan.append(bench.Point(s.num_requests, "chain" if spec.is_chain else "tree", spec, law, length))
            expected.append(s)
    config = bench_config(
        dict(
            target=curve.target, drafter=tuned.drafter, dtype=curve.dtype, weights=curve.weights, device=device,
            num_requests=[c.num_requests for c in tuned.choices], context_len=tuned.context, max_tokens=tokens,
            repeats=repeats, cuda_graph=bool(curve.environment.get("cuda_graph")),
        )
    )  # fmt: skip
    progress(f"loading {config.target}", 0, 1)
    target = bench.load(config.target, config)
    drafter = bench.make_drafter(config.drafter, target, config)
    run = bench.measure(config, plan, bench.Prompts(config, None, target), target, drafter, tuned.command, progress)
    found = []
    for s, row in zip(expected, run.results):
        if not row.ran:
            raise ConfigError(f"measure: {s.shape.name}: {row.error}")
        # Times are the machine's, acceptance is the law's: a short run's own AL would add its sampling error.
        goodput = 1e3 * s.num_requests * s.shape.acceptance_length / row.step_ms.total
        found.append(Measured(s, row.step_ms.total, goodput, row.spec_decode_acceptance_length, row.spread.repeats))
    return found


def as_json(tuned: Tuned, measured: Sequence[Measured]) -> str:
    """Everything, for scripts."""

    def scored(s: Scored | None) -> dict[str, object] | None:
        if s is None:
            return None
        return dict(
            shape=s.shape.name, num_speculative_tokens=s.shape.spec.num_drafts, parents=list(s.shape.spec.parents),
            acceptance_length=s.shape.acceptance_length, draft_ms=s.draft_ms, verify_ms=s.verify_ms, step_ms=s.step_ms,
            output_throughput=s.goodput, output_throughput_per_user=s.goodput / s.num_requests, tpot_ms=s.tpot_ms,
            interval=[s.low, s.high], chance_best=s.chance,
        )  # fmt: skip

    rows = []
    for c, policy in zip(tuned.choices, tuned.policies):
        rows.append(dict(
            num_requests=c.num_requests, speculate=c.speculate, meets_latency=c.within, best=scored(c.best),
            best_chain=scored(c.chain), best_tree=scored(c.tree), plain=scored(c.plain), speedup_interval=list(c.ratio),
            break_even_acceptance_length=c.break_even, expected_loss=c.loss, tied=[s.shape.name for s in c.tied],
            regret=dict(regrets(tuned, c)),
            confidence=None if policy is None else dict(vars(policy), pays=policy.pays),
        ))  # fmt: skip
    result = dict(
        schema_version=1, kind="tuning", command=tuned.command, stamps=tuned.stamps, notes=tuned.notes,
        curve=tuned.curve.label, environment=tuned.curve.environment, context_len=tuned.context,
        latency_ms=tuned.latency_ms, survival=list(pooled(tuned.suites).survival), choices=rows,
        speculative_config=vllm_config(tuned),
        measured=[
            dict(num_requests=m.predicted.num_requests, shape=m.predicted.shape.name, step_ms=m.step_ms,
                 predicted_step_ms=m.predicted.step_ms, output_throughput=m.goodput,
                 predicted_throughput=m.predicted.goodput, spread=m.spread)
            for m in measured
        ],
    )  # fmt: skip
    return json.dumps(result, indent=1, allow_nan=False) + "\n"


def regrets(tuned: Tuned, choice: Choice) -> list[tuple[str, float | None]]:
    """Share of the goodput that common choices lose here; None for one that this curve cannot cost."""
    spoken = [s for s in choice.scored if s.shape.spec.is_chain]
    wrong = [
        ("plain", choice.plain.shape),
        ("longest chain", spoken[-1].shape),
        ("highest AL", max(choice.scored, key=lambda s: s.shape.acceptance_length).shape),
        (f"best of b={tuned.choices[0].num_requests}", tuned.choices[0].best.shape),
        (f"best of b={tuned.choices[-1].num_requests}", tuned.choices[-1].best.shape),
    ]
    return [(name, None if math.isnan(loss := choice.regret(shape)) else loss) for name, shape in dict(wrong).items()]
