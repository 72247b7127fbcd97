"""One draft-and-verify step as tensor code: draft, schedule, verify, accept, commit.

Nothing here reads the device back to the host (on a CPU, where reading is free, ragged trees are flattened without
padding), so on CUDA the whole step is one capturable graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.base import BatchState, Drafter
from drafters.tree import DraftTree, TreeSpec
from dspark_runtime import acceptance, sampling
from dspark_runtime.acceptance import Accepted
from dspark_runtime.models.base import Model
from dspark_runtime.scheduling.scheduler import Scheduler
from dspark_runtime.synthetic import SyntheticLaw
from dspark_runtime.synthetic import accept as synthetic_accept
from verify_kernels import ops, rng
from verify_kernels.batch import KVCache, PassBatch


@dataclass
class Verified:
    """What the target says about every node. rows [R, n]: the flat row of node (r, j)."""

    rows: Tensor
    target_ids: Tensor  # [R, n] arg-max at each node
    best_logits: Tensor  # [R, n] its logit; not finite where the target is broken
    logits: Tensor | None  # [N, V] where the rule or a log-probability needs them
    features: Tensor | None  # [N, taps * H]


@dataclass
class StepResult:
    """One int64 tensor for one copy to the host: [R, depth + 5]: emitted tokens (-1 beyond), then number emitted,
    number of nodes, whether the target's logits were broken, and an out-of-vocabulary draft (-1 for none)."""

    packed: Tensor
    logprobs: tuple[Tensor, Tensor, Tensor] | None  # of the chosen [R, d+1]; best ids, their values [R, d+1, k]
    confidence: Tensor | None  # of every node [R, n], see `DraftTree`; stays on the device unless it is asked for
    experts: list[Tensor]  # ids of every verified token and MoE layer, see `PassBatch`; stay there too


def draft(drafter: Drafter | None, state: BatchState, spec: TreeSpec, sample: bool) -> DraftTree:
    """The trees of this step; only roots without a drafter."""
    if drafter is None:
        return DraftTree.from_spec(TreeSpec.chain(0), state.roots[:, None])
    return drafter.propose(state, spec, sample)


def fill(tree: DraftTree, state: BatchState, spec: TreeSpec) -> DraftTree:
    """Synthetic runs verify the whole requested shape: a drafter's short or missing proposals are replaced by the
    static topology filled up with copies of the root, so that the work is what was asked for."""
    short = spec.num_nodes - tree.width
    tokens = F.pad(tree.tokens, (0, short), value=-1) if short > 0 else tree.tokens[:, : spec.num_nodes]
    parents = spec.parents_on(tokens.device).expand_as(tokens)
    if not spec.is_chain and short <= 0:  # a tree that filled the budget keeps the shape it grew
        whole = (tree.num_nodes >= spec.num_nodes)[:, None]
        parents = torch.where(whole, tree.parents[:, : spec.num_nodes], parents)
    tokens = torch.where(tokens >= 0, tokens, state.roots[:, None])
    full = torch.full_like(tree.num_nodes, spec.num_nodes)
    filled = DraftTree(tokens, parents, full, spec.depth, spec.is_chain, tree.probs, tree.confidence)
    return filled.limit(state.max_drafts)


def flatten(tree: DraftTree, state: BatchState, page_size: int, vocab_size: int) -> tuple[PassBatch, Tensor, Tensor]:
    """The verify pass of a batch of trees, the flat row of every node [R, n], and each request's draft outside the
    vocabulary [R] (-1 for none), which the tree is rid of."""
    r, n = tree.tokens.shape
    device = tree.tokens.device
    counts = tree.num_nodes.tolist() if device.type == "cpu" else None
    placed = ops.place_tree(
        tree.tokens, tree.parents, state.seq_lens, state.page_table, page_size, tree.depth, vocab_size, tree.is_chain
    )
    tree.tokens = placed.tokens
    flat = (placed.token_ids, placed.positions, placed.slots, placed.masks)
    if counts is not None and max(counts) < n:
        n = max(counts)
        flat = tuple(None if x is None else x[:, :n] for x in flat)
    if counts is None or min(counts) == n:
        offsets, rows = _uniform(r, n, device)
        flat = tuple(None if x is None else x.reshape(-1) for x in flat)
    else:
        local = torch.arange(n, device=device)
        valid = local < tree.num_nodes[:, None]
        flat = tuple(None if x is None else x[valid] for x in flat)
        ends = tree.num_nodes.cumsum(0)
        offsets = torch.cat((ends.new_zeros(1), ends)).to(torch.int32)
        rows = torch.minimum(offsets[:-1, None] + local, (ends - 1)[:, None]).long()
    if rows.shape[1] < tree.width:
        rows = torch.cat((rows, rows[:, -1:].expand(-1, tree.width - rows.shape[1])), 1)
    token_ids, positions, slots, masks = flat
    batch = PassBatch(
        token_ids=token_ids,
        positions=positions,
        request_offsets=offsets,
        context_lens=placed.context,
        page_table=state.page_table,
        slot_mapping=slots,
        ancestor_masks=masks,
        max_query_len=n,
        max_kv_len=state.max_seq_len - 1 + n,
        state_rows=state.state_rows,
        speculative=True,
    )
    return batch, rows, placed.worst


