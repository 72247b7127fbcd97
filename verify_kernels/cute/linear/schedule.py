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
    """(rows, k) of a tile for weights of so many rows: each multiprocessor has as many whole row tiles as the others.

    Low ones of up to 64 rows read faster: a ring of many small stages seems to have more on its way than one of few
    large stages. The more tokens, the more of x is read with every row tile, so at 64 tokens, and earlier where row
    tiles are many (an LM head), they are higher. Where rows do not divide so without leaving multiprocessors idle, row
    tiles are shared.

    step: what the rows of a warpgroup are a multiple of. A stage holds at least 8 KB of weights, unless x takes the
    room. Packed tiles are one warpgroup high, and longer: each of their warpgroups takes 128 columns.
    `eval/results/h200/linear.json` has what these rules are made from.
    """
    least = -(-rows // multiprocessors)
    most = 64
    if kind == "plain" and tokens > 8:
        most = 192 if tokens == 64 else 128 if least > 512 else 64
    turns = -(-least // most)
    each = -(-least // turns)
    groups = -(-each // 64)
    height = -(-each // (step * groups)) * step * groups
    if height < max(16, tokens // 2) or -(-rows // height) * (1 + SLACK) < turns * multiprocessors:
        height = most if turns > 1 else 64
    if kind != "plain":
        return height, 512 if height <= 32 and tokens <= 32 else 256
    return height, 256 if height < 32 and tokens <= 16 else 128


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
