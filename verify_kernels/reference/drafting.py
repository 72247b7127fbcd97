"""What a block drafter does around its layers: the context's keys and values, the best logits, a chain of drafts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from verify_kernels.markov import Markov
from verify_kernels.reference.elementwise import rms_norm, rope


def append_context(
    kv: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_norms: Tensor | None,
    eps: float,
) -> None:
    """Write the keys and values of N tokens into the pages of all L layers: norm of the keys, rotary embedding, append.

    kv [N, L, 2, Hkv, D], keys first; k_pages, v_pages [L, P, page_size, Hkv, D]; slots, positions [N] int64; cos_sin as
    `elementwise.rope` takes it; k_norms [L, D] or None.
    """
    for i in range(kv.shape[1]):
        k, v = kv[:, i].unbind(1)
        if k_norms is not None:
            k = rms_norm(k, k_norms[i], eps)
        k_pages[i].flatten(0, 1)[slots] = rope(k, positions, cos_sin)
        v_pages[i].flatten(0, 1)[slots] = v


def top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest entries of logits [N, V], best first -> (values [N, count] float32, ids [N, count] int64).

    Where entries are equal, which of them come first is a backend's own.
    """
    values, ids = logits.topk(count, dim=-1)
    return values.float(), ids


def draft_chain(
    values: Tensor,
    ids: Tensor,
    hidden: Tensor,
    roots: Tensor,
    max_drafts: Tensor,
    temperature: Tensor,
    head: Markov | None,
    target_ids: Tensor | None = None,
    confidence: tuple[Tensor, Tensor] | None = None,
    confidence_temperatures: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best chain of K drafts among M candidates a slot, each under the token before it. No host step between slots.

    values [R, K, M] float32 and ids [R, K, M] int64 (of the draft vocabulary): the slots' base logits; hidden [R, K, d]
    after the final norm; roots, max_drafts [R] int64; temperature [R] float32 (0 counts as 1); target_ids: target id of
    each draft id, None where they are the same. confidence: weight [1, d] or [1, d + r] and bias [1] of its head, of
    whose logits confidence_temperatures [K] float32 divide slot by slot.

    -> (tokens [R, K + 1] int64, the root first, -1 beyond max_drafts; parents likewise; number of nodes [R] int64; sure
    [R, K + 1] float32: the confidence head's probability, or without one the draft's among the candidates).
    """
    r, slots, _ = values.shape
    temperature = torch.where(temperature > 0, temperature, 1.0)[:, None]
    gates = None if head is None else head.of_hidden(hidden)
    tokens, sure, state, e = [roots], [torch.ones_like(temperature[:, 0])], None, None
    for k in range(slots):
        logits = values[:, k]
        if head is not None:
            e = F.embedding(tokens[-1], head.w1)
            z, state = head.step(e, None if gates is None else gates[:, k], state)
            logits = logits + (F.embedding(ids[:, k], head.w2).float() @ z.float()[..., None]).squeeze(-1)
        best, at = (logits / temperature).softmax(-1).max(-1, keepdim=True)
        token = ids[:, k].gather(1, at).squeeze(1)
        tokens.append(token if target_ids is None else target_ids[token])
        if confidence is not None:
            weight, bias = confidence
            x = hidden[:, k] if weight.shape[1] == hidden.shape[2] else torch.cat((hidden[:, k], e), dim=-1)
            best = F.linear(x, weight, bias).float()
            best = torch.sigmoid(best if confidence_temperatures is None else best / confidence_temperatures[k])
        sure.append(best.squeeze(1))
    nodes = torch.arange(slots + 1, device=roots.device)
    count = max_drafts.clamp(max=slots) + 1
    outside = nodes >= count[:, None]
    chain = torch.stack(tokens, 1).masked_fill(outside, -1)
    return chain, (nodes - 1).masked_fill(outside, -1), count, torch.stack(sure, 1)
