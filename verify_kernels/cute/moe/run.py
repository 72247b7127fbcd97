"""Host side of the mixture of experts: which variants run, and the call."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from verify_kernels.cute.device import multiprocessors
from verify_kernels.cute.moe.pack import PART_BYTES
from verify_kernels.cute.variants import ExpertsVariant, RouteVariant
from verify_kernels.errors import INSTEAD, KernelError

Kernel = Callable[..., None]

MAX_TOKENS = 64
MOST_COLUMNS = 32
HALF = 112 * 1024
"""Shared memory for each of two CTAs on an SM."""
MOST_STAGES = 16


def stage_bytes(tokens: int, kind: str, down: bool) -> int:
    """A tile of weights, 64 columns of plain ones and 128 of packed ones, and the rows that go with it."""
    depth = 64 if kind == "plain" else 128
    parts = 1 if down else 2
    weights = 64 * parts * depth * 2 if kind == "plain" else -(-parts * PART_BYTES[kind] // 128) * 128
    return weights + min(tokens, MOST_COLUMNS) * depth * 2


def other_bytes(tokens: int, experts: int, top_k: int, down: bool) -> int:
    """The lists of picks; for down a row tile's sums."""
    pairs = tokens * top_k
    entries = min(experts, pairs) + (pairs // MOST_COLUMNS if tokens > MOST_COLUMNS else 0)
    lists = 4 * (experts * (-(-tokens // 32) + 1) + 2 * entries + 1 + pairs * (1 if down else 2))
    return lists + (2 * 64 * tokens * 4 if down else 0)


def stages(tokens: int, experts: int, top_k: int, down: bool, kind: str = "plain", memory: int = HALF) -> int:
    """Tiles in flight that fit beside all else."""
    left = memory - other_bytes(tokens, experts, top_k, down) - 2048
    return min(MOST_STAGES, left // stage_bytes(tokens, kind, down))


def choose(
    dtype: torch.dtype,
    tokens: int,
    experts: int,
    top_k: int,
    kind: str = "plain",
    situ: tuple[float, float] | None = None,
) -> tuple[ExpertsVariant, ExpertsVariant]:
    """The variants of both products for up to `tokens` tokens. kind: "plain", "fp8" or "mxfp4"; situ: beta and linear beta
    where the activation is SiTU-GLU."""
    if dtype not in (torch.bfloat16, torch.float16):
        raise KernelError(f"experts: dtype is {dtype}, allowed: torch.bfloat16, torch.float16, {INSTEAD}")
    if kind != "plain" and dtype != torch.bfloat16:
        raise KernelError(f"experts: dtype is {dtype}, allowed with {kind}: torch.bfloat16, {INSTEAD}")
    if not 1 <= tokens <= MAX_TOKENS:
        raise KernelError(f"experts: found {tokens} tokens, allowed: 1 to {MAX_TOKENS}, {INSTEAD}")
    if not (1 <= top_k <= 32 and 1 <= experts <= 1024):
        raise KernelError(f"experts: found {top_k} of {experts}, allowed: 1 to 32 of up to 1024, {INSTEAD}")
    padded = max(8, 1 << (tokens - 1).bit_length())
    name = str(dtype).removeprefix("torch.")

    def variant(down: bool) -> ExpertsVariant:
        deep = stages(padded, experts, top_k, down, kind)
        return ExpertsVariant(name, padded, experts, top_k, deep, down, kind, None if down else situ)

    return variant(False), variant(True)


def choose_route(
    dtype: torch.dtype,
    experts: int,
    top_k: int,
    renormalize: bool,
    *,
    scores: str = "softmax",
    bias: bool = False,
    num_groups: int = 1,
    top_groups: int = 1,
) -> RouteVariant:
    """The variant of the choice of experts; see `verify_kernels.reference.moe.moe_route`."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise KernelError(f"router_logits: dtype is {dtype}, allowed: bfloat16, float16, float32, {INSTEAD}")
    if not (1 <= top_k <= min(experts, 32) and experts <= 1024 and num_groups <= 32):
        raise KernelError(
            f"router_logits: found {top_k} of {experts} in {num_groups} groups, allowed: 1 to 32 of up to 1024 in up to 32, "
            f"{INSTEAD}"
        )
    name = str(dtype).removeprefix("torch.")
    return RouteVariant(name, experts, top_k, renormalize, scores, bias, num_groups, top_groups)


def route(
    kernel: Kernel, variant: RouteVariant, logits: Tensor, bias: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """logits [T, E], bias [E] float32 -> (weights [T, k] float32, ids [T, k] int64)."""
    weights = torch.empty(logits.shape[0], variant.top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(weights.shape, dtype=torch.int64, device=logits.device)
    kernel(logits, bias, weights, ids, scale)
    return weights, ids


@functools.cache
def _workspace(device: torch.device, units: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Partial sums, and counters that every call leaves at zero; calls on one stream share them."""
    partial = torch.empty(2 * units, 2, tokens // 8, 128, 4, dtype=torch.float32, device=device)
    return partial, torch.zeros(8 * units, dtype=torch.int32, device=device)


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

    units: CTAs, by default two for each multiprocessor. between [T * k, I]: what the first kernel leaves to the second, the
    pairs of tokens and picks by expert, then by token.
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
    usual = 2 * multiprocessors(x.device)
    partial, counters = _workspace(x.device, max(units or 0, usual), variant.tokens)
    units = units or usual
    if between is None:
        between = x.new_empty(tokens * top_k, inner)
    kernels[0](x, gate_up, ids, weights, between, partial, counters, units)
    kernels[1](between, down, ids, None, out, partial, counters, units)
    return out
