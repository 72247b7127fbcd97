"""Packing: conversations of different lengths into rows of one length, and one training step's share of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

OPEN_ROWS = 64
"""Rows that are filled side by side: a conversation goes to the fullest one that still has room for it."""


@dataclass
class Packed:
    """rows of row_length tokens. documents: which conversation of the row a token belongs to, -1 for padding;
    positions: its place there; anchors: where a block may start (the token after it is the answer's); remaining: how
    many tokens of the conversation follow. All [rows, row_length] int32, anchors bool."""

    tokens: np.ndarray
    documents: np.ndarray
    positions: np.ndarray
    anchors: np.ndarray
    remaining: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


def pack(tokens: np.ndarray, lengths: np.ndarray, row_length: int, order: np.ndarray) -> Packed:
    """tokens flat, lengths [n, 2] of prompt and answer; order: the conversations to use, in the order to place them.

    Conversations longer than a row are cut. The last prompt token is an anchor too: the engine drafts from it.
    """
    ends = lengths.sum(1).cumsum()
    starts = ends - lengths.sum(1)
    rows: list[list[int]] = []
    opened: list[tuple[int, int]] = []  # (room, row)
    for i in order:
        size = min(int(lengths[i].sum()), row_length)
        fits = [(room, row) for room, row in opened if room >= size]
        if fits:
            room, row = min(fits)
            opened.remove((room, row))
        else:
            room, row = row_length, len(rows)
            rows.append([])
        rows[row].append(int(i))
        opened.append((room - size, row))
        if len(opened) > OPEN_ROWS:
            opened.remove(min(opened))
    shape = (len(rows), row_length)
    packed = Packed(
        np.zeros(shape, np.int32),
        np.full(shape, -1, np.int32),
        np.zeros(shape, np.int32),
        np.zeros(shape, bool),
        np.zeros(shape, np.int32),
    )
    for r, members in enumerate(rows):
        at = 0
        for document, i in enumerate(members):
            size = min(int(lengths[i].sum()), row_length)
            span = slice(at, at + size)
            packed.tokens[r, span] = tokens[starts[i] : starts[i] + size]
            packed.documents[r, span] = document
            packed.positions[r, span] = np.arange(size)
            packed.remaining[r, span] = np.arange(size - 1, -1, -1)
            packed.anchors[r, at + int(lengths[i, 0]) - 1 : at + size - 1] = True
            at += size
    return packed


def split(count: int, held_out: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(training, held-out) conversations: a fixed random choice."""
    order = np.random.default_rng(seed).permutation(count)
    held = int(count * held_out)
    return order[held:], order[:held]


def epoch_order(training: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """The order of one pass over the data: a pure function of seed and epoch, so that a resumed run sees the same."""
    return np.random.default_rng((seed, epoch)).permutation(training)
