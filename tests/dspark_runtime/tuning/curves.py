"""Small curves for the tests."""

from __future__ import annotations

from collections.abc import Mapping

from dspark_runtime.tuning.curve import Curve, Point


def point(
    b: int, tokens: int, depth: int, ms: float, draft: float = 0.0, spread: float = 0.0, context: int = 64
) -> Point:
    return Point(
        num_requests=b, num_tokens=tokens, depth=depth, context_len=context, draft_ms=draft, verify_ms=ms, other_ms=0.0,
        spread=spread,
    )  # fmt: skip


def curve(points: list[Point], between: str = "linear", repeats: int = 5, **fields: object) -> Curve:
    return Curve(
        **dict(
            command="test", source="measured", environment={"cpu": "c", "cores": 2, "gpu": None}, target="tiny",
            drafter="ngram", method="ngram", dtype="float32", max_depth=63, can_tree=True, between=between,
            repeats=repeats, points=points,
        )
        | fields
    )  # fmt: skip


def chain_curve(ms: Mapping[int, float], b: int = 1, **options: object) -> Curve:
    """Verify milliseconds by tokens, chains only."""
    spread = options.pop("spread", 0.0)
    return curve([point(b, t, t - 1, x, spread=spread) for t, x in ms.items()], **options)
