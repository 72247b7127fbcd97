"""Operations for CPUs whose own matrix instructions do not know bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def implementations() -> dict[str, Callable[..., Any]]:
    """Operations that this machine runs faster than the torch reference; empty where there are none."""
    return {}
