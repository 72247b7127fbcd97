"""Matrix products for bfloat16 and float32 on CPUs without bfloat16 instructions.

A weight is read once, as torch stores it, for any number of tokens up to 64 (larger calls go in spans of 64), summed in
float32 and rounded once. Every output is summed in the same order whatever else is in the call: row t of the result
depends on x[t] alone, bit for bit.

Other dtypes, and calls that autograd records, run the torch reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verify_kernels.cpu.build import library
from verify_kernels.reference import linear as reference

_HALF = {torch.bfloat16: 1, torch.float32: 0}


def _ours(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype in _HALF
        and weight.dtype == x.dtype
        and x.dim() == weight.dim() == 2
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    )


def _checked(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"weight: found {tuple(weight.shape)} for x {tuple(x.shape)}, allowed: [N, {x.shape[1]}]")
    return (x if x.stride(1) == 1 else x.contiguous()), (weight if weight.stride(1) == 1 else weight.contiguous())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `verify_kernels.reference.linear.linear`."""
    if not _ours(x, weight) or (bias is not None and (bias.dtype != x.dtype or bias.requires_grad)):
        return reference.linear(x, weight, bias)
    x, weight = _checked(x, weight)
    (tokens, k), n = x.shape, weight.shape[0]
    if bias is not None:
        if bias.shape != (n,):
            raise ValueError(f"bias: found {tuple(bias.shape)}, allowed: ({n},)")
        bias = bias.contiguous()
    out = x.new_empty((tokens, n))
    library().dspark_linear(
        _HALF[x.dtype], x.data_ptr(), x.stride(0), weight.data_ptr(), weight.stride(0),
        None if bias is None else bias.data_ptr(), out.data_ptr(), tokens, n, k, torch.get_num_threads(),
    )  # fmt: skip
    return out


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """See `verify_kernels.reference.linear.logits`."""
    if not _ours(x, weight):
        return reference.logits(x, weight)
    x, weight = _checked(x, weight)
    (tokens, k), n = x.shape, weight.shape[0]
    out = torch.empty((tokens, n), dtype=torch.float32)
    library().dspark_logits(
        _HALF[x.dtype], x.data_ptr(), x.stride(0), weight.data_ptr(), weight.stride(0), out.data_ptr(), tokens, n, k,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def greedy_logits(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """See `verify_kernels.reference.linear.greedy_logits`. Equals the arg-max of `logits` exactly."""
    if not _ours(x, weight) or not weight.shape[0]:
        return reference.greedy_logits(x, weight)
    x, weight = _checked(x, weight)
    (tokens, k), n = x.shape, weight.shape[0]
    ids, best = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens, dtype=torch.float32)
    library().dspark_greedy(
        _HALF[x.dtype], x.data_ptr(), x.stride(0), weight.data_ptr(), weight.stride(0), ids.data_ptr(),
        best.data_ptr(), tokens, n, k, torch.get_num_threads(),
    )  # fmt: skip
    return ids, best
