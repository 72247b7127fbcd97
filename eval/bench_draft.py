"""Correctness and speed of all that a DSpark draft, acceptance and commit do on a GPU beside the target's layers.

    python -m eval.bench_draft --json FILE [--kernels DIR]

Every small kernel is compared with its torch reference on random cases (poisoned outputs, every call twice), then the
parts of a draft are timed, each as a CUDA graph, with the kernels and with the torch reference in their place: for
Qwen3-8B's drafter and SmolLM2's, chains of 7 and trees of 32 and 64 nodes, one request and eight. --kernels: a folder
of compiled CuTe DSL kernels for the products and the attention; without it torch runs those. Under 30 seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from drafters.base import BatchState
from drafters.topology import TreeSpec
from drafters.tree import DraftTree
from dspark_runtime.configs import load_model_config, load_tree
from eval.bench import dummy_drafter
from eval.gpu_jobs import graph_us
from verify_kernels import ops, triton
from verify_kernels.markov import Markov
from verify_kernels.reference import drafting, growth, trees
from verify_kernels.reference.growth import Nodes

DRAFTERS = {"qwen3-8b": "qwen3-8b-dspark", "smollm2-135m": "smollm2-135m-dspark"}
GPU = "cuda"
CONTEXT, PAGE = 1024, 16


def to(x: Any, device: str) -> Any:
    """x and what is in it, on a device."""
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, (Markov, Nodes)):
        return type(x)(*(to(y, device) for y in x))
    return tuple(to(y, device) for y in x) if isinstance(x, tuple) else x


def difference(found: Any, wanted: Any) -> float:
    """Share of integers that differ, or the largest relative error of floats, over everything in wanted."""
    if wanted is None:
        return 0.0
    if isinstance(wanted, Tensor):
        found = found.cpu()
        if not wanted.is_floating_point():
            return (found != wanted).float().mean().item() if wanted.numel() else 0.0
        live = wanted.isfinite()
        scale = wanted[live].abs().amax().item() if live.any() else 1.0
        error = (found.float() - wanted.float())[live].abs()
        return (error.amax() / max(scale, 1e-6)).item() if live.any() else 0.0
    return max(difference(a, b) for a, b in zip(found, wanted, strict=True))


# ------------------------------------------------------------------------------------------------------ correctness


def forest(g: torch.Generator, r: int, n: int) -> tuple[Tensor, Tensor, int]:
    """Random trees with padding behind: tokens, parents and their depth."""
    tokens, parents = torch.full((r, n), -1), torch.full((r, n), -1)
    for i in range(r):
        count = int(torch.randint(1, n + 1, (), generator=g))
        tokens[i, :count] = torch.randint(5, (count,), generator=g)
        for j in range(1, count):
            parents[i, j] = int(torch.randint(max(0, j - 6), j, (), generator=g))
    return tokens, parents, max(int(trees.tree_masks(parents, 63)[1].max()), 1)


def cases(g: torch.Generator) -> dict[str, list[tuple[Any, ...]]]:
    """Arguments of every operation but the growth of levels, whose arguments it changes. Few shapes: each compiles."""
    real = lambda *shape: torch.randn(shape, generator=g)  # noqa: E731
    half = lambda *shape: real(*shape).bfloat16()  # noqa: E731
    ints = lambda high, *shape: torch.randint(high, shape, generator=g)  # noqa: E731
    found: dict[str, list[tuple[Any, ...]]] = {}
    for n in (32, 8):
        for _ in range(8):
            r = int(ints(6) + 1)
            tokens, parents, _ = forest(g, r, n)
            depth = 31
            state, table = ints(300, r) + 1, ints(999, r, 30).int() + 1
            more = dict(
                prune_tree=(tokens, parents, torch.rand(r, n, generator=g) < 0.8, depth),
                place_tree=(tokens, parents, state, table, PAGE, depth, 4, False),
                place_block=(state, table, 8, PAGE, 4096, ints(9, r)),
                follow_tree=(tokens, parents, ints(5, r, n), depth),
                reach_tree=(tokens, parents, ints(5, r, n), ints(32, r), depth),
            )
            for name, args in more.items():
                found.setdefault(name, []).append(args)
    survival = torch.rand(7, generator=g, dtype=torch.float64).sort(descending=True).values
    seeds = torch.randint(-(2**62), 2**62, (500,), generator=g)
    found["synthetic_drafts"] = [(seeds, ints(9999, 500), survival, even) for even in (False, True)]
    found["top"] = [(real(7, 151936), 32), (real(4, 49152), 32), (real(2, 60), 32)]
    vocab, d, rank = 5000, 256, 256
    extra = {"gated": [(rank, d + rank), (rank,)], "rnn": [(3 * rank, 2 * rank + d), (3 * rank,)]}
    for kind in ("vanilla", "gated", "rnn"):
        shapes = [(vocab, rank), (vocab, rank), *extra.get(kind, [])]
        head = Markov(kind, *(real(*shape) * 0.08 for shape in shapes))
        sure = (real(1, d + rank) * 0.1, real(1))
        for _ in range(4):
            found.setdefault("draft_chain", []).append((
                real(4, 7, 32), ints(vocab, 4, 7, 32), real(4, 7, d), ints(vocab, 4), ints(9, 4),
                torch.tensor([0.0, 0.5, 1.0, 2.0]), head, None, sure, torch.rand(7, generator=g) + 0.5,
            ))  # fmt: skip
    for kind in ("vanilla", "rnn"):
        shapes = [(vocab, rank), (vocab, rank), *extra.get(kind, [])]
        head = Markov(kind, *(real(*shape) * 0.08 for shape in shapes))
        found.setdefault("draw_chain", []).append((
            real(4, 7, vocab), real(4, 7, d), ints(vocab, 4), head, torch.tensor([0.0, 0.5, 1.0, 2.0]), seeds[:4],
            ints(99, 4),
        ))  # fmt: skip
    w2 = half(vocab, rank)
    found["candidate_logits"] = [
        (real(3, 7, 32)[:, 2], ints(vocab, 3, 7, 32)[:, 2], w2, w2.flip(0), ints(vocab, 3, 40)[:, :w], real(3).abs())
        for w in (1, 17, 31)
    ]
    return found


def check() -> list[dict[str, Any]]:
    """Rows of op, cases, the worst difference and the bound that it must keep."""
    kernels, g, rows = triton.implementations(unmeasured=True), torch.Generator().manual_seed(1), []
    original = Tensor.new_empty

    def poisoned(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = original(self, *args, **kwargs)
        return out.fill_(float("nan") if out.is_floating_point() else -77)

    Tensor.new_empty = poisoned
    try:
        for name, arguments in cases(g).items():
            begin, worst, repeatable = time.perf_counter(), 0.0, True
            reference = getattr(next(m for m in (trees, drafting, growth) if hasattr(m, name)), name)
            for args in arguments:
                wanted = reference(*args)
                found = [kernels[name](*to(args, GPU)) for _ in range(2)]
                if name == "place_tree":  # the masks of padding mean nothing
                    real = args[0] >= 0
                    wanted = wanted._replace(masks=wanted.masks[real])
                    found = [x._replace(masks=x.masks.cpu()[real]) for x in found]
                worst = max(worst, difference(found[0], wanted))
                repeatable &= difference(found[1], to(found[0], "cpu")) == 0
            bound = 1e-4 if name in ("draft_chain", "draw_chain", "candidate_logits") else 0.0
            seconds = time.perf_counter() - begin
            row = dict(op=name, cases=len(arguments), worst=worst, bound=bound, repeatable=repeatable, seconds=seconds)
            rows.append(row)
        rows += [check_growth(kernels, g), check_writes(kernels, g)]
    finally:
        Tensor.new_empty = original
    for row in rows:
        row["ok"] = row["worst"] <= row["bound"] and row["repeatable"]
    return rows


def check_growth(kernels: dict[str, Callable[..., Any]], g: torch.Generator) -> dict[str, Any]:
    """Whole trees of 32 and 64 nodes, level by level: the same nodes with the same scores."""
    worst, count, repeatable = 0.0, 0, True
    for size in (32, 64):
        for _ in range(3):
            logits = torch.randn(3, 7, size, 32, generator=g) * 2
            candidates, limits = torch.randint(999, (3, 1, 32), generator=g), torch.tensor([9, 3, 0])

            def grow(level: Any, best: Any, device: str) -> Any:
                nodes = Nodes.room(torch.zeros(3, dtype=torch.int64, device=device), 1 + 7 * (size - 1))
                first, width, total = 0, 1, 1
                for k in range(7):
                    keep = min(size - 1, width * 32)
                    q = logits[:, k, :width].contiguous().to(device)
                    level(nodes, q, candidates.to(device), limits.to(device), k, first, total, keep, True)
                    first, width, total = total, keep, total + keep
                return best(nodes, total, size)

            wanted = grow(growth.grow_level, growth.best_tree, "cpu")
            found = [grow(kernels["grow_level"], kernels["best_tree"], GPU) for _ in range(2)]
            live = wanted[0] >= 0
            steps = difference(found[0][3].cpu()[live], wanted[3][live])
            worst = max(worst, steps, difference(found[0][:3], wanted[:3]))
            repeatable &= difference(found[1], to(found[0], "cpu")) == 0
            count += 1
    return dict(op="grow_level, best_tree", cases=count, worst=worst, bound=1e-5, repeatable=repeatable)


def check_writes(kernels: dict[str, Callable[..., Any]], g: torch.Generator) -> dict[str, Any]:
    """What is written in place: context entries in bfloat16, committed tokens."""
    worst = 0.0
    for heads, dim in ((8, 128), (3, 64)):
        kv = torch.randn(9, 5, 2, heads, dim, generator=g).bfloat16()
        pages = torch.zeros(2, 5, 7, PAGE, heads, dim, dtype=torch.bfloat16)
        ours = pages.to(GPU, copy=True)
        angles = torch.rand(4096, dim // 2, generator=g) * 6
        args = (
            torch.randperm(7 * PAGE, generator=g)[:9], torch.randint(4096, (9,), generator=g),
            torch.cat((angles.cos(), angles.sin()), 1), torch.rand(5, dim, generator=g).bfloat16() + 0.5, 1e-6,
        )  # fmt: skip
        drafting.append_context(kv, *pages, *args)
        kernels["append_context"](kv.to(GPU), *ours, *to(args, GPU))
        worst = max(worst, difference(ours, pages))
    tokens, parents, _ = forest(g, 5, 32)
    _, emitted, number = trees.follow_tree(tokens, parents, torch.randint(5, (5, 32), generator=g), 31)
    best = torch.randn(5, 32, generator=g)
    best[1, 0], best[2, 3] = float("nan"), float("inf")
    state = [torch.randint(9, (5, 200), generator=g), *(torch.randint(1, 90, (5,), generator=g) for _ in range(3))]
    rest = (emitted, number, (tokens >= 0).sum(1), best, torch.full((5,), -1))
    ours = [x.to(GPU, copy=True) for x in state]
    same = difference(kernels["commit_tokens"](*ours, *to(rest, GPU)), trees.commit_tokens(*state, *rest))
    same = max(same, difference([ours[0][:, :-1], *ours[1:]], [state[0][:, :-1], *state[1:]]))
    return dict(op="append_context, commit_tokens", cases=3, worst=max(worst, same), bound=1e-2, repeatable=True)


# ------------------------------------------------------------------------------------------------------------ speed


def launches(call: Callable[[], Any]) -> int | None:
    """Kernels, copies and fills of one call; None where the profiler sees none."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        call()
        torch.cuda.synchronize()
    count = sum(1 for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    return count or None


class Setup:
    """A drafter with random weights around a target of which only the tables are there, and R requests."""

    def __init__(self, target: str, requests: int, drafter: Any = None) -> None:
        c = load_model_config(target)
        device = torch.device(GPU)
        self.requests, self.vocab = requests, c.vocab_size
        if drafter is None:
            table = torch.randn(c.vocab_size, c.hidden_size, device=device, dtype=torch.bfloat16) * 0.02
            model = SimpleNamespace(
                name=target, device=device, dtype=torch.bfloat16, embed=table, lm_head=table, vocab_size=c.vocab_size,
                num_layers=c.num_hidden_layers, max_model_len=4096,
            )  # fmt: skip
            config = SimpleNamespace(weights="dummy", seed=0)
            drafter = dummy_drafter(DRAFTERS[target], SimpleNamespace(model=model, config=c, name=target), config)
        self.drafter = drafter
        pages = -(-(CONTEXT + 128) // PAGE)
        drafter.allocate(requests * pages + 1, PAGE, device)
        ids = lambda *shape: torch.randint(self.vocab, shape, device=device)  # noqa: E731
        full = lambda value: torch.full((requests,), value, device=device)  # noqa: E731
        table = torch.arange(1, requests * pages + 1, device=device).view(requests, -1).int()
        self.state = BatchState(
            ids(requests, CONTEXT + 128), full(CONTEXT), table, full(63), full(0.0), full(1), full(5), CONTEXT + 64
        )
        self.features = torch.randn(
            requests, 8, len(drafter.taps) * c.hidden_size, device=device, dtype=torch.bfloat16
        )
        self.kept = full(6)
        self.warm = replace(self.state, temperature=full(1.0))

    def parts(self) -> dict[str, Callable[[], Any]]:
        """The parts of a step's draft, acceptance and commit, each as a call."""
        d, state, network = self.drafter, self.state, self.drafter.network
        chain, tree = TreeSpec.chain(7), load_tree("tree-32")
        hidden = d._block(state, state.roots)[:, :7]
        best, ids = d._best(hidden, d.candidates)
        grown = d.propose(state, tree, False)
        line = d.propose(state, chain, False)
        choices = torch.randint(self.vocab, grown.tokens.shape, device=state.tokens.device)
        logits = torch.randn(grown.tokens.shape, device=state.tokens.device)
        survival = torch.tensor([1.0] * 5 + [0.0, 0.0], dtype=torch.float64, device=state.tokens.device)
        steps = torch.zeros_like(state.seq_lens)
        seq_lens, outputs = state.seq_lens.clone(), state.num_outputs.clone()
        bigger = TreeSpec(tuple([-1] + [max(0, i - 9) for i in range(1, 64)]))

        def place(t: DraftTree) -> Any:
            where = state.seq_lens, state.page_table, PAGE
            return ops.place_tree(t.tokens, t.parents, *where, t.depth, self.vocab, t.is_chain)

        def follow(t: DraftTree) -> Any:
            return ops.follow_tree(t.tokens, t.parents, choices[:, : t.width], t.depth, t.is_chain)

        def reach(t: DraftTree) -> Any:
            wanted = ops.synthetic_drafts(state.seeds, steps, survival, True)
            return ops.reach_tree(t.tokens, t.parents, choices[:, : t.width], wanted, t.depth, t.is_chain)

        def commit(t: DraftTree) -> Any:
            _, emitted, count = follow(t)
            seq_lens.copy_(state.seq_lens)
            return ops.commit_tokens(
                state.tokens, seq_lens, outputs, steps, emitted, count, t.num_nodes, logits[:, : t.width], steps
            )

        return {
            "context (fuse, K and V, append)": lambda: d.observe(state, self.features, self.kept),
            "block pass": lambda: d._block(state, state.roots),
            "LM head": lambda: ops.linear(hidden.flatten(0, 1), network.lm_head),
            "LM head and best 32": lambda: d._best(hidden, d.candidates),
            "Markov chain of 7": lambda: d._chain_of(best, ids, hidden, state, state.roots),
            "draft, chain of 7, drawn": lambda: d.propose(self.warm, chain, True),
            "draft, chain of 7": lambda: d.propose(state, chain, False),
            "draft, tree of 32": lambda: d.propose(state, tree, False),
            "draft, tree of 64": lambda: d.propose(state, bigger, False),
            "place, chain": lambda: place(line),
            "place, tree of 32": lambda: place(grown),
            "greedy acceptance, chain": lambda: follow(line),
            "greedy acceptance, tree of 32": lambda: follow(grown),
            "synthetic acceptance, tree of 32": lambda: reach(grown),
            "prune, tree of 32": lambda: ops.prune_tree(grown.tokens, grown.parents, grown.tokens >= 0, grown.depth),
            "acceptance and commit, tree of 32": lambda: commit(grown),
        }


def measure(kernels: Path | None) -> list[dict[str, Any]]:
    """Microseconds and launches of every part, with the kernels and with the reference."""
    cute: dict[str, Callable[..., Any]] = {}
    if kernels is not None:
        from verify_kernels import cute as hopper

        cute = hopper.implementations(kernels)
    rows: list[dict[str, Any]] = []
    for target in DRAFTERS:
        drafter = None
        for requests in (1, 8):
            setup = Setup(target, requests, drafter)
            drafter = setup.drafter
            with torch.inference_mode():
                for name, table in (("reference", {}), ("kernels", cute | triton.implementations(unmeasured=True))):
                    ops._loaded[GPU] = ops._REFERENCE | table
                    for part, call in setup.parts().items():
                        row: dict[str, Any] = dict(drafter=DRAFTERS[target], requests=requests, part=part, by=name)
                        try:
                            row["us"] = graph_us(call)
                            row["launches"] = launches(call) if requests == 1 else None
                        except Exception as error:
                            row["failed"] = f"{type(error).__name__}: {error}"[:300]
                        rows.append(row)
    return rows


def summary(checks: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'ok ' if c['ok'] else 'BAD'} {c['op']}: {c['cases']} cases, worst {c['worst']:.1e} (bound {c['bound']:g})"
        + ("" if c["repeatable"] else ", NOT REPEATABLE")
        for c in checks
    ]
    for target, requests in dict.fromkeys((r["drafter"], r["requests"]) for r in rows):
        lines.append(f"{target}, {requests} request(s): us (launches) by torch's reference | by the kernels")
        own = [r for r in rows if (r["drafter"], r["requests"]) == (target, requests)]
        for part in dict.fromkeys(r["part"] for r in own):
            said = [
                r.get("failed") or f"{r['us']:8.1f}" + (f" ({r['launches']})" if r.get("launches") else "")
                for by in ("reference", "kernels") for r in own if (r["part"], r["by"]) == (part, by)
            ]  # fmt: skip
            lines.append(f"  {part:36} " + " | ".join(f"{x:>16}" for x in said))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=Path, help="folder of compiled CuTe DSL kernels")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    checks, rows = check(), []

    def write() -> None:
        if args.json:
            found = dict(gpu=torch.cuda.get_device_name(), checks=checks, results=rows)
            args.json.write_text(json.dumps(found, indent=1) + "\n")

    write()
    print(summary(checks, []), flush=True)
    rows = measure(args.kernels)
    write()
    print(summary([], rows))
    if not all(c["ok"] for c in checks) or any("failed" in r for r in rows):
        raise SystemExit("some checks or parts failed")


if __name__ == "__main__":
    main()
