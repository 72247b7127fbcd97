"""Triton kernels through which ranks write to one another's memory, without NVLink multicast.

Every rank owns a box that all ranks can write to: two halves, used by turns, of `size` slots (one for what each rank
sends) and one more (for what an owner sends back), each of `capacity` bytes. A message is its own flag: an element that
has not arrived is all ones, a NaN that is never sent (it goes as another NaN), so that one flight over the link is all
that a collective waits for, and nothing has to be ordered before a flag by a fence. Elements are single stores to the
peer's memory and are polled by volatile loads (system scope, past L1). Who has read an element writes the ones back.

Two halves are enough: a rank begins an operation only after it has finished the one before, for which it waited for
every rank's message; and a rank sends that only after it has finished the operation before, reading and writing back
included. So no rank is still busy with the half that is written to. Operations of a box run one after the other, on one
stream, in the same order on all ranks; which half it is lies on the device, so that replayed graphs and calls mix.

Sums are taken in float32, in the order of the ranks, from the same values on every rank: all get the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

HEADER = tl.constexpr(8)  # elements before a unit of rows by counts: 16 bytes or more, its first holds the count


@triton.jit
def _slot(boxes, ranks, turn, slot, capacity, N: tl.constexpr, WORD: tl.constexpr):
    """A slot in the box of a rank, or of several."""
    box = tl.load(boxes + ranks).to(tl.pointer_type(WORD))
    return tl.multiple_of(box, 16) + (turn * (N + 1) + slot).to(tl.int64) * capacity


@triton.jit
def _peers(rank, N: tl.constexpr, PEERS: tl.constexpr):
    """[PEERS]: whom a rank sends to, in which order (each begins with another), and which of them there are."""
    i = tl.arange(0, PEERS)
    return (rank + 1 + i) % N, i < N


@triton.jit
def _send(words, values, mask):
    bits = values.to(words.dtype.element_ty, bitcast=True)
    largest: tl.constexpr = 2 ** (bits.dtype.primitive_bitwidth - 1) - 1
    tl.store(words, tl.where(bits == -1, largest, bits), mask=mask)


@triton.jit
def _receive(words, mask):
    """Waits until every word has come, and makes room for the next. There are as many words as threads or more, so
    that none is read by two threads, one of which might find it gone."""
    bits = tl.load(words, mask=mask, other=0, volatile=True)
    while tl.max((bits == -1).to(tl.int32)) != 0:
        bits = tl.load(words, mask=mask, other=0, volatile=True)
    tl.store(words, tl.full(words.shape, -1, bits.dtype), mask=mask)
    return bits


@triton.jit
def _turn(turns):
    return (tl.load(turns) >> 16) & 1


@triton.jit
def _end(turns):
    """Programs add 65536 in all: the half changes when the last of them has finished, not before."""
    programs = tl.num_programs(0) * tl.num_programs(1)
    last = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1) == programs - 1
    tl.atomic_add(turns, tl.where(last, 65537 - programs, 1), sem="relaxed", scope="gpu")


@triton.jit
def _slots(own, capacity, at, PEERS: tl.constexpr):
    """[PEERS, BLOCK]: the same elements of every rank's slot."""
    return own + tl.arange(0, PEERS).to(tl.int64)[:, None] * capacity + at[None, :]


@triton.jit
def _sum(own, capacity, at, mask, dtype: tl.constexpr, N: tl.constexpr, PEERS: tl.constexpr):
    """[BLOCK] float32: the sum of what all ranks sent."""
    bits = _receive(_slots(own, capacity, at, PEERS), (tl.arange(0, PEERS) < N)[:, None] & mask[None, :])
    return tl.sum(bits.to(dtype, bitcast=True).to(tl.float32), axis=0)


