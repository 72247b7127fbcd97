"""`dspark bench`: plain and speculative decoding of the same prompts, in one process, with the model loaded once.

Every repeat visits every point of the sweep before the next repeat starts, so a slow minute of the machine falls on all
lines alike. A request runs until it has `max_tokens` tokens (end of sequence is ignored); the tokens of its last step
count in full, so no step is cut short and lengths are not biased. Times are taken from the steps in which all requests
ran.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from dspark_runtime.configs import names
from dspark_runtime.errors import CheckpointError, ConfigError, DsparkError
from dspark_runtime.prompts import PromptSet, encode, load_prompts, random_ids
from eval.schema import REAL, BenchConfig, BenchRow, Environment, Pair, Run, Spread, StepMs

if TYPE_CHECKING:
    from drafters.dspark.config import DrafterConfig
    from drafters.tree import TreeSpec
    from dspark_runtime.engine import Engine
    from dspark_runtime.forced_routing import ForcedRouting
    from dspark_runtime.models.config import ModelConfig
    from dspark_runtime.models.kimi_k3 import KimiK3Config
    from dspark_runtime.records import StepRecord
    from dspark_runtime.scheduling.scheduler import Scheduler
    from dspark_runtime.synthetic import SyntheticLaw
    from dspark_runtime.targets import Target

TOLERANCE = 0.05
"""A synthetic run whose realised length is further from the requested one (beyond sampling error) is wrong."""

UNSTEADY = 0.1
"""A line whose repeats spread by more than this share is marked."""

Progress = Callable[[str, int, int], None]


@dataclass
class Repeat:
    """One run of a point: its decode steps and its prefill time."""

    records: list[StepRecord]
    prefill_ms: float


@dataclass
class Point:
    """One line of the sweep. scheduled: what its scheduler is called; error: why it cannot run."""

    num_requests: int
    tree: str
    spec: TreeSpec
    law: SyntheticLaw | None
    requested: float | None
    error: str | None = None
    scheduler: Scheduler | None = None
    scheduled: str | None = None
    repeats: list[Repeat] = field(default_factory=list)

    @property
    def plain(self) -> bool:
        return self.spec.num_drafts == 0


# ------------------------------------------------------------------------------------------------------ the sweep


def shapes(config: BenchConfig) -> list[tuple[str, TreeSpec]]:
    """(name, topology) of every speculative line: chains by k, then trees by name."""
    from drafters.tree import TreeSpec

    ks = config.num_speculative_tokens
    if config.tree and "num_speculative_tokens" not in config.model_fields_set:
        ks = []
    if config.drafter == "none":
        ks = []
        if config.tree:
            raise ConfigError(f"tree: found {config.tree[0]!r} with drafter none, allowed: no tree")
    lines = [("chain", TreeSpec.chain(k)) for k in ks if k]
    if config.tree:
        from dspark_runtime.configs import load_tree

        lines += [(name, load_tree(name)) for name in config.tree]
    return lines


def plan(config: BenchConfig) -> list[Point]:
    """Every point of the sweep: for each number of requests the plain line, then acceptance by shape.

    A point that no law fits carries its reason. Raises ConfigError if no synthetic point at all can run.
    """
    from drafters.tree import TreeSpec
    from dspark_runtime.synthetic import SyntheticLaw, expected_length

    if config.synthetic_acceptance_rates is not None:
        wishes = [dict(rates=config.synthetic_acceptance_rates)]
    elif config.synthetic_acceptance_trace is not None:
        wishes = [dict(trace=config.synthetic_acceptance_trace)]
    else:
        wishes = [
            None if al == REAL else dict(acceptance_length=al, law=config.synthetic_acceptance_law)
            for al in config.acceptance_length or [REAL]
        ]
    if REAL in config.acceptance_length and None not in wishes:
        wishes.insert(0, None)
    if config.drafter == "none" and any(wishes):
        raise ConfigError(
            "drafter: found none with a synthetic acceptance, allowed: a drafter, whose work is timed too"
        )
    lines = shapes(config)
    if any(wishes) and not lines:
        raise ConfigError(
            "num_speculative_tokens: found 0 with a synthetic acceptance, allowed: at least one k above 0 or a tree"
        )
    points = []
    for b in config.num_requests:
        points.append(Point(b, "chain", TreeSpec.chain(0), None, None))
        for wish in wishes:
            for (tree, spec), named in itertools.product(lines, config.scheduler or ["none"]):
                point = Point(b, tree, spec, None, None)
                point.scheduler, point.scheduled = make_scheduler(named, config)
                if wish is not None:
                    point.requested = wish.get("acceptance_length")
                    if point.requested is not None and point.requested > spec.depth + 1:
                        k = math.ceil(point.requested - 1)
                        what = "k" if tree == "chain" else "a tree of depth"
                        point.error = f"AL {point.requested:g} needs {what} >= {k}"
                    else:
                        try:
                            point.law = SyntheticLaw.make(spec.depth, **wish)
                            point.requested = expected_length(point.law)
                        except ConfigError as error:
                            point.error = str(error)
                points.append(point)
    drafted = [p for p in points if not p.plain]
    if drafted and all(p.error for p in drafted):
        deepest = max(p.spec.depth for p in drafted)
        if drafted[0].requested is not None:
            raise ConfigError(
                f"acceptance_length: found {drafted[0].requested:g}, "
                f"allowed: 1 to {deepest + 1} with up to {deepest} drafts"
            )
        raise ConfigError(drafted[0].error)
    return points


def make_scheduler(name: str, config: Pair) -> tuple[Scheduler | None, str | None]:
    """The scheduler that `--scheduler` names, and what to call it. Raises ConfigError, also for a curve of another
    machine or target."""
    if name == "none":
        return None, None
    from dspark_runtime.scheduling.names import label, make_policy
    from dspark_runtime.scheduling.scheduler import Scheduler
    from dspark_runtime.tuning.curve import Curve, differs
    from eval.profile import machine_here

    called = label(name)

    def check(curve: Curve, where: str) -> None:
        nonlocal called
        wrong = differs(curve, machine_here(curve))
        if wrong is not None:
            raise ConfigError(f"scheduler: {where}: measured on another machine ({wrong}), allowed: this one's")
        if curve.source == "model":
            called += " (predicted costs)"
        elif curve.target != config.target:
            raise ConfigError(f"scheduler: {where}: measured with {curve.target}, allowed: {config.target}, the target")

    return Scheduler(make_policy(name, check)), called


def make_drafter(name: str, target: Target, config: BenchConfig) -> object | None:
    """none, ngram, draft:NAME (any target as draft model), draft:self (the target as its own draft model), the folder of
    a DSpark, DFlash or EAGLE-3 checkpoint, or a drafter's architecture of configs/models (with weights "dummy")."""
    if name == "none":
        return None
    if name == "ngram":
        from drafters.ngram import NgramDrafter

        return NgramDrafter()
    if not name.startswith("draft:"):
        from drafters.dspark.load import load_drafter, locate

        try:
            # A drafter that ships has an architecture of the same name.
            if name in names("models") and (config.weights == "dummy" or not locate(name).is_dir()):
                return dummy_drafter(name, target, config)
            return load_drafter(name, target.model)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
    from drafters.draft_model import DraftModel

    model = name.removeprefix("draft:")
    return DraftModel(target.model if model == "self" else load(model, config).model)


