"""Counter-based random numbers: a draw is a pure function of (seed, counter, stream, index).

No generator has state, so the same request gives the same tokens whatever else is in the batch and however many steps
the engine ran before. The mixer is the finaliser of SplitMix64, applied once per key word.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Streams: which decision a draw belongs to. Draws of different streams are independent.
TARGET, ACCEPT, DRAFT, SYNTHETIC, ROUTING = range(5)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


_GAMMA, _M1, _M2 = _signed(0x9E3779B97F4A7C15), _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _mix(x: Tensor) -> Tensor:
    # int64 products wrap around; masks turn arithmetic shifts into logical ones.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _M1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _M2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def uniform(seeds: Tensor, counters: Tensor, stream: int, index: Tensor | int = 0) -> Tensor:
    """Uniform float64 draws in [0, 1).

    seeds and counters int64, broadcast together with index (an int or an int64 tensor). `counters` is the number of
    tokens the request had emitted when the step began (or the output index that is being drawn); `index` tells the
    draws of one step apart.
    """
    key = _mix(_mix(seeds + _GAMMA) + counters * _GAMMA + (stream + 1))
    step = (index + 1) * _M2
    if isinstance(step, int):  # a Python integer does not wrap around by itself
        step = _signed(step % (1 << 64))
    return ((_mix(key + step) >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


_CHUNK = 128


def sample(probs: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF sampling: probs [..., V] (need not be normalised), u [...] in [0, 1) -> ids [...] int64.

    Never returns an id of probability zero. The vocabulary is read once, as sums of chunks; only the chunk that holds
    the draw is summed up token by token.
    """
    chunks = _chunks(probs)
    return _invert(chunks, chunks.sum(-1), u).clamp(max=probs.shape[-1] - 1)


def sample_distinct(probs: Tensor, u: Tensor) -> Tensor:
    """Draws without replacement, each from what the ones before it left: probs [..., V], u [..., J] -> ids [..., J].

    -1 where nothing is left. Each draw is `sample`'s; the vocabulary is read once for all of them.
    """
    chunks = _chunks(probs).clone()
    sums, flat, ids = chunks.sum(-1), chunks.flatten(-2), []
    for j in range(u.shape[-1]):
        drawn = _invert(chunks, sums, u[..., j]).clamp(max=probs.shape[-1] - 1)[..., None]
        ids.append(torch.where(sums.amax(-1, keepdim=True) > 0, drawn, -1))
        flat.scatter_(-1, drawn, 0.0)
        chunk = drawn // _CHUNK
        rest = chunks.gather(-2, chunk[..., None].expand(*chunk.shape, _CHUNK)).sum(-1)
        sums = sums.scatter(-1, chunk, rest)
    return torch.cat(ids, -1)


def _chunks(probs: Tensor) -> Tensor:
    """probs [..., V] -> [..., C, _CHUNK], zeros behind the end."""
    if probs.shape[-1] % _CHUNK:
        probs = F.pad(probs, (0, -probs.shape[-1] % _CHUNK))
    return probs.unflatten(-1, (-1, _CHUNK))


def _invert(chunks: Tensor, sums: Tensor, u: Tensor) -> Tensor:
    """chunks [..., C, _CHUNK] with their sums [..., C], u [...] -> ids [...] int64."""
    cdf = sums.cumsum(-1, dtype=torch.float64)
    threshold = u.to(torch.float64).unsqueeze(-1) * cdf[..., -1:]
    chunk = torch.searchsorted(cdf, threshold, right=True).clamp(max=cdf.shape[-1] - 1)
    before = torch.where(chunk > 0, cdf.gather(-1, (chunk - 1).clamp(min=0)), 0.0)
    inside = chunks.gather(-2, chunk.unsqueeze(-1).expand(*chunk.shape, _CHUNK)).squeeze(-2)
    local = inside.to(torch.float64).cumsum(-1)
    at = torch.searchsorted(local, threshold - before, right=True)
    # A chunk's mass is rounded to float32: a draw past its exact end is its last token of positive probability.
    last = (local < local[..., -1:]).sum(-1, keepdim=True)
    return (chunk * _CHUNK + torch.minimum(at, last)).squeeze(-1)
