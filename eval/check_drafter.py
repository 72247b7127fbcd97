"""What `dspark check` asks of a drafter checkpoint: is it read as it was trained, and are its parts alive?

The target writes text of its own, one token a step, while the drafter's chain at every position is noted and none of it
is used. The same text is then drafted by the drafter's neighbours: layer ids, slots and tables read one step otherwise.
If a neighbour matches the text clearly better, that is the cause.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drafters.base import BatchState
from drafters.dspark.calibration import auc
from drafters.dspark.network import DraftNetwork
from drafters.tree import DraftTree, TreeSpec
from dspark_runtime.engine import Engine
from dspark_runtime.errors import DsparkError
from dspark_runtime.models.kimi_k3 import KimiK3
from dspark_runtime.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from dspark_runtime.models.base import Model

    Verdict = Callable[..., None]
    """verdict(name, passed, text, **numbers)"""

TOKENS = 24
"""Tokens that the target writes after each prompt."""
COVERAGE = 0.8
"""A draft vocabulary that holds less of the target's text than this fails."""
COLLAPSE = 0.4
"""Accepted drafts a step at a context length, as a share of the median over lengths, below which it fails."""
SPREAD = 1e-3
"""A confidence head whose outputs have a smaller standard deviation is constant."""
KNOWS = 0.7
"""AUC of a confidence head; one that is below by three standard errors knows next to nothing."""
USUAL = 0.3
"""First drafts of published drafters match half of the text and more; below this a line says so."""
CONTEXT = 512
"""Longest context that is tried unless asked for; of a drafter with a short range of its own, a little past it."""
PASSAGES = 4
SMALL_PAGE, PAGE, CHUNK = 4, 16, 40

Key = tuple[int, int]
"""(request, committed tokens) of one proposal."""


@dataclass
class Recorder:
    """A drafter that drafts as `inner` does, notes it, and proposes nothing, so that the target writes its own text.

    Requests are told apart by their seeds.
    """

    inner: Any
    chains: dict[Key, list[int]] = field(default_factory=dict)
    sure: dict[Key, list[float]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, state: BatchState, spec: TreeSpec, sample: bool) -> DraftTree:
        tree = self.inner.propose(state, spec, sample)
        keys = list(zip(state.seeds.tolist(), state.seq_lens.tolist()))
        drafts = tree.num_nodes.tolist()
        for key, chain, n in zip(keys, tree.tokens.tolist(), drafts):
            self.chains[key] = chain[1:n]
        if tree.confidence is not None:
            self.sure.update((key, line[1:n]) for key, line, n in zip(keys, tree.confidence.tolist(), drafts))
        return tree.limit(torch.zeros_like(state.max_drafts))


@dataclass
class Written:
    """Texts of the target (prompt and continuation, by request) and what was drafted at each of their positions."""

    texts: dict[int, list[int]]
    chains: dict[Key, list[int]]
    sure: dict[Key, list[float]]
    preemptions: int

    def accepted(self, k: int) -> dict[Key, int]:
        """Drafts that match the text from the first on, at every position with k drafts and k tokens to compare."""
        found = {}
        for (request, length), chain in self.chains.items():
            text = self.texts[request][length : length + k]
            if len(chain) >= k and len(text) == k:
                found[request, length] = next((i for i, (a, b) in enumerate(zip(chain, text)) if a != b), k)
        return found

    def firsts(self) -> dict[Key, bool]:
        """Whether the first draft is what the target wrote."""
        return {key: bool(n) for key, n in self.accepted(1).items()}


def write(
    model: Model, drafter: Any, prompts: Sequence[Sequence[int]], tokens: int, k: int, number: int = 0, **engine: int
) -> Written:
    """Greedy text of the target, `tokens` after each prompt, and the drafter's chains of k along it. number: of the
    first request."""
    recorder = Recorder(drafter)
    longest = min(max(map(len, prompts)) + tokens, model.max_model_len)
    settings = dict(max_num_requests=len(prompts), max_model_len=longest, page_size=PAGE) | engine
    run = Engine(model, recorder, spec=TreeSpec.chain(min(k, drafter.max_depth)), **settings)
    numbers = range(number, number + len(prompts))
    params = [SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=i) for i in numbers]
    outputs = run.generate(prompts, params)
    for output in outputs:
        if output.error:
            raise DsparkError(f"request {output.request_id}: {output.error}")
    texts = {i: [*prompt, *output.token_ids] for i, prompt, output in zip(numbers, prompts, outputs)}
    return Written(texts, recorder.chains, recorder.sure, run.num_preemptions)