def dummy_drafter(name: str, target: Target, config: BenchConfig) -> object:
    """A drafter of configs/models with seeded random weights, around the target. Raises ConfigError, ValueError."""
    from drafters.dspark.load import dummy_drafter
    from dspark_runtime.cost.facts import load_architecture

    drafter = drafter_config(name, target.config)
    if config.weights != "dummy":
        raise ConfigError(f"drafter: {name} is an architecture without weights; add --weights dummy for timing")
    d = load_architecture(name).drafter
    own = [table for table, has in (("embed_tokens", d.embedding), ("lm_head", d.lm_head)) if has]
    return dummy_drafter(drafter, target.model, name, config.seed, own)


def drafter_config(name: str, config: ModelConfig | KimiK3Config) -> DrafterConfig:
    """The network of a DSpark, DFlash or EAGLE-3 drafter: of a checkpoint, or of an architecture of configs/models around
    a target of this shape. What the latter's file leaves open is the target's (norms' epsilon, rotary embedding where it
    has one) or as published (taps spread evenly). Raises ConfigError, ValueError."""
    from drafters.dspark.config import DrafterConfig, Mla
    from drafters.dspark.dialects import parse
    from drafters.dspark.load import locate, read_config
    from dspark_runtime.cost.facts import load_architecture
    from dspark_runtime.models.config import ModelConfig
    from verify_kernels.rope import Rope

    if name not in names("models"):
        folder = locate(name)
        return parse(read_config(folder), str(folder / "config.json"), config.num_hidden_layers)
    a = load_architecture(name)
    if a.drafter is None:
        raise ConfigError(f"drafter: {name} is a target, allowed: draft:{name}, or a drafter of configs/models")
    kinds = [*a.attention.groups, *(["moe"] if a.ffn.moe else [])]
    d, depth, vocab = a.drafter, config.num_hidden_layers, a.vocab_size
    if kinds == ["gqa"]:
        layers = a.attention.gqa
        own = dict(layers="qwen3" if layers.qk_norm else "llama", num_key_value_heads=layers.kv_heads)
        own |= dict(head_dim=layers.head_dim, windows=(layers.window,) * layers.layers if layers.window else ())
    elif kinds == ["mla"] and not a.attention.mla.gated:
        layers = a.attention.mla
        mla = Mla(**{field: getattr(layers, field) for field in Mla.model_fields if hasattr(layers, field)})
        own = dict(layers="mla", mla=mla, num_key_value_heads=layers.heads, head_dim=mla.head_dim)
    else:
        raise ConfigError(f"drafter: {name}: found {', '.join(kinds)}, allowed: gqa, or mla without a gate")
    return DrafterConfig(
        dialect="deepspec",
        kind="dspark",
        **own,
        vocab_size=vocab,
        draft_vocab_size=vocab,
        hidden_size=a.hidden_size,
        intermediate_size=a.ffn.dense.intermediate_size,
        num_hidden_layers=layers.layers,
        num_attention_heads=layers.heads,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope=config.rope if isinstance(config, ModelConfig) else Rope(),
        target_hidden_size=a.hidden_size,
        taps=d.target_layer_ids or sorted({round(1 + (depth - 4) * i / max(d.taps - 1, 1)) for i in range(d.taps)}),
        stream=d.stream,
        block_size=d.num_drafts,
        mask_token_id=0,
        markov_head_type="vanilla" if d.markov_rank else None,
        markov_rank=d.markov_rank,
        confidence="none" if not d.confidence_head else "markov" if d.markov_rank else "hidden",
    )


