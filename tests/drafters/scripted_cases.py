"""Fixture S: a target and drafters that are plain functions, so that every token of a run is known in advance.

64 ids; the target's next token after t is (5 t + 3) mod 64, with logit 10 there and 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

V = 64
PROMPT = [7]
STREAM = [38, 1, 8, 43, 26, 5, 28, 15, 14, 9, 48, 51, 2, 13, 4, 23]
"""The first greedy tokens after PROMPT."""


def after(token: int) -> int:
    return (5 * token + 3) % V


def logits(prefix: tuple[int, ...]) -> list[float]:
    """The target, for `ScriptedModel(V, logits)`."""
    row = [0.0] * V
    row[after(prefix[-1])] = 10.0
    return row


def right_for(k: int) -> Callable[[tuple[int, ...], int], list[int]]:
    """S(k), for `ScriptedDrafter`: right for k slots, from then on each token is one more than the target's."""

    def drafts(prefix: tuple[int, ...], count: int) -> list[int]:
        out, token = [], prefix[-1]
        for slot in range(count):
            token = after(token) if slot < k else (after(token) + 1) % V
            out.append(token)
        return out

    return drafts


def always_right(prefix: tuple[int, ...], count: int) -> list[int]:
    """S*, for `ScriptedDrafter`: the target's own greedy continuation."""
    return right_for(count)(prefix, count)
