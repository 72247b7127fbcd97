"""Host side of the mixture of experts: which variants run, and the call."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from verify_kernels.cute.moe.pack import BYTES, TILE
from verify_kernels.cute.variants import ExpertsVariant
from verify_kernels.errors import INSTEAD, KernelError

Kernel = Callable[..., None]

MAX_TOKENS = 64
ROWS, TILE_K = 128, 64  # of a tile of weights of 16 bits; packed ones are twice as deep
HALF = 112 * 1024
"""Shared memory for each of two kernels on an SM: the second fills its ring while the first still runs."""
MOST_STAGES = 8


def stage_bytes(tokens: int, kind: str) -> int:
    """A tile of weights and the rows that go with it."""
    weights, depth = (ROWS * TILE_K * 2, TILE_K) if kind == "plain" else (-(-BYTES[kind] // 128) * 128, TILE)
    return weights + tokens * depth * 2


def stages(tokens: int, experts: int, top_k: int, kind: str = "plain") -> int:
    """Tiles in flight that fit into half of an SM's shared memory beside the lists of picks."""
    pairs = tokens * top_k
    lists = 4 * (experts * (-(-tokens // 32) + 1) + min(experts, pairs) + 1 + pairs)
    return min(MOST_STAGES, (HALF - lists - 2048) // stage_bytes(tokens, kind))


def choose(
    dtype: torch.dtype, tokens: int, experts: int, top_k: int, kind: str = "plain"
) -> tuple[ExpertsVariant, ExpertsVariant]:
    """The variants of both products for up to `tokens` tokens. kind: "plain", "fp8" or "mxfp4"."""
    if dtype not in (torch.bfloat16, torch.float16):
        raise KernelError(f"experts: dtype is {dtype}, allowed: torch.bfloat16, torch.float16, {INSTEAD}")
    if kind != "plain" and dtype != torch.bfloat16:
        raise KernelError(f"experts: dtype is {dtype}, allowed with {kind}: torch.bfloat16, {INSTEAD}")
    if not 1 <= tokens <= MAX_TOKENS:
        raise KernelError(f"experts: found {tokens} tokens, allowed: 1 to {MAX_TOKENS}, {INSTEAD}")
    if not (1 <= top_k <= min(experts, 32) and experts <= 1024):
        raise KernelError(f"experts: found {top_k} of {experts}, allowed: 1 to 32 of up to 1024, {INSTEAD}")
    padded = max(8, 1 << (tokens - 1).bit_length())
    name, depth = str(dtype).removeprefix("torch."), stages(padded, experts, top_k, kind)
    first, second = (ExpertsVariant(name, padded, experts, top_k, depth, down, kind) for down in (False, True))
    return first, second


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _workspace(device: torch.device, units: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Partial sums, and counters that every call leaves at zero; calls on one stream share them."""
    partial = torch.empty(2 * units, ROWS // 64, tokens // 8, 128, 4, dtype=torch.float32, device=device)
    return partial, torch.zeros(units * (ROWS // 64), dtype=torch.int32, device=device)


def experts(
    kernels: tuple[Kernel, Kernel],
    variants: tuple[ExpertsVariant, ExpertsVariant],
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    out: Tensor,
    units: int | None = None,
    between: Tensor | None = None,
) -> Tensor:
    """x [T, H], gate_up [E, 2 I, H], down [E, H, I], weights [T, k] float32, ids [T, k] int64 -> out [T, H]. Capturable:
    one capture serves any picks. A token's k picks differ. H and I are multiples of 8, T at most the variants' tokens.
    Quantised experts come as `pack.pack` makes them; I is then that of `between`, which must be given.

    units: CTAs, by default one for each multiprocessor. between [T * k, I]: what the first kernel leaves to the second.
    The second kernel reads its weights before the first is done: no earlier kernel of the stream may write them.
    """
    tokens, top_k = ids.shape
    variant = variants[0]
    if tokens > variant.tokens:
        raise ValueError(f"experts: found {tokens} tokens, allowed by {variant.name}: {variant.tokens}")
    hidden, inner = x.shape[1], down.shape[2] if between is None else between.shape[1]
    if hidden % 8 or inner % 8 or (variant.kind == "plain" and gate_up.shape[1] != 2 * inner):
        raise ValueError(
            f"experts: found hidden size {hidden} with {gate_up.shape[1]} and {inner} channels, allowed: multiples of 8, "
            "gate and up as many as down"
        )
    partial, counters = _workspace(x.device, max(units or 0, _multiprocessors(x.device)), variant.tokens)
    units = units or _multiprocessors(x.device)
    if between is None:
        between = x.new_empty(tokens * top_k, inner)
    kernels[0](x, gate_up, ids, weights, between, partial, counters, units)
    kernels[1](between, down, ids, None, out, partial, counters, units)
    return out
