"""Growing a tree level by level, best nodes first: see `drafters.tree_growth`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Nodes(NamedTuple):
    """Every node that was looked at, level by level, all [R, T]: tokens and parents (columns of T) int64, scores
    (logarithm of the path's probability) and steps (its last factor) float32."""

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    steps: Tensor

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @classmethod
    def room(cls, roots: Tensor, width: int) -> Nodes:
        """Room for `width` nodes; roots [R] int64 in column 0."""
        tokens, parents = roots.new_empty(2, roots.shape[0], width).unbind()
        scores, steps = roots.new_empty(2, roots.shape[0], width, dtype=torch.float32).unbind()
        tokens[:, 0], parents[:, 0], scores[:, 0], steps[:, 0] = roots, -1, 0.0, 1.0
        return cls(tokens, parents, scores, steps)


def candidate_logits(
    values: Tensor, ids: Tensor, w2: Tensor, table: Tensor, rows: Tensor, temperature: Tensor
) -> Tensor:
    """Logits of M candidates under each of W parents with the Markov head's part, (values + w2[ids] @ z) / temperature.

    values [R, M] float32 and ids [R, M] int64 of one slot, w2 [V_draft, r]; z of parent (i, j) is table[rows[i, j]],
    table [T, r], rows [R, W] int64; temperature [R] float32 (0 counts as 1) -> [R, W, M] float32.
    """
    z = F.embedding(rows, table).float()
    bias = z @ F.embedding(ids, w2).float().transpose(1, 2)
    return (values[:, None] + bias) / torch.where(temperature > 0, temperature, 1.0)[:, None, None]


def grow_level(
    nodes: Nodes,
    q: Tensor,
    candidates: Tensor,
    max_drafts: Tensor,
    level: int,
    first: int,
    out: int,
    keep: int,
    is_logits: bool = False,
) -> Tensor:
    """The `keep` best children of W nodes, columns first .. first + W - 1 of `nodes`; they go to columns out .. out +
    keep - 1, best first, equal ones by parent and candidate.

    q [R, W, M] float32: probabilities of the candidates [R, W or 1, M] int64 under each parent, or their logits.
    max_drafts [R] int64: children at `level` + 1 beyond it score -inf.
    -> [R, keep] int64: which of the W nodes is each one's parent.
    """
    q = q.softmax(-1) if is_logits else q
    width, count = q.shape[1:]
    below = nodes.scores[:, first : first + width, None] + q.log()
    below = below.masked_fill((level >= max_drafts)[:, None, None], float("-inf")).flatten(1)
    scores, where = below.max(1, keepdim=True) if keep == 1 else below.sort(dim=1, descending=True, stable=True)
    scores, where = scores[:, :keep], where[:, :keep]
    parent = where // count
    columns = slice(out, out + keep)
    nodes.tokens[:, columns] = candidates.expand(-1, width, -1).flatten(1).gather(1, where)
    nodes.parents[:, columns] = first + parent
    nodes.scores[:, columns] = scores
    nodes.steps[:, columns] = q.flatten(1).gather(1, where)
    return parent


def best_tree(nodes: Nodes, total: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The `size` best of the first `total` nodes, in their order; those that score -inf stay away.

    -> (tokens [R, size] int64, parents [R, size] int64, both -1 beyond; number of nodes [R] int64; steps [R, size]
    float32, which mean nothing beyond).
    """
    tokens, parents, scores, steps = (x[:, :total] for x in nodes)
    # Stable, so that a parent comes before a child of equal score.
    best, order = scores.sort(dim=1, descending=True, stable=True)
    chosen = torch.where(best[:, :size] > float("-inf"), order[:, :size], total).sort(dim=1).values
    real = chosen < total
    index = torch.zeros(tokens.shape[0], total + 1, dtype=torch.int64, device=tokens.device)
    index.scatter_(1, chosen, torch.arange(size, device=tokens.device).expand_as(chosen))
    chosen = chosen.clamp(max=total - 1)
    above = parents.gather(1, chosen)
    return (
        tokens.gather(1, chosen).masked_fill(~real, -1),
        index.gather(1, above.clamp(min=0)).masked_fill(~real | (above < 0), -1),
        real.sum(1),
        steps.gather(1, chosen),
    )
