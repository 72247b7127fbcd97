"""e4m3 weights in 128 x 128 blocks as the kernel reads them: blocks of 16 rows x 128 columns, each a stretch of bytes
in which every thread of a warp finds its own values side by side, then its scales. Tiles of any multiple of 16 rows are
made of these, so one packing serves every tile.

Of each 16 columns of a warp's 16 rows, a thread of wgmma holds eight values of A, in pairs of neighbouring columns:
rows r and r + 8, columns 2 c and 2 c + 8, where r = lane / 4 and c = lane % 4.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from verify_kernels.quantized import BLOCK, Fp8Blocks, Quantized
from verify_kernels.reference import linear as reference

ROWS = 16
COLUMNS = BLOCK
BYTES = ROWS * COLUMNS + 16
"""Of a block: its values; float32 scales of rows 0 to 7 and of rows 8 to 15; nothing."""
FEW = 4
"""Blocks of a row of blocks come in so many, of zeros at the end if need be: the longest tile."""


@dataclasses.dataclass(frozen=True, eq=False)
class PackedLinear(Quantized):
    """A matrix [N, K] as `pack` makes it; gate and up take turns of 8 rows in it, as `layouts.interleave` has them."""

    tiles: Tensor
    shape: torch.Size
    kind: str = "fp8"

    @property
    def device(self) -> torch.device:
        return self.tiles.device

    @property
    def nbytes(self) -> int:
        return self.shape.numel() + 4 * -(-self.shape[0] // BLOCK) * -(-self.shape[1] // BLOCK)

    def data_ptr(self) -> int:
        return self.tiles.data_ptr()

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        n, k = self.shape
        values, scales = self.tiles.split((ROWS * COLUMNS, BYTES - ROWS * COLUMNS), dim=-1)
        # [block, column block, pair of steps, r, c, step, column half, 2, row r + 8 before r]
        parts = values.unflatten(-1, (4, 8, 4, 2, 2, 2, 2)).flip(-1)
        codes = parts.permute(0, 8, 3, 1, 2, 5, 6, 4, 7).reshape(ROWS * len(values), -1).view(torch.float8_e4m3fn)
        each = scales.contiguous().view(torch.float32)[..., :2]  # [block, column block, of rows r or of r + 8]
        each = each.transpose(1, 2).flatten(0, 1).repeat_interleave(ROWS // 2, 0).repeat_interleave(COLUMNS, 1)
        return (codes[:n, :k].float() * each[:n, :k]).to(dtype)


def pack_linear(weight: Tensor | Quantized, dtype: torch.dtype, gate_up: bool = False) -> Tensor | Quantized:
    """See `verify_kernels.reference.linear.pack_linear`: e4m3 blocks stay packed where x is bfloat16; what else is
    quantised becomes a tensor of dtype."""
    if isinstance(weight, Fp8Blocks) and dtype == torch.bfloat16 and not (gate_up and len(weight.values) % (2 * BLOCK)):
        return PackedLinear(pack(weight, gate_up), weight.shape)
    return reference.pack_linear(weight, dtype, gate_up)


def packed_shape(n: int, k: int) -> tuple[int, int, int]:
    """Of a matrix [n, k], as uint8."""
    return -(-n // ROWS), FEW * -(-k // (FEW * COLUMNS)), BYTES


def pack(weight: Fp8Blocks, gate_up: bool = False) -> Tensor:
    """weight [N, K] -> uint8 of `packed_shape`. gate_up: N is gate, then up, which are made to take turns of 8 rows.

    Values: [pair of the 8 steps of 16 columns, lane, 4 words], a word two pairs, that of row r in the high bytes of its
    halves. Raises ValueError for rows that do not divide so.
    """
    n, k = weight.shape
    if gate_up and n % ROWS:
        raise ValueError(f"linear: found {n} rows of gate and up, allowed: multiples of {ROWS}")
    order = torch.arange(n, device=weight.device)
    if gate_up:
        order = order.view(2, -1, 8).transpose(0, 1).flatten()
    blocks, columns, _ = packed_shape(n, k)
    codes = weight.values.view(torch.uint8)[order]
    codes = torch.nn.functional.pad(codes, (0, columns * COLUMNS - k, 0, blocks * ROWS - n))
    #                  [block, row half, r, column block, pair of steps, step, column half, c, 2]
    parts = codes.view(blocks, 2, 8, columns, 4, 2, 2, 4, 2)
    # A lane's bytes, little end first: (step, column half, 2, low byte: row r + 8, high byte: row r).
    values = parts.flip(1).permute(0, 3, 4, 2, 7, 5, 6, 8, 1).reshape(blocks, columns, ROWS * COLUMNS)

    rows = torch.arange(blocks, device=weight.device) * ROWS
    each = torch.stack([weight.scales[order[(rows + half).clamp(max=n - 1)] // BLOCK] for half in (0, 8)], dim=-1)
    each = torch.nn.functional.pad(each, (0, 2, 0, columns - each.shape[1]))
    return torch.cat((values, each.contiguous().view(torch.uint8)), dim=-1).contiguous()
