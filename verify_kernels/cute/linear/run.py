"""Host side of the small-T linear: which variant runs, and the call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from verify_kernels.cute.device import H200_MULTIPROCESSORS, multiprocessors as _multiprocessors
from verify_kernels.cute.linear.pack import packed_shape
from verify_kernels.cute.linear.schedule import plan, stages, tile
from verify_kernels.cute.variants import LinearVariant
from verify_kernels.errors import INSTEAD, KernelError

Kernel = Callable[..., None]

MAX_TOKENS = 64


class Rows(NamedTuple):
    """Rows on their way through a norm: values [T, N] is h times the norm's weight, and the sum of squares [P, T]
    float32 over P is that of h."""

    values: Tensor
    squares: Tensor


def choose(
    dtype: torch.dtype,
    tokens: int,
    shape: tuple[int, int] | None = None,
    *,
    kind: str = "plain",
    multiprocessors: int = H200_MULTIPROCESSORS,
    **epilogue: bool,
) -> LinearVariant:
    """The variant for up to `tokens` tokens and weights of this shape [N, K], without one for any.

    kind: of weights, plain or fp8 (e4m3 in 128 x 128 blocks, as `pack.pack` makes them; x is bfloat16). epilogue: bias,
    residual, swiglu, rms_in, rms_out.
    """
    if kind != "plain" and dtype != torch.bfloat16:
        raise KernelError(f"linear: dtype is {dtype} with {kind} weights, allowed: torch.bfloat16, {INSTEAD}")
    if dtype not in (torch.bfloat16, torch.float16):
        raise KernelError(f"linear: dtype is {dtype}, allowed: torch.bfloat16, torch.float16, {INSTEAD}")
    if not 1 <= tokens <= MAX_TOKENS:
        raise KernelError(f"linear: found {tokens} tokens, allowed: 1 to {MAX_TOKENS}, {INSTEAD}")
    padded = max(8, 1 << (tokens - 1).bit_length())
    step = 16 if epilogue.get("swiglu") or kind != "plain" else 8
    rows, k = tile(shape[0] if shape else 1, padded, multiprocessors, step, kind)
    ring = stages(rows, k, padded, kind=kind)
    return LinearVariant(str(dtype).removeprefix("torch."), padded, rows, k, ring, kind=kind, **epilogue)


def variants_of(
    dtype: torch.dtype, products: Iterable[tuple[tuple[int, int], tuple[str, ...]]]
) -> list[LinearVariant]:
    """Every kernel for these products: (shape of the weights, its epilogue) each, for any number of tokens."""
    served = [product for product in products if product[0][1] % 8 == 0]
    found = (
        choose(dtype, tokens, shape, **dict.fromkeys(epilogue, True))
        for tokens in (8, 16, 32, 64)
        for shape, epilogue in served
    )
    return list(dict.fromkeys(found))


@functools.cache
def _workspace(device: torch.device, units: int, groups: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Partial sums, and counters that every call leaves at zero; calls on one stream share them."""
    partial = torch.empty(2 * units, groups, tokens // 8, 128, 4, dtype=torch.float32, device=device)
    return partial, torch.zeros(units * groups, dtype=torch.int32, device=device)


_plan = functools.cache(plan)


def linear(
    kernel: Kernel,
    variant: LinearVariant,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    norm: Tensor | None = None,
    after: Rows | None = None,
    schedule: tuple[int, int] | None = None,
) -> Tensor:
    """x [T, K], weight [N, K] or packed, bias [N], residual [T, N] -> out [T, N] (with swiglu [T, N / 2]). Capturable.

    rms_in: x and squares are a `Rows`, whose norm has this eps. rms_out: after is filled, out's rows on their way
    through a norm of weight `norm` [N]; see `rows_after`.
    Rows may lie apart (x, weight: by multiples of 16 bytes). K is a multiple of 8, T at most variant.tokens. schedule:
    (units, share), by default `schedule.plan`'s for the variant. The weights are read before earlier kernels of the
    stream are done: none of them may write them.
    """
    rows, k = out.shape[1] * (2 if variant.swiglu else 1), x.shape[1]
    if x.shape[0] > variant.tokens:
        raise ValueError(f"linear: found {x.shape[0]} tokens, allowed by {variant.name}: {variant.tokens}")
    if variant.swiglu and rows % 16:
        raise ValueError(f"linear: found {rows} rows of gate and up, allowed: multiples of 16")
    if variant.kind == "fp8" and tuple(weight.shape) != packed_shape(rows, k):
        raise ValueError(f"linear: found packed weights of {tuple(weight.shape)}, allowed: {packed_shape(rows, k)}")
    multiprocessors = _multiprocessors(x.device)
    units, share = schedule or _plan(rows, k, variant.rows, variant.tile_k, multiprocessors)
    partial, counters = _workspace(x.device, max(units, multiprocessors), -(-variant.rows // 64), variant.tokens)
    values, squares_out = (None, None) if after is None else after
    kernel(
        x, weight, out, partial, counters, bias, residual, squares, eps, norm, values, squares_out, units, share
    )
    return out


def rows_after(variant: LinearVariant, out: Tensor) -> Rows:
    """Room for what a variant with rms_out writes beside out [T, N]."""
    t, n = out.shape
    parts = -(-n // variant.rows) * -(-variant.rows // 64)
    return Rows(torch.empty(t, n, dtype=out.dtype, device=out.device), out.new_empty(parts, t, dtype=torch.float32))