def load(name: str, config: Pair, quantization: Literal["none", "fp8"] = "none") -> Target:
    from dspark_runtime.targets import load_target
    from verify_kernels import ops

    ops.use(config.backend)
    options = dict(dtype=config.dtype, device=config.device, weights=config.weights, seed=config.seed)
    return load_target(name, **options, quantization=quantization)


# ------------------------------------------------------------------------------------------------------ one run


class Prompts:
    """Prompts of a repeat: different ones in every repeat, the same ones for every point of that repeat."""

    def __init__(self, config: BenchConfig, texts: PromptSet | None, target: Target) -> None:
        """texts: None for random token ids."""
        self.config, self.set, self.vocab = config, texts, target.model.vocab_size
        self.ids: list[list[int]] = []
        if texts is not None:
            if target.tokenizer is None:
                raise ConfigError(
                    f"prompts: target {target.name} has no tokenizer, allowed: --context N (random token ids)"
                )
            self.ids = [encode(target.tokenizer, text) for text in texts.texts]

    def of(self, repeat: int, num_requests: int) -> list[list[int]]:
        if self.config.context_len is not None:
            seed = (self.config.seed << 32) + (repeat << 16) + num_requests
            return random_ids(num_requests, self.config.context_len, self.vocab, seed)
        first = repeat * num_requests
        return [self.ids[(first + i) % len(self.ids)] for i in range(num_requests)]

    @property
    def longest(self) -> int:
        return self.config.context_len or max(map(len, self.ids))

    def distinct(self, num_requests: int, repeats: int) -> int:
        return min(len(self.ids) or num_requests * repeats, num_requests * repeats)


