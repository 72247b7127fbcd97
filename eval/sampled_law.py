"""Whether sampled drafting leaves the target's law alone, with a real drafter: chi-square on a request's first tokens.

    python -m eval.sampled_law --json FILE [--draws 20000] [--limit 20]

Every draw is a request of its own seed that goes through the drafter's sampled drafts (a chain and a drawn tree) and the
acceptance rule as in the engine, step by step, until it has three tokens. All draws of a prompt share its context, so
that a step of them is one pass of the drafter, and the target is asked once for each text that can occur: with a small
top-k there are few. Their law is then known exactly too. The first draws of each prompt also go through the engine: the
share of them with the same tokens is told (bf16 batches round differently).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from drafters.topology import TreeSpec
    from drafters.tree import DraftTree
    from dspark_runtime.sampling import SamplingParams

TOKENS = 3
ROWS = 128
"""Draws of one pass."""
PAGE = 16
FEW = 5.0
"""Cells that expect fewer draws are counted together."""
LEVEL = 0.01
"""Of each shape's two tests over all prompts: the smallest p times their number, and the sum of their statistics."""


class Texts:
    """What the target makes of a prompt: its law after each text that can follow, `TOKENS` - 1 tokens at most.

    probs [U, V] float32, row 0 uniform: of texts that nothing needs; rows: text -> its row; following: text -> the
    tokens that it can go on with.
    """

    def __init__(self, model: Any, prompt: Sequence[int], params: SamplingParams) -> None:
        import torch

        self.rows: dict[tuple[int, ...], int] = {}
        self.following: dict[tuple[int, ...], list[int]] = {}
        probs = [torch.full((model.vocab_size,), 1 / model.vocab_size)]
        level: list[tuple[int, ...]] = [()]
        for _ in range(TOKENS):
            for text in level:
                self.rows[text] = len(probs)
                probs.append(law_after(model, [*prompt, *text], params))
                self.following[text] = probs[-1].nonzero().flatten().tolist()
            level = [(*text, token) for text in level for token in self.following[text]]
        self.probs = torch.stack(probs)
        self.outcomes = level

    def joint(self) -> Tensor:
        """Probability of each outcome, float64."""
        import torch

        p = torch.ones(len(self.outcomes), dtype=torch.float64)
        for i, text in enumerate(self.outcomes):
            for n, token in enumerate(text):
                p[i] *= self.probs[self.rows[text[:n]], token].double()
        return p

    def rows_of(self, tree: DraftTree, begin: tuple[int, ...]) -> Tensor:
        """The row of every node of trees behind this text, [R, n]; 0 where nothing the target can say leads."""
        import torch

        found = torch.zeros_like(tree.tokens)
        found[:, 0] = self.rows[begin]
        for j in range(1, tree.tokens.shape[1]):
            above = found.gather(1, tree.parents[:, j : j + 1].clamp(min=0)).squeeze(1)
            for text, row in self.rows.items():
                if row in above:
                    for token in self.following[text]:
                        here = (above == row) & (tree.tokens[:, j] == token)
                        found[:, j] = torch.where(here, self.rows.get((*text, token), 0), found[:, j])
        return found


def law_after(model: Any, ids: list[int], params: SamplingParams) -> Tensor:
    """The runtime's own `target_probs` after these tokens, [V]."""
    import torch

    from drafters.tree import DraftTree, TreeSpec
    from dspark_runtime.sampling import SamplingState, target_probs

    state = state_of(ids, 1, params, model.device)
    hidden, _ = model.forward(context(ids, model.device), model.allocate(pages(len(ids)), PAGE))
    tree = DraftTree.from_spec(TreeSpec.chain(0), state.roots[:, None])
    sampling = SamplingState.build([params], [len(ids)], [()], model.vocab_size, model.device)
    rows = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    return target_probs(model.logits(hidden[-1:]), sampling, state, tree, rows)[0]


