"""`dspark bench --rank-of N`: one rank of a model divided among N GPUs, measured on one.

The rank holds its slices of every layer at their real shapes and runs whole steps of the engine. What the other ranks
would add to a collective is not there: its message is counted, and its time modelled from measured latencies, unless
`--collectives real` runs all N ranks. The verify pass is then taken apart: each of its operations is recorded in one
step and its calls of all layers are replayed one after the other, every layer with its own weights.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_runtime.configs import names
from dspark_runtime.cost.collectives import LENDER, Fabric, fabric
from dspark_runtime.errors import ConfigError, DsparkError
from eval import bench
from eval.bench import Point, Progress
from eval.report import num, table
from eval.schema import (
    BenchConfig,
    Environment,
    Range,
    RankCollective,
    RankExperts,
    RankOperation,
    RankRow,
    RankRun,
)

if TYPE_CHECKING:
    from torch import Tensor

    from dspark_runtime.engine import Engine
    from dspark_runtime.forced_routing import ForcedRouting
    from dspark_runtime.models.kimi_k3 import KimiK3, KimiK3Config
    from dspark_runtime.targets import Target
    from eval.floor import Ceilings
    from verify_kernels.batch import PassBatch
    from verify_kernels.comm import Group

STAMPS = {
    "none": "one rank measured, no communication",
    "modelled": "one rank measured, communication modelled",
    "real": "all ranks measured",
}
CONTEXT = 1152
DRAFTS = 7
"""Of K3's published measurements (configs/reported)."""

DRAWS = 64
"""Passes drawn from the routing law for the experts of every rank."""

REPLAYS = 5
PAGE = 16


def settings(config: BenchConfig) -> BenchConfig:
    """What a rank's run takes where the recipe says nothing. Raises ConfigError for what it does not do."""
    update: dict[str, object] = {}
    if config.context_len is None:
        if config.prompts is not None:
            raise ConfigError(f"prompts: found {config.prompts} with rank_of, allowed: --context N")
        update["context_len"] = CONTEXT
    if not config.tree and "num_speculative_tokens" not in config.model_fields_set:
        update["num_speculative_tokens"] = [DRAFTS]
    return config.model_copy(update=update)


# ------------------------------------------------------------------------------------------------------ operations

PASS = {
    "embedding": ("embedding", "head and sampling"),
    "rms_norm": ("norms", "norms"),
    "attention_residual": ("attention residual", "norms"),
    "plan_recurrence": ("plans", "attention"),
    "plan_latent_attention": ("plans", "attention"),
    "kda_verify": ("kda convolution and state", "attention"),
    "kda_prefill": ("kda convolution and state", "attention"),
    "gated_rms_norm": ("kda output norm", "attention"),
    "append_latents": ("mla cache write and gate", "attention"),
    "sigmoid_and_mul": ("mla cache write and gate", "attention"),
    "latent_attention": ("mla cache", "attention"),
    "moe_route": ("top-k", "moe front and tail"),
    "situ_experts": ("routed experts", "routed experts"),
    "commit_states": ("kda state commit", "attention"),
}
"""Operation -> its name and group in the cost model. Products are named after their weights instead."""

PRODUCTS = ("linear", "head_linear", "logits", "greedy_logits")


def weight_names(model: KimiK3) -> dict[int, tuple[str, str]]:
    """id of a weight -> (name, group) of its product, as the cost model names them where it has them apart."""
    from dspark_runtime.models.kimi_k3 import DeltaAttention, GatedMlp

    projections, front, shared = "attention projections", "moe front and tail", "shared experts"
    found = {id(model.lm_head): ("head", "head and sampling")}
    for layer in model.layers:
        m, f = layer.mixer, layer.ffn
        if isinstance(m, DeltaAttention):
            said = ((m.in_proj, "kda q, k, v, gate, beta and forget gate, down"), (m.gate_b, "kda forget gate, up"))
            said += ((m.o, "kda output"),)
        else:
            said = ((m.in_proj, "mla compression and gate"), (m.q_b, "mla query"), (m.up_k, "mla absorbed keys"))
            said += ((m.up_v, "mla absorbed values"), (m.o, "mla output"))
        found |= {id(w): (name, projections) for w, name in said}
        if isinstance(f, GatedMlp):
            found |= {id(f.gate_up): ("mlp gate and up", "dense mlp"), id(f.down): ("mlp down", "dense mlp")}
        else:
            found |= {id(f.down_proj): ("latent down", front), id(f.up_proj): ("latent up", front)}
            found[id(f.shared.gate_up)] = ("shared experts gate and up", shared)
            found[id(f.shared.down)] = ("shared experts down", shared)
    return found


