"""The sequential stage of DSpark drafting in vLLM: K slots of a block, left to right, as one function.

Numbers are those of vLLM's own loop: logits are rounded to the model's dtype after each sum, and the noise of a draw is
vLLM's (MurmurHash3 of the request's seed, the draft step, the position and the token), so that the vanilla head drafts
what vLLM's does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from verify_kernels.markov import Markov

Pick = Callable[[Tensor, int], Tensor]
"""pick(logits [R, V_draft], step) -> target ids [R] int64."""

DRAFT_SALT = 1 << 30
"""Added to the position of a draft's noise: vLLM keeps it apart from the noise of the target's own draws."""


def chain(head: Markov | None, base: Tensor, hidden: Tensor, anchors: Tensor, pick: Pick) -> Tensor:
    """Drafts of a block: base logits [R, K, V_draft], hidden [R, K, d] after the final norm, anchors [R] int64 ->
    target ids [R, K] int64. Without a head (DFlash) the slots do not depend on each other."""
    tokens, previous, state = [], anchors, None
    gates = head.of_hidden(hidden) if head is not None else None
    for k in range(base.shape[1]):
        logits = base[:, k]
        if head is not None:
            e = F.embedding(previous, head.w1)
            z, state = head.step(e, None if gates is None else gates[:, k], state)
            logits = logits + F.linear(z, head.w2)
        previous = pick(logits, k)
        tokens.append(previous)
    return torch.stack(tokens, dim=1)


# ---------------------------------------------------------------------------------------------------- random numbers


def _low(x: Tensor) -> Tensor:
    return x & 0xFFFFFFFF


def _rotate(x: Tensor, by: int) -> Tensor:
    return _low(x << by) | (x >> (32 - by))


def murmur3(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """MurmurHash3 (32 bit, 16 bytes: seed low, seed high, position, token) of broadcast int64 tensors, as int64 in
    [0, 2^32). int64 products wrap, which leaves their low 32 bits right."""
    h = torch.zeros_like(seeds)
    for word in (seeds, seeds >> 32, positions, tokens):
        word = _low(_rotate(_low(_low(word) * 0xCC9E2D51), 15) * 0x1B873593)
        h = _low(_rotate(h ^ word, 13) * 5 + 0xE6546B64)
    h = h ^ 16
    h = _low((h ^ (h >> 16)) * 0x85EBCA6B)
    h = _low((h ^ (h >> 13)) * 0xC2B2AE35)
    return h ^ (h >> 16)


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, broadcast over int64 tensors. The tail that decides comes from small uniforms,
    where float32 is fine."""
    x = murmur3(seeds, positions, tokens)
    u = (x >> 16).float() * 2.0**-16 + ((x & 0xFFFF).float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-u.clamp(max=1 - 2.0**-24)))


def draw(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, step: int) -> Tensor:
    """One draw from softmax(logits / temperature) a row by Gumbel-max, the argmax where the temperature is 0.

    logits [R, V], temperatures [R] float32, seeds [R] int64, positions [R] int64 of the token before the one drawn
    -> [R] int64.
    """
    tokens = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel((seeds ^ (step << 32))[:, None], (positions + DRAFT_SALT)[:, None], tokens)
    warm = (temperatures > 0)[:, None]
    scaled = logits.float() / torch.where(warm, temperatures[:, None], 1.0)
    return torch.where(warm, scaled + noise, scaled).argmax(dim=1)
