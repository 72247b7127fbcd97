"""Draft trees: see `verify_kernels.reference.trees`. One program a request; all of its nodes are in registers.

Slot 0 is on the scratch page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verify_kernels import rng
from verify_kernels.reference.trees import GOLDEN, Placed

__all__ = [
    "tree_masks", "prune_tree", "place_tree", "place_block", "follow_tree", "synthetic_drafts", "reach_tree",
    "commit_tokens",
]  # fmt: skip

_GAMMA, _M1, _M2 = (tl.constexpr(x) for x in (rng._GAMMA, rng._M1, rng._M2))
# A float constant would be rounded to 32 bits.
_SYNTHETIC, _GOLDEN_53 = tl.constexpr(rng.SYNTHETIC), tl.constexpr(int(GOLDEN * 2**53))


def padded(n: int) -> int:
    """Lanes for n entries."""
    return max(16, triton.next_power_of_2(n))


@triton.jit
def _take(values, index, lanes):
    """values[index], all pairs compared: no shared memory of one's own, and few nodes."""
    return tl.sum(tl.where(index[:, None] == lanes[None, :], values[None, :], 0), axis=1)


@triton.jit
def _masks(parent, lanes, ROUNDS: tl.constexpr):
    jump = tl.where(parent >= 0, parent, lanes)
    masks = tl.full(parent.shape, 1, tl.int64) << lanes
    depths = (parent >= 0).to(tl.int64)
    for _ in tl.static_range(ROUNDS):
        masks = masks | _take(masks, jump, lanes)
        depths = depths + _take(depths, jump, lanes)
        jump = _take(jump, jump, lanes)
    return masks, depths


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _M1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _M2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def uniform(seeds, counters, stream, index):
    """`rng.uniform` of int64 tensors: float64 in [0, 1)."""
    key = _mix(_mix(seeds + _GAMMA) + counters * _GAMMA + (stream + 1))
    return ((_mix(key + (index + 1) * _M2) >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16


@triton.jit(do_not_specialize=["stride", "n"])
def _tree_masks(parents, stride, masks, depths, n, N: tl.constexpr, ROUNDS: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, N).to(tl.int64)
    inside = lanes < n
    m, d = _masks(tl.load(parents + r * stride + lanes, mask=inside, other=-1), lanes, ROUNDS)
    tl.store(masks + r * n + lanes, m, mask=inside)
    tl.store(depths + r * n + lanes, d, mask=inside)


def tree_masks(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    r, n = parents.shape
    masks, depths = parents.new_empty(2, r, n).unbind()
    _tree_masks[(r,)](
        parents, parents.stride(0), masks, depths, n, N=padded(n), ROUNDS=depth.bit_length(), num_warps=4
    )
    return masks, depths


@triton.jit(do_not_specialize=["token_stride", "parent_stride", "n"])
def _prune_tree(
    tokens, token_stride, parents, parent_stride, keep, new_tokens, new_parents, count, order, n,
    N: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, N).to(tl.int64)
    inside = lanes < n
    token = tl.load(tokens + r * token_stride + lanes, mask=inside, other=-1)
    parent = tl.load(parents + r * parent_stride + lanes, mask=inside, other=-1)
    wish = tl.load(keep + r * n + lanes, mask=inside, other=0) != 0
    one = tl.full(lanes.shape, 1, tl.int64)
    kept = tl.sum(tl.where((wish & (token >= 0)) | (lanes == 0), one << lanes, 0), axis=0)
    masks, _ = _masks(parent, lanes, ROUNDS)
    real = inside & ((masks & ~kept) == 0)
    upto = tl.cumsum(real.to(tl.int64), axis=0)
    total = tl.sum(real.to(tl.int64), axis=0)
    above = tl.where(real & (parent >= 0), _take(upto - 1, parent, lanes), -1)
    at = r * n + tl.where(real, upto - 1, total + lanes - upto)
    tl.store(new_tokens + at, tl.where(real, token, -1), mask=inside)
    tl.store(new_parents + at, above, mask=inside)
    tl.store(order + at, lanes, mask=inside)
    tl.store(count + r, total)


def prune_tree(tokens: Tensor, parents: Tensor, keep: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r, n = tokens.shape
    new_tokens, new_parents, order = tokens.new_empty(3, r, n).unbind()
    count = tokens.new_empty(r)
    _prune_tree[(r,)](
        tokens, tokens.stride(0), parents, parents.stride(0), keep.contiguous().view(torch.uint8), new_tokens,
        new_parents, count, order, n, N=padded(n), ROUNDS=depth.bit_length(), num_warps=4,
    )  # fmt: skip
    return new_tokens, new_parents, count, order


@triton.jit(do_not_specialize=["token_stride", "parent_stride", "table_stride", "n"])
def _place_tree(
    tokens, token_stride, parents, parent_stride, seq_lens, table, table_stride, checked, token_ids, positions, slots,
    masks, context, worst, n, page_size, vocab, N: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, N).to(tl.int64)
    inside = lanes < n
    token = tl.load(tokens + r * token_stride + lanes, mask=inside, other=-1)
    parent = tl.load(parents + r * parent_stride + lanes, mask=inside, other=-1)
    have = tl.load(seq_lens + r) - 1
    largest = tl.max(token, axis=0)
    tl.store(worst + r, tl.where(largest >= vocab, largest, -1))
    tl.store(context + r, have.to(tl.int32))
    token = tl.minimum(token, vocab - 1)
    if masks is None:
        depth = tl.where(parent >= 0, lanes, 0)
    else:
        mask, depth = _masks(parent, lanes, ROUNDS)
        tl.store(masks + r * n + lanes, mask, mask=inside)
    real = token >= 0
    index = have + lanes
    page = tl.load(table + r * table_stride + index // page_size, mask=real, other=0).to(tl.int64)
    at = r * n + lanes
    tl.store(checked + at, token, mask=inside)
    tl.store(token_ids + at, tl.maximum(token, 0), mask=inside)
    tl.store(positions + at, have + depth, mask=inside)
    tl.store(slots + at, tl.where(real, page * page_size + index % page_size, 0), mask=inside)


def place_tree(
    tokens: Tensor,
    parents: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    page_size: int,
    depth: int,
    vocab_size: int,
    is_chain: bool,
) -> Placed:
    r, n = tokens.shape
    checked, token_ids, positions, slots, masks = tokens.new_empty(5, r, n).unbind()
    masks = None if is_chain else masks
    context, worst = tokens.new_empty(r, dtype=torch.int32), tokens.new_empty(r)
    _place_tree[(r,)](
        tokens, tokens.stride(0), parents, parents.stride(0), seq_lens, page_table, page_table.stride(0), checked,
        token_ids, positions, slots, masks, context, worst, n, page_size, vocab_size,
        N=padded(n), ROUNDS=depth.bit_length(), num_warps=4,
    )  # fmt: skip
    return Placed(checked, token_ids, positions, slots, masks, context, worst)


@triton.jit(do_not_specialize=["table_stride", "pages", "width", "max_positions"])
def _place_block(
    seq_lens, table, table_stride, pages, kept, positions, slots, context, width, page_size, max_positions,
    N: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, N).to(tl.int64)
    inside = lanes < width
    have = tl.load(seq_lens + r) - 1
    tl.store(context + r, have.to(tl.int32))
    index = tl.minimum(have + lanes, pages * page_size - 1)
    page = tl.load(table + r * table_stride + index // page_size, mask=inside, other=0).to(tl.int64)
    slot = page * page_size + index % page_size
    if kept is not None:
        slot = tl.where(lanes < tl.load(kept + r), slot, 0)
    tl.store(positions + r * width + lanes, tl.minimum(have + lanes, max_positions - 1), mask=inside)
    tl.store(slots + r * width + lanes, slot, mask=inside)


def place_block(
    seq_lens: Tensor, page_table: Tensor, width: int, page_size: int, max_positions: int, kept: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    r = seq_lens.shape[0]
    positions, slots = seq_lens.new_empty(2, r * width).unbind()
    context = seq_lens.new_empty(r, dtype=torch.int32)
    _place_block[(r,)](
        seq_lens, page_table, page_table.stride(0), page_table.shape[1], kept, positions, slots, context, width,
        page_size, max_positions, N=padded(width), num_warps=1,
    )  # fmt: skip
    return positions, slots, context


@triton.jit(do_not_specialize=["token_stride", "parent_stride", "choice_stride", "n"])
def _follow_tree(
    tokens, token_stride, parents, parent_stride, choices, choice_stride, path, emitted, count, n,
    N: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, N).to(tl.int64)
    inside = lanes < n
    token = tl.load(tokens + r * token_stride + lanes, mask=inside, other=-1)
    parent = tl.load(parents + r * parent_stride + lanes, mask=inside, other=-1)
    choice = tl.load(choices + r * choice_stride + lanes, mask=inside, other=0)
    node = tl.full([], 0, tl.int64)
    steps = tl.full([], 1, tl.int64)
    going = node == 0
    wish = tl.sum(tl.where(lanes == 0, choice, 0), axis=0)
    out = r * (DEPTH + 1)
    tl.store(path + out, node)
    tl.store(emitted + out, wish)
    for d in range(DEPTH):
        child = tl.min(tl.where((parent == node) & (token == wish) & inside, lanes, N), axis=0)
        going = going & (child < N)
        node = tl.where(going, child, node)
        wish = tl.sum(tl.where(lanes == node, choice, 0), axis=0)
        tl.store(path + out + d + 1, tl.where(going, node, -1))
        tl.store(emitted + out + d + 1, tl.where(going, wish, -1))
        steps += tl.where(going, 1, 0)
    tl.store(count + r, steps)


def follow_tree(
    tokens: Tensor, parents: Tensor, choices: Tensor, depth: int, is_chain: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    r, n = tokens.shape
    path, emitted = tokens.new_empty(2, r, depth + 1).unbind()
    count = tokens.new_empty(r)
    _follow_tree[(r,)](
        tokens, tokens.stride(0), parents, parents.stride(0), choices, choices.stride(0), path, emitted, count, n,
        N=padded(n), DEPTH=depth, num_warps=1,
    )  # fmt: skip
    return path, emitted, count


@triton.jit(do_not_specialize=["depth"])
def _synthetic_drafts(seeds, steps, survival, wanted, depth, N: tl.constexpr, EVEN: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, N)
    seed, step = tl.load(seeds + r), tl.load(steps + r)
    if EVEN:
        golden = (step * 0 + _GOLDEN_53).to(tl.float64) * 1.1102230246251565e-16
        u = uniform(seed, step * 0, _SYNTHETIC, step * 0) + step.to(tl.float64) * golden
        u = u - tl.floor(u)
    else:
        u = uniform(seed, step, _SYNTHETIC, step * 0)
    rates = tl.load(survival + lanes, mask=lanes < depth, other=0.0)
    tl.store(wanted + r, tl.sum((u < rates).to(tl.int64), axis=0))


def synthetic_drafts(seeds: Tensor, steps: Tensor, survival: Tensor, even: bool) -> Tensor:
    r, depth = seeds.shape[0], survival.shape[0]
    wanted = seeds.new_empty(r)
    _synthetic_drafts[(r,)](seeds, steps, survival, wanted, depth, N=padded(depth), EVEN=even, num_warps=1)
    return wanted


@triton.jit(do_not_specialize=["token_stride", "parent_stride", "choice_stride", "n"])
def _reach_tree(
    tokens, token_stride, parents, parent_stride, choices, choice_stride, wanted, path, emitted, count, n,
    N: tl.constexpr, ROUNDS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, N).to(tl.int64)
    inside = lanes < n
    token = tl.load(tokens + r * token_stride + lanes, mask=inside, other=-1)
    parent = tl.load(parents + r * parent_stride + lanes, mask=inside, other=-1)
    choice = tl.load(choices + r * choice_stride + lanes, mask=inside, other=0)
    masks, depths = _masks(parent, lanes, ROUNDS)
    depths = tl.where(token >= 0, depths, 0)
    reach = tl.max(((masks[:, None] >> lanes[None, :]) & 1) * depths[:, None], axis=0)
    goal = tl.minimum(tl.load(wanted + r), tl.max(depths, axis=0))
    node = tl.full([], 0, tl.int64)
    out = r * (DEPTH + 1)
    tl.store(path + out, node)
    for d in range(DEPTH):
        able = (parent == node) & (token >= 0) & (reach >= goal)
        child = tl.min(tl.where(able, lanes, N), axis=0)
        moving = d < goal
        node = tl.where(moving & (child < N), child, node)
        draft = tl.sum(tl.where(lanes == node, token, 0), axis=0)
        tl.store(path + out + d + 1, tl.where(moving, node, -1))
        tl.store(emitted + out + d, draft, mask=moving)
        tl.store(emitted + out + d + 1, -1, mask=d >= goal)
    tl.store(emitted + out + goal, tl.sum(tl.where(lanes == node, choice, 0), axis=0))
    tl.store(count + r, goal + 1)


def reach_tree(
    tokens: Tensor, parents: Tensor, choices: Tensor, wanted: Tensor, depth: int, is_chain: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    r, n = tokens.shape
    path, emitted = tokens.new_empty(2, r, depth + 1).unbind()
    count = tokens.new_empty(r)
    _reach_tree[(r,)](
        tokens, tokens.stride(0), parents, parents.stride(0), choices, choices.stride(0), wanted, path, emitted, count,
        n, N=padded(n), ROUNDS=depth.bit_length(), DEPTH=depth, num_warps=4,
    )  # fmt: skip
    return path, emitted, count


@triton.jit(do_not_specialize=["history_stride", "length", "best_stride", "width", "n"])
def _commit_tokens(
    history, history_stride, length, seq_lens, num_outputs, steps, emitted, num_emitted, num_nodes, best, best_stride,
    worst, packed, width, n, W: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, W)
    inside = lanes < width
    token = tl.load(emitted + r * width + lanes, mask=inside, other=-1)
    have, count, nodes = tl.load(seq_lens + r), tl.load(num_emitted + r), tl.load(num_nodes + r)
    j = tl.arange(0, N)
    logit = tl.load(best + r * best_stride + j, mask=(j < n) & (j < nodes), other=0.0)
    broken = tl.max(tl.where(tl.abs(logit) < float("inf"), 0, 1).to(tl.int64), axis=0)  # NaN compares false
    tl.store(history + r * history_stride + have + lanes, token, mask=inside & (token >= 0))
    tl.store(history + r * history_stride + length - 1, -1, mask=count < width)
    out = packed + r * (width + 4)
    tl.store(out + lanes, token, mask=inside)
    tl.store(out + width, count)
    tl.store(out + width + 1, nodes)
    tl.store(out + width + 2, broken)
    tl.store(out + width + 3, tl.load(worst + r))
    tl.store(seq_lens + r, have + count)
    tl.store(num_outputs + r, tl.load(num_outputs + r) + count)
    tl.store(steps + r, tl.load(steps + r) + 1)


def commit_tokens(
    history: Tensor,
    seq_lens: Tensor,
    num_outputs: Tensor,
    steps: Tensor,
    emitted: Tensor,
    num_emitted: Tensor,
    num_nodes: Tensor,
    best_logits: Tensor,
    worst: Tensor,
) -> Tensor:
    (r, width), n = emitted.shape, best_logits.shape[1]
    packed = emitted.new_empty(r, width + 4)
    _commit_tokens[(r,)](
        history, history.stride(0), history.shape[1], seq_lens, num_outputs, steps, emitted.contiguous(), num_emitted,
        num_nodes, best_logits, best_logits.stride(0), worst, packed, width, n, W=padded(width), N=padded(n),
        num_warps=1,
    )  # fmt: skip
    return packed
