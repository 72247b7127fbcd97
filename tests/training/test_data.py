"""Packing, splits and the choice of blocks: what must hold for any conversations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data import OPEN_ROWS, Packed, epoch_order, pack, split
from training.passes import choose

PAIRS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=90)


def packed_of(pairs: list[tuple[int, int]], row_length: int, seed: int = 0) -> tuple[Packed, np.ndarray, np.ndarray]:
    """Tokens are 1, 2, 3, ... over all conversations: each says where it comes from."""
    lengths = np.array(pairs, dtype=np.int32)
    tokens = np.arange(1, int(lengths.sum()) + 1, dtype=np.int32)
    order = np.random.default_rng(seed).permutation(len(pairs))
    return pack(tokens, lengths, row_length, order), lengths, tokens


@settings(max_examples=100, deadline=None)
@given(PAIRS, st.integers(8, 40), st.integers(0, 99))
def test_a_token_is_learnt_from_exactly_where_it_is_the_targets(pairs, row_length: int, seed: int) -> None:
    """The token after an anchor is an answer's, every answer token that is in a row follows an anchor, once."""
    packed, lengths, _ = packed_of(pairs, row_length, seed)
    starts = np.append(0, lengths.sum(1).cumsum())
    answers = set()
    for (prompt, answer), start in zip(pairs, starts):
        answers |= set(range(start + prompt + 1, start + min(prompt + answer, row_length) + 1))
    learnt = [int(packed.tokens[r, at + 1]) for r, at in np.argwhere(packed.anchors)]
    assert len(set(learnt)) == len(learnt) and set(learnt) == answers
    for r, at in np.argwhere(packed.anchors):
        assert packed.documents[r, at] == packed.documents[r, at + 1] >= 0
        assert packed.tokens[r, at + 1] == packed.tokens[r, at] + 1


@settings(max_examples=100, deadline=None)
@given(PAIRS, st.integers(8, 40), st.integers(0, 99))
def test_a_row_is_conversations_one_after_another_and_then_padding(pairs, row_length: int, seed: int) -> None:
    packed, _, _ = packed_of(pairs, row_length, seed)
    for r in range(len(packed)):
        documents = packed.documents[r]
        size = int((documents >= 0).sum())
        assert size > 0 and (documents[size:] == -1).all() and (packed.tokens[r, size:] == 0).all()
        assert not packed.anchors[r, size:].any() and not packed.remaining[r, size:].any()
        assert sorted(set(documents[:size])) == list(range(documents[:size].max() + 1)) and (np.diff(documents[:size]) >= 0).all()
        for document in range(documents[:size].max() + 1):
            here = np.flatnonzero(documents == document)
            assert packed.positions[r, here].tolist() == list(range(len(here)))
            assert packed.remaining[r, here].tolist() == list(range(len(here)))[::-1]


@settings(max_examples=60, deadline=None)
@given(PAIRS, st.integers(8, 40))
def test_no_two_rows_could_have_been_one(pairs, row_length: int) -> None:
    """While no row was closed for being too many: a later row was opened because its first member fitted nowhere."""
    packed, _, _ = packed_of(pairs, row_length)
    if len(packed) > OPEN_ROWS:
        return
    used = (packed.documents >= 0).sum(1)
    first = [int((packed.documents[r] == 0).sum()) for r in range(len(packed))]
    for later in range(len(packed)):
        assert all(used[r] + first[later] > row_length for r in range(later))


def test_thousands_of_conversations_fill_their_rows() -> None:
    draw = np.random.default_rng(1)
    lengths = draw.integers(10, 200, (4000, 2)).astype(np.int32)
    packed = pack(np.zeros(int(lengths.sum()), np.int32), lengths, 1024, np.arange(4000))
    assert (packed.documents >= 0).mean() > 0.97


@given(st.integers(1, 500), st.floats(0, 0.999), st.integers(0, 99))
def test_a_split_is_a_fixed_partition(count: int, held_out: float, seed: int) -> None:
    training, held = split(count, held_out, seed)
    assert sorted([*training, *held]) == list(range(count)) and len(held) == int(count * held_out)
    assert len(training) > 0
    again = split(count, held_out, seed)
    assert np.array_equal(training, again[0]) and np.array_equal(held, again[1])


def test_epochs_are_orders_of_their_own() -> None:
    training, _ = split(100, 0.1, 3)
    orders = [epoch_order(training, 3, epoch).tolist() for epoch in range(3)]
    assert all(sorted(order) == sorted(training.tolist()) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert epoch_order(training, 3, 1).tolist() == orders[1] != epoch_order(training, 4, 1).tolist()


@settings(max_examples=60, deadline=None)
@given(PAIRS, st.integers(12, 40), st.integers(1, 12), st.integers(1, 8), st.integers(0, 99))
def test_blocks_are_chosen_at_anchors_and_labelled_with_what_follows(
    pairs, row_length: int, count: int, block: int, seed: int
) -> None:
    packed, _, _ = packed_of(pairs, row_length)
    rows = np.arange(len(packed))
    step = choose(packed, rows, count, block, (seed,), torch.device("cpu"))
    for name in ("tokens", "documents", "positions"):
        assert np.array_equal(getattr(step, name).numpy(), getattr(packed, name))
    for r in rows:
        places = step.anchors[r].tolist()
        assert places == sorted(set(places)) and len(places) == count
        real = [at for at in places if packed.anchors[r, at]]
        assert len(real) == min(count, int(packed.anchors[r].sum()))  # fillers only where anchors run out
        for a, at in enumerate(places):
            for k in range(block):
                here = at + 1 + k
                inside = here < row_length and packed.documents[r, here] == packed.documents[r, at] >= 0
                assert bool(step.supervised[r, a, k]) == (bool(packed.anchors[r, at]) and inside)
                if step.supervised[r, a, k]:
                    assert int(step.labels[r, a, k]) == packed.tokens[r, here]
    again = choose(packed, rows, count, block, (seed,), torch.device("cpu"))
    assert torch.equal(step.anchors, again.anchors)


def test_every_anchor_has_the_same_chance() -> None:
    packed, _, _ = packed_of([(4, 16)], 24)
    seen = np.zeros(24)
    for seed in range(3000):
        seen[choose(packed, np.array([0]), 4, 2, (seed,), torch.device("cpu")).anchors[0].numpy()] += 1
    assert not seen[~packed.anchors[0]].any()
    # 16 anchors, 4 of them each time: 750 ± 24.
    assert seen[packed.anchors[0]] == pytest.approx(750, abs=110)
