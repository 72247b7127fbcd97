"""`dspark check`: is a pair of target and drafter sound? Seconds, a drafter's checkpoint on a CPU minutes.

Every check has a known answer: a target that drafts for itself accepts everything; speculative output equals plain
output; prompt lengths around page and chunk edges change nothing. What is left is the drafter's own quality: its
AL, and for a checkpoint that reads hidden states whether it is read as it was trained (`eval.check_drafter`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dspark_runtime.errors import DsparkError
from eval.bench import load, make_drafter
from dspark_runtime.prompts import encode, load_prompts, random_ids
from eval.schema import BenchConfig

if TYPE_CHECKING:
    from drafters.tree import TreeSpec
    from dspark_runtime.models.base import Model
    from dspark_runtime.request import RequestOutput

PAGE, CHUNK = 16, 40
EDGES = (15, 16, 17, 31, 32, 33, CHUNK - 1, CHUNK, CHUNK + 1)
DRAFTS = 4
TREE = (-1, 0, 0, 1, 1, 2, 3)
NEAR_TIE = {"float32": 0.0, "bfloat16": 0.125, "float16": 0.02}
"""Gap of two log-probabilities that rounding alone can turn round, by dtype."""


def run(
    model: Model,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    drafter: Any = None,
    spec: TreeSpec | None = None,
    logprobs: int | None = None,
    **engine: int,
) -> list[RequestOutput]:
    """Greedy output of all prompts, exactly `tokens` each. Raises DsparkError if a request fails."""
    from dspark_runtime.engine import Engine
    from dspark_runtime.sampling import SamplingParams

    longest = max(map(len, prompts)) + tokens
    settings = dict(max_num_requests=len(prompts), max_model_len=min(longest, model.max_model_len), page_size=PAGE)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs)
    outputs = Engine(model, drafter, spec=spec, **(settings | engine)).generate(prompts, params)
    for output in outputs:
        if output.error:
            raise DsparkError(f"request {output.request_id}: {output.error}")
    return outputs


def compare_outputs(plain: Sequence[RequestOutput], other: Sequence[RequestOutput], gap: float) -> tuple[int, int]:
    """(requests that differ, of them near ties): a near tie first differs in a token within `gap` of the best."""
    differ = ties = 0
    for a, b in zip(plain, other, strict=True):
        if a.token_ids == b.token_ids:
            continue
        differ += 1
        at = next(i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids)) if x != y)
        if gap:
            best = a.logprobs[at]
            ties += best.logprob - best.top.get(b.token_ids[at], float("-inf")) <= gap
    return differ, ties


def length_of(outputs: Sequence[RequestOutput]) -> float:
    """AL, bonus token included, pooled over the requests' steps."""
    steps = sum(o.num_steps for o in outputs)
    return (steps + sum(o.num_accepted for o in outputs)) / steps


