"""Norms, gated activation and the cache write, each one call instead of several small torch operations.

Dtypes other than bfloat16 and float32, layouts other than the usual ones, and calls that autograd records run the torch
reference. Rounding happens where the reference rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verify_kernels.batch import PassBatch
from verify_kernels.cpu.build import library
from verify_kernels.reference import attention as reference_attention, elementwise as reference

_HALF = {torch.bfloat16: 1, torch.float32: 0}


def _ours(x: Tensor, *others: Tensor) -> bool:
    return (
        x.dtype in _HALF
        and all(t.dtype == x.dtype for t in others)
        and not (torch.is_grad_enabled() and (x.requires_grad or any(t.requires_grad for t in others)))
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `verify_kernels.reference.elementwise.rms_norm`."""
    h = x.shape[-1]
    if not _ours(x, weight) or weight.shape != (h,) or not weight.is_contiguous():
        return reference.rms_norm(x, weight, eps)
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
    stride = x.stride(0) if x.dim() == 2 else h
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    library().dspark_rms_norm(
        _HALF[x.dtype], x.data_ptr(), stride, weight.data_ptr(), out.data_ptr(), x.numel() // h, h, eps
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `verify_kernels.reference.elementwise.add_rms_norm`."""
    h = x.shape[-1]
    if not _ours(x, residual, weight) or x.shape != residual.shape or weight.shape != (h,):
        return reference.add_rms_norm(x, residual, weight, eps)
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    library().dspark_add_rms_norm(
        _HALF[x.dtype], x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr(),
        x.numel() // h, h, eps,
    )  # fmt: skip
    return out, total


def silu_and_mul(x: Tensor) -> Tensor:
    """See `verify_kernels.reference.elementwise.silu_and_mul`."""
    return gated(x, x.shape[-1] // 2)


def gated(x: Tensor, side: int) -> Tensor:
    """silu(gate) * up of x [..., 2 I]: `side` channels of gate, as many of up, and so on -> [..., I]."""
    if not _ours(x) or x.dim() != 2 or not side or x.shape[1] % (2 * side):
        gate, up = x.unflatten(-1, (-1, 2, side)).unbind(-2)
        return (torch.nn.functional.silu(gate) * up).flatten(-2)
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, inner = x.shape[0], x.shape[1] // 2
    out = x.new_empty((rows, inner))
    library().dspark_silu_and_mul(
        _HALF[x.dtype], x.data_ptr(), x.stride(0), out.data_ptr(), rows, inner, side, torch.get_num_threads()
    )
    return out


def append_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: PassBatch,
    cos_sin: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """See `verify_kernels.reference.attention.append_kv`. q, k and v may be slices of one [N, (Hq + 2 Hkv) D] product.

    Raises IndexError where a slot or a position is outside the cache or the rotary table.
    """
    norms = () if q_norm is None or k_norm is None else (q_norm, k_norm)
    (n, heads, dim), kv_heads = q.shape, k.shape[1]
    if (
        not _ours(q, k, v, k_pages, v_pages, *norms)
        or (q_norm is None) != (k_norm is None)
        or cos_sin.dtype != torch.float32
        or cos_sin.shape[1] != dim
        or not (cos_sin.is_contiguous() and k_pages.is_contiguous() and v_pages.is_contiguous())
    ):
        return reference_attention.append_kv(
            q, k, v, k_pages, v_pages, batch, cos_sin, q_norm, k_norm, eps, k_scale, v_scale
        )
    q, k, v = (t if t.stride(2) == 1 and t.stride(1) == dim else t.contiguous() for t in (q, k, v))
    norms = tuple(t.contiguous() for t in norms)
    slots, positions = batch.slot_mapping.contiguous(), batch.positions.contiguous()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    failed = library().dspark_append_kv(
        _HALF[q.dtype], q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0),
        out.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr(), slots.data_ptr(), positions.data_ptr(),
        cos_sin.data_ptr(), norms[0].data_ptr() if norms else None, norms[1].data_ptr() if norms else None,
        n, heads, kv_heads, dim, k_pages.shape[0] * k_pages.shape[1], cos_sin.shape[0], eps,
    )  # fmt: skip
    if failed:
        raise IndexError(
            f"append_kv: slots found up to {int(slots.max())}, positions up to {int(positions.max())}; allowed: "
            f"0 to {k_pages.shape[0] * k_pages.shape[1] - 1} and 0 to {cos_sin.shape[0] - 1}"
        )
    return out
