"""Quantised experts as the kernels read them: tiles of 128 rows of gate and up, or 64 of down, x 128 columns, each a stretch
of bytes that starts and ends on 16, in which every thread of a warpgroup, which takes 64 rows, finds its own values side by
side.

Of each 16 columns of 64 rows, a thread of wgmma holds eight values of A, in pairs of neighbouring columns:
rows r and r + 8, columns 2 c and 2 c + 8, where r = 16 * warp + lane / 4 and c = lane % 4. Gate and up take turns of 8
rows, so that r is a channel's gate and r + 8 its up. Rows and columns past the matrix are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from verify_kernels.quantized import BLOCK, GROUP, Fp8Blocks, Mxfp4, Quantized, Scaled

TILE = 128  # columns
PART = 64  # rows of a warpgroup
VALUES = {"mxfp4": PART * TILE // 2, "fp8": PART * TILE}
PART_BYTES = {"mxfp4": VALUES["mxfp4"] + PART * TILE // GROUP, "fp8": VALUES["fp8"] + 16}
"""Of 64 rows of a tile."""

AT_ONCE = 1 << 27
"""Values that are packed at once: some ten bytes of memory each, for a moment."""


def rows_of(gate_up: bool) -> int:
    """Rows of a tile."""
    return 2 * PART if gate_up else PART


def packed_shape(kind: str, shape: tuple[int, int, int], gate_up: bool) -> tuple[int, int, int, int]:
    """[E, ceil(N / rows), ceil(K / 128), bytes of a tile] of a matrix [E, N, K]."""
    (e, n, k), rows = shape, rows_of(gate_up)
    return e, -(-n // rows), -(-k // TILE), PART_BYTES[kind] * (rows // PART)


@dataclass(frozen=True, eq=False)
class PackedExperts(Quantized):
    """tiles as `pack` makes them of a stack [E, N, K] of this shape. nbytes is of what they stand for, as it was;
    the memory that they take is tiles.nbytes, more by the tiles' rims."""

    tiles: Tensor
    kind: str
    shape: torch.Size
    gate_up: bool

    @property
    def device(self) -> torch.device:
        return self.tiles.device

    @property
    def nbytes(self) -> int:
        e, n, k = self.shape
        scales = n * k // GROUP if self.kind == "mxfp4" else 4 * -(-n // BLOCK) * -(-k // BLOCK)
        return e * (n * k * VALUES[self.kind] // VALUES["fp8"] + scales)

    def data_ptr(self) -> int:
        return self.tiles.data_ptr()

    def __getitem__(self, index: int) -> Scaled:
        """An expert's matrix, unpacked."""
        return unpack(self.tiles[index, None], self.kind, self.shape[1:], self.gate_up)[0]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return torch.stack([self[e].dequantize(dtype) for e in range(self.shape[0])])


def pack_experts(gate_up: Tensor | Quantized, down: Tensor | Quantized) -> tuple[Tensor | Quantized, Tensor | Quantized]:
    """See `verify_kernels.reference.moe.pack_experts`: quantised ones packed; of 16 bits the kernels read as they are."""

    def packed(weight: Tensor | Quantized, first: bool) -> Tensor | Quantized:
        if not isinstance(weight, Scaled):
            return weight
        return PackedExperts(pack(weight, first), weight.kind, weight.shape, first)

    return packed(gate_up, True), packed(down, False)


def pack(weight: Scaled, gate_up: bool) -> Tensor:
    """weight [E, N, K] -> uint8 `packed_shape`. gate_up: N is gate, then up, and a tile has 128 rows; else it has 64.

    For each 64 rows of a tile, MXFP4: its values, [half of the 8 steps of 16 columns, thread, 4 words], then its scales,
    [warp, 8 rows, 4 groups of 32 columns, row or row + 8], see `scale_bytes`. e4m3: its values, [pair of steps, thread, 4 words], then
    float32 scales of rows r and of rows r + 8, and 8 bytes of nothing. Raises ValueError for what has no such form.
    """
    e, n, k = weight.shape
    if gate_up and n % 16:
        raise ValueError(f"experts: found {n} rows of gate and up, allowed: multiples of 16")
    if weight.kind == "fp8" and gate_up and n // 2 % TILE:
        raise ValueError(f"experts: found {n // 2} channels, allowed with fp8 blocks: multiples of {TILE}")
    if weight.kind not in PART_BYTES:
        raise ValueError(f"experts: found {weight.kind}, allowed: fp8, mxfp4")
    out = torch.empty(packed_shape(weight.kind, weight.shape, gate_up), dtype=torch.uint8, device=weight.device)
    if out.is_meta:
        return out
    if isinstance(weight, Mxfp4) and (most := int(weight.scales.max())) > 192:
        raise ValueError(f"scales: found 2^{most - 127}, allowed: up to 2^65")
    order = _order(n, gate_up, weight.device)
    count = max(1, AT_ONCE // (n * k))
    for first in range(0, e, count):
        some = slice(first, first + count)
        parts = (_fp8 if isinstance(weight, Fp8Blocks) else _mxfp4)(weight[some], order)
        if gate_up:  # a tile is two of them, the last's second zeros where rows end before
            parts = F.pad(parts, (0, 0, 0, 0, 0, parts.shape[1] % 2)).unflatten(1, (-1, 2)).transpose(2, 3)
        out[some].view(parts.shape).copy_(parts)
    return out


def unpack(tiles: Tensor, kind: str, shape: tuple[int, int], gate_up: bool) -> Scaled:
    """Matrices of this shape [N, K] from the `tiles` that `pack` made of them: its inverse."""
    n, k = shape
    places = _order(n, gate_up, tiles.device).argsort()
    parts = tiles.unflatten(3, (rows_of(gate_up) // PART, -1)).transpose(2, 3).flatten(1, 2)  # [E, R, C, bytes]
    values, scales = parts.split((VALUES[kind], PART_BYTES[kind] - VALUES[kind]), dim=-1)
    e, r, c = parts.shape[:3]
    if kind == "fp8":
        codes = values.reshape(e, r, c, 4, 128, 2, 2, 2, 2).flip(-1).permute(0, 1, 2, 4, 3, 5, 6, 8, 7)
        codes = _rows(codes, n, k)[:, places].view(torch.float8_e4m3fn)
        blocks = scales.contiguous().view(torch.float32)[..., :2]  # [E, R, C, of rows r or of r + 8]
        if gate_up:  # 128 channels are four parts
            return Fp8Blocks(codes, blocks[:, ::4].permute(0, 3, 1, 2).flatten(1, 2).contiguous())
        return Fp8Blocks(codes, blocks[:, ::2, :, 0].contiguous())
    low, high = values.unflatten(-1, (2, 128, 4, 2, 2)).unbind(-1)  # [E, R, C, half, thread, step, column]
    signs = high >> 7, high >> 4 & 1, high >> 1 & 1, high >> 6 & 1
    magnitudes = (high & 1) << 2 | low >> 6, low >> 3 & 7, low & 7, high >> 3 & 4 | high >> 2 & 3
    codes = torch.stack([s << 3 | m for s, m in zip(signs, magnitudes)], dim=-2).transpose(3, 4)
    codes = _rows(codes, n, k)[:, places]
    exponents = scales.unflatten(-1, (4, 8, 4, 2)).permute(0, 1, 3, 6, 4, 2, 5).reshape(e, PART * r, 4 * c)
    exponents = exponents[:, places, : k // GROUP]
    return Mxfp4(codes[..., ::2] | codes[..., 1::2] << 4, (exponents << 1 | exponents >> 7) - 62)


def _order(n: int, gate_up: bool, device: torch.device) -> Tensor:
    """Which row of the matrix each packed row is."""
    order = torch.arange(n, device=device)
    return order.view(2, -1, 8).transpose(0, 1).flatten() if gate_up else order


def _parts(codes: Tensor) -> Tensor:
    """[E, N, K] -> [E, R, C, thread, step, column half, row half, 2]: a thread's values of every 64 x 128, in pairs
    (r, 2c), (r + 8, 2c), (r, 2c + 8), (r + 8, 2c + 8)."""
    e, n, k = codes.shape
    codes = F.pad(codes, (0, -k % TILE, 0, -n % PART))
    #                   [E, R, warp, row half, r, C, step, column half, c, 2]
    parts = codes.view(e, -1, 4, 2, 8, codes.shape[2] // TILE, 8, 2, 4, 2)
    return parts.permute(0, 1, 5, 2, 4, 8, 6, 7, 3, 9).flatten(3, 5)


def _rows(parts: Tensor, n: int, k: int) -> Tensor:
    """[E, R, C, ...] in the order of `_parts` -> [E, N, K]."""
    e, r, c = parts.shape[:3]
    codes = parts.reshape(e, r, c, 4, 8, 4, 8, 2, 2, 2).permute(0, 1, 3, 8, 4, 2, 6, 7, 5, 9)
    return codes.reshape(e, PART * r, TILE * c)[:, :n, :k]


def scale_bytes(e8m0: Tensor) -> Tensor:
    """Exponents, uint8 up to 192, as the kernels read them: those of bf16 factors (`dequantize.mxfp4_bytes`), each turned right
    by a bit, so that seven bits are a factor's high byte and one is of its low byte."""
    factor = e8m0 + 62
    return (factor >> 1) | (factor << 7)


def _mxfp4(weight: Mxfp4, order: Tensor) -> Tensor:
    codes = torch.stack((weight.values & 15, weight.values >> 4), dim=-1).flatten(-2)[:, order]
    parts = _parts(codes).flatten(-3, -2)  # [E, R, C, thread, step, pair, column]
    e, r, c = parts.shape[:3]
    s, m = (parts >> 3).unbind(-2), (parts & 7).unbind(-2)
    # See `dequantize.e2m1_pairs` for the places.
    high = s[0] << 7 | s[3] << 6 | (m[3] & 4) << 3 | s[1] << 4 | (m[3] & 3) << 2 | s[2] << 1 | m[0] >> 2
    low = m[0] << 6 | m[1] << 3 | m[2]
    values = torch.stack((low, high), dim=-1).unflatten(4, (2, 4)).transpose(3, 4)  # [E, R, C, half, thread, ...]

    scales = weight.scales[:, order]
    scales = scale_bytes(F.pad(scales, (0, 4 * c - scales.shape[2], 0, PART * r - scales.shape[1])))
    scales = scales.view(e, r, 4, 2, 8, c, 4).permute(0, 1, 5, 2, 4, 6, 3)  # [E, R, C, warp, r, k group, row half]
    return torch.cat((values.flatten(3), scales.flatten(3)), dim=-1)


def _fp8(weight: Fp8Blocks, order: Tensor) -> Tensor:
    n = weight.shape[1]
    parts = _parts(weight.values.view(torch.uint8)[:, order]).unflatten(4, (4, 2))
    # Rows r and r + 8 of a column are the high and the low byte of a half: [E, R, C, pair of steps, thread, step, ...]
    values = parts.permute(0, 1, 2, 4, 3, 5, 6, 8, 7).flip(-1)

    rows = torch.arange(parts.shape[1], device=order.device) * PART
    block = order[rows.clamp(max=n - 1)] // BLOCK, order[(rows + 8).clamp(max=n - 1)] // BLOCK
    scales = torch.stack([weight.scales[:, b] for b in block], dim=-1)  # [E, R, C, 2]
    scales = F.pad(scales, (0, 2)).contiguous().view(torch.uint8)
    return torch.cat((values.flatten(3), scales), dim=-1)
