"""Earlier occurrences of a request's last tokens in its own context."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.base import BatchState


class Continuations(NamedTuple):
    """tokens [R, C, depth] int64: what followed the C best occurrences, -1 beyond their ends. matched [R, C] int64: how
    many of the last tokens each shares (0 where there is no occurrence)."""

    tokens: Tensor
    matched: Tensor


def continuations(state: BatchState, depth: int, count: int, longest: int, shortest: int = 1) -> Continuations:
    """The `count` best occurrences' continuations, none longer than state.max_drafts.

    An occurrence is better the more tokens it shares with the end of the sequence (between shortest and longest) and,
    among equals, the more recent it is.
    """
    length, device = state.max_seq_len, state.tokens.device
    ends = state.seq_lens[:, None]
    history = F.pad(state.tokens[:, :length], (longest, 0), value=-1)  # token i is in column longest + i
    suffix = history.gather(1, ends + longest - 1 - torch.arange(longest, device=device))  # newest first
    at = torch.arange(length, device=device)
    # score = i + length * (how many tokens up to and including i equal the last ones): longer first, then later.
    score, matches = at, at < ends - 1
    for back in range(longest):
        matches = matches & (history[:, longest - back : longest - back + length] == suffix[:, back : back + 1])
        score = score + matches * length
    count = min(count, length)
    best, where = score.topk(count, dim=1) if count > 1 else score.max(dim=1, keepdim=True)
    start = where + 1
    found = best >= shortest * length
    stop = torch.minimum(ends, start + state.max_drafts[:, None]).masked_fill(~found, 0)
    reach = start[:, :, None] + torch.arange(depth, device=device)
    columns = reach.clamp(max=length - 1) + longest
    tokens = history.gather(1, columns.flatten(1)).view_as(reach).masked_fill(reach >= stop[:, :, None], -1)
    return Continuations(tokens, (best // length).masked_fill(~found, 0))