def clearly_better(other: dict[Key, bool], base: dict[Key, bool]) -> bool:
    """A paired sign test at three standard errors, over the positions that both have."""
    both = other.keys() & base.keys()
    gained, lost = sum(other[x] > base[x] for x in both), sum(other[x] < base[x] for x in both)
    return gained - lost > 3 * math.sqrt(gained + lost)


# ------------------------------------------------------------------------------------------------------ neighbours


def rebuilt(drafter: Any, **changes: Any) -> Any:
    """The drafter with another embed, lm_head, target_ids or tensors (by name, beside its own)."""
    old, c = drafter.network, drafter.network.config
    own_mask = c.mask_token_id is None or not torch.equal(old.mask, old.embed[c.mask_token_id])
    tables = {name: changes.get(name, getattr(old, name)) for name in ("embed", "lm_head", "target_ids")}
    tensors = old.tensors() | changes.get("tensors", {})
    new = copy.copy(drafter)
    new.network = DraftNetwork(c, tensors, **tables, mask=old.mask if own_mask else None).requires_grad_(False)
    return new


def neighbours(model: Any, drafter: Any) -> Iterator[tuple[str, str, Any]]:
    """(name, what is wrong if it matches better, drafter) of every reading next to the one that was loaded."""
    c, network = drafter.config, drafter.network
    anchors = [c.sample_from_anchor]
    if c.kind != "eagle3" and c.block_size > 1:
        anchors.append(not c.sample_from_anchor)
    shifts = [x for x in (0, -1, 1) if -1 <= min(c.taps) + x and max(c.taps) + x < model.num_layers]
    for shift, anchor in itertools.product(shifts, anchors):
        said = {}
        other = copy.copy(drafter)
        if shift:
            said["layer ids"] = f"taps {shift:+d}"
            other.taps = c.model_copy(update=dict(taps=tuple(i + shift for i in c.taps))).tapped
        if anchor != c.sample_from_anchor:
            said["slots"] = f"sample_from_anchor {str(anchor).lower()}"
            other.config = c.model_copy(update=dict(sample_from_anchor=anchor))
            other.max_depth = other.config.num_drafts
            other.temperatures = ()  # they are one for each draft, of which there are more or fewer now
        if said:
            name = ", ".join(said.values())
            yield name, f"{' and '.join(said)} look off by one: {name} matches", other
    if isinstance(model, KimiK3):  # whose layers attend over depth
        stream = "sum" if c.stream == "mixture" else "mixture"
        other = copy.copy(drafter)
        other.taps = c.model_copy(update=dict(stream=stream)).tapped
        yield f"stream {stream}", f"the taps are not the stream that it was trained on: the {stream} matches", other
    for name, table in (("LM head", "lm_head"), ("embedding", "embed")):
        own, targets = getattr(network, table), getattr(model, table)
        if table == "lm_head" and network.target_ids is not None:
            targets = targets[network.target_ids]
        if own.shape == targets.shape and not torch.equal(own, targets):
            wrong = f"the {name} is not the one that the drafter was trained with: the target's matches"
            yield f"target's {name}", wrong, rebuilt(drafter, **{table: targets})
    if (ids := network.target_ids) is not None:
        rows = torch.arange(len(ids), device=ids.device)
        for name, wrong, other in (
            ("d2t as ids", "d2t holds target ids where offsets were read: read so it matches", ids - rows),
            ("d2t rows -1", "d2t is off by one row: shifted back it matches", ids.roll(-1)),
            ("d2t rows +1", "d2t is off by one row: shifted on it matches", ids.roll(1)),
            ("d2t ids -1", "d2t is off by one: target ids less one match", ids - 1),
            ("d2t ids +1", "d2t is off by one: target ids plus one match", ids + 1),
        ):
            if 0 <= int(other.min()) and int(other.max()) < c.vocab_size and len(other.unique()) == len(ids):
                yield name, wrong, rebuilt(drafter, target_ids=other)


