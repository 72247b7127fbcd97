"""Acceptance rules: which drafts of a verified tree are kept, and which token follows them.

Every rule here emits tokens with exactly the target's distribution. All are tensor functions over padded trees; they
loop over the host-known depth or width only, so they run inside a CUDA graph.

Common arguments: `probs` [N, V] float32 is the target's distribution of each verified node (`sampling.target_probs`),
with node (r, j) in row rows[r, j]; rows [R, n] int64 may hold any index below N for padding nodes. seeds and counters
[R] int64 key the random draws: counters is the request's number of emitted tokens at the start of the step. A token
that is drawn, rather than drafted, uses the TARGET stream at its own output index, as plain decoding does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.tree import DraftTree, TreeSpec
from dspark_runtime.errors import ConfigError
from verify_kernels import ops, rng

_TINY = 1e-8
"""A residual lighter than this is rounding noise: the rejection that led to it has (almost) no probability."""


@dataclass
class Accepted:
    """What a step keeps. The distribution behind emitted token i is the logits row of node path[:, i].

    path         [R, depth + 1] int64   kept nodes, the root first; -1 beyond
    tokens       [R, depth + 1] int64   emitted: the accepted drafts, then the next token; -1 beyond
    num_emitted  [R] int64              1 to depth + 1; accepted drafts = num_emitted - 1
    """

    path: Tensor
    tokens: Tensor
    num_emitted: Tensor


def emit(tree: DraftTree, path: Tensor, num_accepted: Tensor, next_tokens: Tensor) -> Accepted:
    """The drafts on a path (path [R, depth + 1], -1 padded) followed by one more token (next_tokens [R])."""
    following = torch.cat([path[:, 1:], torch.full_like(path[:, :1], -1)], 1)
    drafts = torch.where(following >= 0, tree.tokens.gather(1, following.clamp(min=0)), -1)
    return Accepted(path, drafts.scatter(1, num_accepted[:, None], next_tokens[:, None]), num_accepted + 1)


def chain_path(tree: DraftTree, num_accepted: Tensor) -> Tensor:
    """[R, depth + 1]: nodes 0 to num_accepted of a chain, then -1."""
    nodes = torch.arange(tree.depth + 1, device=num_accepted.device)
    return torch.where(nodes <= num_accepted[:, None], nodes, -1)


def greedy(tree: DraftTree, target_ids: Tensor) -> Accepted:
    """Keep drafts while they equal the target's choice. target_ids [R, n] int64: the choice after each node."""
    is_chain = tree.is_chain and tree.width > tree.depth
    return Accepted(*ops.follow_tree(tree.tokens, tree.parents, target_ids, tree.depth, is_chain))


def node_sampling(tree: DraftTree, probs: Tensor, rows: Tensor, seeds: Tensor, counters: Tensor) -> Accepted:
    """Draw from the target at each node and follow the draw while a child carries it (fact sheet §4.3, rule N).

    Lossless for any tree that was chosen without looking at the target's randomness, and coupled: the emitted tokens
    are those of plain sampling with the same seed.
    """
    u = rng.uniform(seeds[:, None], counters[:, None] + tree.depths(), rng.TARGET)
    # By flat row, so that the distributions are not copied into the padded layout; all nodes at once, because a walk that
    # draws where it stands waits for itself at every depth.
    total = probs.shape[0]
    owned = torch.where(tree.tokens >= 0, rows, total)
    u = u.new_zeros(total + 1).scatter(0, owned.flatten(), u.flatten())[:total]
    return greedy(tree, rng.sample(probs, u)[rows])


