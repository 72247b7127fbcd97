"""Which part of a small-T linear each CTA does.

The tiles of the weights (row tile, k tile), k fastest, are one line. Unit u of the launch takes the stretch
[u * share, (u + 1) * share) of it, so a row tile may be shared by consecutive units; their partial sums are added in
the order of k by the one that arrives last.
"""

from __future__ import annotations

SLACK = 0.07
"""How much longer than an even share a stretch may be, if that lets fewer units share a row tile."""


def contributors(row_tile: int, k_tiles: int, share: int) -> tuple[int, int]:
    """First and last unit of a row tile."""
    return row_tile * k_tiles // share, (row_tile * k_tiles + k_tiles - 1) // share


def most_contributors(row_tiles: int, k_tiles: int, share: int) -> int:
    """Units of the row tile that is shared by most."""
    period = min(row_tiles, share)  # where the cuts lie in a row tile repeats after `share` row tiles at the latest
    return max(last - first + 1 for first, last in (contributors(n, k_tiles, share) for n in range(period)))


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