def check(
    config: BenchConfig,
    k: int | None,
    tree: str | None,
    expect_al: float | None,
    tolerance: float,
    min_al: float,
    context: int | None,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Load the pair, run every check, say one line for each. One row a check: check, passed, text, and its numbers.

    k: drafts in a row, None for 4 or as many as the drafter makes.
    """
    target = load(config.target, config)
    drafter = make_drafter(config.drafter, target, config)
    return check_pair(target, drafter, k, tree, expect_al, tolerance, min_al, context, say)


def check_pair(
    target: Any,
    drafter: Any,
    k: int | None,
    tree: str | None,
    expect_al: float | None,
    tolerance: float,
    min_al: float,
    context: int | None,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    from drafters.draft_model import DraftModel
    from drafters.dspark.drafter import BlockDrafter
    from drafters.dspark.eagle3 import Eagle3Drafter
    from drafters.tree import TreeSpec
    from dspark_runtime.configs import load_tree
    from eval.check_drafter import check_drafter

    model = target.model
    dtype = str(model.dtype).removeprefix("torch.")
    gap = NEAR_TIE[dtype]
    logprobs = 2 if gap else None
    if target.tokenizer is not None:
        prompts = [encode(target.tokenizer, text) for text in load_prompts().texts[:6]]
    else:
        prompts = random_ids(6, 24, model.vocab_size, seed=0)
    tokens = 20
    rows: list[dict[str, Any]] = []

    def verdict(name: str, passed: bool, text: str, **numbers: Any) -> None:
        rows.append(dict(check=name, passed=passed, text=text, **numbers))
        say(f"{'ok  ' if passed else 'FAIL'}  {text}")

    def same(name: str, what: str, plain: list[RequestOutput], other: list[RequestOutput]) -> None:
        differ, ties = compare_outputs(plain, other, gap)
        text = f"{what}: {len(other) - differ} of {len(other)} outputs equal plain decoding"
        verdict(name, differ == ties, text + (f", {ties} near ties within {dtype} rounding" if ties else ""))

    if k is None:
        k = DRAFTS if drafter is None else min(DRAFTS, drafter.max_depth)
    say(f"target {target.name} ({dtype}), drafter {drafter.name if drafter is not None else 'none'}, k={k}")
    plain = run(model, prompts, tokens, logprobs=logprobs)

    # Lengths at page and chunk edges: short pages and chunks against one page and one chunk, with the target as its own
    # drafter, so that a wrong position or a lost cache entry shows as a rejected draft.
    edges = random_ids(len(EDGES), max(EDGES), model.vocab_size, seed=1)
    edges = [ids[:length] for ids, length in zip(edges, EDGES) if length + 6 <= model.max_model_len]
    reference = run(model, edges, 6, logprobs=logprobs, page_size=64)
    recurrent = model.allocate(2, 1).states is not None
    own, spec = (None, TreeSpec.chain(0)) if recurrent else (DraftModel(model), TreeSpec.chain(4))
    twin = run(model, edges, 6, own, spec, max_prefill_tokens=CHUNK)
    at_chunk = [i for i, ids in enumerate(edges) if len(ids) == CHUNK + 1]
    alone = [run(model, [edges[i]], 6, own, spec, max_prefill_tokens=CHUNK)[0] for i in at_chunk]
    drafted = sum(o.num_drafted for o in [*twin, *alone])
    accepted = sum(o.num_accepted for o in [*twin, *alone])
    enough = accepted == drafted if not gap else accepted >= 0.9 * drafted
    if recurrent:
        say("      target as its own drafter: not checked, recurrent layers do not draft")
    else:
        verdict("twin", enough and drafted > 0, f"target as its own drafter: {accepted} of {drafted} drafts accepted")
    lengths = ", ".join(str(len(ids)) for ids in edges)
    same(
        "prompt_lengths",
        f"prompt lengths {lengths} (page {PAGE}, chunk {CHUNK})",
        [*reference, *(reference[i] for i in at_chunk)],
        [*twin, *alone],
    )

    if drafter is None:
        return rows
    chain = run(model, prompts, tokens, drafter, TreeSpec.chain(k))
    same("chain", f"chain of {k}", plain, chain)
    if drafter.can_tree:
        spec = load_tree(tree) if tree else TreeSpec(TREE)
        if not tree and spec.depth > drafter.max_depth:
            spec = TreeSpec(tuple(p for p, d in zip(TREE, spec.depths) if d <= drafter.max_depth))
        same("tree", f"tree {tree or f'of {spec.num_drafts} drafts, depth {spec.depth}'}", plain, run(model, prompts, tokens, drafter, spec))
    elif tree:
        verdict("tree", False, f"tree {tree}: {drafter.name} drafts chains only")
    else:
        say(f"      tree: not checked, {drafter.name} drafts chains only")

    length = length_of(chain)
    proposed = sum(o.num_drafted for o in chain)
    taken = sum(o.num_accepted for o in chain)
    line = f"AL {length:.2f} over {len(prompts)} prompts of {tokens} tokens ({taken} of {proposed} drafts accepted)"
    if not proposed:
        verdict("al", False, f"DEAD DRAFTER: {drafter.name} proposed nothing; {line}")
    elif length < min_al:
        verdict("al", False, f"DEAD DRAFTER: almost nothing is accepted, below --min-al {min_al:g}; {line}")
    elif expect_al is not None:
        verdict("al", abs(length - expect_al) <= tolerance, f"{line}; expected {expect_al:g} ± {tolerance:g}")
    else:
        verdict("al", True, line)
    if isinstance(drafter, (BlockDrafter, Eagle3Drafter)):
        check_drafter(model, drafter, prompts, k, min_al, context, verdict)
    return rows
