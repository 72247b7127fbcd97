"""Other mixtures of experts on the same weights and picks, for `eval.bench_moe`.

`grouped`: torch's grouped product, with sorting and gathering in torch. `triton`: the usual fused Triton kernels, 16 tokens
of one expert to a block, whose lists are made before the timed call (a favour: engines make them in every step); fp8 blocks
with 16-bit activations, as ours. `vllm`: vLLM's own, where it is installed; fp8 blocks with fp8 activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verify_kernels.quantized import BLOCK, Fp8Blocks

Call = Callable[[Tensor], Tensor]
"""x [T, H] -> y [T, H]."""
Weights = Tensor | Fp8Blocks


def grouped(gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Call:
    experts, top_k = gate_up.shape[0], ids.shape[1]
    bounds = torch.arange(1, experts + 1, device=ids.device)

    def call(x: Tensor) -> Tensor:
        picked, order = ids.flatten().sort()
        ends = torch.searchsorted(picked, bounds).to(torch.int32)
        rows = order // top_k
        gate, up = torch._grouped_mm(x[rows], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        y = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        out.index_add_(0, rows, y.float() * weights.flatten()[order, None])
        return out.to(x.dtype)

    return call


def vllm(gate_up: Weights, down: Weights, weights: Tensor, ids: Tensor) -> Call:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    picks, config, options = ids.to(torch.int32), VllmConfig(), {}
    if isinstance(gate_up, Fp8Blocks):
        options["quant_config"] = fp8_w8a8_moe_quant_config(gate_up.scales, down.scales, block_shape=[BLOCK, BLOCK])
        gate_up, down = gate_up.values, down.values

    def call(x: Tensor) -> Tensor:
        with set_current_vllm_config(config):
            return fused_experts(x, gate_up, down, weights, picks, **options)

    return call


def triton(gate_up: Weights, down: Weights, weights: Tensor, ids: Tensor) -> Call:
    first, second = _triton_kernels()
    import triton as tr

    (tokens, top_k), (_, both, hidden) = ids.shape, gate_up.shape
    inner = both // 2
    blocks, lists = [], []
    for e in ids.unique().tolist():
        pairs = (ids.flatten() == e).nonzero().flatten().tolist()
        for i in range(0, len(pairs), 16):
            part = pairs[i : i + 16]
            blocks.append(e)
            lists.append(part + [tokens * top_k] * (16 - len(part)))
    blocks_, lists_ = (torch.tensor(x, dtype=torch.int32, device=ids.device) for x in (blocks, lists))
    scale = weights.flatten().float()
    fp8 = isinstance(gate_up, Fp8Blocks)
    matrices = (gate_up.values, gate_up.scales, down.values, down.scales) if fp8 else (gate_up, scale, down, scale)

    def call(x: Tensor) -> Tensor:
        between = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=x.device)
        each = torch.empty(tokens, top_k, hidden, dtype=x.dtype, device=x.device)
        first[(len(blocks) * tr.cdiv(inner, 32),)](
            x, *matrices[:2], between, blocks_, lists_, hidden, inner, tokens * top_k, top_k, FP8=fp8, BLOCK_N=32,
            BLOCK_K=128, num_warps=4, num_stages=4,
        )  # fmt: skip
        second[(len(blocks) * tr.cdiv(hidden, 64),)](
            between, *matrices[2:], each, blocks_, lists_, scale, hidden, inner, tokens * top_k, FP8=fp8, BLOCK_N=64,
            BLOCK_K=128, num_warps=4, num_stages=4,
        )  # fmt: skip
        return each.sum(1)

    return call


PEERS: dict[str, Callable[[Any, Any, Tensor, Tensor], Call]] = {"triton": triton, "grouped": grouped, "vllm": vllm}


def _triton_kernels() -> tuple[Any, Any]:
    import triton
    import triton.language as tl

    globals()["tl"] = tl  # the compiler looks names up among the module's

    @triton.jit
    def first(
        x, w, scales, out, blocks, lists, H, I, pairs, top_k,
        FP8: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ):  # fmt: skip
        across = tl.cdiv(I, BLOCK_N)
        block, n = tl.program_id(0) // across, tl.program_id(0) % across
        expert = tl.load(blocks + block).to(tl.int64)
        pair = tl.load(lists + block * 16 + tl.arange(0, 16))
        there = pair < pairs
        columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        deep = tl.cdiv(H, 128)
        from_x = x + (pair // top_k)[:, None] * H + k[None, :]
        from_w = w + expert * 2 * I * H + columns[None, :] * H + k[:, None]
        from_s = scales + (expert * tl.cdiv(2 * I, 128) + n * BLOCK_N // 128) * deep
        gate = tl.zeros((16, BLOCK_N), tl.float32)
        up = tl.zeros((16, BLOCK_N), tl.float32)
        for start in range(0, H, BLOCK_K):
            inside = start + k < H
            a = tl.load(from_x + start, mask=there[:, None] & inside[None, :], other=0.0)
            mask = inside[:, None] & (columns < I)[None, :]
            more_gate = tl.dot(a, tl.load(from_w + start, mask=mask, other=0.0).to(a.dtype))
            more_up = tl.dot(a, tl.load(from_w + start + I * H, mask=mask, other=0.0).to(a.dtype))
            if FP8:
                more_gate *= tl.load(from_s + start // 128)
                more_up *= tl.load(from_s + I // 128 * deep + start // 128)
            gate += more_gate
            up += more_up
        value = gate * tl.sigmoid(gate) * up
        to = out + pair[:, None] * I + columns[None, :]
        tl.store(to, value.to(out.dtype.element_ty), mask=there[:, None] & (columns < I)[None, :])

    @triton.jit
    def second(
        h, w, scales, out, blocks, lists, scale, H, I, pairs,
        FP8: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ):  # fmt: skip
        across = tl.cdiv(H, BLOCK_N)
        block, n = tl.program_id(0) // across, tl.program_id(0) % across
        expert = tl.load(blocks + block).to(tl.int64)
        pair = tl.load(lists + block * 16 + tl.arange(0, 16))
        there = pair < pairs
        columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        from_w = w + expert * H * I + columns[None, :] * I + k[:, None]
        from_s = scales + (expert * tl.cdiv(H, 128) + n * BLOCK_N // 128) * tl.cdiv(I, 128)
        total = tl.zeros((16, BLOCK_N), tl.float32)
        for start in range(0, I, BLOCK_K):
            inside = start + k < I
            a = tl.load(h + pair[:, None] * I + start + k[None, :], mask=there[:, None] & inside[None, :], other=0.0)
            mask = inside[:, None] & (columns < H)[None, :]
            more = tl.dot(a, tl.load(from_w + start, mask=mask, other=0.0).to(a.dtype))
            if FP8:
                more *= tl.load(from_s + start // 128)
            total += more
        total *= tl.load(scale + pair, mask=there, other=0.0)[:, None]
        to = out + pair[:, None] * H + columns[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=there[:, None] & (columns < H)[None, :])

    return first, second
