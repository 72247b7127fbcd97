"""The cost model against enumeration, transcription and the tables it is calibrated on."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from dspark_runtime.configs import find, names, read_yaml
from dspark_runtime.cost.facts import load_architecture, load_hardware
from dspark_runtime.cost.kernels import Interval, Kernels, fit, load_kernels
from dspark_runtime.cost.routing import Routing, inclusion, interpolate
from dspark_runtime.cost.step import Load, Parallelism, cost_curve, prefill_ms, step_time, transfer_ms
from dspark_runtime.errors import ConfigError
from dspark_runtime.validation import checked

K3, DRAFTER, GB300 = load_architecture("kimi-k3"), load_architecture("kimi-k3-dspark-inferact"), load_hardware("gb300")


# --------------------------------------------------------------------------------------------------- routing


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(4, 1, 3), (4, 2, 2), (5, 3, 2), (3, 2, 3)])
def test_uniform_routing_by_enumeration(experts: int, top_k: int, tokens: int) -> None:
    choices = list(itertools.combinations(range(experts), top_k))
    counts = [len(set().union(*picks)) for picks in itertools.product(choices, repeat=tokens)]
    assert Routing().unique(experts, top_k, 1, tokens) == pytest.approx(sum(counts) / len(counts), rel=1e-12)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.01, 3.0])
def test_zipf_inclusion(exponent: float) -> None:
    p = inclusion(896, 16, exponent)
    assert sum(p) == pytest.approx(16) and max(p) <= 1 + 1e-12 and list(p) == sorted(p, reverse=True)
    # Within the part that is not certain, chances stand as i^-exponent.
    free = [i for i in range(896) if p[i] < 1 - 1e-9]
    i, j = free[0], free[-1]
    assert p[i] / p[j] == pytest.approx(((j + 1) / (i + 1)) ** exponent)
    skewed = Routing("zipf", exponent).unique(896, 16, 1, 32)
    uniform = Routing().unique(896, 16, 1, 32)
    assert skewed == pytest.approx(uniform) if exponent == 0 else skewed < uniform


def test_recorded_and_overlapping_routing() -> None:
    recorded = Routing("recorded", recorded=(8.0, 12.0, 14.0))
    assert [recorded.unique(128, 8, 1, t) for t in (1, 2, 3, 9)] == [8.0, 12.0, 14.0, 14.0]
    assert recorded.unique(128, 8, 1, 1.5) == 10.0
    # Requests are independent; tokens of one request share.
    half = Routing(overlap=0.5)
    assert half.unique(896, 16, 8, 8) == Routing().unique(896, 16, 8, 8)
    assert half.unique(896, 16, 1, 7) == Routing().unique(896, 16, 1, 4)
    assert Routing(overlap=1.0).unique(896, 16, 2, 16) == Routing().unique(896, 16, 2, 2)
    with pytest.raises(ConfigError, match="overlap: found 2"):
        Routing(overlap=2.0)
    with pytest.raises(ConfigError, match="routing: found 'magic'"):
        Routing("magic")
    with pytest.raises(ConfigError, match="recorded: found nothing"):
        Routing("recorded")


# --------------------------------------------------------------------------------------------------- kernels


def test_a_rule_is_found_again_and_knows_its_spread() -> None:
    rule = fit([(x, 5.0 + 0.25 * x) for x in (1.0, 10.0, 100.0, 1000.0)])
    assert (rule.latency_us, rule.us_per_byte) == (pytest.approx(5), pytest.approx(0.25))
    assert (rule.low, rule.high) == (pytest.approx(1), pytest.approx(1))
    points = [(1.0, 6.0), (10.0, 7.0), (100.0, 33.0), (1000.0, 240.0)]
    rule = fit(points)
    for x, us in points:
        assert rule.us(x).low <= us * (1 + 1e-12) and us <= rule.us(x).high * (1 + 1e-12)
    loss = lambda a, b: sum(((a + b * x) / us - 1) ** 2 for x, us in points)  # noqa: E731
    best = loss(rule.latency_us, rule.us_per_byte)
    for da, db in ((0.01, 0), (-0.01, 0), (0, 0.001), (0, -0.001)):
        assert loss(rule.latency_us + da, rule.us_per_byte + db) > best
    assert fit([(1.0, 3.0), (2.0, 2.0)]).us_per_byte == 0.0  # nothing gets cheaper with size


def test_interpolation() -> None:
    assert [interpolate([1, 2, 4], [10, 20, 40], x) for x in (0.5, 1, 1.5, 3, 4, 8)] == [10, 10, 15, 30, 40, 80]


@pytest.mark.parametrize("name", names("kernels"))
def test_kernel_tables_are_valid(name: str) -> None:
    k = load_kernels(name)
    for n, width, us in k.gemm:
        assert (
            k.gemm_rule.us(2.0 * n * width).low <= us * 1.0001 and us <= k.gemm_rule.us(2.0 * n * width).high * 1.0001
        )
    assert k.gemm_rule.us_per_byte > 1 / (k.reference_bandwidth_gbps * 1e3)  # no kernel beats the memory


def test_a_broken_kernel_table_names_the_field() -> None:
    values = read_yaml(find("kernels", "h200"))
    values["moe"]["rows"] = "1 1 balanced 30 127"
    with pytest.raises(ConfigError, match="k.yaml: moe: rows: found 5 cells"):
        checked(Kernels, values, "k.yaml")


@pytest.mark.parametrize(
    ("tp", "ep", "us"),
    [
        (8, 1, {1: 31.7, 8: 89.9, 64: 435}),
        (16, 1, {1: 29.4, 8: 69.5, 128: 300}),
        (1, 8, {1: 29.6, 4: 47.3}),
        (1, 16, {2: 29.9, 8: 49.8}),
        (1, 32, {8: 33.8}),
    ],
)
def test_experts_cost_what_was_measured(tp: int, ep: int, us: dict[int, float]) -> None:
    """Published medians of one MoE layer on GB300, all the way through the model of a step."""
    p = Parallelism(tp=tp * ep, ep=ep)
    for tokens, value in us.items():
        step = step_time(K3, GB300, p, Load(1, tokens))
        (op,) = (o for o in step.operations if o.name == "routed experts")
        assert op.us.mid == pytest.approx(value, rel=0.01) and op.count == 92


# ----------------------------------------------------------------------------------------------------- floor


@pytest.mark.parametrize(
    ("tokens", "unique", "tp8", "tp16"),
    [
        (1, 16, 2.14, 1.07),
        (2, 31.7, 2.54, 1.27),
        (8, 120.3, 4.77, 2.39),
        (64, 613, 17.20, 8.60),
        (256, 887, 24.11, 12.06),
    ],
)
def test_the_floor_of_k3_against_a_separate_account(tokens: int, unique: float, tp8: float, tp16: float) -> None:
    """Distinct experts x 17.55 MB x 92 + 111.1 GB of BF16, over 8 TB/s. The model adds caches and states: taken off."""
    for gpus, expected in ((8, tp8), (16, tp16)):
        step = step_time(K3, GB300, Parallelism(tp=gpus), Load(1, tokens, context=1))
        state = 2 * K3.state_values_per_request() * 4
        got = step.floor.mid - 1e3 * state / 8e12 / gpus
        assert step.unique_experts == pytest.approx(unique, rel=2e-3)
        assert got == pytest.approx(expected, rel=4e-3)


@pytest.mark.parametrize(
    "name", ["kimi-k3", "qwen3-8b", "qwen3-30b-a3b", "qwen3.8-2.4t-a95b", "deepseek-v4-pro", "smollm2-135m"]
)
def test_operations_read_every_weight_once(name: str) -> None:
    """The bytes of the operations are those of the parameters: nothing forgotten, nothing twice."""
    model = load_architecture(name)
    step = step_time(model, GB300, Parallelism(tp=8), Load(1, 1, context=1))
    cached = (
        "cache",
        "mla cache",
        "latent cache",
        "kda convolution and state",
        "gdn convolution and state",
        "routed experts",
    )
    dense = sum(op.bytes * op.count for op in step.operations if op.name not in cached)
    expected = 2 * (model.other_params + model.embedding_params)  # products count in bf16
    assert dense == pytest.approx(expected, rel=2e-3)
    flops = sum(op.flops * op.count for op in step.operations if op.group not in ("attention",))
    assert flops == pytest.approx(2 * model.active_params, rel=3e-3)


@pytest.mark.parametrize("machine", names("hardware"))
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_layers_are_ordered_and_intervals_hold(machine: str, tokens: int) -> None:
    hardware = load_hardware(machine)
    step = step_time(K3, hardware, Parallelism(tp=16), Load(4, tokens), DRAFTER if tokens > 1 else None)
    for value in (step.floor, *([step.achievable] if step.achievable.mid else [])):
        assert 0 < value.low <= value.mid <= value.high
    assert sum(v.mid for v in step.groups().values()) == pytest.approx(step.achievable.mid)
    if hardware.kernels is None and hardware.effective_bandwidth is None:
        assert step.achievable.mid == 0 and "achievable layer is empty" in step.notes[0]
    else:
        assert step.achievable.mid > step.floor.mid * 0.99


def test_work_is_shared_as_the_parallelism_says() -> None:
    load = Load(8, 1, context=8192)
    one, two = (step_time(K3, GB300, Parallelism(tp=tp), load) for tp in (8, 16))
    assert two.floor.mid == pytest.approx(one.floor.mid / 2)
    assert two.achievable.mid < one.achievable.mid

    def us(step, name: str) -> float:
        return next(op.us.mid for op in step.operations if op.name == name)

    # Context parallel decoding divides the latent cache that tensor parallelism copies.
    split = step_time(K3, GB300, Parallelism(tp=8, cp=8), replace(load, context=131072))
    whole = step_time(K3, GB300, Parallelism(tp=8), replace(load, context=131072))
    assert us(split, "mla cache") < us(whole, "mla cache") / 3
    # Data parallel attention sees a share of the requests; replicated matrices are no cheaper on more ranks.
    assert us(two, "latent down") == us(one, "latent down")
    assert us(step_time(K3, GB300, Parallelism(tp=8, replicated=False), load), "latent down") < us(one, "latent down")
    for bad, message in (
        ({"tp": 8, "ep": 3}, "parallelism.ep: found 3"),
        ({"tp": 0}, "parallelism.tp"),
        ({"tp": 4, "cp": 3}, "parallelism.cp"),
    ):
        with pytest.raises(ConfigError, match=message):
            Parallelism(**bad)


def test_caches_and_states_in_bytes() -> None:
    step = step_time(K3, GB300, Parallelism(tp=8), Load(4, 8, context=8192, kv="fp8"))
    by_name = {op.name: op for op in step.operations}
    cache, state = by_name["mla cache"], by_name["kda convolution and state"]
    assert cache.bytes * cache.count == 4 * 8192 * 24 * 576
    assert state.bytes * state.count == 4 * 2 * 69 * 96 * 128 * 128 * 4
    qwen = step_time(load_architecture("qwen3-8b"), load_hardware("h200"), Parallelism(), Load(3, 2, context=1000))
    cache = next(op for op in qwen.operations if op.name == "cache")
    assert cache.bytes == 3 * 1000 * 2 * 8 * 128 * 2 and cache.flops == 6 * 1000 * 4 * 32 * 128


def test_the_longer_of_two_streams_counts() -> None:
    step = step_time(K3, GB300, Parallelism(tp=8), Load(1, 8))
    counted = dict((op.name, ms.mid) for op, ms in step.counted)
    assert counted["shared experts down"] == 0.0 and counted["routed experts"] > 0
    slow = [replace(op, us=op.us * 100) if op.name.startswith("shared") else op for op in step.operations]
    counted = dict((op.name, ms.mid) for op, ms in replace(step, operations=tuple(slow)).counted)
    assert counted["shared experts down"] > 0 and counted["routed experts"] == 0.0


def test_a_scheduler_gets_a_rising_curve() -> None:
    curve = cost_curve(
        load_architecture("qwen3-8b"), load_hardware("h200"), Parallelism(), Load(8), [1, 2, 4, 8, 16, 64]
    )
    assert [t for t, _ in curve] == [1, 2, 4, 8, 16, 64]
    assert all(a[1] <= b[1] for a, b in itertools.pairwise(curve)) and curve[-1][1] > curve[0][1]


def test_prefill_and_transfer() -> None:
    """8192 tokens of Qwen3-8B: 2 x 8192 x weights + causal-free attention, at 989 TFLOP/s."""
    model, h200 = load_architecture("qwen3-8b"), load_hardware("h200")
    flops = 2 * model.other_params * 8192 + 2 * 36 * 4096 * 8192**2
    assert prefill_ms(model, h200, 1, 8192).mid == pytest.approx(1e3 * flops / 989e12, rel=1e-6)
    assert transfer_ms(model, h200, 2, 8192) == pytest.approx(1e3 * 8192 * 36 * 2 * 8 * 128 * 2 / 900e9)
    assert transfer_ms(model, load_hardware("mi355x"), 2, 8192) == 0.0


def test_sums_of_intervals_take_errors_to_agree() -> None:
    total = Interval(1, 2, 4) + Interval(1, 1, 1) * 2
    assert (total.low, total.mid, total.high) == (3, 4, 6) and math.isclose(total.widen(0.5, 2).high, 12)
