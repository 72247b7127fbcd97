"""Choosing a node's children from its logits: the best ones, or draws without replacement."""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.base import BatchState
from drafters.topology import TreeSpec
from verify_kernels import rng


def levels(spec: TreeSpec) -> list[tuple[int, int, list[int]]]:
    """(first node, last node + 1, nodes of the next level) of each level that has children."""
    nodes = [[i for i, d in enumerate(spec.depths) if d == depth] for depth in range(spec.depth + 1)]
    return [(level[0], level[-1] + 1, below) for level, below in zip(nodes, nodes[1:])]


def top(logits: Tensor, count: int) -> Tensor:
    """The `count` largest entries' ids, [..., count], ties to the lowest id (which topk does not promise)."""
    ids = []
    for _ in range(count):
        ids.append(logits.argmax(-1))
        if len(ids) < count:
            logits = logits.scatter(-1, ids[-1][..., None], float("-inf"))
    return torch.stack(ids, -1)


def draw(logits: Tensor, state: BatchState, first: int, count: int) -> tuple[Tensor, Tensor]:
    """`count` children of each node of a level: ids [R, w, count], and the law q [R, w, V] they are drawn from.

    logits [R, w, V] float32 of nodes first .. first + w - 1. Rows at temperature 0 take the best tokens; q is one-hot.
    """
    width, vocab = logits.shape[1:]
    temperature = state.temperature[:, None, None]
    q = (logits / torch.where(temperature > 0, temperature, 1.0)).softmax(-1)
    best = logits.topk(min(count, vocab)).indices
    # A broken row (NaN, whose sum is not positive) is greedy too: acceptance needs a distribution.
    warm = (temperature > 0) & (q.sum(-1, keepdim=True) > 0)
    q = torch.where(warm, q, torch.zeros_like(q).scatter(-1, best[..., :1], 1.0))
    index = first + torch.arange(width, device=logits.device)
    key = index[:, None] * vocab + torch.arange(count, device=logits.device)
    u = rng.uniform(state.seeds[:, None, None], state.num_outputs[:, None, None], rng.DRAFT, key)
    drawn = rng.sample_distinct(q, u)
    # Once q is spent, which in a greedy row is after the first child: the best token that is left.
    ids: list[Tensor] = []
    for rank in range(count):
        spare = best
        if ids:
            taken = (best[..., None] == torch.stack(ids, -1)[..., None, :]).any(-1)
            spare = best.gather(-1, (~taken).to(torch.int8).argmax(-1, keepdim=True))
        ids.append(torch.where(drawn[..., rank] >= 0, drawn[..., rank], spare[..., 0]))
    return torch.stack(ids, -1), q