# ---------------------------------------------------------------------------------------------------------- checks


def check_drafter(
    model: Any,
    drafter: Any,
    prompts: Sequence[Sequence[int]],
    k: int,
    min_al: float,
    context: int | None,
    verdict: Verdict,
) -> None:
    """Every check of a drafter that reads hidden states, one verdict or more each. context: see CONTEXT.

    drafter: a BlockDrafter or an Eagle3Drafter. Chains of k; a first draft that matches less than min_al - 1 is dead.
    """
    base = write(model, drafter, prompts, TOKENS, k)
    if not base.firsts():
        verdict("first_drafts", False, f"first drafts: {drafter.name} proposed nothing")
        return
    check_reading(model, drafter, base, prompts, k, min_al, verdict)
    check_heads(model, drafter, base, prompts, k, verdict)
    check_vocabulary(drafter, base, prompts, verdict)
    check_same(model, drafter, prompts, k, verdict)
    check_contexts(model, drafter, base, k, context, verdict)


def check_reading(
    model: Any, drafter: Any, base: Written, prompts: Sequence[Sequence[int]], k: int, min_al: float, verdict: Verdict
) -> None:
    """First drafts on the target's text, as the checkpoint was read and as its neighbours would be."""
    firsts = base.firsts()
    rate = sum(firsts.values()) / len(firsts)
    rates, better = {}, []
    for name, wrong, other in neighbours(model, drafter):
        found = write(model, other, prompts, TOKENS, k).firsts()
        rates[name] = sum(found.values()) / len(found) if found else 0.0
        if clearly_better(found, firsts):
            better.append((rates[name], wrong))
    numbers = dict(matched=rate, drafts=len(firsts), neighbours=rates)
    if better:
        best, wrong = max(better, key=lambda found: found[0])
        verdict("first_drafts", False, f"first drafts: {wrong} {best:.2f} against {rate:.2f}", **numbers)
        return
    listed = ", ".join(f"{name} {value:.2f}" for name, value in rates.items())
    line = f"first drafts match {rate:.2f} of {len(firsts)} tokens that the target wrote ({listed})"
    if rate < min_al - 1:
        line += ": weights of another target, or untrained; no neighbouring reading does better"
    elif rate < USUAL:
        line += ": few, half and more is usual; no neighbouring reading does better (too little training, or other text)"
    verdict("first_drafts", rate >= min_al - 1, line, **numbers)


