"""The two passes of a training step: the target over packed rows, and every block of the step at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.dspark.network import DraftNetwork
from training.data import Packed
from verify_kernels import ops
from verify_kernels.batch import PassBatch, slots_of
from verify_kernels.reference.elementwise import rope

PAGE_SIZE = 16


@dataclass
class Step:
    """One step's data on the device. B rows of S tokens, A anchors in each.

    tokens, documents, positions [B, S] int64; anchors [B, A] int64 (places in the row, sorted); labels [B, A, γ] int64;
    supervised [B, A, γ] bool: the label belongs to the anchor's conversation, and the anchor is no filler.
    """

    tokens: Tensor
    documents: Tensor
    positions: Tensor
    anchors: Tensor
    labels: Tensor
    supervised: Tensor


def choose(packed: Packed, rows: np.ndarray, anchors: int, block_size: int, seed: tuple[int, ...], device: torch.device) -> Step:
    """A step from packed rows: `anchors` distinct places a row, uniformly at random. Pure in `seed`."""
    draw = np.random.default_rng(seed)
    scores = draw.random((len(rows), packed.tokens.shape[1])) - ~packed.anchors[rows] * 2.0  # fillers come last
    places = np.sort(np.argpartition(-scores, anchors - 1, axis=1)[:, :anchors], axis=1)
    real = np.take_along_axis(packed.anchors[rows], places, 1)
    ahead = places[..., None] + 1 + np.arange(block_size)
    left = np.take_along_axis(packed.remaining[rows], places, 1)[..., None]
    supervised = real[..., None] & (np.arange(block_size) < left)
    ahead = np.minimum(ahead, packed.tokens.shape[1] - 1)
    labels = np.take_along_axis(packed.tokens[rows][:, None], ahead.reshape(len(rows), 1, -1), 2).reshape(ahead.shape)

    def put(x: np.ndarray) -> Tensor:
        x = torch.from_numpy(np.ascontiguousarray(x))
        x = x if x.dtype == torch.bool else x.long()
        return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x

    arrays = (packed.tokens[rows], packed.documents[rows], packed.positions[rows], places, labels, supervised)
    return Step(*map(put, arrays))


class TargetPass:
    """The target over packed rows, every conversation a request of one prefill pass in a cache of its own."""

    def __init__(self, model: Any, rows: int, row_length: int) -> None:
        self.model = model
        # Every conversation rounds up to a page; those of 16 tokens waste at most as much again.
        self.cache = model.allocate(2 * rows * -(-row_length // PAGE_SIZE) + rows + 1, PAGE_SIZE)

    def __call__(self, step: Step, documents: np.ndarray, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """-> (features [B, S, taps * H], hidden after the final norm [B * S, H]). documents: the host's copy."""
        rows, length = documents.shape
        device = step.tokens.device
        starts = np.concatenate([np.ones((rows, 1), bool), documents[:, 1:] != documents[:, :-1]], 1).flatten()
        offsets = np.append(np.flatnonzero(starts), rows * length)
        sizes = np.diff(offsets)
        pages = -(-sizes // PAGE_SIZE)
        first = np.cumsum(pages) - pages + 1  # page 0 is nobody's
        if int(pages.sum()) + 1 > self.cache.k.shape[1]:
            raise ValueError(f"rows: {len(sizes)} conversations need {int(pages.sum())} pages, the cache has {self.cache.k.shape[1] - 1}")
        table = torch.from_numpy(first[:, None] + np.minimum(np.arange(pages.max()), pages[:, None] - 1)).to(device, torch.int32)
        owner = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)).to(device)
        local = torch.from_numpy(np.concatenate([np.arange(size) for size in sizes])).to(device)
        batch = PassBatch(
            token_ids=step.tokens.flatten(),
            positions=local,
            request_offsets=torch.from_numpy(offsets).to(device, torch.int32),
            context_lens=torch.zeros(len(sizes), dtype=torch.int32, device=device),
            page_table=table,
            slot_mapping=slots_of(table[owner], local[:, None], PAGE_SIZE).squeeze(1),
            ancestor_masks=None,
            max_query_len=int(sizes.max()),
            max_kv_len=int(sizes.max()),
        )
        hidden, features = self.model.forward(batch, self.cache, taps)
        return features.clone().view(rows, length, -1), hidden.clone()  # out of inference mode


