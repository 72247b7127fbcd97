"""What a block drafter does around its layers: the context's keys and values, the best logits, a chain of drafts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from verify_kernels import rng
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


def draw_chain(
    base: Tensor, hidden: Tensor, roots: Tensor, head: Markov, temperature: Tensor, seeds: Tensor, counters: Tensor
) -> tuple[Tensor, Tensor]:
    """K drafts in a row, each drawn from the whole vocabulary under the token before it. No host step between slots.

    base [R, K, V] logits, hidden [R, K, d] after the final norm, roots [R] int64; temperature [R] float32, 0 for the best
    token; seeds and counters [R] int64 key the draws: slot k's is `rng.uniform(seeds, counters, rng.DRAFT, k * V)`.

    -> (tokens [R, K] int64, probs [R, K + 1, V] float32: the law that each draft was drawn from, one-hot where it was not;
    the last row is zero).
    """
    r, slots, vocab = base.shape
    warm = (temperature > 0)[:, None]
    scale = torch.where(warm, temperature[:, None], 1.0)
    gates, previous, state = head.of_hidden(hidden), roots, None
    tokens, laws = [], []
    for k in range(slots):
        e = F.embedding(previous, head.w1)
        z, state = head.step(e, None if gates is None else gates[:, k], state)
        logits = base[:, k].float() + F.linear(z, head.w2).float()
        law = (logits / scale).softmax(-1)
        best = logits.argmax(-1)
        # A broken row (NaN, whose sum is not positive) is greedy too: acceptance needs a distribution.
        drawn = warm & (law.sum(-1, keepdim=True) > 0)
        law = torch.where(drawn, law, torch.zeros_like(law).scatter(-1, best[:, None], 1.0))
        previous = torch.where(drawn[:, 0], rng.sample(law, rng.uniform(seeds, counters, rng.DRAFT, k * vocab)), best)
        tokens.append(previous)
        laws.append(law)
    return torch.stack(tokens, 1), torch.stack([*laws, torch.zeros_like(laws[0])], 1)