@dataclass
class Recorded:
    """The calls of one operation in a pass, with what they must read and compute."""

    name: str
    group: str
    calls: list[Callable[[], object]] = field(default_factory=list)
    backends: set[str] = field(default_factory=set)
    bytes: float = 0.0
    flops: float = 0.0


class Recorder:
    """Takes a verify pass apart as `ops.recording` tells of it. experts: local ids of each MoE layer."""

    def __init__(self, model: KimiK3) -> None:
        self.weights = weight_names(model)
        self.operations: dict[str, Recorded] = {}
        self.batch: PassBatch | None = None
        self.experts: list[Tensor] = []
        self.held = model.config.experts_held

    def __call__(self, op: str, implementation: Callable[..., Any], args: tuple[Any, ...], keywords: dict) -> None:
        if op == "plan_recurrence":
            self.batch = args[0]
        if op in PRODUCTS:
            # The one product whose weight is made anew in each pass: the router's, widened.
            name, group = self.weights.get(id(args[1]), ("router", "moe front and tail"))
        elif op == "situ_and_mul":
            # The routed experts' own is inside their operation.
            name, group = "mlp and shared experts activation", "shared experts"
        elif op in PASS:
            name, group = PASS[op]
        else:
            return  # drafting, acceptance: phases of the step
        entry = self.operations.setdefault(name, Recorded(name, group))
        entry.calls.append(lambda: implementation(*args, **keywords))
        entry.backends.add(implementation.__module__)
        size, flops = self.cost(op, args)
        entry.bytes += size
        entry.flops += flops

    def cost(self, op: str, args: tuple[Any, ...]) -> tuple[float, float]:
        """(bytes that one call must read, or write back; its flops). Activations are small and not counted."""
        if op in PRODUCTS:
            return args[1].nbytes, 2.0 * args[1].numel() * len(args[0])
        if op == "situ_experts":
            gate_up, down, ids = args[1], args[2], args[4]
            local = ids[(ids >= 0) & (ids < self.held)]
            self.experts.append(ids)
            values = (gate_up.numel() + down.numel()) / self.held
            size = (gate_up.nbytes + down.nbytes) / self.held
            return size * local.unique().numel(), 2.0 * values * local.numel()
        if op == "kda_verify":
            tokens, state = len(args[0]), args[7][0]
            return state.nbytes * self.batch.num_requests, 8.0 * state.numel() * tokens
        if op == "commit_states":
            return 2.0 * args[0][:, 0].nbytes * len(args[3]), 0.0
        if op == "latent_attention":
            q, pages, rank = args[0], args[1], args[3]
            counts = self.batch.request_offsets.diff()
            seen = self.batch.context_lens + counts
            size = float(seen.sum()) * pages.shape[-1] * pages.element_size()
            return size, 2.0 * q.shape[1] * (q.shape[2] + rank) * float((seen * counts).sum())
        return 0.0, 0.0


def replay_ms(calls: Sequence[Callable[[], object]], device: Any) -> float:
    """Milliseconds of all calls, one after the other: median of the replays; on a GPU as one CUDA graph."""
    import torch

    def run() -> None:
        for call in calls:
            call()

    times = []
    with torch.inference_mode():
        run()
        if device.type != "cuda":
            for _ in range(REPLAYS):
                start = time.perf_counter()
                run()
                times.append((time.perf_counter() - start) * 1e3)
            return statistics.median(times)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            run()
        for _ in range(REPLAYS + 1):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
    return statistics.median(times[1:])


def timed(recorder: Recorder, ceilings: Ceilings, device: Any) -> list[RankOperation]:
    return [
        RankOperation(
            name=r.name, group=r.group, count=len(r.calls), ms=replay_ms(r.calls, device),
            floor_ms=floor_ms(r.bytes, r.flops, ceilings), bytes=r.bytes, flops=r.flops,
            backend=", ".join(sorted(r.backends)),
        )
        for r in recorder.operations.values()
    ]  # fmt: skip


