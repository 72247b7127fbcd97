"""Quantised experts as the kernels read them: tiles of 128 rows of gate and up, or 64 of down, x 128 columns, each a stretch
of bytes that starts and ends on 16, in which every thread of a warpgroup, which takes 64 rows, finds its own values side by
side.

Of each 16 columns of 64 rows, a thread of wgmma holds eight values of A, in pairs of neighbouring columns:
rows r and r + 8, columns 2 c and 2 c + 8, where r = 16 * warp + lane / 4 and c = lane % 4. Gate and up take turns of 8
rows, so that r is a channel's gate and r + 8 its up. Rows and columns past the matrix are zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verify_kernels.quantized import BLOCK, GROUP, Fp8Blocks, Mxfp4, Quantized

TILE = 128  # columns
PART = 64  # rows of a warpgroup
PART_BYTES = {"mxfp4": PART * TILE // 2 + PART * TILE // GROUP, "fp8": PART * TILE + 16}
"""Of 64 rows of a tile."""


def rows_of(gate_up: bool) -> int:
    """Rows of a tile."""
    return 2 * PART if gate_up else PART


def pack(weight: Quantized, gate_up: bool) -> Tensor:
    """weight [E, N, K] -> uint8 [E, ceil(N / rows), ceil(K / 128), bytes of a tile]. gate_up: N is gate, then up, and a tile
    has 128 rows; else it has 64.

    For each 64 rows of a tile, MXFP4: its values, [half of the 8 steps of 16 columns, thread, 4 words], then its scales,
    [warp, 8 rows, 4 groups of 32 columns, row or row + 8], see `scale_bytes`. e4m3: its values, [pair of steps, thread, 4 words], then
    float32 scales of rows r and of rows r + 8, and 8 bytes of nothing. Raises ValueError for what has no such form.
    """
    e, n, k = weight.shape
    if gate_up and n % 16:
        raise ValueError(f"experts: found {n} rows of gate and up, allowed: multiples of 16")
    order = torch.arange(n, device=weight.device)
    if gate_up:
        order = order.view(2, -1, 8).transpose(0, 1).flatten()
    if isinstance(weight, Fp8Blocks):
        if gate_up and n // 2 % TILE:
            raise ValueError(f"experts: found {n // 2} channels, allowed with fp8 blocks: multiples of {TILE}")
        return _tiled(_fp8(weight, order), gate_up)
    if isinstance(weight, Mxfp4):
        return _tiled(_mxfp4(weight, order), gate_up)
    raise ValueError(f"experts: found {weight.kind}, allowed: fp8, mxfp4")


def _tiled(parts: Tensor, gate_up: bool) -> Tensor:
    """[E, N / 64, K / 128, bytes] -> tiles; the last of gate and up may want 64 rows of zeros."""
    if not gate_up:
        return parts.contiguous()
    e, r, c, size = parts.shape
    parts = torch.nn.functional.pad(parts, (0, 0, 0, 0, 0, r % 2))
    return parts.view(e, -1, 2, c, size).transpose(2, 3).reshape(e, -1, c, 2 * size).contiguous()


def _parts(codes: Tensor) -> Tensor:
    """[E, N, K] -> [E, R, C, thread, step, pair, 2]: a thread's values of every 64 x 128. pair: (r, 2c), (r + 8, 2c),
    (r, 2c + 8), (r + 8, 2c + 8)."""
    e, n, k = codes.shape
    codes = torch.nn.functional.pad(codes, (0, -k % TILE, 0, -n % PART))
    #                   [E, R, warp, row half, r, C, step, column half, c, 2]
    parts = codes.view(e, -1, 4, 2, 8, codes.shape[2] // TILE, 8, 2, 4, 2)
    return parts.permute(0, 1, 5, 2, 4, 8, 6, 7, 3, 9).reshape(e, parts.shape[1], parts.shape[5], 128, 8, 4, 2)


def _words(values: Tensor) -> Tensor:
    """Non-negative int64 words -> their bytes, little end first: [..., W] -> [..., 4 W] uint8."""
    shifts = torch.arange(0, 32, 8, device=values.device)
    return ((values[..., None] >> shifts) & 255).to(torch.uint8).flatten(-2)


def scale_bytes(e8m0: Tensor) -> Tensor:
    """Exponents, uint8 up to 192, as the kernels read them: those of bf16 factors (`dequantize.mxfp4_bytes`), each turned right
    by a bit, so that seven bits are a factor's high byte and one is of its low byte."""
    factor = e8m0 + 62
    return (factor >> 1) | (factor << 7)


def _mxfp4(weight: Mxfp4, order: Tensor) -> Tensor:
    codes = torch.stack((weight.values & 15, weight.values >> 4), dim=-1).flatten(-2)[:, order]
    if int(weight.scales.max()) > 192:
        raise ValueError(f"scales: found 2^{int(weight.scales.max()) - 127}, allowed: up to 2^65")
    parts = _parts(codes).long()
    sign, magnitude = parts >> 3, parts & 7
    halves = torch.zeros_like(parts[..., 0, :])
    for pair, shift in enumerate((0, 3, 6)):
        halves |= (sign[..., pair, :] << (15 - shift)) | (magnitude[..., pair, :] << (6 - shift))
    last_sign, last = sign[..., 3, :], magnitude[..., 3, :]
    halves |= (last_sign << 14) | ((last >> 2) << 13) | ((last & 3) << 10)
    words = halves[..., 0] | (halves[..., 1] << 16)  # [E, R, C, thread, step]
    values = _words(words.unflatten(-1, (2, 4)).transpose(-2, -3))  # [E, R, C, half, thread, bytes]
    e, r, c = words.shape[:3]

    scales = weight.scales[:, order]
    scales = scale_bytes(torch.nn.functional.pad(scales, (0, 4 * c - scales.shape[2], 0, PART * r - scales.shape[1])))
    scales = scales.view(e, r, 4, 2, 8, c, 4).permute(0, 1, 5, 2, 4, 6, 3)  # [E, R, C, warp, r, k group, row half]
    return torch.cat((values.flatten(3), scales.flatten(3)), dim=-1)


def _fp8(weight: Fp8Blocks, order: Tensor) -> Tensor:
    n, k = weight.shape[1:]
    parts = _parts(weight.values.view(torch.uint8)[:, order]).long()
    first, second = parts[..., 0::2, :], parts[..., 1::2, :]  # high and low bytes of the halves: rows r and r + 8
    halves = (first << 8) | second
    words = halves[..., 0] | (halves[..., 1] << 16)  # [E, R, C, thread, step, word]
    values = _words(words.flatten(-2).unflatten(-1, (4, 4)).transpose(-2, -3))
    e, r, c = words.shape[:3]

    rows = torch.arange(r, device=order.device) * PART
    block = order[rows.clamp(max=n - 1)] // BLOCK, order[(rows + 8).clamp(max=n - 1)] // BLOCK
    scales = torch.stack([weight.scales[:, b] for b in block], dim=-1)  # [E, R, C, 2]
    scales = torch.nn.functional.pad(scales, (0, 2)).contiguous().view(torch.uint8)
    return torch.cat((values.flatten(3), scales), dim=-1)
