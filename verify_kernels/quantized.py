"""Weights that stay quantised in memory: block-scaled e4m3 and MXFP4, as published checkpoints store them.

Shapes [..., N, K] as of the matrices that they stand for; leading dimensions (experts) index like a tensor's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

BLOCK = 128
"""Rows and columns that share one scale of block-scaled e4m3."""
GROUP = 32
"""Columns that share one scale of MXFP4 (OCP Microscaling specification 1.0)."""

Self = TypeVar("Self", bound="Scaled")


class Quantized:
    """One matrix [N, K] or a stack of them, in whatever form it is kept."""

    kind: str  # "fp8" or "mxfp4"
    shape: torch.Size

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Of values and scales."""
        raise NotImplementedError

    def data_ptr(self) -> int:
        raise NotImplementedError

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[..., N, K] in dtype."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Quantized:
        """A matrix of a stack."""
        raise NotImplementedError

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()


@dataclasses.dataclass(frozen=True, eq=False)
class Scaled(Quantized):
    """values and scales as checkpoints have them."""

    values: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        """Raises ValueError for parts that do not fit together."""
        raise NotImplementedError

    def __getitem__(self: Self, index: int | slice) -> Self:
        """A matrix of a stack, or some of them."""
        return type(self)(self.values[index], self.scales[index])

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def to(self: Self, device: torch.device | str) -> Self:
        return type(self)(self.values.to(device), self.scales.to(device))


class Fp8Blocks(Scaled):
    """values [..., N, K] float8_e4m3fn, scales [..., ceil(N / 128), ceil(K / 128)] float32: weight = value * scale of
    its 128 x 128 block (`weight_scale_inv` of Qwen3 and DeepSeek FP8 checkpoints)."""

    kind = "fp8"

    def __post_init__(self) -> None:
        *stack, n, k = self.values.shape
        _expect("values", self.values.dtype, torch.float8_e4m3fn)
        _expect("scales", self.scales.dtype, torch.float32)
        _expect("scales", tuple(self.scales.shape), (*stack, -(-n // BLOCK), -(-k // BLOCK)))

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        n, k = self.shape[-2:]
        scales = self.scales.to(wide).repeat_interleave(BLOCK, -2)[..., :n, :].repeat_interleave(BLOCK, -1)[..., :k]
        return (self.values.to(wide) * scales).to(dtype)


class Mxfp4(Scaled):
    """values [..., N, K / 2] uint8, two e2m1 a byte, the even column in the low half; scales [..., N, K / 32] uint8, e8m0:
    weight = value * 2^(scale - 127) (`weight_packed` and `weight_scale` of compressed-tensors checkpoints)."""

    kind = "mxfp4"

    def __post_init__(self) -> None:
        *rows, half = self.values.shape
        _expect("values", self.values.dtype, torch.uint8)
        _expect("scales", self.scales.dtype, torch.uint8)
        if 2 * half % GROUP:
            raise ValueError(f"values: found {2 * half} columns, allowed: multiples of {GROUP}")
        _expect("scales", tuple(self.scales.shape), (*rows, 2 * half // GROUP))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.values.shape[:-1], 2 * self.values.shape[-1]))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        codes = torch.stack((self.values & 15, self.values >> 4), dim=-1).flatten(-2)
        magnitude = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.float64, device=self.device)
        values = torch.cat((magnitude, -magnitude))[codes.long()]
        # In float64, where every scale is a normal number.
        return (values * torch.exp2(self.scales.double() - 127).repeat_interleave(GROUP, -1)).to(dtype)


def stack(parts: Sequence[Scaled]) -> Scaled:
    """Matrices of one kind and shape -> [len(parts), ...]."""
    return type(parts[0])(*(torch.stack([getattr(p, field) for p in parts]) for field in ("values", "scales")))


def join_rows(parts: Sequence[Scaled]) -> Scaled:
    """Rows of one matrix after those of another, which end on whole blocks. Raises ValueError where they do not."""
    for part in parts[:-1]:
        if part.kind == "fp8" and part.shape[-2] % BLOCK:
            raise ValueError(f"rows: found {part.shape[-2]} before others, allowed: multiples of {BLOCK} for fp8 blocks")
    return type(parts[0])(*(torch.cat([getattr(p, field) for p in parts], -2) for field in ("values", "scales")))


def quantize_fp8(weight: Tensor) -> Fp8Blocks:
    """Nearest e4m3 values with each block's largest magnitude at 448. weight [..., N, K]."""
    n, k = weight.shape[-2:]
    wide = torch.nn.functional.pad(weight.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = wide.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., N / 128, 128, K / 128, 128]
    scales = blocks.abs().amax((-3, -1)).clamp(min=1e-12) / 448.0
    values = (blocks / scales[..., :, None, :, None]).flatten(-4, -3).flatten(-2)[..., :n, :k]
    return Fp8Blocks(values.to(torch.float8_e4m3fn), scales)


def quantize_mxfp4(weight: Tensor) -> Mxfp4:
    """Nearest e2m1 values (ties to even codes) with shared exponents as the OCP specification picks them. weight
    [..., N, K], K a multiple of 32."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    _, exponent = torch.frexp(groups.abs().amax(-1))
    scales = (exponent - 1 - 2 + 127).clamp(0, 254)  # floor(log2(amax)) - log2 of e2m1's largest power of two
    x = torch.ldexp(groups, 127 - scales[..., None])
    edges = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), device=weight.device)
    low, high = torch.bucketize(x.abs(), edges), torch.bucketize(x.abs(), edges, right=True)
    codes = torch.where(low % 2 == 0, low, high) | (x.signbit() << 3)
    codes = codes.to(torch.uint8).flatten(-2)
    return Mxfp4(codes[..., ::2] | codes[..., 1::2] << 4, scales.to(torch.uint8))


def _expect(field: str, found: object, allowed: object) -> None:
    if found != allowed:
        raise ValueError(f"{field}: found {found}, allowed: {allowed}")