def floor_ms(size: float, flops: float, ceilings: Ceilings) -> float:
    return max(size / ceilings.read_bandwidth_gbps / 1e6, flops / ceilings.matmul_tflops / 1e9)


# ----------------------------------------------------------------------------------------- experts, communication


def make_group(config: BenchConfig) -> Group:
    """The rank alone, or this process among those that torchrun started. Raises ConfigError if they are too few."""
    from verify_kernels.comm import Alone, Distributed

    if config.collectives != "real":
        return Alone(0, config.rank_of)
    import torch
    from torch import distributed

    found = int(os.environ.get("WORLD_SIZE", "1"))
    if found != config.rank_of:
        allowed = f"{config.rank_of}, one a rank, started by torchrun"
        raise ConfigError(f"collectives: found real with {found} process{'es' * (found > 1)}, allowed: {allowed}")
    cuda = config.device != "cpu" and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not distributed.is_initialized():
        distributed.init_process_group("nccl" if cuda else "gloo")
    if cuda and config.backend == "unmeasured":
        from verify_kernels.comm.symmetric import Symmetric

        return Symmetric()
    return Distributed()


def ranks_experts(routing: ForcedRouting, batch: PassBatch, experts: int, size: int) -> tuple[float, float]:
    """(mean, slowest) of the different experts that a rank holds and a pass touches, over layers and passes drawn from
    the law. The slowest is each layer's: the ranks wait for one another in every layer."""
    import torch

    mean, slowest = 0.0, 0.0
    for _ in range(DRAWS):
        ids = routing(batch).flatten(1)
        touched = torch.zeros(len(ids), experts, device=ids.device).scatter_(1, ids, 1.0)
        held = touched.view(len(ids), size, -1).sum(2)
        mean += float(held.mean()) / DRAWS
        slowest += float(held.amax(1).mean()) / DRAWS
    return mean, slowest


def expert_numbers(
    recorder: Recorder, numbers: dict[str, Any], routing: ForcedRouting | None, model: KimiK3
) -> RankExperts | None:
    if not recorder.experts:
        return None
    c, held = model.config, recorder.held
    local = [ids[(ids >= 0) & (ids < held)].unique().numel() for ids in recorder.experts]
    mean = slowest = None
    if routing is not None:
        ranks = c.shard.size if c.shard.parallel == "ep" else 1
        mean, slowest = ranks_experts(routing, recorder.batch, c.num_experts, ranks)
    return RankExperts(
        law=numbers["routing"],
        expected=numbers["expected_experts_per_layer"],
        counted=numbers["unique_experts_per_layer"],
        this_rank=statistics.fmean(local),
        mean_rank=mean,
        slowest_rank=slowest,
    )


def collectives(record: Counter[tuple[str, str, int]], where: Fabric | None) -> list[RankCollective]:
    """Messages of a step, by name, kind and bytes, in order of first use."""
    return [
        RankCollective(
            name=name, kind=kind, count=count, bytes=size,
            us=None if where is None else tuple(vars(where.us(kind, size)).values()),
        )
        for (name, kind, size), count in record.items()
    ]  # fmt: skip


def communication_ms(messages: Sequence[RankCollective]) -> Range:
    return tuple(sum(m.count * m.us[i] for m in messages) / 1e3 for i in range(3))


