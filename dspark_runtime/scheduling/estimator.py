"""How likely a draft is accepted, learned while requests run: for drafters whose word is missing or not calibrated."""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.topology import TreeSpec
from drafters.tree import DraftTree
from dspark_runtime.acceptance import Accepted

BINS = 16
LOGITS = 5.0
"""What a draft is judged by falls into BINS bins: a probability by its logit, from -LOGITS to LOGITS, a request's recent
rate as it is."""
DECAY = 0.99
"""What a step leaves of all counts before it."""
PRIOR = 2.0
"""Weight, in drafts, of what is believed without any: an unseen draft is worth verifying, and after its counts have
decayed a hopeless one is tried again."""
RECENT = 0.2
"""Weight of a request's newest step in its recent rate."""


class OnlineEstimator:
    """Counts of drafts and accepted drafts by depth and by one number that says something of a draft, decayed.

    That number is the drafter's own confidence where there is one; where drafts were sampled, the largest probability
    of the law they were drawn from; else the share of the request's recent drafts that were accepted, with a bin of its
    own for a request without any. None of them depends on the draft's own token, as schedules of sampled drafts demand.
    The estimate leans on the drafter's confidence, or on 1, with the weight of PRIOR drafts.
    """

    def __init__(self, spec: TreeSpec, generations: Tensor) -> None:
        """generations [rows] int64: see `Scheduler.start`."""
        device, rows = generations.device, generations.shape[0]
        self.generations = generations
        # Of each depth and bin: drafts that were judged, and those of them that were accepted.
        self.counts = torch.zeros((spec.depth + 1) * (BINS + 1), 2, device=device)
        self.recent = torch.zeros(rows, device=device)
        self.owner = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self.rows = (self.recent, self.owner)

    def estimate(self, tree: DraftTree, depths: Tensor) -> Tensor:
        """[R, n] float32: probability that a node is accepted, given that its parent was. Roots and padding: anything.

        depths [R, n] or [n] int64 of the tree's nodes.
        """
        r, n = tree.tokens.shape
        prior: Tensor | float = PRIOR
        self._by_request = False
        if tree.confidence is not None:
            prior = PRIOR * tree.confidence
            bins = _bin(tree.confidence)
        elif tree.probs is not None:
            above = torch.arange(-1, n - 1, device=depths.device).expand(r, n) if tree.is_chain else tree.parents
            bins = _bin(tree.probs.amax(2).gather(1, above.clamp(min=0)))
        else:
            self._by_request = True
            known = self.owner[:r] == self.generations[:r]
            bins = torch.where(known, (self.recent[:r] * BINS).long().clamp_(max=BINS - 1), BINS)[:, None]
        self._cells = (depths * (BINS + 1) + bins).expand(r, n)
        judged, taken = self.counts.index_select(0, self._cells.flatten()).view(r, n, 2).unbind(2)
        return (taken + prior) / (judged + PRIOR)

    def trim(self, keep: Tensor) -> None:
        """The tree lost the nodes outside keep [R, n] bool, and the others moved to the front."""
        self._cells = self._cells.gather(1, (~keep).to(torch.int8).argsort(dim=1, stable=True))

    def observe(self, tree: DraftTree, accepted: Accepted) -> None:
        """Learn from the verified tree of this step: a node is judged where its parent was accepted."""
        r, n = tree.tokens.shape
        nodes = torch.arange(n, device=tree.tokens.device)
        kept = accepted.num_emitted - 1
        if tree.is_chain:
            total = torch.minimum(kept + 1, tree.num_nodes - 1)
            # Roots are counted too, at depth 0, which nobody asks for.
            judged, taken = nodes <= total[:, None], nodes <= kept[:, None]
        else:
            on = torch.zeros(r, n + 1, dtype=torch.bool, device=nodes.device)
            on = on.scatter(1, torch.where(accepted.path >= 0, accepted.path, n), True)[:, :n]
            judged = (tree.parents >= 0) & on.gather(1, tree.parents.clamp(min=0))
            taken = judged & on
            total = judged.sum(1)
        # Whole numbers, so that their order does not matter to the sums.
        new = torch.stack((judged, taken), 2).float().view(-1, 2)
        new = torch.zeros_like(self.counts).index_add_(0, self._cells[:, :n].flatten(), new)
        self.counts.mul_(DECAY).add_(new)
        if self._by_request:
            tried = total > 0
            known = self.owner[:r] == self.generations[:r]
            weight = torch.where(known, RECENT, 1.0) * tried
            self.recent[:r].lerp_(kept / total.clamp(min=1), weight)
            self.owner[:r] = torch.where(tried, self.generations[:r], self.owner[:r])


def _bin(probability: Tensor) -> Tensor:
    """0 to BINS - 1, int64; what is no number is in the lowest."""
    place = probability.logit().mul_(0.5 * BINS / LOGITS).add_(0.5 * BINS)
    return place.nan_to_num_(0.0).clamp_(0, BINS - 1).long()
