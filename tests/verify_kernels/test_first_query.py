"""`PassBatch.first_query`: a pass whose earlier new tokens are in the cache equals those rows of the whole pass."""

from __future__ import annotations

import pytest
import torch

from drafters.tree import DraftTree, TreeSpec
from verify_kernels.batch import KVCache, PassBatch, slots_of
from verify_kernels.reference.attention import paged_tree_attention, plan_attention

TREE = TreeSpec((-1, 0, 0, 1, 1, 2, 3, 3))
CONTEXT = [0, 5, 11]
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 8, 4


def parts(spec: TreeSpec, masked: bool, first: int, last: int) -> tuple[torch.Tensor, KVCache, PassBatch]:
    """Queries [R, n, HEADS, DIM] float64, a full cache, and the pass over nodes first .. last - 1."""
    g = torch.Generator().manual_seed(3)
    r, n = len(CONTEXT), spec.num_nodes
    context = torch.tensor(CONTEXT)
    # Seven pages per request, shuffled. Every key holds noise, so one too many or too few shows.
    table = (torch.randperm(3 * 7, generator=g) + 1).view(r, 7).to(torch.int32)
    cache = KVCache.allocate(1, 3 * 7 + 1, PAGE, KV_HEADS, DIM, torch.float64, "cpu")
    cache.k.normal_(generator=g)
    cache.v.normal_(generator=g)
    q = torch.randn(r, n, HEADS, DIM, generator=g, dtype=torch.float64)
    masks, depths = DraftTree.from_spec(spec, torch.zeros(r, n, dtype=torch.int64)).masks_and_depths()
    if not masked:
        depths = torch.arange(n).expand(r, n)
    nodes = torch.arange(first, last)
    width = last - first
    batch = PassBatch(
        token_ids=torch.zeros(r * width, dtype=torch.int64),
        positions=(context[:, None] + depths[:, first:last]).reshape(-1),
        request_offsets=torch.arange(r + 1, dtype=torch.int32) * width,
        context_lens=context.to(torch.int32),
        page_table=table,
        slot_mapping=slots_of(table, context[:, None] + nodes, PAGE).reshape(-1),
        ancestor_masks=masks[:, first:last].reshape(-1) if masked else None,
        max_query_len=width,
        max_kv_len=max(CONTEXT) + last,
        first_query=first,
    )
    return q[:, first:last].reshape(r * width, HEADS, DIM), cache, batch


def attend(spec: TreeSpec, masked: bool, first: int, last: int) -> torch.Tensor:
    q, cache, batch = parts(spec, masked, first, last)
    out = paged_tree_attention(q, cache.k[0], cache.v[0], batch, scale=0.3)
    return out.view(len(CONTEXT), last - first, HEADS, DIM)


@pytest.mark.parametrize("first, last", [(0, 1), (1, 3), (3, 6), (6, 8), (2, 8)])
@pytest.mark.parametrize("spec, masked", [(TREE, True), (TreeSpec.chain(7), True), (TreeSpec.chain(7), False)])
def test_a_level_sees_what_it_sees_in_the_whole_pass(spec: TreeSpec, masked: bool, first: int, last: int) -> None:
    whole = attend(spec, masked, 0, spec.num_nodes)
    torch.testing.assert_close(attend(spec, masked, first, last), whole[:, first:last], rtol=0, atol=1e-12)


def test_visible_keys_are_the_context_and_the_ancestors() -> None:
    _, _, batch = parts(TREE, True, 3, 6)
    visible = plan_attention(batch, PAGE).visible
    above = {3: [0, 1, 3], 4: [0, 1, 4], 5: [0, 2, 5]}
    for r, context in enumerate(CONTEXT):
        for node, ancestors in above.items():
            want = [*range(context), *(context + a for a in ancestors)]
            assert visible[r, node - 3].nonzero().flatten().tolist() == want


def test_a_window_is_refused() -> None:
    _, _, batch = parts(TREE, True, 1, 3)
    with pytest.raises(ValueError, match="window: found 8 with first_query 1"):
        plan_attention(batch, PAGE, window=8)