def check_heads(
    model: Any, drafter: Any, base: Written, prompts: Sequence[Sequence[int]], k: int, verdict: Verdict
) -> None:
    """A Markov head must change drafts without deciding them alone; a confidence head must not be constant."""
    k = min(k, drafter.max_depth)
    if drafter.network.markov is not None:
        w2 = "markov_head.markov_w2.weight"
        own = drafter.network.tensors()[w2]

        def scaled(factor: float) -> Written:
            return write(model, rebuilt(drafter, tensors={w2: own * factor}), prompts, TOKENS, k)

        def length(written: Written) -> float:
            counts = written.accepted(k).values()
            return 1 + sum(counts) / max(len(counts), 1)

        def differs(other: Written) -> float:
            pairs = [pair for key in base.chains for pair in zip(base.chains[key], other.chains[key])]
            return sum(a != b for a, b in pairs) / len(pairs)

        without = scaled(0.0)
        drafts = sum(map(len, base.chains.values()))
        changed = differs(without)
        numbers = dict(changed=changed, al=length(base), al_without=length(without))
        line = f"Markov head changes {changed:.2f} of the drafts, "
        line += f"AL {length(base):.2f} with it and {length(without):.2f} without"
        passed = False
        if not changed:
            why = "all zero" if not own.any() or not drafter.network.markov.w1.any() else "untrained"
            line = f"Markov head is dead: its bias changes none of {drafts} drafts ({why})"
        elif differs(scaled(4.0)) < 0.1 * changed:
            line = f"Markov head is huge, it decides alone: four times its bias changes next to nothing; {line}"
        elif clearly_better(_whole(without, k), _whole(base, k)):
            line = f"Markov head does harm, it is another drafter's: {line}"
        else:
            passed = True
        verdict("markov_head", passed, line, **numbers)
    if drafter.network.confidence is not None:
        counts = base.accepted(k)
        values = torch.tensor([x for line in base.sure.values() for x in line], dtype=torch.float64)
        spread = float(values.std()) if len(values) > 1 else 0.0
        # Of drafts whose predecessors all matched: what the confidence is about.
        judged = [(base.sure[key][i], i < n) for key, n in counts.items() for i in range(min(n + 1, k))]
        sure, right = (torch.tensor(x).numpy() for x in zip(*judged)) if judged else (None, None)
        area = auc(sure, right) if judged else None
        line = f"confidence head: {float(values.mean()):.3f} ± {spread:.3f} over {len(values)} drafts"
        passed = spread >= SPREAD  # not where it is NaN
        if not passed:
            line = f"confidence head is constant, it was not trained: {float(values.mean()):.3f} ± {spread:.1g}"
        elif area is not None:
            yes, no = int(right.sum()), int((~right).sum())
            error = math.sqrt((yes + no + 1) / (12 * yes * no))  # of the rank sum where nothing is known
            line += f", AUC {area:.2f} (0.5 knows nothing)"
            if area + 3 * error < KNOWS:
                passed = False
                line = f"confidence head does not know what is accepted, it was not trained or is another drafter's: {line}"
        verdict("confidence_head", passed, line, mean=float(values.mean()), spread=spread, auc=area)


def _whole(written: Written, k: int) -> dict[Key, bool]:
    """Every draft of every chain by itself, keyed by (position, draft)."""
    found = {}
    for (request, length), chain in written.chains.items():
        for i, (a, b) in enumerate(zip(chain[:k], written.texts[request][length:])):
            found[request * k + i, length] = a == b
    return found


def check_vocabulary(drafter: Any, base: Written, prompts: Sequence[Sequence[int]], verdict: Verdict) -> None:
    """A pruned draft vocabulary caps what can match."""
    ids = drafter.network.target_ids
    if ids is None:
        return
    known = set(ids.tolist())
    wrote = [t for text, prompt in zip(base.texts.values(), prompts) for t in text[len(prompt) :]]
    share = sum(t in known for t in wrote) / len(wrote)
    line = f"draft vocabulary: its {len(ids)} of {drafter.vocab_size} tokens are {share:.2f} of what the target writes"
    if share < COVERAGE:
        line += f", below {COVERAGE:g}: the rest can never be drafted (another tokenizer, domain or d2t)"
    verdict("draft_vocabulary", share >= COVERAGE, line, covered=share)


