"""Other mixtures of experts on the same weights and picks, for `eval.bench_moe`.

`grouped`: torch's grouped product, with sorting and gathering in torch. `triton`: the usual fused Triton kernels, 16 tokens
of one expert to a block, whose lists are made before the timed call (a favour: engines make them in every step). `vllm`:
vLLM's own, where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Call = Callable[[Tensor], Tensor]
"""x [T, H] -> y [T, H]."""


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


def vllm(gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Call:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import fused_experts

    picks, config = ids.to(torch.int32), VllmConfig()

    def call(x: Tensor) -> Tensor:
        with set_current_vllm_config(config):
            return fused_experts(x, gate_up, down, weights, picks)

    return call


def triton(gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Call:
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

    def call(x: Tensor) -> Tensor:
        between = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=x.device)
        each = torch.empty(tokens, top_k, hidden, dtype=x.dtype, device=x.device)
        first[(len(blocks) * tr.cdiv(inner, 32),)](
            x, gate_up, between, blocks_, lists_, hidden, inner, tokens * top_k, top_k, BLOCK_N=32, BLOCK_K=128,
            num_warps=4, num_stages=4,
        )  # fmt: skip
        second[(len(blocks) * tr.cdiv(hidden, 64),)](
            between, down, each, blocks_, lists_, scale, hidden, inner, tokens * top_k, BLOCK_N=64, BLOCK_K=128,
            num_warps=4, num_stages=4,
        )  # fmt: skip
        return each.sum(1)

    return call


PEERS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Call]] = {"triton": triton, "grouped": grouped, "vllm": vllm}


def _triton_kernels() -> tuple[Any, Any]:
    import triton
    import triton.language as tl

    globals()["tl"] = tl  # the compiler looks names up among the module's

    @triton.jit
    def first(x, w, out, blocks, lists, H, I, pairs, top_k, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
        across = tl.cdiv(I, BLOCK_N)
        block, n = tl.program_id(0) // across, tl.program_id(0) % across
        expert = tl.load(blocks + block).to(tl.int64)
        pair = tl.load(lists + block * 16 + tl.arange(0, 16))
        there = pair < pairs
        columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        from_x = x + (pair // top_k)[:, None] * H + k[None, :]
        from_w = w + expert * 2 * I * H + columns[None, :] * H + k[:, None]
        gate = tl.zeros((16, BLOCK_N), tl.float32)
        up = tl.zeros((16, BLOCK_N), tl.float32)
        for start in range(0, H, BLOCK_K):
            inside = start + k < H
            a = tl.load(from_x + start, mask=there[:, None] & inside[None, :], other=0.0)
            mask = inside[:, None] & (columns < I)[None, :]
            gate += tl.dot(a, tl.load(from_w + start, mask=mask, other=0.0))
            up += tl.dot(a, tl.load(from_w + start + I * H, mask=mask, other=0.0))
        value = gate * tl.sigmoid(gate) * up
        to = out + pair[:, None] * I + columns[None, :]
        tl.store(to, value.to(out.dtype.element_ty), mask=there[:, None] & (columns < I)[None, :])

    @triton.jit
    def second(h, w, out, blocks, lists, scale, H, I, pairs, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
        across = tl.cdiv(H, BLOCK_N)
        block, n = tl.program_id(0) // across, tl.program_id(0) % across
        expert = tl.load(blocks + block).to(tl.int64)
        pair = tl.load(lists + block * 16 + tl.arange(0, 16))
        there = pair < pairs
        columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        total = tl.zeros((16, BLOCK_N), tl.float32)
        for start in range(0, I, BLOCK_K):
            inside = start + k < I
            a = tl.load(h + pair[:, None] * I + start + k[None, :], mask=there[:, None] & inside[None, :], other=0.0)
            mask = inside[:, None] & (columns < H)[None, :]
            total += tl.dot(a, tl.load(w + expert * H * I + columns[None, :] * I + start + k[:, None], mask=mask, other=0.0))
        total *= tl.load(scale + pair, mask=there, other=0.0)[:, None]
        to = out + pair[:, None] * H + columns[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=there[:, None] & (columns < H)[None, :])

    return first, second
