"""Quantised experts and routers against transcriptions of their formats in Python numbers and float64."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verify_kernels import ops
from verify_kernels.quantized import Fp8Blocks, Mxfp4, join_rows, quantize_fp8, quantize_mxfp4, stack
from verify_kernels.reference.moe import moe_experts, moe_route

E2M1 = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 5: 3.0, 6: 4.0, 7: 6.0}


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_every_byte_of_mxfp4_and_every_scale() -> None:
    values = torch.arange(256, dtype=torch.uint8).repeat(254, 1)
    scales = torch.arange(254, dtype=torch.uint8)[:, None].expand(-1, 16)  # 2^127 * 6 is no float32
    found = Mxfp4(values, scales.contiguous()).dequantize(torch.float64)
    for row, column in itertools.product((0, 1, 7, 119, 127, 253), range(512)):
        code = column // 2 >> 4 * (column % 2) & 15
        assert found[row, column] == (-1.0 if code & 8 else 1.0) * E2M1[code & 7] * 2.0 ** (row - 127)
    assert torch.equal(Mxfp4(values, scales.contiguous()).dequantize(torch.float32)[:253].double(), found[:253])
    exact = Mxfp4(values[66:193], scales[66:193].contiguous())
    assert torch.equal(exact.dequantize(torch.bfloat16).double(), exact.dequantize(torch.float64))


@pytest.mark.parametrize(("n", "k"), [(128, 128), (130, 300), (5, 7)])
def test_fp8_blocks_by_their_definition(n: int, k: int) -> None:
    bytes_ = torch.randint(0, 127, (n, k), dtype=torch.uint8) | (torch.randint(0, 2, (n, k), dtype=torch.uint8) << 7)
    scales = torch.rand(-(-n // 128), -(-k // 128)) + 0.1
    found = Fp8Blocks(bytes_.view(torch.float8_e4m3fn), scales).dequantize(torch.float64)
    for i, j in itertools.product({0, n // 2, n - 1}, range(k)):
        assert found[i, j] == e4m3(int(bytes_[i, j])) * float(scales[i // 128, j // 128])


@pytest.mark.parametrize("shape", [(4, 64), (3, 130, 192)])
def test_quantising_picks_the_nearest_value(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.logspace(-3, 2, shape[-2])[:, None]
    four = quantize_mxfp4(weight)
    assert four.shape == weight.shape
    step = torch.exp2(four.scales.double() - 127).repeat_interleave(32, -1).float()
    grid = torch.tensor([s * v for s in (1, -1) for v in E2M1.values()])
    nearest = (weight / step)[..., None].sub(grid).abs().amin(-1) * step
    assert torch.equal((four.dequantize(torch.float32) - weight).abs(), nearest)
    eight = quantize_fp8(weight)
    assert (eight.dequantize(torch.float32) - weight).abs().max() <= eight.scales.max() * 448 / 16
    again = quantize_fp8(eight.dequantize(torch.float32))
    assert torch.equal(again.values.view(torch.uint8), eight.values.view(torch.uint8))


def test_exact_halves_go_to_even_codes() -> None:
    row = torch.zeros(1, 32)
    row[0, :9] = torch.tensor([6.0, 0.25, 0.75, 1.25, -1.75, 2.5, -3.5, 5.0, 4.0])
    assert quantize_mxfp4(row).dequantize(torch.float32)[0, :9].tolist() == [6, 0, 1, 1, -2, 2, -4, 4, 4]


def test_stacks_and_joined_rows_keep_their_values() -> None:
    parts = [torch.randn(128, 160) for _ in range(4)]
    for quantize in (quantize_fp8, quantize_mxfp4):
        each = [quantize(p) for p in parts]
        joined = stack([join_rows(each[:2]), join_rows(each[2:])])
        assert joined.shape == (2, 256, 160) and joined[1].dim() == 2
        want = torch.stack([p.dequantize(torch.float32) for p in each]).view(2, 256, 160)
        assert torch.equal(joined.dequantize(torch.float32), want)
    with pytest.raises(ValueError, match="rows: found 100 before others, allowed: multiples of 128"):
        join_rows([quantize_fp8(p[:100]) for p in parts])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Fp8Blocks(torch.zeros(2, 2), torch.zeros(1, 1)), "values: found torch.float32, allowed: torch.float8_e4m3fn"),
        (lambda: Fp8Blocks(torch.zeros(200, 2).to(torch.float8_e4m3fn), torch.zeros(1, 1)), "scales: found (1, 1), allowed: (2, 1)"),
        (lambda: Mxfp4(torch.zeros(2, 24, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8)), "values: found 48 columns, allowed: multiples of 32"),
        (lambda: Mxfp4(torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8)), "scales: found (2, 1), allowed: (2, 2)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(make, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


# ------------------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("kind", ["plain", "fp8", "mxfp4"])
@pytest.mark.parametrize("shared", [False, True])
def test_experts_against_loops_over_tokens_in_float64(kind: str, shared: bool) -> None:
    torch.manual_seed(2)
    e, i, h, t, k = 5, 32, 64, 7, 2
    gate_up, down = torch.randn(e, 2 * i, h) / 8, torch.randn(e, h, i) / 6
    if kind != "plain":
        quantize = quantize_fp8 if kind == "fp8" else quantize_mxfp4
        gate_up, down = quantize(gate_up), quantize(down)
    exact = [w.double() if kind == "plain" else w.dequantize(torch.float64) for w in (gate_up, down)]
    extra = (torch.randn(2 * 24, h) / 8, torch.randn(h, 24) / 5) if shared else None
    x = torch.randn(t, h)
    weights, ids = moe_route(torch.randn(t, e), k, True)
    ids[0] = torch.tensor([4, 0])

    def ffn(row: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        gate, up = (first @ row).chunk(2)
        return second @ (gate / (1 + torch.exp(-gate)) * up)

    want = torch.zeros(t, h, dtype=torch.float64)
    for row, (w, picked) in enumerate(zip(weights, ids)):
        for rank in range(k):
            want[row] += float(w[rank]) * ffn(x[row].double(), exact[0][picked[rank]], exact[1][picked[rank]])
        if extra is not None:
            want[row] += ffn(x[row].double(), *(m.double() for m in extra))
    for run in (moe_experts, ops.moe_experts):
        found = run(x, gate_up, down, weights, ids, extra)
        assert (found.double() - want).abs().max() < 1e-5
    wide = moe_experts(x.double(), *(exact if kind == "plain" else (gate_up, down)), weights.double(), ids, extra and tuple(m.double() for m in extra))
    assert (wide - want).abs().max() < 1e-12


# ------------------------------------------------------------------------------------------------------- routers


def chosen(logits: list[float], k: int, scores: str, bias: list[float] | None, groups: int, top: int) -> tuple[list[int], list[float]]:
    """By the definition, in Python numbers: (ids, their scores)."""
    total = sum(map(math.exp, logits))
    weights = [math.exp(x) / total if scores == "softmax" else 1 / (1 + math.exp(-x)) for x in logits]
    choice = [w + b for w, b in zip(weights, bias or [0.0] * len(weights))]
    size = len(logits) // groups
    merits = []
    for g in range(groups):
        inside = sorted(choice[g * size : (g + 1) * size], reverse=True)
        merits.append(inside[0] if bias is None else sum(inside[:2]))
    kept = sorted(range(groups), key=lambda g: (-merits[g], g))[:top]
    ids = sorted((i for i in range(len(logits)) if i // size in kept), key=lambda i: (-choice[i], i))[:k]
    return ids, [weights[i] for i in ids]


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    scores=st.sampled_from(["softmax", "sigmoid"]),
    biased=st.booleans(),
    groups=st.sampled_from([1, 2, 4]),
    size=st.integers(2, 5),
    renormalize=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
)
def test_every_router_by_its_definition(data, scores, biased, groups, size, renormalize, scale) -> None:
    """Few different logits, so that ties are common."""
    experts = groups * size
    top = data.draw(st.integers(1, groups))
    k = data.draw(st.integers(1, top * size))
    numbers = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=experts, max_size=experts)
    rows = data.draw(st.lists(numbers, min_size=1, max_size=3))
    bias = data.draw(st.lists(st.sampled_from([0.0, 0.25, -0.5]), min_size=experts, max_size=experts)) if biased else None
    weights, ids = moe_route(
        torch.tensor(rows, dtype=torch.float64), k, renormalize, scores=scores, num_groups=groups, top_groups=top, scale=scale,
        bias=None if bias is None else torch.tensor(bias, dtype=torch.float64),
    )  # fmt: skip
    for row, w, picked in zip(rows, weights.tolist(), ids.tolist()):
        want, values = chosen(row, k, scores, bias, groups, top)
        assert picked == want
        total = sum(values) if renormalize else 1.0
        assert w == pytest.approx([v / total * scale for v in values], abs=1e-12)


def test_the_router_of_deepseek_v3_in_transformers() -> None:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = DeepseekV3Config(
        hidden_size=16, n_routed_experts=32, num_experts_per_tok=4, n_group=4, topk_group=2, norm_topk_prob=True,
        routed_scaling_factor=2.5, moe_intermediate_size=8, n_shared_experts=2,
    )  # fmt: skip
    torch.manual_seed(0)
    block = DeepseekV3MoE(config).eval()
    with torch.no_grad():
        for p in block.parameters():
            p.normal_(0, 0.5)
        block.gate.e_score_correction_bias.uniform_(0, 0.2)
        x = torch.randn(40, 16)
        logits = torch.nn.functional.linear(x, block.gate.weight)
        weights, ids = moe_route(
            logits, 4, True, scores="sigmoid", bias=block.gate.e_score_correction_bias, num_groups=4, top_groups=2, scale=2.5
        )
        experts = block.experts
        shared = block.shared_experts
        found = moe_experts(
            x, experts.gate_up_proj, experts.down_proj, weights, ids,
            (torch.cat((shared.gate_proj.weight, shared.up_proj.weight)), shared.down_proj.weight),
        )  # fmt: skip
        want = block(x[None])[0]
    assert (found - want).abs().max() < 1e-4


def test_router_errors_name_the_field() -> None:
    logits = torch.zeros(2, 6)
    with pytest.raises(ValueError, match="scores: found 'tanh', allowed: softmax, sigmoid"):
        moe_route(logits, 2, True, scores="tanh")
    for groups, top, k in ((4, 1, 1), (2, 3, 1), (2, 1, 4)):
        with pytest.raises(ValueError, match="num_groups, top_groups, top_k: found"):
            moe_route(logits, k, True, num_groups=groups, top_groups=top)
