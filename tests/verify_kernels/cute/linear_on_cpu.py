"""The small-T linear's host side on a CPU: what `linear.kernel` computes, written from its docstrings in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from verify_kernels import cute, ops
from verify_kernels.cute.linear import run
from verify_kernels.cute.variants import AnyVariant, LinearVariant

OPERATIONS = ("linear", "linear_silu_and_mul", "linear_add_rms_norm", "normed", "logits", "greedy_logits")


def kernel(variant: LinearVariant, calls: list[LinearVariant]) -> Callable[..., None]:
    """A stand-in for a compiled variant; every call is noted."""

    def call(
        x: Tensor, w: Tensor, y: Tensor, partial: Tensor, counters: Tensor, bias: Tensor | None,
        residual: Tensor | None, squares: Tensor | None, eps: float, norm: Tensor | None, scaled: Tensor | None,
        squares_out: Tensor | None, units: int, share: int,
    ) -> None:  # fmt: skip
        calls.append(variant)
        given = [operand is not None for operand in (bias, residual, squares, norm, scaled, squares_out)]
        v = variant
        assert given == [v.bias, v.residual, v.rms_in, v.rms_out, v.rms_out, v.rms_out]
        assert str(x.dtype) == str(w.dtype) == f"torch.{v.dtype}" and x.shape[0] <= v.tokens
        assert units * share >= 1 and partial.shape[0] >= 2 * units and partial.shape[2] == v.tokens // 8
        assert not counters.any()
        sums = x.float() @ w.float().T
        if squares is not None:
            sums *= torch.rsqrt(squares.sum(0) / w.shape[1] + eps)[:, None]
        if v.swiglu:
            gate, up = sums.unflatten(1, (-1, 2, 8)).unbind(2)
            sums = (torch.nn.functional.silu(gate) * up).flatten(1)
        for term in (bias, residual):
            sums = sums if term is None else sums + term.float()
        y.copy_(sums)
        if norm is not None:
            kept = y.float()
            scaled.copy_(kept * norm.float())
            parts = kept.square().tensor_split(len(squares_out), dim=1)
            squares_out.copy_(torch.stack([part.sum(1) for part in parts]))

    return call


def serve(patch: pytest.MonkeyPatch) -> list[LinearVariant]:
    """Has `ops` run the linear's CUDA implementations on the CPU from here on; returns the list of calls to come."""
    calls: list[LinearVariant] = []

    def load(variant: AnyVariant) -> Callable[..., Any]:
        assert isinstance(variant, LinearVariant)
        return kernel(variant, calls)

    patch.setattr(cute, "check_machine", lambda: None)
    patch.setattr(cute.kernels, "build", lambda variant, folder: variant)
    patch.setattr(cute.kernels, "load", load)
    patch.setattr(run, "_multiprocessors", lambda device: 132)
    found = cute.implementations()
    patch.setattr(ops, "_loaded", {"cpu": ops._REFERENCE | {name: found[name] for name in OPERATIONS}})
    return calls