def run_once(engine: Engine, point: Point, prompts: Sequence[list[int]], config: BenchConfig, repeat: int) -> Repeat:
    """All requests of a point, from submission until each has `max_tokens` tokens. Raises DsparkError if one fails."""
    from dspark_runtime.sampling import SamplingParams

    method = config.rejection_sample_method if not point.plain else "auto"
    engine.configure(point.spec, point.law, method, point.scheduler)
    engine.records.clear()
    engine.prefill_ms.clear()
    for i, prompt in enumerate(prompts):
        # Room for one whole step more than is asked for: a step is never cut, the request is ended here instead.
        params = SamplingParams(
            temperature=config.temperature,
            max_tokens=config.max_tokens + point.spec.depth + 1,
            ignore_eos=True,
            seed=(config.seed << 32) + (repeat << 16) + i,
        )
        engine.submit(prompt, params)
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason == "error":
                raise DsparkError(f"request {output.request_id}: {output.error}")
            if len(output.token_ids) >= config.max_tokens:
                engine.abort(output.request_id)
    return Repeat(list(engine.records), sum(engine.prefill_ms))


# ------------------------------------------------------------------------------------------------------ the numbers


def acceptance_numbers(repeats: Sequence[Repeat], depth: int) -> dict[str, object]:
    """Lengths, rates and histogram over every (request, step) pair. See `BenchRow` for what each name means."""
    emitted = [e for r in repeats for s in r.records for e in s.emitted]
    accepted = [a for r in repeats for s in r.records for a in s.accepted]
    proposed = sum(d for r in repeats for s in r.records for d in s.drafted)
    pairs = len(emitted)
    per_request: dict[tuple[int, int], list[int]] = {}
    for i, repeat in enumerate(repeats):
        for step in repeat.records:
            for request, e in zip(step.request_ids, step.emitted):
                per_request.setdefault((i, request), []).append(e)
    survival = [sum(a >= i for a in accepted) / pairs for i in range(1, depth + 1)]
    conditional = [p / q if q else None for p, q in zip(survival, [1.0, *survival])]
    return dict(
        spec_decode_acceptance_length=sum(emitted) / pairs,
        spec_decode_acceptance_length_per_request=statistics.fmean(map(statistics.fmean, per_request.values())),
        spec_decode_per_position_acceptance_rates=survival,
        spec_decode_conditional_acceptance_rates=conditional,
        accepted_per_step=sum(accepted) / pairs,
        proposed_per_step=proposed / pairs,
        draft_acceptance_rate=sum(accepted) / proposed if proposed else None,
        emitted_histogram=[sum(e == i for e in emitted) for i in range(1, depth + 2)],
        steps=sum(len(r.records) for r in repeats),
    )


def time_numbers(repeats: Sequence[Repeat], num_requests: int) -> dict[str, object]:
    """Rates and times from the steps in which all requests ran. Raises DsparkError if they never did."""
    rates, step_medians, request_rates = [], [], []
    full = [[s for s in r.records if s.num_requests == num_requests] for r in repeats]
    for steps in full:
        if not steps:
            raise DsparkError(f"never ran {num_requests} requests at once; use more --tokens")
        seconds = sum(s.ms["total"] for s in steps) / 1e3
        rates.append(sum(sum(s.emitted) for s in steps) / seconds)
        step_medians.append(statistics.median(s.ms["total"] for s in steps))
        tokens: dict[int, int] = {}
        for s in steps:
            for request, e in zip(s.request_ids, s.emitted):
                tokens[request] = tokens.get(request, 0) + e
        request_rates += [n / seconds for n in tokens.values()]
    steps = [s for part in full for s in part]
    rate = statistics.median(rates)
    phases = {
        k: statistics.median(s.ms.get(k, 0.0) for s in steps) for k in ("draft", "verify", "accept", "other", "total")
    }
    return dict(
        output_throughput=rate,
        output_throughput_per_user=rate / num_requests,
        tpot_ms=1e3 * num_requests / rate,
        chunk_gap_ms=phases["total"],
        prefill_ms=statistics.median(r.prefill_ms for r in repeats),
        step_ms=StepMs(**phases),
        verified_tokens=statistics.median(s.verified_tokens for s in steps),
        spread=Spread(
            repeats=relative_std(step_medians, statistics.fmean(step_medians)),
            prompts=relative_std(request_rates, statistics.fmean(request_rates)),
        ),
    )