@triton.jit(do_not_specialize=["rank"])
def all_reduce(
    boxes, turns, x, residual, weight, out, normed, rank, width, capacity, eps,
    N: tl.constexpr, PEERS: tl.constexpr, WORD: tl.constexpr, TWO_SHOT: tl.constexpr, ADD: tl.constexpr,
    NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = sum of every rank's x (+ residual); normed = its RMSNorm. Program (row, block of columns); with NORM a
    block holds the row. In one shot every rank sends to every rank and adds; in two, each unit has an owner, which adds
    and sends the sum."""
    unit = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    here = tl.program_id(0).to(tl.int64) * width + columns
    at = unit.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    turn = _turn(turns)
    values = tl.load(x + here, mask=mask)
    dtype: tl.constexpr = values.dtype
    peers, exist = _peers(rank, N, PEERS)
    meant = exist[:, None] & mask[None, :]
    own = _slot(boxes, rank, turn, 0, capacity, N, WORD)
    if TWO_SHOT:
        owner = unit % N
        _send(_slot(boxes, owner, turn, rank, capacity, N, WORD) + at, values, mask)
        if owner == rank:
            y = _sum(own, capacity, at, mask, dtype, N, PEERS)
            if ADD:
                y += tl.load(residual + here, mask=mask).to(tl.float32)
            y = tl.broadcast_to(y.to(dtype)[None, :], PEERS, BLOCK)
            _send(_slot(boxes, peers, turn, N, capacity, N, WORD)[:, None] + at[None, :], y, meant)
        y = _receive(_slot(boxes, rank, turn, N, capacity, N, WORD) + at, mask).to(dtype, bitcast=True)
    else:
        values = tl.broadcast_to(values[None, :], PEERS, BLOCK)
        _send(_slot(boxes, peers, turn, rank, capacity, N, WORD)[:, None] + at[None, :], values, meant)
        y = _sum(own, capacity, at, mask, dtype, N, PEERS)
        if ADD:
            y += tl.load(residual + here, mask=mask).to(tl.float32)
        y = y.to(dtype)
    tl.store(out + here, y, mask=mask)
    if NORM:
        wide = tl.where(mask, y.to(tl.float32), 0.0)  # of the sum as it is stored
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
        gain = tl.load(weight + columns, mask=mask).to(tl.float32)
        tl.store(normed + here, (wide * scale * gain).to(dtype), mask=mask)
    _end(turns)


@triton.jit(do_not_specialize=["rank"])
def exchange(
    boxes, turns, x, counts, out, found, rank, width, capacity, x_row, x_rank, out_row, out_rank,
    N: tl.constexpr, PEERS: tl.constexpr, WORD: tl.constexpr, SPLIT: tl.constexpr, SUM: tl.constexpr,
    COUNTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sends `width` columns of each row of x to every rank: to each its own (SPLIT, x_rank elements apart) or the same;
    out has what came from each, out_rank apart, or their sum (SUM). COUNTED: rows of a rank from its count on are not
    sent, and found has the counts that came. Program (row, block of columns)."""
    row, block = tl.program_id(0), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    head: tl.constexpr = HEADER if COUNTED else 0
    first = (row * tl.num_programs(1) + block).to(tl.int64) * (BLOCK + head)
    at = first + head + tl.arange(0, BLOCK)
    turn = _turn(turns)
    peers, exist = _peers(rank, N, PEERS)
    meant = exist[:, None] & mask[None, :]
    slots = _slot(boxes, peers, turn, rank, capacity, N, WORD)
    here = x + row.to(tl.int64) * x_row + columns
    if SPLIT:
        values = tl.load(here[None, :] + peers.to(tl.int64)[:, None] * x_rank, mask=meant)
    else:
        values = tl.broadcast_to(tl.load(here, mask=mask)[None, :], PEERS, BLOCK)
    if COUNTED:
        count = tl.load(counts + peers, mask=exist, other=0)
        tl.store(slots + first, count.to(WORD), mask=exist)
        meant = meant & (row < count)[:, None]
    _send(slots[:, None] + at[None, :], values, meant)
    dtype: tl.constexpr = values.dtype
    own = _slot(boxes, rank, turn, 0, capacity, N, WORD)
    if SUM:
        y = _sum(own, capacity, at, mask, dtype, N, PEERS)
        tl.store(out + row.to(tl.int64) * out_row + columns, y.to(dtype), mask=mask)
    else:
        ranks = tl.arange(0, PEERS)
        present = (ranks < N)[:, None] & mask[None, :]
        if COUNTED:
            lane = tl.arange(0, 128)
            came = _receive(_slots(own, capacity, first + lane, PEERS), (ranks < N)[:, None] & (lane == 0)[None, :])
            came = tl.sum(came.to(tl.int32), axis=1)
            present = present & (row < came)[:, None]
            if (row == 0) & (block == 0):
                tl.store(found + ranks, came, mask=ranks < N)
        bits = _receive(_slots(own, capacity, at, PEERS), present)
        to = out + row.to(tl.int64) * out_row + ranks.to(tl.int64)[:, None] * out_rank + columns[None, :]
        tl.store(to, bits.to(dtype, bitcast=True), mask=present)
    _end(turns)
