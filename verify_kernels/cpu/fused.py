"""Products with what follows them, on the norms and the activation of `verify_kernels.cpu.elementwise`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from verify_kernels.cpu.elementwise import add_rms_norm, gated
from verify_kernels.layouts import SIDE


def over(linear: Callable[..., Tensor]) -> dict[str, Callable[..., Any]]:
    """The fused operations of `verify_kernels.reference.linear`, made of a product."""

    def linear_silu_and_mul(x: Tensor, gate_up: Tensor) -> Tensor:
        return gated(linear(x, gate_up), SIDE)

    def linear_add_rms_norm(
        x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm(linear(x, weight, bias), residual, norm, eps)

    return {"linear_silu_and_mul": linear_silu_and_mul, "linear_add_rms_norm": linear_add_rms_norm}
