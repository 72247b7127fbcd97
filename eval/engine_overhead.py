"""What the engine itself costs a step: a model and a drafter that do nothing, beside the embedded target's real step.

    python -m eval.engine_overhead [--threads 2] [--json FILE]

With a target whose pass is a constant and a drafter whose tree is made beforehand, all that is left of a step is the
engine: batch layout, acceptance, commit, records, stop rules. The real step has the same shape, in the same process.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from drafters.base import BatchState
    from drafters.tree import DraftTree, TreeSpec

SHAPES = [(name, k, requests, t) for t in (0.0, 1.0) for requests in (1, 32) for name, k in (("plain", 0), ("chain", 7), ("tree-16", None))]
"""(name, k of a chain, requests, temperature). Sampling reads the logits of every node; greedy decoding does not."""


def null_model(like):
    """A model that computes nothing: `like`'s vocabulary and limits, constant hidden states and arg-max."""
    import torch

    from verify_kernels.batch import KVCache

    zeros = torch.zeros(1024, like.vocab_size)

    class Null:
        name, vocab_size, max_model_len = "null", like.vocab_size, 1024
        num_layers, eos_token_ids = 1, ()
        device, dtype = torch.device("cpu"), torch.float32

        def allocate(self, pages: int, page_size: int, requests: int = 1) -> KVCache:
            return KVCache.allocate(1, pages, page_size, 1, 1, torch.float32, "cpu")

        def forward(self, batch, cache, taps=()):
            return torch.empty(batch.num_tokens, 1), None

        def logits(self, hidden):
            return zeros[: hidden.shape[0]]

        def greedy(self, hidden):
            return torch.full((hidden.shape[0],), 7), torch.zeros(hidden.shape[0])

    return Null()


class FreeDrafter:
    """Proposes token 7 everywhere, which the null model accepts: a whole block is accepted every step."""

    name, vocab_size, max_depth, lookahead, can_tree, can_sample, taps, kv = "free", None, 63, 0, True, False, (), None

    def allocate(self, pages, page_size, device) -> None:
        pass

    def prefill(self, batch, features) -> None:
        pass

    def observe(self, state, features, kept) -> None:
        pass

    def propose(self, state: BatchState, spec: TreeSpec, sample: bool) -> DraftTree:
        import torch

        from drafters.tree import DraftTree

        tokens = torch.full((state.num_requests, spec.num_nodes), 7)
        tokens[:, 0] = state.roots
        return DraftTree.from_spec(spec, tokens)


def step_ms(model, spec: TreeSpec, requests: int, steps: int, temperature: float) -> dict[str, list[float]]:
    """Milliseconds of `steps` decode steps by phase, after as many warm-up steps."""
    from dspark_runtime.engine import Engine
    from dspark_runtime.sampling import SamplingParams

    engine = Engine(
        model, FreeDrafter() if spec.num_drafts else None, spec=spec, max_num_requests=requests, max_model_len=1024
    )
    for i in range(requests):
        engine.submit([3] * (32 + i), SamplingParams(temperature=temperature, max_tokens=900, ignore_eos=True))
    while len(engine.records) < 2 * steps and engine.has_work:
        engine.step()
    records = [r for r in engine.records[steps:] if r.num_requests == requests]
    return {name: [r.ms[name] for r in records] for name in ("draft", "verify", "accept", "other", "total")}


def main(
    threads: Annotated[int, typer.Option(help="CPU threads")] = 2,
    steps: Annotated[int, typer.Option(help="timed steps of each shape")] = 50,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
) -> None:
    import torch
    from rich.console import Console
    from rich.table import Table

    from drafters.tree import TreeSpec
    from dspark_runtime.configs import load_tree
    from dspark_runtime.targets import load_target
    from eval.environment import write_result

    torch.set_num_threads(threads)
    real = load_target("smollm2", dtype="bfloat16", device="cpu").model
    null = null_model(real)
    table = Table("step", "requests", "temperature", "engine ms", "real step ms", "share", title="Engine overhead, SmolLM2-135M bfloat16")
    rows = []
    for name, k, requests, temperature in SHAPES:
        spec = load_tree(name) if k is None else TreeSpec.chain(k)
        ours = step_ms(null, spec, requests, steps, temperature)["total"]
        row = {"tree": name, "num_speculative_tokens": spec.num_drafts, "num_requests": requests, "temperature": temperature}
        row |= {"engine_ms": statistics.median(ours), "engine_p90_ms": sorted(ours)[int(0.9 * len(ours))]}
        if requests == 1:
            row["step_ms"] = statistics.median(step_ms(real, spec, requests, max(10, steps // 4), temperature)["total"])
            row["share"] = row["engine_ms"] / row["step_ms"]
        rows.append(row)
        table.add_row(
            f"{name} k={spec.num_drafts}",
            str(requests),
            str(temperature),
            f"{row['engine_ms']:.2f}",
            f"{row['step_ms']:.1f}" if "step_ms" in row else "-",
            f"{100 * row['share']:.1f} %" if "share" in row else "-",
        )
    Console().print(table)
    if json_file:
        command = f"python -m eval.engine_overhead --threads {threads} --steps {steps}"
        write_result(json_file, command, rows, threads=threads)


if __name__ == "__main__":
    typer.run(main)
