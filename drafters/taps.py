"""What a drafter reads of its target. No torch here."""

from __future__ import annotations


class Mixed(int):
    """A tap of decoder layer i, counted as any other, that means what layer i + 1 reads and not what layer i left.

    The two differ in models whose layers attend over depth (Kimi-K3): there a layer leaves the sum since its block
    began, and the next one reads a mixture of that sum and all finished blocks (before its norm). Elsewhere they are
    the same, and this is the layer's number.
    """