def expert_numbers(point: Point, num_experts: int, routing: ForcedRouting | None) -> dict[str, object]:
    """Different experts of a layer in the steps in which all requests ran: counted, and what the law expects."""
    steps = [s for r in point.repeats for s in r.records if s.num_requests == point.num_requests and s.unique_experts]
    if not num_experts or not steps:
        return {}
    counts = Counter(tuple(d + 1 for d in s.drafted) for s in steps)
    return dict(
        routing=routing.name if routing is not None else "model",
        unique_experts_per_layer=statistics.fmean(statistics.fmean(s.unique_experts) for s in steps),
        expected_experts_per_layer=(
            sum(n * routing.expected(c) for c, n in counts.items()) / len(steps) if routing is not None else None
        ),
    )


def forced_routing(config: BenchConfig, target: Target) -> ForcedRouting | None:
    """The law of `config.routing`; not said, it is uniform for experts of random weights and the router's own choices
    otherwise. Raises ConfigError."""
    from dspark_runtime import forced_routing

    name = config.routing
    if name is None:
        name = "uniform" if config.weights == "dummy" and target.config.num_experts else "model"
    return forced_routing.make(name, target.config, config.seed, target.model.device)


def relative_std(values: Sequence[float], mean: float) -> float:
    return statistics.stdev(values) / mean if len(values) > 1 else 0.0


def sampling_error(law: SyntheticLaw, pairs: int) -> float:
    """Standard error of the mean length over `pairs` independent draws of a law."""
    mean = math.fsum(law.survival)
    square = math.fsum((2 * i - 1) * p for i, p in enumerate(law.survival, start=1))
    return math.sqrt(max(0.0, square - mean * mean) / pairs)


def finish_row(row: BenchRow, point: Point, plain: BenchRow | None, floor_ms: float | None) -> BenchRow:
    """The row's comparison with the plain line of as many requests and with the floor, if known; its verdicts."""
    total = row.step_ms.total
    row.floor_ms = floor_ms
    row.time_over_floor = total / floor_ms if floor_ms else None
    if plain is not None and plain.ran:
        row.speedup = row.output_throughput / plain.output_throughput
        row.break_even_acceptance_length = total / plain.step_ms.total
    if point.law is not None:
        pairs = sum(row.emitted_histogram)
        off = abs(row.spec_decode_acceptance_length - point.requested)
        if off > TOLERANCE + 3 * sampling_error(point.law, pairs):
            row.error = f"asked for AL {point.requested:.2f}, realised {row.spec_decode_acceptance_length:.2f}"
    if point.law is None and not point.plain and not row.proposed_per_step:
        row.warning = "drafter proposed nothing"
    elif row.spread.repeats > UNSTEADY:
        row.warning = f"unsteady machine: the repeats' step times spread by {100 * row.spread.repeats:.0f} %"
    return row


# ------------------------------------------------------------------------------------------------------ the command


def bench(
    config: BenchConfig, command: str = "dspark bench", progress: Progress = lambda text, done, total: None
) -> Run:
    """Load, warm up, measure, and return every number. Raises ConfigError before anything slow where it can."""
    points = plan(config)
    texts = load_prompts(config.prompts) if config.context_len is None else None
    progress(f"loading {config.target}", 0, 1)
    target = load(config.target, config, config.quantization)
    drafter = make_drafter(config.drafter, target, config)
    prompts = Prompts(config, texts, target)
    return measure(config, points, prompts, target, drafter, command, progress)


