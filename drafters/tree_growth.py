"""Growing draft trees whose shape is chosen at run time (drafters fact sheet §4.2).

A node's score is the logarithm of its estimated probability of being accepted, the product of its path's. The best tree
of n nodes for the sum of these probabilities is the n best nodes: scores never rise along a path, so no node comes
without its parent. Level by level, only the n best of a level can belong to it; that is exact, and needs a few batched
operations per level instead of a heap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from drafters.suffix import Continuations
from drafters.tree import DraftTree
from verify_kernels import ops
from verify_kernels.reference.growth import Nodes

Carry = tuple[Tensor, ...]
Children = Callable[[int, Tensor, Carry], tuple[Tensor, Tensor, Tensor | None, Carry]]
"""children(depth, tokens [R, W], carry) -> (candidate ids [R, W, M], or [R, 1, M] where all parents have the same, their
logits under each parent [R, W, M] float32, confidence of each parent's draft [R, W] float32 or None, carry). depth counts
from 0, the root's; carry is what is known of each node's path, tensors [R, W, ...]: a call gets what it gave for the
parents, and () at the root."""

Confidence = Literal["off", "weight", "match", "stop"]

SUFFIX_RATES = (0.0, 0.35, 0.5, 0.65, 0.75, 0.8, 0.85, 0.9, 0.93)
"""Estimated probability that a text goes on as it did where its last 0, 1, 2, ... tokens occurred before."""


def grow(
    roots: Tensor,
    children: Children,
    depth: int,
    num_nodes: int,
    max_drafts: Tensor,
    *,
    chain: bool = False,
    confidence: Confidence = "off",
    stop_below: float = 0.0,
    repeats: Continuations | None = None,
    width: int | None = None,
) -> DraftTree:
    """The best tree of at most num_nodes nodes (root included) and depth levels, or the best path. Deterministic.

    roots [R] int64; max_drafts [R] int64 limits each request's depth. The tree's `confidence` is q, in a chain c where
    there is one. The score of child x of token t at depth k is q_k(x | t), the softmax over its candidates, and

    - confidence "weight": times c_k(t), so that unsure levels lose nodes to sure ones;
    - "match": with q flattened or sharpened until its largest entry is c_k(t);
    - "stop": unchanged, but nothing is grown below a node whose own score times c_k(t) is under stop_below.

    repeats: continuations of earlier occurrences become children too, in a mixture: with probability
    SUFFIX_RATES[matched tokens] the next token is theirs, else it is drawn from q.

    width: children are asked for the best so many nodes of a level only, where each costs a pass of the drafter. The
    tree is the best among the nodes that were looked at, and the best of all where width is no limit.
    """
    r, device = roots.shape[0], roots.device
    most = 1 if chain else num_nodes - 1  # nodes of one level
    nodes = Nodes.room(roots, 1 + depth * most)
    carry: Carry = ()
    on = None if repeats is None else torch.ones(r, 1, repeats.matched.shape[1], dtype=torch.bool, device=device)
    first, count, total = 0, 1, 1  # the level's first column, its nodes that get children, all columns so far
    for k in range(depth):
        level = slice(first, first + count)
        candidates, logits, sure, carry = children(k, nodes.tokens[:, level], carry)
        plain = repeats is None and (sure is None or confidence == "off")
        q = logits if plain else _confident(logits, nodes.scores[:, level], sure, confidence, stop_below)
        if repeats is not None:
            candidates, q = _mixed(candidates, q, on, repeats, k)
        keep = min(most, q.shape[1] * q.shape[2])
        parent = ops.grow_level(nodes, q, candidates, max_drafts, k, first, total, keep, plain)
        if chain and sure is not None:
            nodes.steps[:, total : total + 1] = sure
        first, count, total = total, keep if width is None else min(keep, width), total + keep
        parent = parent[:, :count]
        carry = tuple(_of(x, parent) for x in carry)
        if repeats is not None:
            on = _of(on, parent) & (repeats.tokens[:, None, :, k] == nodes.tokens[:, first : first + count, None])
    tokens, parents, number, steps = ops.best_tree(nodes, total, min(num_nodes, total))
    return DraftTree(tokens, parents, number, depth, chain, confidence=steps)


def _of(x: Tensor, parent: Tensor) -> Tensor:
    """x [R, V, ...] of parents, for each of their children: parent [R, W] -> [R, W, ...]."""
    return x.gather(1, parent.view(*parent.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))


def _confident(logits: Tensor, scores: Tensor, sure: Tensor | None, mode: Confidence, stop_below: float) -> Tensor:
    """Probabilities of the candidates [R, W, M], shaped by the parent's confidence [R, W]."""
    if sure is None or mode == "off":
        return logits.softmax(-1)
    sure = sure[..., None]
    if mode == "weight":
        return logits.softmax(-1) * sure
    if mode == "stop":
        return logits.softmax(-1) * (scores.exp()[..., None] * sure >= stop_below)
    # Largest probability as a function of a factor on the logits: monotone, so bisect (in the logarithm, 2^-6 to 2^6).
    logits = logits - logits.amax(-1, keepdim=True)
    low, high = torch.full_like(sure, -6.0), torch.full_like(sure, 6.0)
    for _ in range(12):
        middle = (low + high) / 2
        flat = 1 / (logits * middle.exp2()).exp().sum(-1, keepdim=True) < sure
        low, high = torch.where(flat, middle, low), torch.where(flat, high, middle)
    return (logits * ((low + high) / 2).exp2()).softmax(-1)


def _mixed(candidates: Tensor, q: Tensor, on: Tensor, repeats: Continuations, k: int) -> tuple[Tensor, Tensor]:
    """Candidates [R, W or 1, M + C] and probabilities [R, W, M + C] with the continuations' next tokens mixed in.

    on [R, W, C]: the node's path is the continuation's beginning. Better continuations come first and take their share
    of what is left.
    """
    following = repeats.tokens[:, :, k]  # [R, C]
    live = on & (following >= 0)[:, None]
    same = (following[:, :, None] == following[:, None, :]).tril(-1)  # [R, C, C]: an earlier one says the same
    live = live & ~(live.float() @ same.float().transpose(1, 2) > 0)
    rates = _rates(repeats.matched + k) * (repeats.matched > 0)
    weight = live * rates[:, None]
    left = torch.cat((torch.ones_like(weight[..., :1]), (1 - weight).cumprod(-1)), dim=-1)
    share = weight * left[..., :-1]
    hit = following[:, None, :, None] == candidates[:, :, None, :]  # [R, W or 1, C, M]
    q = q * left[..., -1:] + (share[:, :, None] @ hit.float()).squeeze(2)
    extra = share.masked_fill(hit.any(-1), 0.0)
    following = following.clamp(min=0)[:, None].expand(-1, candidates.shape[1], -1)
    return torch.cat((candidates, following), -1), torch.cat((q, extra), -1)


def _rates(matched: Tensor) -> Tensor:
    """SUFFIX_RATES of [R, C] lengths, as arithmetic on the device: no table is copied there."""
    rate = torch.zeros_like(matched, dtype=torch.float32)
    for length, (before, value) in enumerate(zip(SUFFIX_RATES, SUFFIX_RATES[1:]), start=1):
        rate = rate + (matched >= length) * (value - before)
    return rate
