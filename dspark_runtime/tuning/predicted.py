"""A step-cost curve from the performance model, for hardware that is not here. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dspark_runtime.cost.facts import load_architecture, load_hardware
from dspark_runtime.cost.kernels import ZERO
from dspark_runtime.cost.step import Load, Parallelism, step_time
from dspark_runtime.errors import ConfigError
from dspark_runtime.tuning.curve import Curve, Point

DEPTH = 15
"""Deepest draft of a drafter without an architecture of its own (prompt lookup), which costs nothing here."""


def predicted_curve(
    target: str,
    drafter: str,
    hardware: str,
    parallelism: Parallelism,
    num_requests: Sequence[int],
    contexts: Sequence[int],
    tree_tokens: Sequence[int],
    chain: Sequence[int] | None,
    command: str,
) -> Curve:
    """The achievable layer of the model as a curve. drafter: an architecture of configs/models with a drafter section,
    "ngram" or "none". chain: drafts of the chains (default: all up to the drafter's). The interval of a step is taken
    as two standard deviations to either side, and as an error that all points share in proportion: one machine's
    kernels are all a little faster or slower than the model's."""
    model, machine = load_architecture(target), load_hardware(hardware)
    own = drafter not in ("ngram", "none")
    proposer = load_architecture(drafter) if own else None
    if own and proposer.drafter is None:
        raise ConfigError(
            f"drafter: found {drafter!r}, allowed: ngram, none, or an architecture with a drafter section"
        )
    depth = 0 if drafter == "none" else proposer.drafter.num_drafts if own else DEPTH
    lengths = sorted({0, *(range(depth + 1) if chain is None else chain)})
    if lengths[-1] > depth:
        raise ConfigError(f"num_speculative_tokens: found {lengths[-1]}, allowed: at most {depth} for {drafter}")
    shapes = [(k + 1, k) for k in lengths]
    shapes += [(t, min(lengths[-1], t - 2)) for t in sorted(set(tree_tokens)) if lengths[-1] > 0]
    limit = model.max_position_embeddings
    if limit is not None and max(contexts) > limit:
        raise ConfigError(f"context: found {max(contexts)}, allowed: at most {limit}, the context limit of {target}")
    points, notes = [], set()
    weights, memory = model.checkpoint_bytes / 1e9, parallelism.gpus * machine.datasheet.memory_gb
    if weights >= memory:
        notes.add(f"DOES NOT FIT: {weights:.0f} GB of weights, {memory:.0f} GB of memory")
    for context in contexts:
        for b in num_requests:
            for tokens, deep in shapes:
                load = Load(b, tokens, context)
                whole = step_time(model, machine, parallelism, load, proposer if tokens > 1 else None)
                notes.update(whole.notes)
                if not whole.achievable.mid:
                    raise ConfigError(
                        f"hardware: found {hardware!r}, allowed: one with measured kernels or an efficiency"
                    )
                # The drafter's pass is of as many positions as the tree is deep, however large it is.
                if own and tokens > deep + 1:
                    narrow = step_time(model, machine, parallelism, replace(load, tokens=deep + 1), proposer)
                    draft = narrow.groups().get("draft", ZERO).mid
                else:
                    draft = whole.groups().get("draft", ZERO).mid
                verify = whole.achievable.mid - whole.groups().get("draft", ZERO).mid
                half = (whole.achievable.high - whole.achievable.low) / 4
                points.append(
                    Point(num_requests=b, num_tokens=tokens, depth=deep, context_len=context, draft_ms=draft,
                          verify_ms=verify, other_ms=0.0, spread=half / whole.achievable.mid)
                )  # fmt: skip
    gpus = f", {parallelism}" if parallelism.gpus > 1 else ""
    return Curve(
        command=command, source="model", target=target,
        environment={"machine": hardware, "gpu": machine.title + gpus, "gpus": parallelism.gpus},
        drafter=drafter, method="dspark" if own else drafter, dtype=model.weights.experts if model.ffn.moe else "bf16",
        weights="dummy", max_depth=depth, can_tree=bool(depth), between="linear", repeats=1,
        notes=sorted(notes), points=points,
    )  # fmt: skip
