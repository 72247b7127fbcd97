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

from drafters.children import levels
from drafters.suffix import Continuations
from drafters.topology import TreeSpec
from drafters.tree import DraftTree
from drafters.tree_search import drawn_profile
from verify_kernels import ops
from verify_kernels.reference.growth import Nodes

Carry = tuple[Tensor, ...]
Children = Callable[[int, Tensor, Carry], tuple[Tensor, Tensor, Tensor | None, Carry]]
"""children(depth, tokens [R, W], carry) -> (candidate ids [R, W, M], or [R, 1, M] where all parents have the same,
their logits under each parent [R, W, M] float32, confidence of each parent's draft [R, W] float32 or None, carry).
depth counts from 0, the root's; carry is what is known of each node's path, tensors [R, W, ...]: a call gets what it
gave for the parents, and () at the root."""

Draws = Callable[[int, slice, Tensor, Carry, int], tuple[Tensor, Tensor, Tensor | None, Carry]]
"""draws(depth, nodes, tokens [R, W], carry, count) -> (count children of each of these nodes, drawn without replacement
and in this order [R, W, count] int64, the law they are drawn from [R, W, V] float32, probability that a first draw is
accepted [R, W] float32 or None, carry)."""

Confidence = Literal["off", "weight", "match", "stop"]

SIBLINGS = 8
"""Children that one node may have where its level has more nodes than one."""

SUFFIX_RATES = (0.0, 0.04, 0.2, 0.3, 0.35, 0.4, 0.45, 0.5, 0.7)
"""Probability that a text goes on as it did where its last 0, 1, 2, ... tokens occurred before, where the drafter by
itself says otherwise: r in P(x) = q(x) + (1 - q(x)) r. Measured on 1,572 steps of SmolLM2 over the project's prompts,
greedy (r is 0.03 to 0.04 after one token, 0.22 after two, 0.33 after three, 0.72 after eight or more; few have five to
seven)."""


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
    SUFFIX_RATES[matched tokens] the next token is theirs, else it is drawn from q. Matched are those before the root
    and, deeper in the tree, the continuation's own.

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


def draw_tree(roots: Tensor, draws: Draws, spec: TreeSpec, vocab_size: int, adapt: bool) -> DraftTree:
    """A tree of spec.num_nodes nodes whose children are drawn, with the laws they are drawn from.

    adapt: `spec` says how many nodes each level has, and they go where a draw is likeliest to be accepted: child j of a
    node counts as reached with probability reach(node) * `drawn_profile`(its first draw's)[j], and the best of a level
    stay. Otherwise the topology is the TreeSpec's. The tree's `confidence` is the last factor of that product.

    What `acceptance.tree_rejection` needs of the shape, and why it holds. Let L(tree) be the law of the output if this
    tree is verified and decoding goes on plainly. Take a tree and draw one more child x of node v from what v's law q
    has left. Both trees are verified alike until all of v's other children are rejected. There the first tree emits a
    token of the residual p; the second accepts x with probability min(1, p(x) / q(x)) and goes on with the target's
    own law, or else emits from norm(max(p - q, 0)): p again. So the mean of L over the new draw is the old L, whatever
    the tree is, and a tree that is drawn node by node has the mean L of the bare root, which is the target's law --- if
    whether and where the next draw is made depends on earlier draws alone (L is a martingale), and siblings are tried
    in the order of their draws. Here a level's places are settled by the confidences of the nodes above it and by the
    number of siblings, before any of its tokens is looked at, and nothing is taken back later. A rule that looks at a
    draw before it keeps it (dropping unlikely tokens, keeping the best n of all levels by scores that can rise along a
    path, or after a level's width was cut) breaks the proof and the law.
    """
    (r, n), device = (roots.shape[0], spec.num_nodes), roots.device
    tokens = roots[:, None].repeat(1, n)
    parents = spec.parents_on(device).repeat(r, 1)
    probs = torch.zeros(r, n, vocab_size, device=device)
    reach, steps = torch.ones(2, r, n, device=device).unbind()
    carry: Carry = ()
    sure: Tensor | None = None
    for k, (first, last, below) in enumerate(levels(spec)):
        width, size, children = last - first, len(below), slice(below[0], below[-1] + 1)
        ranks = max(spec.ranks[child] for child in below) + 1
        if adapt:
            ranks = size if width == 1 else min(size, max(SIBLINGS, -(-size // width)))
        nodes = slice(first, last)
        ids, probs[:, nodes], sure, carry = draws(k, nodes, tokens[:, nodes], carry, ranks)
        rates = torch.stack(drawn_profile(torch.ones_like(reach[:, nodes]) if sure is None else sure, ranks), -1)
        if adapt:
            likely = (reach[:, nodes, None] * rates).flatten(1)
            # Stable: siblings whose rates are both zero keep their order too.
            place = likely.sort(dim=1, descending=True, stable=True).indices[:, :size]
        else:
            at = (spec.parents_on(device)[children] - first) * ranks + spec.ranks_on(device)[children]
            place = at.expand(r, -1)
        parent = place // ranks
        tokens[:, children] = ids.flatten(1).gather(1, place)
        parents[:, children] = first + parent
        steps[:, children] = rates.flatten(1).gather(1, place)
        reach[:, children] = reach[:, nodes].gather(1, parent) * steps[:, children]
        carry = tuple(_of(x, parent) for x in carry)
    full = torch.full((r,), n, dtype=torch.int64, device=device)
    return DraftTree(
        tokens, parents, full, spec.depth, spec.is_chain, probs=probs, confidence=None if sure is None else steps
    )


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
