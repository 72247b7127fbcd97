"""Draft trees as tensors: masks, pruning, where their nodes go, which of them are accepted, what a step commits.

Trees of R requests are padded to n nodes: tokens [R, n] int64 (-1 beyond a request's nodes), parents [R, n] int64 (-1
for the root, node 0, and beyond). A parent comes before its children; n is at most 64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from verify_kernels import rng
from verify_kernels.batch import SCRATCH_PAGE, slots_of

GOLDEN = 0.6180339887498949
"""(sqrt(5) - 1) / 2: its multiples modulo 1 fill the unit interval evenly."""


class Placed(NamedTuple):
    """Where the nodes of R trees go in one verify pass, all [R, n] but context and worst.

    tokens      int64   the drafts, those outside the vocabulary replaced by its last id; -1 for padding
    token_ids   int64   the same, 0 for padding
    positions   int64   context + depth
    slots       int64   cache slots; the scratch page's for padding
    masks       int64   see `tree_masks`; None for chains
    context     [R] int32   tokens in the cache
    worst       [R] int64   a draft outside the vocabulary, -1 for none
    """

    tokens: Tensor
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    masks: Tensor | None
    context: Tensor
    worst: Tensor


def bits(count: int, device: torch.device) -> Tensor:
    """1 << i, [count] int64."""
    return torch.ones((), dtype=torch.int64, device=device) << torch.arange(count, device=device)


def tree_masks(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Ancestor masks [R, n] int64 (bit j of node i: j is i or an ancestor of i) and depths [R, n] int64.

    depth: at least the longest path. Padding has depth 0; its masks mean nothing.
    """
    r, n = parents.shape
    jump = torch.where(parents >= 0, parents, torch.arange(n, device=parents.device))
    masks = bits(n, parents.device).expand(r, -1)
    depths = (parents >= 0).long()
    for _ in range(depth.bit_length()):  # each round doubles how far up a node has looked
        masks = masks | masks.gather(1, jump)
        depths = depths + depths.gather(1, jump)
        jump = jump.gather(1, jump)
    return masks, depths


