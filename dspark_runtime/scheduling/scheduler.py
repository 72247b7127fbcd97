"""A policy in the engine's step: from draft trees to the trees that are verified."""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.base import BatchState
from drafters.topology import TreeSpec
from drafters.tree import DraftTree
from dspark_runtime.acceptance import Accepted
from dspark_runtime.scheduling.estimator import OnlineEstimator
from dspark_runtime.scheduling.policies import Drafts, Policy, on_host


class Scheduler:
    """Trims drafted trees to what a policy wants verified. One object serves one engine at a time.

    rows: buffers of one row a request, which move with the requests. What a row remembers counts only as long as the
    request in it is the one that it was remembered of, and has been there since: its generation says so.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._started: tuple[object, ...] = ()
        self._estimator: OnlineEstimator | None = None
        self._history: list[tuple[Tensor, Tensor]] = []

    def start(self, spec: TreeSpec, generations: Tensor, calibrated: bool) -> None:
        """Called while no request runs. generations [rows] int64: the engine's buffer, whose entry changes to a number
        never used before whenever a request enters a row anew. calibrated: the trees' confidence is taken as it is;
        without that (or without a confidence) acceptance is estimated from what was observed, and what has been
        observed survives a start with the same arguments. Raises ConfigError for what the policy cannot serve."""
        new = (spec, calibrated)
        if self._started and self._started[0] is generations and self._started[1:] == new:
            return
        rows, device = generations.shape[0], generations.device
        self.policy.start(spec, rows, device)
        wanted = self.policy.needs_confidence and not calibrated
        self._estimator = OnlineEstimator(spec, generations) if wanted else None
        # The newest first: survival of every node, and the generation that it is of.
        self._history = [
            (torch.zeros(rows, spec.num_nodes, device=device), torch.full_like(generations, -1))
            for _ in range(self.policy.lag)
        ]
        self._started = (generations, *new)

    @property
    def rows(self) -> tuple[Tensor, ...]:
        own = () if self._estimator is None else self._estimator.rows
        return (*own, *(buffer for pair in self._history for buffer in pair))

    def drafts(self, context_lens: Tensor) -> bool:
        """Whether the step that begins drafts, or is a plain one. context_lens [R] int64. Asked once a step."""
        return self.policy.drafts(context_lens)

    def schedule(self, tree: DraftTree, state: BatchState) -> DraftTree:
        """The part of the trees that is verified."""
        if tree.width == 1:
            return tree
        depths = torch.arange(tree.width, device=tree.tokens.device) if tree.is_chain else tree.depths()
        alive = survival(tree, self._estimates(tree, depths)) if self.policy.needs_confidence else None
        drafts = Drafts(alive, depths, state.context_lens, self._remember(alive))
        keep = self.policy.keep(drafts)
        if tree.is_chain:
            return tree.limit(keep.sum(1) - 1)
        if self._estimator is not None:
            self._estimator.trim(keep)
        return tree.prune(keep)

    def observe(self, tree: DraftTree, accepted: Accepted) -> None:
        """What became of the tree that `schedule` returned."""
        if self._estimator is not None and tree.width > 1:
            self._estimator.observe(tree, accepted)

    def _estimates(self, tree: DraftTree, depths: Tensor) -> Tensor:
        if self._estimator is not None:
            return self._estimator.estimate(tree, depths)
        return tree.confidence

    def _remember(self, alive: Tensor) -> Tensor | None:
        """Put this step's survival into the history; returns that of `lag` steps ago."""
        if not self._history:
            return None
        r, width = alive.shape
        generations = self._started[0][:r]
        values, owners = self._history[-1]
        stale = torch.where((owners[:r] == generations)[:, None], values[:r], 1.0)
        for i in range(len(self._history) - 1, 0, -1):
            for older, newer in zip(self._history[i], self._history[i - 1]):
                older[:r] = newer[:r]
        values, owners = self._history[0]
        values[:r, :width] = alive
        values[:r, width:] = 0.0
        owners[:r] = generations
        return stale


def survival(tree: DraftTree, confidence: Tensor) -> Tensor:
    """Product of the confidences [R, n] on each node's path: [R, n] float32, see `Drafts.survival`. A confidence that
    is no number counts as 0."""
    alive = confidence.nan_to_num(0.0).clamp_(0.0, 1.0).mul_(tree.tokens >= 0).abs_()  # no -0.0
    alive[:, 0] = 1.0
    if tree.is_chain:
        # A parallel product may round upwards along a path.
        return alive.cumprod(1) if on_host(alive) else alive.cumprod(1).cummin(1).values
    above = tree.parents.clamp(min=0)
    below = alive
    for _ in range(tree.depth - 1):  # each node times its parent, from the root on: never above the parent's
        alive = torch.where(tree.parents > 0, below * alive.gather(1, above), below)
    return alive