def visible(
    documents: Tensor, anchors: Tensor, block_size: int, length: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """mask(b, h, query, key): a block's slots see the context before its anchor and all slots of the block. Keys are
    the row's `length` tokens, then every block's slots."""

    def mask(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        anchor = anchors[b, query // block_size]
        at = key.clamp(max=length - 1)
        context = (key < length) & (at < anchor) & (documents[b, at] == documents[b, anchor])
        return context | ((key >= length) & ((key - length) // block_size == query // block_size))

    return mask


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [B, Hq, Q, D], k and v [B, Hkv, L, D], mask [B, 1, Q, L] bool -> [B, Hq, Q, D]."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def dense_mask(documents: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    rows, length = documents.shape
    queries = anchors.shape[1] * block_size
    device = documents.device
    mask = visible(documents, anchors, block_size, length)
    b = torch.arange(rows, device=device)[:, None, None]
    q = torch.arange(queries, device=device)[None, :, None]
    return mask(b, b, q, torch.arange(length + queries, device=device)[None, None])[:, None]


def block_mask(documents: Tensor, anchors: Tensor, block_size: int) -> Any:
    """The same mask for FlexAttention, which skips what no query of a tile sees."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, length = documents.shape
    queries = anchors.shape[1] * block_size
    mask = visible(documents, anchors, block_size, length)
    return create_block_mask(mask, rows, None, queries, length + queries, device=documents.device)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """`dense_attention` with a block mask; to be compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def draft_pass(
    network: DraftNetwork,
    step: Step,
    features: Tensor,
    cos_sin: Tensor,
    mask: Any,
    attention: Callable[[Tensor, Tensor, Tensor, Any], Tensor],
) -> Tensor:
    """Every block of a step: features [B, S, taps * H] -> hidden after the final norm [B * A, γ, d]."""
    c = network.config
    rows, length = step.tokens.shape
    count, slots = step.anchors.shape[1], c.block_size
    fused = network.fuse(features.flatten(0, 1))
    place = step.positions.flatten()
    at = step.positions.gather(1, step.anchors)[..., None] + torch.arange(slots, device=step.tokens.device)
    at = at.flatten()

    def heads(x: Tensor, size: int) -> Tensor:
        return x.view(rows, size, *x.shape[1:]).transpose(1, 2)

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer = network.layers[i]
        context_k, context_v = layer.context(fused)
        if layer.q_norm is not None:
            q, k, context_k = (
                ops.rms_norm(x, w, c.rms_norm_eps)
                for x, w in ((q, layer.q_norm), (k, layer.k_norm), (context_k, layer.k_norm))
            )
        q, k, context_k = rope(q, at, cos_sin), rope(k, at, cos_sin), rope(context_k, place, cos_sin)
        dtype = v.dtype
        keys = torch.cat((heads(context_k, length), heads(k, count * slots)), 2).to(dtype)
        values = torch.cat((heads(context_v, length), heads(v, count * slots)), 2)
        out = attention(heads(q, count * slots).to(dtype), keys, values, mask)
        return out.transpose(1, 2).reshape(-1, *q.shape[1:])

    anchors = step.tokens.gather(1, step.anchors).flatten()
    return network.block(anchors, attend)


def heads_pass(network: DraftNetwork, step: Step, hidden: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The sequential heads under the real prefix: hidden [B * A, γ, d] -> (z [B * A, γ, r], confidence logits
    [B * A, γ] float32), each None where there is no such head."""
    before = torch.cat((step.tokens.gather(1, step.anchors)[..., None], step.labels[..., :-1]), -1).flatten(0, 1)
    n, slots = before.shape
    z = e = None
    if network.markov is not None:
        e = network.markov.embed(before.flatten()).view(n, slots, -1)
        if network.markov.kind == "rnn":
            each, state = [], None
            for k in range(slots):
                out, state = network.markov(e[:, k], hidden[:, k], state)
                each.append(out)
            z = torch.stack(each, 1)
        else:
            z = network.markov(e.flatten(0, 1), hidden.flatten(0, 1), None)[0].view(n, slots, -1)
    confidence = None
    if network.confidence is not None:
        flat = None if e is None else e.flatten(0, 1)
        confidence = network.confidence(hidden.flatten(0, 1), flat).view(n, slots)
    return z, confidence