def prune_tree(tokens: Tensor, parents: Tensor, keep: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tree of the kept nodes, moved to the front in their order; keep [R, n] bool. A node whose parent is dropped
    is dropped with it; the root stays.

    -> (tokens [R, n], parents [R, n], number of nodes [R], order [R, n]: the old index at each new one), all int64.
    """
    n = tokens.shape[1]
    keep = keep & (tokens >= 0) | (torch.arange(n, device=keep.device) == 0)
    kept = (keep * bits(n, keep.device)).sum(1, keepdim=True)
    keep = tree_masks(parents, depth)[0] & ~kept == 0  # a lost ancestor takes its descendants along
    order = (~keep).to(torch.int8).argsort(dim=1, stable=True)
    new_index = keep.cumsum(1) - 1
    count = keep.sum(1)
    inside = torch.arange(n, device=keep.device) < count[:, None]
    above = new_index.gather(1, parents.clamp(min=0)).masked_fill(parents < 0, -1)
    tokens, parents = (torch.where(inside, x.gather(1, order), -1) for x in (tokens, above))
    return tokens, parents, count, order


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
    """The verify pass of a batch of trees. seq_lens [R] int64 counts the root; page_table [R, P] int32."""
    worst = tokens.amax(1)
    worst = torch.where(worst >= vocab_size, worst, -1)
    tokens = tokens.clamp(max=vocab_size - 1)
    local = torch.arange(tokens.shape[1], device=tokens.device)
    masks, depths = (None, torch.where(parents >= 0, local, 0)) if is_chain else tree_masks(parents, depth)
    context = seq_lens - 1
    real = tokens >= 0
    index = torch.where(real, context[:, None] + local, 0)
    slots = torch.where(real, slots_of(page_table, index, page_size), SCRATCH_PAGE)
    return Placed(tokens, tokens.clamp(min=0), context[:, None] + depths, slots, masks, context.int(), worst)


def place_block(
    seq_lens: Tensor, page_table: Tensor, width: int, page_size: int, max_positions: int, kept: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`width` new tokens in a row behind each request's context of seq_lens - 1 [R] int64 tokens.

    kept [R] int64: the first so many are written, the others go to the scratch page; None: all. Positions stop at the
    last one below max_positions, slots at the page table's end.
    -> (positions [R * width] int64, slots [R * width] int64, context [R] int32)
    """
    context = seq_lens - 1
    local = torch.arange(width, device=seq_lens.device)
    logical = context[:, None] + local
    slots = slots_of(page_table, logical.clamp(max=page_table.shape[1] * page_size - 1), page_size)
    if kept is not None:
        slots = torch.where(local < kept[:, None], slots, SCRATCH_PAGE * page_size)
    return logical.clamp(max=max_positions - 1).flatten(), slots.flatten(), context.int()


def follow_tree(
    tokens: Tensor, parents: Tensor, choices: Tensor, depth: int, is_chain: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk from the root for as long as a child carries the choice at its parent. choices [R, n] int64, after each
    node.

    is_chain: every node's parent is the node before it, and n > depth.
    -> (path [R, depth + 1]: nodes, emitted [R, depth + 1]: their choices, both -1 beyond; number emitted [R]), int64.
    """
    if is_chain:
        kept = (tokens[:, 1 : depth + 1] == choices[:, :depth]).cumprod(1).sum(1)
        path = _chain_path(kept, depth)
        return path, torch.where(path >= 0, choices[:, : depth + 1], -1), kept + 1
    node = torch.zeros_like(parents[:, 0])
    alive = torch.ones_like(node, dtype=torch.bool)
    token = choices[:, 0]
    path, emitted = [node], [token]
    for _ in range(depth):
        # The first matching child, or 0, which is nobody's child. No choice is -1, so padding never matches.
        child = ((parents == node[:, None]) & (tokens == token[:, None])).int().argmax(1)
        alive = alive & (child > 0)
        node = torch.where(alive, child, node)
        token = choices.gather(1, node[:, None]).squeeze(1)
        path.append(torch.where(alive, node, -1))
        emitted.append(torch.where(alive, token, -1))
    kept = torch.stack(path, 1)
    return kept, torch.stack(emitted, 1), (kept >= 0).sum(1)


def synthetic_drafts(seeds: Tensor, steps: Tensor, survival: Tensor, even: bool) -> Tensor:
    """Drafts to accept, [R] int64: how many of survival [depth] float64 exceed one uniform draw a request and step.

    seeds, steps [R] int64. even: draws are a golden-ratio sequence with a seeded start instead of independent.
    """
    if even:
        u = (rng.uniform(seeds, torch.zeros_like(seeds), rng.SYNTHETIC) + steps.double() * GOLDEN) % 1.0
    else:
        u = rng.uniform(seeds, steps, rng.SYNTHETIC)
    return (u[:, None] < survival).sum(1)


def _chain_path(kept: Tensor, depth: int) -> Tensor:
    nodes = torch.arange(depth + 1, device=kept.device)
    return torch.where(nodes <= kept[:, None], nodes, -1)


def reach_tree(
    tokens: Tensor, parents: Tensor, choices: Tensor, wanted: Tensor, depth: int, is_chain: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept `wanted` [R] int64 drafts whatever they are, or as many as the deepest path has: at each node the first
    child that still reaches the depth. What is emitted: the drafts of the path, then the choice at its end.

    is_chain and what is returned: as `follow_tree`.
    """
    if is_chain:
        wanted = wanted.minimum((tokens[:, 1 : depth + 1] >= 0).cumprod(1).sum(1))
        path, last = _chain_path(wanted, depth), choices.gather(1, wanted[:, None])
        drafts = torch.nn.functional.pad(tokens[:, 1 : depth + 1], (0, 1), value=-1)
        within = torch.arange(depth + 1, device=tokens.device) < wanted[:, None]
        return path, torch.where(within, drafts, -1).scatter(1, wanted[:, None], last), wanted + 1
    masks, depths = tree_masks(parents, depth)
    depths = torch.where(tokens >= 0, depths, 0)
    ancestors = (masks[:, :, None] >> torch.arange(tokens.shape[1], device=tokens.device)) & 1
    reach = (ancestors * depths[:, :, None]).amax(1)  # deepest descendant of each node
    wanted = wanted.minimum(reach[:, 0])
    node = torch.zeros_like(wanted)
    path, emitted = [node], []
    for d in range(depth):
        able = (parents == node[:, None]) & (tokens >= 0) & (reach >= wanted[:, None])
        child = able.int().argmax(1)
        moving = d < wanted
        node = torch.where(moving, child, node)
        path.append(torch.where(moving, node, -1))
        emitted.append(torch.where(moving, tokens.gather(1, node[:, None]).squeeze(1), -1))
    emitted.append(torch.full_like(node, -1))
    last = choices.gather(1, node[:, None])
    return torch.stack(path, 1), torch.stack(emitted, 1).scatter(1, wanted[:, None], last), wanted + 1


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
    """Append what a step emitted, [R, depth + 1] int64 (-1 beyond), to history [R, L] int64, whose last column takes
    the padding, and count it in seq_lens, num_outputs and steps [R] int64, in place.

    best_logits [R, n] float32: of the first num_nodes [R] nodes, not finite where the target is broken.
    -> for the host, [R, depth + 5] int64: emitted, then number emitted, number of nodes, broken or not, worst.
    """
    live = torch.arange(best_logits.shape[1], device=history.device) < num_nodes[:, None]
    broken = (~torch.isfinite(best_logits) & live).any(1)
    where = seq_lens[:, None] + torch.arange(emitted.shape[1], device=history.device)
    history.scatter_(1, torch.where(emitted >= 0, where, history.shape[1] - 1), emitted)
    packed = torch.cat((emitted, torch.stack((num_emitted, num_nodes, broken.long(), worst), dim=1)), dim=1)
    seq_lens += num_emitted
    num_outputs += num_emitted
    steps += 1
    return packed