@lru_cache(maxsize=256)
def _uniform(r: int, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Offsets [R + 1] int32 and flat rows [R, n] int64 of n nodes each; nobody writes to them."""
    offsets = torch.arange(r + 1, device=device, dtype=torch.int32) * n
    return offsets, torch.arange(r * n, device=device).view(r, n)


def verify(
    model: Model, cache: KVCache, batch: PassBatch, rows: Tensor, taps: tuple[int, ...], keep_logits: bool
) -> Verified:
    """One pass of the target over all nodes."""
    hidden, features = model.forward(batch, cache, taps)
    if keep_logits:
        logits = model.logits(hidden)
        best, ids = logits.max(dim=-1)
    else:
        logits = None
        ids, best = model.greedy(hidden)
    # As many rows as nodes are one each, in order.
    ids, best = (x.view(rows.shape) if x.shape[0] == rows.numel() else x[rows] for x in (ids, best))
    return Verified(rows, ids, best, logits, features)


def accept(
    tree: DraftTree,
    state: BatchState,
    verified: Verified,
    params: sampling.SamplingState,
    rule: str,
    law: SyntheticLaw | None,
    steps: Tensor,
) -> Accepted:
    """The accepted path and next token of each request.

    Greedy batches compare arg-max ids. Otherwise `rule` names an entry of `acceptance.RULES`. A synthetic law replaces
    the decision, not the work: the target's choice at every node is made all the same and is emitted after the path.
    """
    if params.all_greedy:
        if law is None:
            return acceptance.greedy(tree, verified.target_ids)
        return synthetic_accept(tree, verified.target_ids, law, state.seeds, steps)
    probs = sampling.target_probs(verified.logits, params, state, tree, verified.rows)
    if law is None:
        return acceptance.RULES[rule].accept(tree, probs, verified.rows, state.seeds, state.num_outputs)
    u = rng.uniform(state.seeds[:, None], state.num_outputs[:, None] + tree.depths(), rng.TARGET)
    return synthetic_accept(tree, rng.sample(probs[verified.rows], u), law, state.seeds, steps)


def commit(accepted: Accepted, tree: DraftTree, state: BatchState, caches: list[KVCache]) -> None:
    """Make the accepted path's cache entries contiguous, and move recurrent states past it."""
    for cache in caches:
        if not tree.is_chain:
            ops.commit_path(cache, state.page_table, state.context_lens, accepted.path)
        if (states := cache.states) is not None:
            records, states.records = states.records, []
            ops.commit_states(
                states.state, states.window, records, state.state_rows, state.context_lens, accepted.path
            )


def decode(
    model: Model,
    cache: KVCache,
    drafter: Drafter | None,
    state: BatchState,
    params: sampling.SamplingState,
    spec: TreeSpec,
    rule: str,
    law: SyntheticLaw | None,
    scheduler: Scheduler | None,
    steps: Tensor,
    sample_drafts: bool,
    num_logprobs: int | None,
    mark: Callable[[str], None],
) -> StepResult:
    """The whole step on tensors. `mark(phase)` is called as each phase ends; scheduling counts as drafting."""
    tree = draft(drafter, state, spec, sample_drafts)
    if law is not None:
        tree = fill(tree, state, spec)
    if scheduler is not None:
        tree = scheduler.schedule(tree, state)
    mark("draft")

    batch, rows, worst = flatten(tree, state, cache.page_size, model.vocab_size)
    taps = drafter.taps if drafter is not None else ()
    keep = num_logprobs is not None or not params.all_greedy
    verified = verify(model, cache, batch, rows, taps, keep)
    mark("verify")

    accepted = accept(tree, state, verified, params, rule, law, steps)
    if scheduler is not None:
        scheduler.observe(tree, accepted)
    logprobs = None
    if num_logprobs is not None:
        chosen = verified.logits[rows.gather(1, accepted.path.clamp(min=0)).flatten()]
        found = sampling.logprobs_of(chosen, accepted.tokens.clamp(min=0).flatten(), num_logprobs)
        logprobs = tuple(x.view(*accepted.tokens.shape, *x.shape[1:]) for x in found)
    if drafter is not None:
        features = None
        if verified.features is not None:
            features = verified.features[rows.gather(1, accepted.path.clamp(min=0))]
        drafter.observe(state, features, accepted.num_emitted)
    caches = [cache] if drafter is None or drafter.kv is None else [cache, drafter.kv]
    commit(accepted, tree, state, caches)
    packed = ops.commit_tokens(
        state.tokens, state.seq_lens, state.num_outputs, steps, accepted.tokens, accepted.num_emitted, tree.num_nodes,
        verified.best_logits, worst,
    )  # fmt: skip
    mark("accept")
    return StepResult(packed, logprobs, tree.confidence, batch.experts)