def measure(
    config: BenchConfig,
    points: list[Point],
    prompts: Prompts,
    target: Target,
    drafter: object | None,
    command: str,
    progress: Progress,
) -> Run:
    """All repeats of all points with one engine."""
    from dspark_runtime.engine import Engine
    from eval import floor
    from eval.environment import environment

    model = target.model
    routing = model.routing = forced_routing(config, target)
    deepest = max(p.spec.depth for p in points)
    longest = prompts.longest + config.max_tokens + deepest + 1
    if longest > model.max_model_len:
        raise ConfigError(
            f"context_len: prompts of up to {prompts.longest} tokens, {config.max_tokens} new, {deepest + 1} of "
            f"one step make {longest}, allowed: at most {model.max_model_len}, the context limit of {target.name}"
        )
    cuda_graph = config.cuda_graph if config.cuda_graph is not None else model.device.type == "cuda"
    progress("measuring the machine", 0, 1)
    ceilings = floor.measure_ceilings(model.device, model.dtype)
    engine = Engine(
        model,
        drafter,
        max_num_requests=max(config.num_requests),
        max_model_len=longest,
        cuda_graph=cuda_graph,
        record_experts=target.config.num_experts > 0,
    )
    runnable = [p for p in points if not p.error]
    for point in runnable:
        if not point.plain:
            try:
                engine.configure(point.spec, point.law, config.rejection_sample_method, point.scheduler)
            except ConfigError as error:
                point.error = str(error)
    runnable = [p for p in points if not p.error]
    if all(p.plain for p in runnable) and len(points) > len(runnable):
        raise ConfigError(next(p.error for p in points if p.error))

    rounds = config.warmup + config.repeats
    repeats = config.repeats
    try:
        for i in range(rounds):
            for j, point in enumerate(runnable):
                what = "warm-up" if i < config.warmup else f"repeat {i - config.warmup + 1}/{config.repeats}"
                progress(f"{what}, b={point.num_requests}", i * len(runnable) + j, rounds * len(runnable))
                repeat = run_once(engine, point, prompts.of(i, point.num_requests), config, i)
                if i >= config.warmup:
                    point.repeats.append(repeat)
    except KeyboardInterrupt:
        # What every line has measured by now is still a table.
        repeats = min((len(p.repeats) for p in runnable), default=0)
        if not repeats:
            raise
        for point in runnable:
            del point.repeats[repeats:]
    progress("done", 1, 1)

    cost = floor.model_cost(model, engine.cache.bytes_per_token)
    drafts = None
    if getattr(drafter, "kv", None) is not None and hasattr(drafter, "model"):
        drafts = floor.model_cost(drafter.model, drafter.kv.bytes_per_token)
    rows: list[BenchRow] = []
    baseline: dict[int, BenchRow] = {}
    for point in points:
        row = empty_row(point, target, drafter, config, prompts)
        rows.append(row)
        if point.error:
            continue
        row = row.model_copy(
            update=acceptance_numbers(point.repeats, point.spec.depth)
            | time_numbers(point.repeats, point.num_requests)
            | expert_numbers(point, target.config.num_experts, routing)
            | dict(repeats=repeats, num_prompts=prompts.distinct(point.num_requests, repeats))
        )
        rows[-1] = row
        if point.plain:
            baseline[point.num_requests] = row
        steps = [s for r in point.repeats for s in r.records if s.num_requests == point.num_requests]
        context = statistics.median(s.context_tokens for s in steps)
        passes = [(cost, row.verified_tokens, context, row.unique_experts_per_layer)]
        if drafts is not None:
            passes += [(drafts, float(point.num_requests), context, None)] * point.spec.depth
        finish_row(row, point, baseline.get(point.num_requests), floor.floor_ms(ceilings, passes))

    return Run(
        command=command,
        interrupted=repeats < config.repeats,
        synthetic=any(row.synthetic for row in rows),
        environment=Environment(
            **environment(
                model.device,
                config.seed,
                cuda_graph=cuda_graph,
                prompts=prompts.set.name if prompts.set else None,
                prompts_sha256=prompts.set.sha256 if prompts.set else None,
                read_bandwidth_gbps=ceilings.read_bandwidth_gbps,
                matmul_tflops=ceilings.matmul_tflops,
                ceilings=ceilings.source,
            )
        ),
        seed=config.seed,
        config=config,
        results=rows,
    )


def empty_row(point: Point, target: Target, drafter: object | None, config: BenchConfig, prompts: Prompts) -> BenchRow:
    """What is known of a point before it ran."""
    synthetic = point.law is not None or point.requested is not None
    if point.law is not None:
        acceptance = point.law.describe()
    else:
        acceptance = f"SYNTHETIC AL {point.requested:g}" if synthetic else REAL
    return BenchRow(
        target=target.name,
        drafter=config.drafter,
        method="plain" if point.plain else drafter.name,
        acceptance=acceptance,
        synthetic=synthetic,
        num_requests=point.num_requests,
        context_len=config.context_len,
        context="random token ids" if prompts.set is None else f"prompts {prompts.set.name}",
        num_speculative_tokens=point.spec.num_drafts,
        tree=point.tree,
        scheduler=point.scheduled,
        dtype=str(target.model.dtype).removeprefix("torch.") + ("" if config.quantization == "none" else "+fp8"),
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        requested_acceptance_length=point.requested,
        error=point.error,
    )