def default_hardware(device: Any) -> str:
    """This GPU's entry of configs/hardware, else the one whose collectives were measured."""
    import torch

    from eval.floor import known_hardware

    known = known_hardware(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return Path(known["file"]).stem if known else LENDER


# ------------------------------------------------------------------------------------------------------ the command


def rank_config(config: BenchConfig, group: Group) -> KimiK3Config:
    """What the rank holds. Raises ConfigError for targets that are not divided."""
    from dspark_runtime.models.kimi_k3 import KimiK3Config
    from dspark_runtime.models.shards import Shard
    from dspark_runtime.targets import target_config

    named = config.target in names("models") or config.target.endswith((".yaml", ".yml"))
    whole = target_config(config.target) if named else None
    if not isinstance(whole, KimiK3Config):
        raise ConfigError(f"rank_of: found target {config.target}, allowed: architectures of Kimi-K3's form")
    return whole.of_rank(Shard(group.rank, group.size, config.parallel))


def load(config: BenchConfig, group: Group, longest: int, say: Callable[[str], None]) -> tuple[Target, int]:
    """(the rank's target, bytes of its caches). Says what it takes, or raises ConfigError, before it takes it."""
    from dspark_runtime import targets
    from dspark_runtime.engine import MAX_NODES
    from dspark_runtime.models.kimi_k3 import cache_bytes, dummy_kimi_k3, memory, weight_bytes
    from verify_kernels import ops

    ops.use(config.backend)
    part, requests = rank_config(config, group), max(config.num_requests)
    if longest > part.max_position_embeddings:
        raise ConfigError(
            f"context_len: found {config.context_len}, with new tokens and one step {longest}, allowed: at most "
            f"{part.max_position_embeddings}, the context limit of {config.target}"
        )
    dtype = targets.DTYPES["bfloat16" if config.dtype == "auto" else config.dtype]
    device = targets.device_of(config.device)
    pages = requests * -(-(longest + MAX_NODES) // PAGE) + 1
    size, cache = weight_bytes(part, dtype), cache_bytes(part, dtype, pages * PAGE, requests)
    rank = f"rank {group.rank} of {group.size} of {config.target} ({config.parallel})"
    takes = f"{amount(size)} of weights, {amount(cache)} of caches and states for {requests} x {longest} tokens"
    room, whose = memory(device)
    if size + cache > room:
        allowed = "more ranks, fewer requests or a shorter context"
        raise ConfigError(f"rank_of: {rank} takes {takes}; {whose} has {amount(room)}; allowed: {allowed}")
    say(f"{rank}: {takes}")
    name = Path(config.target).stem
    model = dummy_kimi_k3(name, part, dtype, device, config.seed, None, group)
    return targets.Target(name, model, None, part), cache


def measure_rank(
    config: BenchConfig,
    command: str = "dspark bench",
    progress: Progress = lambda text, done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> RankRun:
    """Every point of the recipe on one rank. Raises ConfigError before anything slow where it can."""
    import torch

    from dspark_runtime.engine import Engine
    from eval import floor
    from eval.environment import environment

    config = settings(config)
    points = bench.plan(config)
    wrong = next((p.error for p in points if p.error), None)
    if wrong is not None:
        raise ConfigError(f"acceptance_length: {wrong}")
    group = make_group(config)
    most = max(p.spec.depth for p in points) + 1
    longest = config.context_len + max(config.max_tokens, 2 * most) + most  # the second step is taken apart
    target, cache = load(config, group, longest, say)
    model: KimiK3 = target.model
    device = model.device
    where = None
    if config.collectives == "modelled":
        where = fabric(config.hardware or default_hardware(device), group.size)
    drafter = bench.make_drafter(config.drafter, target, config)
    prompts = bench.Prompts(config, None, target)
    routing = model.routing = bench.forced_routing(config, target)
    cuda_graph = config.cuda_graph if config.cuda_graph is not None else device.type == "cuda"
    progress("measuring the machine", 0, 1)
    ceilings = floor.measure_ceilings(device, model.dtype)

    def engine(graph: bool) -> Engine:
        options = dict(max_num_requests=max(config.num_requests), max_model_len=longest, page_size=PAGE)
        return Engine(model, drafter, cuda_graph=graph, record_experts=True, **options)

    timing = engine(cuda_graph)
    rounds = config.warmup + config.repeats
    for i in range(rounds):
        for j, point in enumerate(points):
            what = "warm-up" if i < config.warmup else f"repeat {i - config.warmup + 1}/{config.repeats}"
            progress(f"{what}, b={point.num_requests}", i * len(points) + j, rounds * len(points))
            repeat = bench.run_once(timing, point, prompts.of(i, point.num_requests), config, i)
            if i >= config.warmup:
                point.repeats.append(repeat)
    del timing

    rows = []
    for point in points:
        progress(f"operations, b={point.num_requests}, {point.spec.num_nodes} nodes", 1, 1)
        recorder, record = taken_apart(engine(False), point, prompts, config, model, group)
        numbers = bench.acceptance_numbers(point.repeats, point.spec.depth)
        numbers |= bench.time_numbers(point.repeats, point.num_requests)
        numbers |= bench.expert_numbers(point, target.config.num_experts, routing)
        operations = timed(recorder, ceilings, device)
        row = row_of(config, point, target, drafter, numbers, operations, recorder, record, where, routing, ceilings)
        rows.append(row.model_copy(update={"cache_bytes": cache}))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    progress("done", 1, 1)
    return RankRun(
        command=command,
        synthetic=any(row.synthetic for row in rows),
        environment=Environment(
            **environment(
                device,
                config.seed,
                cuda_graph=cuda_graph,
                read_bandwidth_gbps=ceilings.read_bandwidth_gbps,
                matmul_tflops=ceilings.matmul_tflops,
                ceilings=ceilings.source,
            )
        ),
        seed=config.seed,
        config=config,
        results=rows,
    )


def taken_apart(
    engine: Engine, point: Point, prompts: bench.Prompts, config: BenchConfig, model: KimiK3, group: Group
) -> tuple[Recorder, Counter[tuple[str, str, int]]]:
    """One decode step of a point, recorded: its operations, and how often each of its messages (name, kind, bytes)."""
    from dspark_runtime.sampling import SamplingParams
    from verify_kernels import ops

    engine.configure(point.spec, point.law, config.rejection_sample_method if not point.plain else "auto")
    for i, prompt in enumerate(prompts.of(0, point.num_requests)):
        room = 3 * (point.spec.depth + 1)  # for the steps before the recorded one, and itself
        params = SamplingParams(temperature=config.temperature, max_tokens=room, ignore_eos=True, seed=i)
        engine.submit(prompt, params)
    while not engine.records and engine.has_work:
        engine.step()
    recorder = Recorder(model)
    group.sent.clear()
    with ops.recording(recorder):
        engine.step()
    if recorder.batch is None:
        raise DsparkError("rank_of: no decode step ran, allowed: a --context that leaves room for two steps")
    return recorder, group.sent.copy()


def row_of(
    config: BenchConfig,
    point: Point,
    target: Target,
    drafter: Any,
    numbers: dict[str, Any],
    operations: list[RankOperation],
    recorder: Recorder,
    record: Counter[tuple[str, str, int]],
    where: Fabric | None,
    routing: ForcedRouting | None,
    ceilings: Ceilings,
) -> RankRow:
    from dspark_runtime.models.kimi_k3 import weight_bytes

    model: KimiK3 = target.model
    shard, step = model.config.shard, numbers["step_ms"]
    messages = collectives(record, where)
    experts = expert_numbers(recorder, numbers, routing, model)
    straggler = 0.0
    if experts is not None and experts.mean_rank is not None and experts.this_rank and config.collectives != "real":
        own = sum(op.ms for op in operations if op.group == "routed experts")
        straggler = own * (experts.slowest_rank - experts.mean_rank) / experts.this_rank
    communication = communication_ms(messages) if where is not None else None
    implied = tuple(step.total + straggler + x for x in communication or (0.0, 0.0, 0.0))
    length = numbers["spec_decode_acceptance_length"]
    within = sum(op.ms for op in operations if op.name != PASS["commit_states"][0])
    synthetic = point.law is not None
    error = None
    if synthetic:
        off = abs(length - point.requested)
        if off > bench.TOLERANCE + 3 * bench.sampling_error(point.law, sum(numbers["emitted_histogram"])):
            error = f"asked for AL {point.requested:.2f}, realised {length:.2f}"
    return RankRow(
        target=target.name,
        stamp=STAMPS[config.collectives],
        rank=shard.rank,
        rank_of=shard.size,
        parallel=shard.parallel,
        collectives=config.collectives,
        dtype=str(model.dtype).removeprefix("torch."),
        drafter="none" if point.plain else drafter.name,
        acceptance=point.law.describe() if synthetic else "real",
        synthetic=synthetic,
        num_requests=point.num_requests,
        context_len=config.context_len,
        num_speculative_tokens=point.spec.num_drafts,
        tree=point.tree,
        verified_tokens=numbers["verified_tokens"],
        spec_decode_acceptance_length=length,
        weight_bytes=weight_bytes(model.config, model.dtype),
        cache_bytes=0,
        step_ms=step,
        spread=numbers["spread"],
        floor_ms=floor_ms(sum(op.bytes for op in operations), sum(op.flops for op in operations), ceilings),
        between_ms=step.verify - within,
        operations=operations,
        messages=messages,
        communication_ms=communication,
        communication_source={
            "none": "no communication counted", "real": "measured inside the step",
        }.get(config.collectives) or f"{where.machine.title}: {where.source}",
        experts=experts,
        straggler_ms=straggler,
        implied_step_ms=implied,
        implied_output_throughput=tuple(1e3 * length * point.num_requests / x for x in reversed(implied)),
        error=error,
        notes=list(where.notes) if where is not None else [],
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ the report


def amount(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def span(values: Range | None, digits: int = 2) -> str:
    if values is None:
        return ""
    low, mid, high = (f"{x:.{digits}f}" for x in values)
    return mid if low == high else f"{mid} [{low}-{high}]"


def line(row: RankRow) -> str:
    if not row.synthetic:
        return "plain" if not row.num_speculative_tokens else f"{row.drafter} k={row.num_speculative_tokens}"
    shape = f"k={row.num_speculative_tokens}" if row.tree == "chain" else f"tree {row.tree}"
    return f"{row.acceptance.removesuffix(' (min_variance)')} {shape}"


def text(run: RankRun) -> str:
    """For people: the system that is implied, then each line taken apart."""
    first, e = run.results[0], run.environment
    stamp = "SYNTHETIC ACCEPTANCE in the lines marked so · " if run.synthetic else ""
    parts = [
        f"{stamp}{first.stamp}",
        f"{first.target} · rank {first.rank} of {first.rank_of} ({first.parallel}) · {first.dtype} · "
        f"{e.gpu or e.cpu} · {amount(first.weight_bytes)} of weights, {amount(first.cache_bytes)} of cache and states",
        "",
        table(
            ("line", "b", "AL", "verified", "step ms", "floor ms", "x floor", "communication ms", "slowest rank +ms",
             "implied step ms", "implied tok/s"),
            [
                (line(r), str(r.num_requests), num(r.spec_decode_acceptance_length), num(r.verified_tokens, 0),
                 num(r.step_ms.total), num(r.floor_ms, 3), num(r.step_ms.total / r.floor_ms, 1) if r.floor_ms else "",
                 span(r.communication_ms), num(r.straggler_ms), span(r.implied_step_ms),
                 span(r.implied_output_throughput, 1))
                for r in run.results
            ],
        ),
        "",
        f"implied: of the whole system of {first.rank_of} ranks; drafting by {run.config.drafter}, not by the model's "
        f"own drafter. Communication: {'; '.join([first.communication_source, *first.notes])}.",
    ]  # fmt: skip
    for r in run.results:
        parts += ["", f"{line(r)}, b={r.num_requests}, context {r.context_len}:", ""]
        body = [
            (op.name, op.group, str(op.count), num(op.ms, 3), num(op.floor_ms, 3),
             num(op.ms / op.floor_ms, 1) if op.floor_ms else "", num(op.bytes / 1e6, 2), op.backend)
            for op in sorted(r.operations, key=lambda op: -op.ms)
        ]  # fmt: skip
        body += [
            ("between operations", "", "", num(r.between_ms, 3), "", "", "", ""),
            ("draft", "step", "", num(r.step_ms.draft, 3), "", "", "", ""),
            ("acceptance and commit", "step", "", num(r.step_ms.accept, 3), "", "", "", ""),
            ("host", "step", "", num(r.step_ms.other, 3), "", "", "", ""),
        ]
        parts += [table(("operation", "group", "times", "ms", "floor ms", "x floor", "MB", "backend"), body), ""]
        sent = [(m.name, m.kind, str(m.count), str(m.bytes), span(m.us, 1)) for m in r.messages]
        parts += [table(("collective", "kind", "times", "bytes a rank", "us each"), sent)]
        if x := r.experts:
            whole = f"{x.counted:.1f} counted" + (f", {x.expected:.1f} expected" if x.expected is not None else "")
            parts += ["", f"different experts of a layer under {x.law} routing: {whole}; this rank {x.this_rank:.1f}"]
            if x.mean_rank is not None:
                parts[-1] += f", mean rank {x.mean_rank:.1f}, slowest of {r.rank_of} {x.slowest_rank:.1f}"
            parts[-1] += "." if r.parallel == "ep" else " (every rank holds a slice of each)."
    return "\n".join(parts) + "\n"
