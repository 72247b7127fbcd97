"""Which part of a grouped product each CTA does: arithmetic that the kernel and its tests share.

The tiles (row tile, k tile), k fastest, are one line; unit u takes the stretch [u * share, (u + 1) * share) of it. Gate
and up: the row tiles of one entry after those of another; an entry is a picked expert with some or all of its tokens. Down:
the row tiles of the output, and in each the k tiles of all entries one after the other. Arguments are integers, of Python
or of a kernel.
"""

from __future__ import annotations

from typing import TypeVar

N = TypeVar("N")


def line(down: bool, row_tiles: N, k_tiles: N, entries: N, units: N) -> tuple[N, N, N]:
    """(row tiles, k tiles, share) of the line, from those of one expert and the number of entries."""
    rows, depth = (row_tiles, k_tiles * entries) if down else (row_tiles * entries, k_tiles)
    return rows, depth, (rows * depth + units - 1) // units


def expert_of(down: bool, tile: N, row_tiles: N, k_tiles: N, entries: N) -> tuple[N, N, N]:
    """(which entry, row tile, k tile in it) of a tile of the line."""
    if down:
        depth = k_tiles * entries
        return tile % depth // k_tiles, tile // depth, tile % k_tiles
    row = tile // k_tiles
    return row // row_tiles, row % row_tiles, tile % k_tiles


def contributors(row_tile: N, k_tiles: N, share: N) -> tuple[N, N]:
    """First and last unit of a row tile of the line."""
    return row_tile * k_tiles // share, (row_tile * k_tiles + k_tiles - 1) // share
