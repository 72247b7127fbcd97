"""Which part of a small-T linear each CTA does.

The tiles of the weights (row tile, k tile), k fastest, are one line. Unit u of the launch takes the stretch
[u * share, (u + 1) * share) of it, so a row tile may be shared by consecutive units; their partial sums are added in
the order of k by the one that arrives last. A row tile that one unit has alone costs no such end: `tile` makes tiles as
low as it takes for that.
"""

from __future__ import annotations

SHARED_MEMORY = 227 * 1024
"""Of a CTA on sm_90, in bytes; an SM has 1 KB more, and each CTA takes 1 KB of it beside what it asks for."""

SLACK = 0.07
"""How much longer than an even share a stretch may be, if that lets fewer units share a row tile."""


def contributors(row_tile: int, k_tiles: int, share: int) -> tuple[int, int]:
    """First and last unit of a row tile."""
    return row_tile * k_tiles // share, (row_tile * k_tiles + k_tiles - 1) // share


def most_contributors(row_tiles: int, k_tiles: int, share: int) -> int:
    """Units of the row tile that is shared by most."""
    period = min(row_tiles, share)  # where the cuts lie in a row tile repeats after `share` row tiles at the latest
    return max(last - first + 1 for first, last in (contributors(n, k_tiles, share) for n in range(period)))


def tile(rows: int, tokens: int, multiprocessors: int, step: int = 8, kind: str = "plain") -> tuple[int, int]:
    """(rows, k) of a tile for weights of so many rows: one row tile to a multiprocessor where that keeps nearly all of
    them busy, and x, which every one of them reads, is not much more than its weights.

    step: what the rows of a warpgroup are a multiple of. A stage of less than 16 KB of weights is not worth its
    barrier, so low tiles are long, unless x takes the room. Packed tiles are one warpgroup high and as long as makes
    enough of them busy.
    """
    least = -(-rows // multiprocessors)
    groups = -(-least // 64)
    height = -(-least // (step * groups)) * step * groups
    row_tiles = -(-rows // height)
    most = 192 if kind == "plain" else 64
    if not max(16, tokens // 2) <= height <= most or row_tiles * (1 + SLACK) < multiprocessors:
        # The higher the tiles, the less often x is read: 2.5 % of the time of an LM head at 32 tokens.
        height = 128 if kind == "plain" and least > 512 and tokens > 8 else 64
    if kind != "plain":
        return height, 512 if height <= 32 and tokens <= 16 else 256
    return height, 256 if height <= 32 and tokens <= 16 else 128


def stages(rows: int, tile_k: int, tokens: int, resident: int = 1, kind: str = "plain") -> int:
    """Stages of a ring that fills shared memory, or with `resident` CTAs on an SM their part of it."""
    room = SHARED_MEMORY if resident == 1 else (SHARED_MEMORY + 1024) // resident - 1024
    groups = -(-rows // 64)
    head = 4 * tokens * (1 + 4 * groups) + 4 * groups + 64  # 1 / rms, squares by warp, arrivals, gaps
    weights = 2 * rows * tile_k
    if kind != "plain":
        weights = rows * (tile_k + tile_k // 128)
        head += (tile_k // 128 - 1) * tokens * 256  # sums of the warpgroups beside the first
    stage = weights + 2 * tokens * tile_k
    found = (room - head - 1024) // (stage + 16)  # two barriers each; the ring begins at a multiple of 1024
    return int(found)


def plan(rows: int, k: int, tile_rows: int, tile_k: int, multiprocessors: int, slack: float = SLACK) -> tuple[int, int]:
    """(units, share) for weights [rows, k]: as even as it goes, then with the fewest units to a row tile.

    Reading is what takes the time, and a few multiprocessors less read as fast; what shared row tiles cost comes at
    the end, when nothing else hides it.
    """
    row_tiles, k_tiles = -(-rows // tile_rows), -(-k // tile_k)
    total = row_tiles * k_tiles
    least = -(-total // multiprocessors)
    shares = range(least, int(least * (1 + slack)) + 1)
    share = min(shares, key=lambda s: (most_contributors(row_tiles, k_tiles, s), s))
    return -(-total // share), share


def segments(unit: int, row_tiles: int, k_tiles: int, share: int) -> list[tuple[int, int, int, int]]:
    """What a unit does, in order: (row tile, first k tile, last k tile + 1, slot of its partial sums or -1).

    The kernel's own arithmetic, for tests and readers.
    """
    begin, end = unit * share, min((unit + 1) * share, row_tiles * k_tiles)
    found = []
    for n in range(begin // k_tiles, -(-end // k_tiles)):
        first, last = max(begin - n * k_tiles, 0), min(end - n * k_tiles, k_tiles)
        whole = first == 0 and last == k_tiles
        found.append((n, first, last, -1 if whole else 2 * unit + (first == 0)))
    return found
