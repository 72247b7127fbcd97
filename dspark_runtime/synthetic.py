"""Synthetic acceptance: forced acceptance lengths, for timing. Not lossless; its text is never shown as text.

Only the number of accepted drafts is forced. Drafts and target tokens are the real ones, and the ids written to the
cache, fed to the drafter and emitted are one list. AL counts the bonus token: 1 + accepted drafts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from drafters.tree import DraftTree
from dspark_runtime.acceptance import Accepted, emit
from dspark_runtime.errors import ConfigError
from verify_kernels import ops, rng

LAWS = ("min_variance", "geometric")


@dataclass(frozen=True)
class SyntheticLaw:
    """How many drafts each step accepts. Made by `SyntheticLaw.make`.

    survival          unconditional rates: survival[i - 1] is the probability that at least i drafts are accepted
    trace             accepted drafts of recorded steps, replayed in order; None: draw from `survival`
    rank_frequencies  in a tree, how often the accepted child is number 0, 1, ... of its parent; None: always the first
    """

    name: str
    survival: tuple[float, ...]
    trace: tuple[int, ...] | None = None
    rank_frequencies: tuple[float, ...] | None = None
    _tensors: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def make(
        cls,
        depth: int,
        *,
        acceptance_length: float | None = None,
        law: str = "min_variance",
        rates: Sequence[float] | None = None,
        trace: str | Path | None = None,
        rank_frequencies: Sequence[float] | None = None,
    ) -> SyntheticLaw:
        """A law for trees of this depth, from exactly one of:

        - acceptance_length L, 1 to depth + 1, under law "min_variance" (rates [1] * floor(L - 1) + [frac] + [0] ..., as
          in vLLM) or "geometric" (rates rho^i, rho solved for the mean);
        - rates: `depth` unconditional acceptance rates, none above the one before;
        - trace: a JSON file {"accepted": [drafts of each step, ...]} or {"emitted": [accepted + 1, ...]}.
        """
        given = [
            name
            for name, value in (
                ("synthetic_acceptance_length", acceptance_length),
                ("synthetic_acceptance_rates", rates),
                ("synthetic_acceptance_trace", trace),
            )
            if value is not None
        ]
        if len(given) != 1:
            raise ConfigError(
                f"synthetic acceptance: found {' and '.join(given) or 'nothing'}, allowed: exactly one of "
                "synthetic_acceptance_length, synthetic_acceptance_rates, synthetic_acceptance_trace"
            )
        ranks = _rank_frequencies(rank_frequencies)
        if acceptance_length is not None:
            return cls(law, _rates_of_length(float(acceptance_length), depth, law), None, ranks)
        if rates is not None:
            return cls("rates", _checked_rates(rates, depth), None, ranks)
        steps = _read_trace(Path(trace), depth)
        survival = tuple(sum(a >= i for a in steps) / len(steps) for i in range(1, depth + 1))
        return cls("trace", survival, steps, ranks)

    @property
    def depth(self) -> int:
        return len(self.survival)

    def describe(self) -> str:
        """The stamp of every output of a synthetic run."""
        return f"SYNTHETIC AL {expected_length(self):.2f} ({self.name})"

    def on(self, what: str, device: torch.device) -> Tensor:
        """survival, trace or rank_frequencies on a device; kept there, so that a captured step copies nothing."""
        key = (what, device)
        if key not in self._tensors:
            dtype = torch.int64 if what == "trace" else torch.float64
            self._tensors[key] = torch.tensor(getattr(self, what), dtype=dtype, device=device)
        return self._tensors[key]


def expected_length(law: SyntheticLaw) -> float:
    """Mean tokens per step, the bonus token included."""
    return 1.0 + math.fsum(law.survival)


def _rates_of_length(length: float, depth: int, law: str) -> tuple[float, ...]:
    if law not in LAWS:
        raise ConfigError(f"synthetic_acceptance_law: found {law!r}, allowed: {', '.join(LAWS)}")
    if not 1 <= length <= depth + 1:
        raise ConfigError(
            f"synthetic_acceptance_length: found {length:g}, allowed: 1 to {depth + 1} (the bonus token included; "
            f"{depth} drafts deep)"
        )
    if law == "min_variance":
        return tuple(min(1.0, max(0.0, length - 1 - i)) for i in range(depth))
    low, high = 0.0, 1.0
    for _ in range(60):
        rho = (low + high) / 2
        low, high = (rho, high) if sum(rho**i for i in range(1, depth + 1)) < length - 1 else (low, rho)
    return tuple(high**i for i in range(1, depth + 1))


def _checked_rates(rates: Sequence[float], depth: int) -> tuple[float, ...]:
    if len(rates) != depth:
        raise ConfigError(f"synthetic_acceptance_rates: found {len(rates)} values, allowed: {depth}, one per depth")
    for i, rate in enumerate(rates):
        if not 0 <= rate <= 1:
            raise ConfigError(f"synthetic_acceptance_rates[{i}]: found {rate}, allowed: 0 to 1")
        if i and rate > rates[i - 1]:
            raise ConfigError(
                f"synthetic_acceptance_rates[{i}]: found {rate} after {rates[i - 1]}, allowed: no increase (rates are "
                "unconditional)"
            )
    return tuple(float(rate) for rate in rates)


def _rank_frequencies(frequencies: Sequence[float] | None) -> tuple[float, ...] | None:
    if frequencies is None:
        return None
    if not frequencies or any(not 0 <= f < math.inf for f in frequencies) or sum(frequencies) <= 0:
        raise ConfigError(f"rank_frequencies: found {list(frequencies)}, allowed: finite values >= 0, not all 0")
    return tuple(float(f) for f in frequencies)


def _read_trace(path: Path, depth: int) -> tuple[int, ...]:
    try:
        data = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"synthetic_acceptance_trace: cannot read {path}: {error}") from error
    keys = list(data) if isinstance(data, dict) else []
    if keys not in (["accepted"], ["emitted"]) or not isinstance(steps := data[keys[0]], list) or not steps:
        raise ConfigError(
            f'synthetic_acceptance_trace: {path} must hold {{"accepted": [...]}} or {{"emitted": [...]}}, not empty'
        )
    bonus = int(keys[0] == "emitted")
    for i, step in enumerate(steps):
        if type(step) is not int or not bonus <= step <= depth + bonus:
            raise ConfigError(
                f"synthetic_acceptance_trace: {keys[0]}[{i}]: found {step!r}, "
                f"allowed: integers {bonus} to {depth + bonus}"
            )
    return tuple(step - bonus for step in steps)


def accepted_drafts(law: SyntheticLaw, seeds: Tensor, steps: Tensor) -> Tensor:
    """Drafts to accept, [R] int64. seeds, steps [R] int64: steps counts the request's verify steps so far.

    One uniform u per request and step: the number of i with u < survival_i has the law of drawing the conditional rates
    survival_i / survival_{i-1} one after another. Under min_variance u is a golden-ratio sequence with a seeded start
    instead of independent draws, so that the mean over N steps is off by O(log N / N) and not O(1 / sqrt(N)). A trace
    is replayed from a seeded offset.
    """
    if law.trace is not None:
        start = rng.uniform(seeds, torch.zeros_like(seeds), rng.SYNTHETIC)
        trace = law.on("trace", seeds.device)
        return trace[((start * len(law.trace)).long() + steps) % len(law.trace)]
    return ops.synthetic_drafts(seeds, steps, law.on("survival", seeds.device), law.name == "min_variance")


def accept(tree: DraftTree, target_ids: Tensor, law: SyntheticLaw, seeds: Tensor, steps: Tensor) -> Accepted:
    """Keep as many drafts as the law says, or as many as the request's tree has; then the target's token.

    target_ids [R, n] int64: the target's token after each node. seeds, steps [R] int64: see `accepted_drafts`. In a
    tree, each accepted child is drawn by rank among those that can still reach the depth.
    """
    wanted = accepted_drafts(law, seeds, steps)
    is_chain = tree.is_chain and tree.width > tree.depth
    if is_chain or law.rank_frequencies is None:
        return Accepted(*ops.reach_tree(tree.tokens, tree.parents, target_ids, wanted, tree.depth, is_chain))
    path, kept, last = _walk_to(tree, wanted, law, seeds, steps)
    return emit(tree, path, kept, target_ids.gather(1, last[:, None]).squeeze(1))


def _walk_to(
    tree: DraftTree, wanted: Tensor, law: SyntheticLaw, seeds: Tensor, steps: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A path of `wanted` drafts, or to the deepest node, children drawn by the law's rank frequencies: path [R, depth + 1],
    drafts on it [R], last node [R]."""
    n = tree.width
    nodes = torch.arange(n, device=wanted.device)
    depths = torch.where(tree.tokens >= 0, tree.depths(), 0)
    reach = (tree.ancestors() * depths[:, :, None]).amax(1)  # deepest descendant of each node
    wanted = wanted.minimum(reach[:, 0])
    siblings = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (nodes[None, :] < nodes[:, None])
    ranks = siblings.sum(2)
    known = len(law.rank_frequencies)
    frequency = law.on("rank_frequencies", wanted.device)[ranks.clamp(max=known - 1)]
    weights = torch.where(ranks < known, frequency, 0.0)
    node = torch.zeros_like(wanted)
    path = [node]
    for depth in range(tree.depth):
        able = (tree.parents == node[:, None]) & (tree.tokens >= 0) & (reach >= wanted[:, None])
        share = torch.where(able, weights, 0.0)
        drawn = rng.sample(share, rng.uniform(seeds, steps, rng.SYNTHETIC, depth + 1))
        child = torch.where(share.sum(1) > 0, drawn, able.int().argmax(1))
        moving = depth < wanted
        node = torch.where(moving, child, node)
        path.append(torch.where(moving, node, -1))
    return torch.stack(path, 1), wanted, node