def pages(tokens: int) -> int:
    """Of a cache for one request with room for the drafter's slots, and the scratch page."""
    return -(-(tokens + 64) // PAGE) + 1


def state_of(ids: Sequence[int], requests: int, params: SamplingParams, device: torch.device) -> Any:
    """The same context so many times, all in the pages of one."""
    import torch

    from drafters.base import BatchState

    def each(value: float, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full((requests,), value, dtype=dtype, device=device)

    table = torch.arange(1, pages(len(ids)), dtype=torch.int32, device=device)
    tokens = torch.tensor(ids, device=device).expand(requests, -1)
    return BatchState(
        tokens=tokens, seq_lens=each(len(ids)), page_table=table.expand(requests, -1).contiguous(), max_drafts=each(TOKENS),
        temperature=each(params.temperature, torch.float32), seeds=each(0), num_outputs=each(0), max_seq_len=len(ids),
    )  # fmt: skip


def context(ids: Sequence[int], device: torch.device) -> Any:
    """A prompt pass of all these tokens."""
    import torch

    from verify_kernels.batch import PassBatch

    at = torch.arange(len(ids), device=device)
    return PassBatch(
        token_ids=torch.tensor(ids, device=device),
        positions=at,
        request_offsets=torch.tensor([0, len(ids)], dtype=torch.int32, device=device),
        context_lens=torch.zeros(1, dtype=torch.int32, device=device),
        page_table=torch.arange(1, pages(len(ids)), dtype=torch.int32, device=device)[None],
        slot_mapping=at + PAGE,
        ancestor_masks=None,
        max_query_len=len(ids),
        max_kv_len=len(ids),
    )


def draw(
    model: Any, drafter: Any, prompt: list[int], texts: Texts, params: SamplingParams, spec: TreeSpec, rule: str, seeds: Tensor
) -> tuple[Tensor, float]:
    """The first tokens of a request of each seed [N, TOKENS], and the mean number of drafts a step accepted."""
    import torch

    from dspark_runtime import acceptance

    out = torch.full((len(seeds), TOKENS), -1, dtype=torch.int64)
    waiting: dict[tuple[int, ...], Tensor] = {(): torch.arange(len(seeds))}
    steps = accepted_drafts = 0
    while waiting:
        begin, who = waiting.popitem()
        ids = [*prompt, *begin]
        cache = model.allocate(pages(len(ids)), PAGE)
        drafter.allocate(pages(len(ids)), PAGE, model.device)
        before = context(ids[:-1], model.device)  # the last token is the root: it is verified with the drafts
        _, features = model.forward(before, cache, drafter.taps)
        drafter.prefill(before, features)
        for part in who.split(ROWS):
            state = state_of(ids, len(part), params, model.device)
            state.seeds, state.num_outputs = seeds[part], state.num_outputs + len(begin)
            tree = drafter.propose(state, spec, True)
            rows = texts.rows_of(tree, begin)
            got = acceptance.RULES[rule].accept(tree, texts.probs, rows, state.seeds, state.num_outputs)
            steps, accepted_drafts = steps + len(part), accepted_drafts + int((got.num_emitted - 1).sum())
            fits = got.tokens[:, : TOKENS - len(begin)]
            out[part, len(begin) : len(begin) + fits.shape[1]] = fits
        for text in {tuple(t for t in line if t >= 0) for line in out[who].unique(dim=0).tolist()}:
            if len(text) < TOKENS:
                row = torch.tensor([*text, *[-1] * (TOKENS - len(text))])
                here = who[(out[who] == row).all(1)]
                waiting[text] = torch.cat((waiting[text], here)) if text in waiting else here
    return out, accepted_drafts / steps


def chi_square(tokens: Tensor, texts: Texts) -> tuple[float, int, float]:
    """(statistic, cells, p) of draws [N, TOKENS] against the exact law. A draw that the law excludes has p = 0."""
    import torch

    expected = texts.joint() * len(tokens)
    place = {text: i for i, text in enumerate(texts.outcomes)}
    observed = torch.zeros_like(expected)
    for line, count in zip(*(x.tolist() for x in tokens.unique(dim=0, return_counts=True))):
        if tuple(line) not in place:
            return float("inf"), len(expected), 0.0
        observed[place[tuple(line)]] = count
    small = expected < FEW
    cells = [(observed[~small], expected[~small])]
    if small.any():
        cells.append((observed[small].sum()[None], expected[small].sum()[None]))
    seen, want = (torch.cat(x) for x in zip(*cells))
    statistic = float(((seen - want) ** 2 / want).sum())
    return statistic, len(want), tail(statistic, len(want) - 1)


def tail(statistic: float, freedom: int) -> float:
    """Probability of a larger chi-square of so many degrees of freedom."""
    import torch

    if not freedom:
        return 1.0
    half, at = (torch.tensor(x / 2, dtype=torch.float64) for x in (freedom, statistic))
    return float(torch.special.gammaincc(half, at))


def through_the_engine(
    model: Any, drafter: Any, prompt: list[int], params: SamplingParams, spec: TreeSpec, seeds: Sequence[int]
) -> list[list[int]]:
    """The same requests as `draw`'s, by the whole engine."""
    from dataclasses import replace

    from dspark_runtime.engine import Engine

    length = len(prompt) + 2 * TOKENS + 8
    engine = Engine(model, drafter, spec=spec, max_num_requests=32, max_model_len=length, cuda_graph=False)
    # Room for whole steps: what the limit of tokens would cut is not drafted.
    each = [replace(params, seed=seed, max_tokens=2 * TOKENS, ignore_eos=True) for seed in seeds]
    return [output.token_ids[:TOKENS] for output in engine.generate([prompt] * len(seeds), each)]


def measure(
    model: Any, drafter: Any, name: str, prompt: list[int], spec: TreeSpec, draws: int, checked: int, top_k: int, first: int
) -> dict[str, Any]:
    """One prompt and shape. first: the first seed."""
    import torch

    from dspark_runtime.acceptance import choose_rule
    from dspark_runtime.sampling import SamplingParams

    params = SamplingParams(temperature=1.0, top_k=top_k, max_tokens=TOKENS)
    rule = choose_rule("auto", spec, True)
    seeds = first + torch.arange(draws)
    texts = Texts(model, prompt, params)
    tokens, accepted = draw(model, drafter, prompt, texts, params, spec, rule, seeds)
    statistic, cells, p = chi_square(tokens, texts)
    same = through_the_engine(model, drafter, prompt, params, spec, seeds[:checked].tolist()) if checked else []
    equal = sum(a == b for a, b in zip(same, tokens[:checked].tolist()))
    return dict(
        shape=name, num_nodes=spec.num_nodes, rejection_sample_method=rule, draws=draws, top_k=top_k, cells=cells,
        chi_square=statistic, p=p, accepted_per_step=accepted, engine_draws=len(same), engine_equal=equal,
    )  # fmt: skip


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
    draws: Annotated[int, typer.Option(help="draws of each prompt and shape")] = 20_000,
    limit: Annotated[int, typer.Option(help="prompts")] = 20,
    checked: Annotated[int, typer.Option(help="draws that go through the engine too")] = 64,
    top_k: Annotated[int, typer.Option(help="tokens that the target may sample")] = 4,
    drafter: Annotated[str, typer.Option(help="a DSpark drafter")] = "smollm2-135m-dspark",
    target: Annotated[str, typer.Option(help="its target")] = "smollm2",
) -> None:
    import torch
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from drafters.topology import TreeSpec
    from drafters.tree_search import drawn_tree
    from dspark_runtime.prompts import encode, load_prompts
    from eval.bench import load, make_drafter
    from eval.environment import write_result
    from eval.schema import EvalConfig

    config = EvalConfig(target=target, drafter=drafter)
    loaded = load(target, config)
    drafting = make_drafter(drafter, loaded, config)
    prompts = load_prompts().texts[:limit]
    shapes = {"chain": TreeSpec.chain(TOKENS), "tree": drawn_tree(10, TOKENS)}
    rows = []
    with torch.inference_mode():
        for i, text in enumerate(track(prompts, "drawing")):
            prompt = encode(loaded.tokenizer, text)
            for j, (name, spec) in enumerate(shapes.items()):
                first = (2 * i + j) * draws
                found = measure(loaded.model, drafting, name, prompt, spec, draws, checked, top_k, first)
                rows.append({"prompt": i} | found)
                if json_file:
                    command = f"python -m eval.sampled_law --draws {draws} --limit {limit} --checked {checked} --top-k {top_k}"
                    write_result(json_file, command, rows)
    table = Table("shape", "prompts", "draws each", "smallest p x prompts", "p of all", "accepted a step", "engine equal")
    wrong = []
    for name in shapes:
        own = [r for r in rows if r["shape"] == name]
        least = min(1.0, min(r["p"] for r in own) * len(own))
        together = tail(sum(r["chi_square"] for r in own), sum(r["cells"] - 1 for r in own))
        equal, of = (sum(r[f"engine_{what}"] for r in own) for what in ("equal", "draws"))
        mean = sum(r["accepted_per_step"] for r in own) / len(own)
        table.add_row(name, str(len(own)), str(draws), f"{least:.3g}", f"{together:.3g}", f"{mean:.2f}", f"{equal} of {of}")
        if min(least, together) < LEVEL:
            wrong.append(name)
    Console().print(table)
    if wrong:
        raise SystemExit(f"law: the draws of {' and '.join(wrong)} are not the target's at the level of {LEVEL}")


if __name__ == "__main__":
    typer.run(main)