def check_same(model: Any, drafter: Any, prompts: Sequence[Sequence[int]], k: int, verdict: Verdict) -> None:
    """Prompts cut at chunk and page edges, and requests that were preempted and resumed, draft the same."""
    allowed = 0.99 if model.dtype == torch.float32 else 0.9  # rounding depends on how a batch is cut

    def same(a: Written, b: Written) -> tuple[int, int]:
        shared = [
            (chain, a.chains[request, n])
            for (request, n), chain in b.chains.items()
            if (request, n) in a.chains and a.texts[request][:n] == b.texts[request][:n]
        ]
        return sum(x == y for x, y in shared), len(shared)

    stream = [t for prompt in prompts for t in prompt]
    edges = (1, 2, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 1)
    cuts = [passage(stream, n, i) for i, n in enumerate(edges) if n + 8 <= model.max_model_len]
    whole = write(model, drafter, cuts, 8, k, page_size=64, max_prefill_tokens=sum(map(len, cuts)))
    # One by one, so that every chunk belongs to one prompt: in a batch the first would take another's share.
    right = total = 0
    for i, cut in enumerate(cuts):
        a, b = same(whole, write(model, drafter, [cut], 8, k, number=i, max_prefill_tokens=CHUNK))
        right, total = right + a, total + b
    line = f"prefill chunks of {CHUNK}, pages of {PAGE}: {right} of {total} chains are those of one chunk"
    if right < allowed * total:
        line += ": entries of the drafter's cache are lost or misplaced at the edges"
    verdict("chunk_edges", right >= allowed * total, line, same=right, chains=total)

    few = [passage(stream, 24, i) for i in range(3)]
    few = [prompt[: max(1, model.max_model_len - TOKENS)] for prompt in few]
    reserve = max(min(k, drafter.max_depth) + 1, drafter.lookahead)
    pages = sum(-(-(len(prompt) - 1 + reserve) // SMALL_PAGE) for prompt in few)
    calm = write(model, drafter, few, TOKENS, k, page_size=SMALL_PAGE)
    tight = write(model, drafter, few, TOKENS, k, page_size=SMALL_PAGE, num_pages=pages + 2)
    right, total = same(calm, tight)
    line = f"preempted {tight.preemptions} times: {right} of {total} chains are those of an uninterrupted run"
    if right < allowed * total:
        line += ": the drafter's cache is not what it was after the context was computed again"
    elif not tight.preemptions:
        line += ": nothing was preempted, so nothing was checked (the target's context limit is too short)"
    passed = right >= allowed * total and tight.preemptions > 0
    verdict("preemption", passed, line, same=right, chains=total, preemptions=tight.preemptions)


def passage(stream: Sequence[int], length: int, number: int) -> list[int]:
    """`length` tokens of a text without end, from a start that differs by number."""
    return [stream[(number * 101 + i) % len(stream)] for i in range(length)]


def context_lengths(model_limit: int, own_range: int, tokens: int, context: int | None) -> list[int]:
    """Contexts to try: powers of four, the last before the drafter's own range ends, the first past it, the longest."""
    longest = context or (own_range + 64 if own_range <= 2 * CONTEXT else CONTEXT)
    longest = min(longest, model_limit - tokens)
    lengths = {4**i for i in range(12)} | {own_range - tokens, own_range, longest}
    return sorted(n for n in lengths if 0 < n <= longest and not own_range - tokens < n < own_range)


def check_contexts(model: Any, drafter: Any, base: Written, k: int, context: int | None, verdict: Verdict) -> None:
    """AL against context length, up to past the drafter's own range of positions where the target goes there."""
    k = min(k, drafter.max_depth)
    tokens = 16 + k
    own = drafter.config.max_position_embeddings
    stream = [t for text in base.texts.values() for t in text]
    counts: dict[int, Tensor] = {}
    for n in context_lengths(model.max_model_len, own, tokens, context):
        cuts = [passage(stream, n, i) for i in range(PASSAGES)]
        found = write(model, drafter, cuts, tokens, k).accepted(k)
        counts[n] = torch.tensor(list(found.values()) or [0], dtype=torch.float64)
    lengths = {n: 1 + float(x.mean()) for n, x in counts.items()}
    # A few tokens of context are too little for any drafter: shown, not judged.
    usual = sorted(lengths[n] - 1 for n in lengths if 16 <= n < own) or [0.0]
    typical = usual[len(usual) // 2]
    floor = COLLAPSE * typical
    scatter = math.sqrt(floor * (1 + floor))  # of a geometric law; the counts' own is 0 where nothing is accepted
    low = [n for n, x in counts.items() if n >= 16 and float(x.mean()) < floor - 2 * scatter / math.sqrt(len(x))]
    table = ", ".join(f"{n}: {al:.2f}" for n, al in lengths.items())
    line = f"AL by tokens of context {table}"
    if low:
        where = f"from {low[0]} tokens of context on AL falls to {lengths[low[0]]:.2f}, {1 + typical:.2f} is usual"
        if low[0] >= own:
            line = f"{where}: past the drafter's own range of {own} (max_position_embeddings); {line}"
        else:
            line = f"{where}: positions or cache entries go wrong, or it never saw texts this long; {line}"
    elif max(lengths) < own:
        line += f" (its own range of {own} was not passed)"
    verdict("contexts", not low, line, al_by_context={str(n): al for n, al in lengths.items()})
