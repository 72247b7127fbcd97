"""What a scheduler costs the host a step, by policy: 256 requests with 7 drafts each.

    python -m eval.scheduling_overhead [--threads 1] [--json FILE]

"decision" is the policy alone, from survival to the drafts that are kept; "whole" is everything that scheduling adds to
a step with a calibrated confidence: survival, history, decision, trimming; "estimated" is that with the online
estimator in the place of the confidence, its learning included. Every step has other confidences: sorting numbers that
were sorted before would be timed as faster than it is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dspark_runtime.scheduling.policies import Policy

BATCHES = 50
"""Different batches that are scheduled in turn."""


def policies(requests: int, drafts: int) -> dict[str, Policy]:
    """Every policy, with costs at which about half of the drafts are worth verifying."""
    from dspark_runtime.scheduling.policies import Budget, EarlyStop, FixedLength, Lagged, Threshold
    from dspark_runtime.tuning.curve import Curve, Point

    points = [
        Point(num_requests=b, num_tokens=t, depth=t - 1, context_len=1024, draft_ms=1.0, other_ms=0.0, spread=0.0,
              verify_ms=10 + 5 * b / requests * t)
        for b in (1, requests) for t in range(1, drafts + 2)
    ]  # fmt: skip
    curve = Curve(
        command="", source="model", environment={}, target="", drafter="", method="", dtype="", max_depth=drafts,
        can_tree=False, between="linear", repeats=1, points=points,
    )  # fmt: skip
    return {
        "fixed": FixedLength(drafts // 2), "threshold": Threshold(0.5), "budget": Budget(requests * (drafts + 2) // 2),
        "early-stop": EarlyStop(curve), "async": Lagged(curve),
    }  # fmt: skip


def overhead_us(policy: Policy, requests: int, drafts: int, rounds: int) -> dict[str, float]:
    """Median microseconds of a step: decision, whole, estimated; and the share of the drafts that is verified."""
    import torch

    from drafters.base import BatchState
    from drafters.tree import DraftTree, TreeSpec
    from dspark_runtime.acceptance import Accepted, chain_path
    from dspark_runtime.scheduling.policies import Drafts
    from dspark_runtime.scheduling.scheduler import Scheduler, survival

    spec = TreeSpec.chain(drafts)
    zeros = torch.zeros(requests, dtype=torch.int64)
    one, table = zeros[:, None], zeros[:, None].int()
    state = BatchState(one, zeros + 1025, table, zeros + drafts, zeros.float(), zeros, zeros, 1025)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.ones(requests, spec.num_nodes, dtype=torch.int64)
    sure = [torch.rand(tokens.shape, generator=generator) ** 0.2 for _ in range(BATCHES)]
    trees = [DraftTree.from_spec(spec, tokens, confidence=c) for c in sure]
    alive = [survival(tree, tree.confidence) for tree in trees]
    depths = torch.arange(spec.num_nodes)
    shown = [Drafts(a, depths, state.context_lens, b) for a, b in zip(alive, alive[2:] + alive[:2])]

    def median(step: Callable[[int], object]) -> float:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            for i in range(BATCHES):
                step(i)
            times.append((time.perf_counter() - start) / BATCHES * 1e6)
        return statistics.median(times)

    found: dict[str, float] = {}
    for name, calibrated in (("whole", True), ("estimated", False)):
        scheduler = Scheduler(policy)
        scheduler.start(spec, torch.arange(requests), calibrated)

        def step(i: int) -> None:
            tree = scheduler.schedule(trees[i], state)
            if not calibrated:
                kept = (tree.num_nodes - 1) // 2
                path = chain_path(tree, kept)
                scheduler.observe(tree, Accepted(path, path, kept + 1))

        if calibrated:
            verified = sum(int(scheduler.schedule(tree, state).num_nodes.sum()) - requests for tree in trees)
            found["decision"] = median(lambda i: policy.keep(shown[i]))
        found[name] = median(step)
    return found | {"verified": verified / (BATCHES * requests * drafts)}


def main(
    threads: Annotated[int, typer.Option(help="CPU threads")] = 1,
    requests: Annotated[int, typer.Option("-b", "--num-requests", help="requests")] = 256,
    drafts: Annotated[int, typer.Option("-k", "--num-speculative-tokens", help="drafts of each")] = 7,
    rounds: Annotated[int, typer.Option(help="rounds over 50 batches, of which the median is taken")] = 60,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
) -> None:
    import torch
    from rich.console import Console
    from rich.table import Table

    from eval.environment import write_result

    torch.set_num_threads(threads)
    title = f"{requests} requests, {drafts} drafts"
    table = Table("policy", "decision us", "whole us", "estimated us", "verified", title=title)
    rows = []
    with torch.inference_mode():
        for name, policy in policies(requests, drafts).items():
            us = overhead_us(policy, requests, drafts, rounds)
            times = (f"{us[k]:.0f}" for k in ("decision", "whole", "estimated"))
            table.add_row(name, *times, f"{100 * us['verified']:.0f} %")
            rows.append(
                {"policy": name, "num_requests": requests, "num_speculative_tokens": drafts}
                | {f"{k}_us": us[k] for k in ("decision", "whole", "estimated")}
                | {"verified_share": us["verified"]}
            )
    Console().print(table)
    if json_file:
        command = f"python -m eval.scheduling_overhead --threads {threads} -b {requests} -k {drafts} --rounds {rounds}"
        write_result(json_file, command, rows, threads=threads)


if __name__ == "__main__":
    typer.run(main)
