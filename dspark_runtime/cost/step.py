"""StepTime(model, drafter, hardware, parallelism, tokens, requests, context, precision, routing law) -> milliseconds,
as a sum over named operations. Two of the three layers are here; the third, a constant fitted to reports, is the
caller's.

floor       bytes / datasheet bandwidth or flops / datasheet rate, whichever is longer, with all weights, caches and
work
            spread evenly over all GPUs and everything inside a pass overlapped. No latency, no communication. Draft
            pass and verify pass follow one another.
achievable  every operation as its class was measured (configs/kernels), one after another on the busiest rank: no
overlap
            but the shared experts beside the routed ones. A stack that fuses or overlaps more can be faster than this.

Microseconds inside, milliseconds in the results. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from dspark_runtime.cost.facts import BYTES, Architecture, Gdn, Gqa, Hardware, Kda, Latent, Mla, Moe
from dspark_runtime.cost.kernels import ZERO, Interval, Kernels, load_kernels
from dspark_runtime.cost.routing import Routing
from dspark_runtime.errors import ConfigError

# A table measured on a relative of the machine says less about it.
BORROWED = (0.75, 1.4)


@dataclass(frozen=True)
class Parallelism:
    """tp x dp GPUs. tp shards attention and dense matrices, dp copies them for disjoint requests. The experts are
    spread over all GPUs: ep ways by expert, the rest by slicing each. cp splits a cache that tp would copy (context
    parallel decoding). replicated: small matrices that K3's first stacks copy to every rank (query and key compression,
    router, latent projections)."""

    tp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    replicated: bool = True

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "ep", "cp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"parallelism.{name}: found {getattr(self, name)}, allowed: 1 or more")
        if self.gpus % self.ep:
            raise ConfigError(f"parallelism.ep: found {self.ep}, allowed: divisors of {self.gpus} GPUs")
        if self.tp % self.cp:
            raise ConfigError(f"parallelism.cp: found {self.cp}, allowed: divisors of tp ({self.tp})")

    @property
    def gpus(self) -> int:
        return self.tp * self.dp

    @property
    def moe_tp(self) -> int:
        return self.gpus // self.ep

    def __str__(self) -> str:
        parts = [
            f"TP{self.tp}",
            *(f"{n.upper()}{v}" for n, v in (("dp", self.dp), ("ep", self.ep), ("cp", self.cp)) if v > 1),
        ]
        return "·".join(parts)


@dataclass(frozen=True)
class Load:
    """One step: `requests` at once, each with `tokens` verified (root and drafts, of a chain or a tree) over `context`
    committed tokens. kv: precision of the cache."""

    requests: int
    tokens: int = 1
    context: int = 1024
    kv: str = "bf16"

    @property
    def total(self) -> int:
        return self.requests * self.tokens


@dataclass(frozen=True)
class Operation:
    """One named operation of a step, `count` times. Bytes and flops are those of the whole machine for one time; us is
    the achievable time of the busiest rank for one time. collective: bytes of the message of one rank."""

    name: str
    group: str
    count: int
    bytes: float
    flops: float
    launches: int
    us: Interval
    precision: str = "bf16"
    collective: float = 0.0
    beside: str = ""  # runs beside the operation of this name: only the longer of the two counts

    @property
    def total_us(self) -> Interval:
        return self.us * self.count


@dataclass(frozen=True)
class StepTime:
    """The two layers of a step in milliseconds; passes are ("draft", "verify"), in order of execution."""

    operations: tuple[Operation, ...]
    floor_by_pass: dict[str, Interval]
    achievable: Interval
    unique_experts: float
    notes: tuple[str, ...] = field(default=())

    @property
    def floor(self) -> Interval:
        return sum(self.floor_by_pass.values(), ZERO)

    @property
    def counted(self) -> list[tuple[Operation, Interval]]:
        """Operations with the milliseconds that they add; what runs beside something longer adds nothing."""
        beside: dict[str, list[Operation]] = {}
        for op in self.operations:
            beside.setdefault(op.beside, []).append(op)
        hidden: set[str] = set()
        for op in self.operations:
            others = beside.get(op.name, [])
            longer = sum(other.total_us.mid for other in others) > op.total_us.mid
            hidden |= {op.name} if longer else {other.name for other in others}
        return [(op, ZERO if op.name in hidden else op.total_us * 1e-3) for op in self.operations]

    def groups(self) -> dict[str, Interval]:
        """Achievable milliseconds by group of operations."""
        out: dict[str, Interval] = {}
        for op, ms in self.counted:
            out[op.group] = out.get(op.group, ZERO) + ms
        return out


class _Builder:
    """Collects the operations of one pass."""

    def __init__(
        self, machine: Hardware, kernels: Kernels | None, p: Parallelism, load: Load, routing: Routing
    ) -> None:
        self.machine, self.kernels, self.p, self.load, self.routing = machine, kernels, p, load, routing
        self.local = math.ceil(load.requests / p.dp)  # requests of a rank
        self.rows = self.local * load.tokens  # tokens of a rank
        self.operations: list[Operation] = []
        reference = kernels.reference_bandwidth_gbps * 1e9 if kernels else 0.0
        measured = (machine.read_bandwidth_gbps or 0.0) * 1e9
        self.scale = reference / (measured or machine.bandwidth()[1]) if kernels else 1.0

    def widened(self, us: Interval) -> Interval:
        return us.widen(*BORROWED) if self.machine.borrowed else us

    def gemm(
        self,
        name: str,
        group: str,
        count: int,
        n: float,
        k: float,
        shards: int,
        precision: str = "bf16",
        beside: str = "",
    ) -> None:
        """[rows, k] x [k, n], its weight split over `shards` ranks of a tp group (1: every rank has a copy)."""
        size = n * k * BYTES[precision]
        us = ZERO
        if self.kernels:
            us = self.kernels.gemm_rule.us(size / shards, self.scale)
            compute = 1e6 * 2 * n * k / shards * self.rows / (0.8 * self.machine.flops(precision))
            us = self.widened(Interval(max(us.low, compute), max(us.mid, compute), max(us.high, compute)))
        self.add(name, group, count, size, 2 * n * k * self.load.total, us, precision, beside=beside)

    def add(
        self, name: str, group: str, count: int, size: float, flops: float, us: Interval, precision: str = "bf16",
        launches: int = 1, collective: float = 0.0, beside: str = "",
    ) -> None:  # fmt: skip
        self.operations.append(Operation(name, group, count, size, flops, launches, us, precision, collective, beside))

    def elementwise(self, name: str, group: str, count: int, times: int = 1, beside: str = "") -> None:
        us = self.widened(Interval(*self.kernels.elementwise_us) * times) if self.kernels else ZERO
        self.add(name, group, count, 0.0, 0.0, us, launches=times, beside=beside)

    def all_reduce(self, name: str, count: int, width: int) -> None:
        if self.p.gpus == 1 or (self.p.tp == 1 and name != "experts all-to-all"):
            return
        message = self.rows * width * 2.0
        us = ZERO
        if self.kernels and self.kernels.all_reduce:
            up_to, low, mid, high = self.kernels.all_reduce
            rest = max(0.0, message - up_to)
            wire = (
                1e6 * 2 * rest / (self.machine.datasheet.link_gbps * 1e9) if self.machine.datasheet.link_gbps else 0.0
            )
            top = self.kernels.all_reduce_large_high_us if rest else high
            us = self.widened(Interval(low + wire, mid + wire, max(top, mid) + wire))
        self.add(name, "communication", count, 0.0, 0.0, us, collective=message)

    def attention(self, name: str, count: int, size: float, flops: float, shards: float) -> None:
        """Reading a cache of `size` bytes in all; a rank reads size / shards."""
        us = ZERO
        if self.kernels:
            us = self.kernels.attention_rule.us(size / shards, self.scale)
            compute = 1e6 * flops / self.p.gpus / (0.6 * self.machine.flops("bf16"))
            us = self.widened(Interval(max(us.low, compute), max(us.mid, compute), max(us.high, compute)))
        self.add(name, "attention", count, size, flops, us)

    def recurrent(self, name: str, count: int, heads: int, state: float) -> None:
        us = ZERO
        size = 2.0 * state * self.load.requests
        if self.kernels:
            measured = self.kernels.recurrent_us(heads / self.p.tp, self.local, self.load.tokens)
            us = self.widened(measured or self.kernels.attention_rule.us(size / self.p.gpus, self.scale))
        self.add(name, "attention", count, size, 4.0 * state / 4 * self.load.total, us, "fp32")

    # --------------------------------------------------------------------------------------------- blocks

    def linear_attention(self, h: int, g: Kda | Gdn) -> None:
        n, tp, name = g.layers, self.p.tp, "kda" if isinstance(g, Kda) else "gdn"
        if isinstance(g, Kda):
            width = g.heads * g.head_dim
            self.gemm(f"{name} q, k, v, gate", "attention projections", n, 4 * width, h, tp)
            self.gemm(f"{name} beta and forget gate, down", "attention projections", n, g.gate_rank + g.heads, h, 1)
            self.gemm(f"{name} forget gate, up", "attention projections", n, width, g.gate_rank, tp)
            heads = g.heads
        else:
            k, width, heads = g.key_heads * g.head_dim, g.value_heads * g.head_dim, g.value_heads
            self.gemm(f"{name} q, k, v, gate", "attention projections", n, 2 * k + 2 * width + 2 * heads, h, tp)
        self.recurrent(f"{name} convolution and state", n, heads, 4.0 * g.state_values)
        if self.load.tokens > 1:
            self.elementwise(f"{name} output norm", "attention", n)
        self.gemm(f"{name} output", "attention projections", n, h, width, tp)

    def latent_attention(self, h: int, g: Mla) -> None:
        n, tp = g.layers, self.p.tp
        shared = 1 if self.p.replicated else tp
        out = g.heads * g.v_head_dim
        self.gemm("mla compression", "attention projections", n, g.q_lora_rank + g.kv_values, h, shared)
        self.gemm(
            "mla query",
            "attention projections",
            n,
            g.heads * (g.qk_nope_head_dim + g.qk_rope_head_dim),
            g.q_lora_rank,
            tp,
        )
        self.gemm("mla absorbed keys", "attention projections", n, g.heads * g.qk_nope_head_dim, g.kv_lora_rank, tp)
        values = g.kv_values * BYTES[self.load.kv] * self.load.context * self.load.requests
        flops = 2.0 * g.heads * (g.kv_values + g.kv_lora_rank) * self.load.context * self.load.total
        self.attention("mla cache", n, values, flops, self.p.dp * self.p.cp)
        self.gemm("mla absorbed values", "attention projections", n, g.heads * g.v_head_dim, g.kv_lora_rank, tp)
        if g.gated:
            self.gemm("mla gate", "attention projections", n, out, h, tp)
        self.elementwise("mla cache write and gate", "attention", n, 2)
        self.gemm("mla output", "attention projections", n, h, out, tp)

    def compressed_attention(self, h: int, g: Latent) -> None:
        n, tp = g.layers, self.p.tp
        width = g.heads * g.head_dim
        self.gemm("latent compression", "attention projections", n, g.q_lora_rank + g.head_dim, h, 1)
        self.gemm("latent query", "attention projections", n, width, g.q_lora_rank, tp)
        context, limit = self.load.context, (math.inf, g.index_topk)
        # What a query reads: the window in full, the compressed rest: all of it, or the index's choice from ratio 4.
        read = sum(
            count * min(context, g.window + (min(context / ratio, limit[ratio < 128]) if ratio else 0))
            for ratio, count in g.compress_ratios.items()
        ) / n  # fmt: skip
        size = g.head_dim * BYTES[self.load.kv] * read * self.load.requests
        self.attention("latent cache", n, size, 4.0 * width * read * self.load.total, self.p.dp * self.p.cp)
        self.elementwise("latent cache write, norms, index", "attention", n, 3)
        self.gemm("latent output, down", "attention projections", n, g.o_lora_rank, width, tp)
        self.gemm("latent output, up", "attention projections", n, h, g.o_groups * g.o_lora_rank, tp)

    def head_attention(self, h: int, g: Gqa) -> None:
        n, tp = g.layers, self.p.tp
        q, kv = g.heads * g.head_dim, g.kv_heads * g.head_dim
        self.gemm("q, k, v", "attention projections", n, q * (2 if g.gated else 1) + 2 * kv, h, tp)
        self.elementwise("norms, rotary embedding, cache write", "attention", n)
        context = min(self.load.context, g.window) if g.window else self.load.context
        size = g.kv_values * BYTES[self.load.kv] * context * self.load.requests
        shards = self.p.dp * max(min(tp, g.kv_heads), self.p.cp)
        self.attention("cache", n, size, 4.0 * q * context * self.load.total, shards)
        if g.gated:
            self.elementwise("output gate", "attention", n)
        self.gemm("attention output", "attention projections", n, h, q, tp)

    def dense_mlp(self, h: int, layers: int, inter: int) -> None:
        self.gemm("mlp gate and up", "dense mlp", layers, 2 * inter, h, self.p.tp)
        self.elementwise("mlp activation", "dense mlp", layers)
        self.gemm("mlp down", "dense mlp", layers, h, inter, self.p.tp)

    def experts(self, h: int, m: Moe, precision: str) -> float:
        """Adds the operations of the MoE layers; returns the distinct experts of a layer."""
        p, load, n = self.p, self.load, m.layers
        width = m.expert_hidden_size or h
        shared = 1 if p.replicated else p.tp
        self.gemm("router", "moe front and tail", n, m.num_experts, h, 1)
        self.elementwise("top-k", "moe front and tail", n)
        if m.expert_hidden_size:
            self.gemm("latent down", "moe front and tail", n, width, h, shared)
            self.elementwise("latent norm", "moe front and tail", n)
        if p.ep > 1 and p.dp > 1:
            self.all_reduce("experts all-to-all", 2 * n, width)
        unique = self.routing.unique(m.num_experts, m.num_experts_per_tok, load.requests, load.total)
        one = 3.0 * width * m.intermediate_size
        size = unique * one * BYTES[precision]
        flops = 2.0 * one * m.num_experts_per_tok * load.total
        self.add(
            "routed experts", "routed experts", n, size, flops, self.expert_us(m, width, unique, precision), precision
        )
        if m.num_shared_experts:
            inter = m.num_shared_experts * m.shared_intermediate_size
            beside = "routed experts"
            self.gemm("shared experts gate and up", "shared experts", n, 2 * inter, h, p.tp, beside=beside)
            self.elementwise("shared experts activation", "shared experts", n, beside=beside)
            self.gemm("shared experts down", "shared experts", n, h, inter, p.tp, beside=beside)
        if m.expert_hidden_size:
            self.gemm("latent up", "moe front and tail", n, h, width, shared)
        self.elementwise("combine", "moe front and tail", n)
        return unique

    def expert_us(self, m: Moe, width: int, unique: float, precision: str) -> Interval:
        """As measured for this shape and shard; else by the bytes of distinct experts, at the efficiency of as narrow a
        slice."""
        k = self.kernels
        if k is None:
            return ZERO
        t, p = k.moe, self.p
        if (t.num_experts, t.num_experts_per_tok, t.hidden_size, t.intermediate_size, t.precision) == (
            m.num_experts, m.num_experts_per_tok, width, m.intermediate_size, precision,
        ):  # fmt: skip
            tokens = self.routing.independent(self.load.requests, self.load.total)
            law = "zipf" if self.routing.law == "zipf" else "balanced"
            if self.routing.law == "recorded":  # as many tokens as touch that many experts under uniform routing
                tokens = math.log1p(-min(unique / m.num_experts, 0.9999)) / math.log1p(
                    -m.num_experts_per_tok / m.num_experts
                )
            us = k.moe_us(p.moe_tp, p.ep, law, tokens)
            if us is not None:
                # The part that is not latency goes with the machine's bandwidth.
                fixed = min(us.low, k.moe_rules[min(k.moe_rules, key=lambda tp: abs(tp - p.moe_tp))].latency_us)
                us = Interval(*(fixed + (x - fixed) * self.scale for x in (us.low, us.mid, us.high)))
                return self.widened(us)
        slice_width = m.intermediate_size / p.moe_tp
        rule = k.moe_rules[min(k.moe_rules, key=lambda tp: abs(math.log(t.intermediate_size / tp / slice_width)))]
        size = max(1.0, unique / p.ep) * 3 * width * m.intermediate_size * BYTES[precision] / p.moe_tp
        us = rule.us(size, self.scale)
        compute = 1e6 * 2 * 3 * width * m.intermediate_size * m.num_experts_per_tok * self.load.total / p.gpus
        compute /= 0.6 * self.machine.flops(precision)
        return self.widened(Interval(max(us.low, compute), max(us.mid, compute), max(us.high, compute)))

    def layers(self, a: Architecture) -> float:
        """All decoder layers; returns the distinct experts of a layer (0 without)."""
        h, n = a.hidden_size, a.num_layers
        self.elementwise("norms and residual", "norms", n, 2)
        if a.attention_residual_block:
            self.elementwise("attention residual", "norms", n, 2)
        for group in a.attention.groups.values():
            build = {Kda: self.linear_attention, Gdn: self.linear_attention, Mla: self.latent_attention,
                     Latent: self.compressed_attention, Gqa: self.head_attention}[type(group)]  # fmt: skip
            build(h, group)
        self.all_reduce("all-reduce after attention", n, h)
        unique = 0.0
        if a.ffn.dense:
            self.dense_mlp(h, a.ffn.dense.layers, a.ffn.dense.intermediate_size)
        if a.ffn.moe:
            unique = self.experts(h, a.ffn.moe, a.weights.experts)
        self.all_reduce("all-reduce after mlp", n, h)
        return unique

    def head(self, a: Architecture, group: str) -> None:
        self.gemm("head", group, 1, a.vocab_size, a.hidden_size, self.p.tp)
        self.sampling("sampling", group, 1, 6, a.vocab_size)

    def sampling(self, name: str, group: str, count: int, passes: int, vocab: int) -> None:
        """Passes over float32 logits of the rows and vocabulary of a rank."""
        us = ZERO
        size = self.rows * vocab / self.p.tp * 4.0
        if self.kernels:
            base = Interval(*self.kernels.elementwise_us)
            wire = size * self.scale / (self.kernels.reference_bandwidth_gbps * 1e3)
            us = self.widened((base + Interval.exact(wire)) * passes)
        self.add(name, group, count, 0.0, 0.0, us, launches=passes)


def _relabel(operations: list[Operation], prefix: str, group: str | None) -> list[Operation]:
    return [
        replace(
            op, name=f"{prefix}{op.name}", group=group or op.group, beside=f"{prefix}{op.beside}" if op.beside else ""
        )
        for op in operations
    ]


def _floor_ms(operations: list[Operation], machine: Hardware, gpus: int) -> Interval:
    size = sum(op.bytes * op.count for op in operations) / gpus
    low, mid, high = machine.bandwidth()
    compute = 1e3 * sum(op.flops * op.count / machine.flops(op.precision) for op in operations) / gpus
    memory = [1e3 * size / bandwidth for bandwidth in (high, mid, low)]
    return Interval(*(max(m, compute) for m in memory))


def _at_bandwidth(op: Operation, machine: Hardware, gpus: int) -> Interval:
    """Microseconds of an operation at the bandwidth that the makers of a machine reach, with nothing else in its
    way."""
    memory = 1e6 * op.bytes / gpus / (machine.bandwidth()[1] * machine.effective_bandwidth)
    compute = 1e6 * op.flops / gpus / machine.flops(op.precision)
    return Interval.exact(max(memory, compute)).widen(machine.effective_bandwidth, 1 / machine.effective_bandwidth)


def step_time(
    model: Architecture,
    machine: Hardware,
    parallelism: Parallelism,
    load: Load,
    drafter: Architecture | None = None,
    routing: Routing | None = None,
) -> StepTime:
    """The cost of one draft-and-verify step; without a drafter, of one verify or decode pass.

    A block drafter runs one pass of its drafts a request (as many as are verified besides the root, at most its block),
    takes in what the last step committed (its projection of the tapped layers, the keys of its own layers), and samples
    draft by draft through its Markov head.
    """
    routing = routing or Routing()
    kernels = load_kernels(machine.kernels) if machine.kernels else None
    verify = _Builder(machine, kernels, parallelism, load, routing)
    unique = verify.layers(model)
    verify.head(model, "head and sampling")
    if drafter is None and load.tokens > 1:
        verify.elementwise("acceptance", "head and sampling", 1, 4)
    passes = {"verify": _relabel(verify.operations, "", None)}
    if drafter is not None:
        if drafter.drafter is None:
            raise ConfigError(f"drafter: found {drafter.name}, allowed: an architecture with a drafter section")
        d, h = drafter.drafter, drafter.hidden_size
        drafts = min(load.tokens - 1, d.num_drafts) or 1
        draft = _Builder(machine, kernels, parallelism, replace(load, tokens=drafts), routing)
        draft.gemm("tapped layers", "draft", 1, h, d.taps * h, parallelism.tp)
        draft.layers(drafter)
        draft.gemm("head", "draft", 1, drafter.vocab_size, h, parallelism.tp)
        if d.markov_rank:
            one = _Builder(machine, kernels, parallelism, replace(load, tokens=1), routing)
            one.gemm("markov head", "draft", drafts, drafter.vocab_size, d.markov_rank, parallelism.tp)
            one.sampling("markov sampling", "draft", drafts, 3, drafter.vocab_size)
            one.all_reduce("markov gather", drafts, 8)
            draft.operations += one.operations
        draft.elementwise("acceptance", "draft", 1, 4)
        passes = {"draft": _relabel(draft.operations, "draft ", "draft"), **passes}
    operations = [op for ops in passes.values() for op in ops]
    floors = {name: _floor_ms(ops, machine, parallelism.gpus) for name, ops in passes.items()}
    notes = []
    if kernels is None and machine.effective_bandwidth:
        share = machine.effective_bandwidth
        notes.append(
            f"no measured kernels for {machine.title}: achievable is the floor at {share:.0%} of the bandwidth"
        )
        operations = [replace(op, us=_at_bandwidth(op, machine, parallelism.gpus), beside="") for op in operations]
    elif kernels is None:
        notes.append(f"no measured kernels for {machine.title}: the achievable layer is empty")
    elif machine.borrowed:
        notes.append(f"kernels borrowed from {kernels.title}, widened by {BORROWED[0]:g} to {BORROWED[1]:g}")
    if kernels and kernels.all_reduce is None and parallelism.gpus > 1:
        notes.append("no measured collective: communication counts nothing")
    step = StepTime(tuple(operations), floors, ZERO, unique, tuple(notes))
    return replace(step, achievable=sum((ms for _, ms in step.counted), ZERO))


def cost_curve(
    model: Architecture, machine: Hardware, parallelism: Parallelism, load: Load, tokens: list[int]
) -> list[tuple[int, float]]:
    """(verified tokens of a request, achievable milliseconds of the verify pass), for a scheduler."""
    return [(t, step_time(model, machine, parallelism, replace(load, tokens=t)).achievable.mid) for t in tokens]


# ------------------------------------------------------------------------------------------- prefill, transfer


def prefill_ms(model: Architecture, machine: Hardware, gpus: int, prompt: int) -> Interval:
    """Floor of the prefill of one prompt: its flops at the datasheet's rate (experts at theirs), or one reading of all
    weights, whichever is longer."""
    moe = model.ffn.moe
    routed = moe.layers * moe.num_experts_per_tok * moe.expert_params(model.hidden_size) if moe else 0
    other = model.other_params
    attention = 0.0
    for g in model.attention.groups.values():
        if isinstance(g, Gqa):
            attention += (
                2.0 * g.layers * g.heads * g.head_dim * prompt * (min(prompt, g.window) if g.window else prompt)
            )
        elif isinstance(g, Mla):
            attention += (
                g.layers * g.heads * (g.qk_nope_head_dim + g.qk_rope_head_dim + g.v_head_dim) * float(prompt) ** 2
            )
    seconds = 2.0 * routed * prompt / machine.flops(model.weights.experts)
    seconds += (2.0 * other * prompt + attention) / machine.flops("fp8" if model.weights.other == "fp8" else "bf16")
    low, mid, high = machine.bandwidth()
    size = model.expert_params * BYTES[model.weights.experts] + other * BYTES[model.weights.other]
    return Interval(*(1e3 * max(seconds / gpus, size / bandwidth / gpus) for bandwidth in (high, mid, low)))


def transfer_ms(model: Architecture, machine: Hardware, gpus: int, prompt: int, kv: str = "bf16") -> float:
    """Floor of moving the cache and state of one prompt from prefill to decode GPUs, over all their links at once."""
    if not machine.datasheet.link_gbps:
        return 0.0
    size = model.kv_values_per_token() * BYTES[kv] * prompt + model.state_values_per_request() * 4.0
    return 1e3 * size / (machine.datasheet.link_gbps * 1e9 * gpus)