def _drafted(tree: DraftTree, probs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts of a chain: real [R, depth] bool (prefix-closed), their target and their draft probability float64."""
    depth = tree.depth
    drafts = tree.tokens[:, 1 : depth + 1]
    real = (drafts >= 0).cumprod(1).bool()
    ids = drafts.clamp(min=0)
    p = probs[rows[:, :depth], ids].double()
    if tree.probs is None:
        return real, p, torch.ones_like(p)
    return real, p, tree.probs[:, :depth].gather(2, ids[..., None]).squeeze(2).double()


def _end_chain(
    tree: DraftTree, probs: Tensor, rows: Tensor, seeds: Tensor, counters: Tensor, kept: Tensor, weight: Tensor | None
) -> Accepted:
    """Draw the token after `kept` [R] accepted drafts of a chain.

    From norm(max(weight * p - q, 0)) if a draft follows there (it was rejected), from p if none does.
    """
    at = kept[:, None]
    p = probs[rows.gather(1, at).squeeze(1)]
    following = torch.cat([tree.tokens[:, 1 : tree.depth + 1], torch.full_like(at, -1)], 1).gather(1, at)
    if tree.probs is None:  # max(weight * p - point mass, 0) is weight * p without that token
        residual = p.scatter(1, following.clamp(min=0), 0.0)
    else:
        q = tree.probs[torch.arange(p.shape[0], device=p.device), kept]
        residual = ((p if weight is None else p * weight[:, None]) - q).clamp(min=0.0)
    use_residual = (following >= 0) & (residual.sum(1, keepdim=True) > _TINY)
    token = rng.sample(torch.where(use_residual, residual, p), rng.uniform(seeds, counters + kept, rng.TARGET))
    return emit(tree, chain_path(tree, kept), kept, token)


def chain_rejection(tree: DraftTree, probs: Tensor, rows: Tensor, seeds: Tensor, counters: Tensor) -> Accepted:
    """Token-level rejection on a chain (Leviathan et al. 2023; drafters fact sheet §2.1).

    Draft d is accepted with probability min(1, p(d) / q(d)); the first rejected one is replaced by a draw from
    norm(max(p - q, 0)). Without `tree.probs` every draft counts as a point mass, so a rejected draft leaves p.
    """
    real, p, q = _drafted(tree, probs, rows)
    u = rng.uniform(seeds[:, None], counters[:, None], rng.ACCEPT, torch.arange(tree.depth, device=rows.device))
    kept = (real & (u * q < p)).cumprod(1).sum(1)
    return _end_chain(tree, probs, rows, seeds, counters, kept, None)


def block_stops(tree: DraftTree, probs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification's weights w and acceptance probabilities h of each prefix length, both [R, depth + 1] float64.

    w_0 = 1, w_i = min(1, w_{i-1} p(x_i) / q(x_i)). With m_i = sum over x of max(w_i p(x) - q(x), 0) at node i,
    h_i = m_i / (m_i + 1 - w_i) before the end of the block and h_i = w_i at its end, which is the request's own number
    of drafts. h_0 = 1; h is 0 beyond the block. Where m_i = 1 - w_i = 0, draft and target agree: no stop is needed.
    """
    real, p, q = _drafted(tree, probs, rows)
    w = [torch.ones_like(counts := real.sum(1), dtype=torch.float64)]
    for i in range(tree.depth):
        w.append((w[-1] * p[:, i] / q[:, i]).clamp(max=1.0))
    weights = torch.stack(w, 1)
    inner = weights[:, :-1]
    if tree.probs is None:
        mass = inner * (1 - p)
    else:
        target = probs[rows[:, : tree.depth]]
        mass = (target * inner[..., None].float() - tree.probs[:, : tree.depth]).clamp(min=0.0).sum(2).double()
    total = mass + 1 - inner
    h = torch.where(total > 0, mass / total.masked_fill(total <= 0, 1.0), 0.0)
    lengths = torch.arange(tree.depth + 1, device=rows.device)
    h = torch.cat([h, torch.zeros_like(weights[:, :1])], 1).masked_fill(lengths >= counts[:, None], 0.0)
    h = torch.where(lengths == counts[:, None], weights, h)
    return weights, torch.where(lengths == 0, 1.0, h)


def block_verification(tree: DraftTree, probs: Tensor, rows: Tensor, seeds: Tensor, counters: Tensor) -> Accepted:
    """Block verification of a chain: judges prefixes by their joint ratio (Sun et al. 2024, arXiv 2403.10444).

    The longest prefix whose own draw falls below its h (see `block_stops`) is kept; the next token comes from
    norm(max(w p - q, 0)), or from p after a whole block. On average it keeps at least as much as `chain_rejection`.
    """
    weights, h = block_stops(tree, probs, rows)
    lengths = torch.arange(tree.depth + 1, device=rows.device)
    u = rng.uniform(seeds[:, None], counters[:, None], rng.ACCEPT, lengths)
    kept = torch.where(u < h, lengths, 0).amax(1)
    weight = weights.gather(1, kept[:, None]).squeeze(1).float()
    return _end_chain(tree, probs, rows, seeds, counters, kept, weight)


def _worth_trying(trial: Tensor) -> Tensor | slice | None:
    """The requests that `tree_rejection` computes at a node: on a CPU, where reading is free, those at its parent alone."""
    if trial.device.type != "cpu":
        return slice(None)
    at = trial.nonzero().squeeze(1)
    return at if len(at) else None


def tree_rejection(tree: DraftTree, probs: Tensor, rows: Tensor, seeds: Tensor, counters: Tensor) -> Accepted:
    """Recursive rejection, children drawn without replacement (Sequoia; drafters fact sheet §4.3, rules S and E).

    The children of the current node are tried in index order, which is the order they were drawn in: accept x with
    probability min(1, p(x) / q(x)), else p <- norm(max(p - q, 0)), q(x) <- 0, renormalise q. A child that q cannot have
    produced (no `tree.probs`, or q exhausted by the siblings before it) is a point mass: accept it with probability
    p(x), else p(x) <- 0.
    """
    r, n = tree.tokens.shape
    u = rng.uniform(seeds[:, None], counters[:, None], rng.ACCEPT, torch.arange(n, device=rows.device))
    columns = torch.arange(tree.depth + 1, device=rows.device)
    node = torch.zeros_like(tree.num_nodes)
    kept = torch.zeros_like(node)
    path = torch.where(columns == 0, 0, -1).repeat(r, 1)
    p = probs[rows[:, 0]]
    q = None if tree.probs is None else tree.probs[:, 0].clone()
    for j in range(1, n):  # a parent comes before its children, so one pass in index order meets every child in turn
        trial = (tree.parents[:, j] == node) & (tree.tokens[:, j] >= 0)
        at = _worth_trying(trial)
        if at is None:
            continue
        trial, ids = trial[at], tree.tokens[at, j].clamp(min=0)[:, None]
        pj = p[at]
        px = pj.gather(1, ids).squeeze(1)
        qj = None if q is None else q[at]
        qx = torch.zeros_like(px) if qj is None else qj.gather(1, ids).squeeze(1)
        accept = trial & (u[at, j] * torch.where(qx > 0, qx, 1.0).double() < px)
        reject = (trial & ~accept)[:, None]

        residual = pj if qj is None else (pj - qj * (qx > 0)[:, None]).clamp(min=0.0)
        residual = residual.scatter(1, ids, 0.0)
        mass = residual.sum(1, keepdim=True)
        pj = torch.where(reject & (mass > _TINY), residual / mass.clamp(min=_TINY), pj)
        p[at] = torch.where(accept[:, None], probs[rows[at, j]], pj)
        if qj is not None:
            rest = qj.scatter(1, ids, 0.0)
            mass = rest.sum(1, keepdim=True)
            qj = torch.where(reject, rest / mass.masked_fill(mass == 0, 1.0), qj)
            q[at] = torch.where(accept[:, None], tree.probs[at, j], qj)
        node[at] = torch.where(accept, j, node[at])
        kept[at] += accept
        path[at] = torch.where(accept[:, None] & (columns == kept[at, None]), j, path[at])
    return emit(tree, path, kept, rng.sample(p, rng.uniform(seeds, counters + kept, rng.TARGET)))


class Rule(NamedTuple):
    """accept(tree, probs, rows, seeds, counters) -> Accepted, and what it needs of the tree."""

    accept: Callable[[DraftTree, Tensor, Tensor, Tensor, Tensor], Accepted]
    needs_chain: bool = False
    needs_probs: bool = False


RULES: dict[str, Rule] = {
    "standard": Rule(chain_rejection, needs_chain=True),
    "block": Rule(block_verification, needs_chain=True),
    "node": Rule(node_sampling),
    "tree": Rule(tree_rejection, needs_probs=True),
}


def choose_rule(method: str, spec: TreeSpec, drafter_samples: bool) -> str:
    """The name in RULES that verifies trees of this shape. drafter_samples: `DraftTree.probs` will be set.

    "auto" takes "node" for deterministic drafts (the law of rejection, coupled to plain sampling), and for sampled ones
    "standard" on a chain, "tree" otherwise. Raises ConfigError for a rule that the shape or the drafter does not allow.
    """
    if method == "auto":
        return "node" if not drafter_samples else "standard" if spec.is_chain else "tree"
    if method not in RULES:
        raise ConfigError(f"rejection_sample_method: found {method!r}, allowed: auto, {', '.join(RULES)}")
    rule = RULES[method]
    if rule.needs_chain and not spec.is_chain:
        raise ConfigError(
            f"rejection_sample_method: found {method!r} with a tree that branches, allowed: auto, node"
            + (", tree" if drafter_samples else "")
        )
    if rule.needs_probs and not drafter_samples:
        raise ConfigError(
            f"rejection_sample_method: found {method!r} with drafts that carry no probabilities, allowed: auto, "
            + ("standard, block, node" if spec.is_chain else "node")
        )
    return method
