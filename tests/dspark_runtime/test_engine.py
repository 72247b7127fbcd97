"""The engine on scripted models, whose right answers are known exactly.

Fixture S of the users' fact sheet: 64 ids, the target's next token is (5 t + 3) mod 64. The scripted model rebuilds every
prefix from its cache pages, so a wrong page, slot, mask or commit shows as a wrong token.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from drafters.scripted import ScriptedDrafter
from drafters.tree import TreeSpec
from dspark_runtime.engine import Engine
from dspark_runtime.errors import ConfigError, RequestError
from dspark_runtime.models.scripted import ScriptedModel
from dspark_runtime.request import RequestOutput
from dspark_runtime.sampling import SamplingParams
from dspark_runtime.synthetic import SyntheticLaw

V = 64
STREAM = [38, 1, 8, 43, 26, 5, 28, 15, 14, 9, 48, 51, 2, 13, 4, 23]  # from prompt [7]
TREE = TreeSpec((-1, 0, 0, 0, 1, 1, 2, 4, 4, 7))


def after(token: int) -> int:
    return (5 * token + 3) % V


def logits(prefix: tuple[int, ...]) -> list[float]:
    row = [0.0] * V
    row[after(prefix[-1])] = 10.0
    return row


def target(**options: object) -> ScriptedModel:
    return ScriptedModel(V, logits, **{"max_model_len": 256, **options})


def right_for(k: int) -> Callable[[tuple[int, ...], int], list[int]]:
    """S(k): drafts that are right for k slots, then one off."""

    def drafts(prefix: tuple[int, ...], count: int) -> list[int]:
        out, token = [], prefix[-1]
        for slot in range(count):
            token = after(token) if slot < k else (after(token) + 1) % V
            out.append(token)
        return out

    return drafts


def bushy(prefix: tuple[int, ...], count: int) -> tuple[list[int], list[int]]:
    """A full TREE whose right path runs through second and third children."""
    root = prefix[-1]
    a = after(root)
    b = after(a)
    c = after(b)
    d = after(c)
    #        0     1          2  3          4      5      6  7      8      9
    tokens = [root, (a + 1) % V, a, (a + 2) % V, 11, 12, b, 13, 14, 15]
    parents = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 7]
    assert len(tokens) == TREE.num_nodes and (c, d)
    return tokens[1:], parents[1:]


def engine(model: ScriptedModel | None = None, drafts: Callable | None = None, k: int = 4, **options: object) -> Engine:
    drafter = ScriptedDrafter(drafts) if drafts else None
    spec = options.pop("spec", TreeSpec.chain(k if drafts else 0))
    return Engine(model or target(), drafter, spec=spec, **options)


def greedy(max_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def run(e: Engine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    return e.generate([prompt], params)[0]


def all_free(e: Engine) -> bool:
    return e.pool.num_free == e.pool.capacity and not e.has_work


# ------------------------------------------------------------------ greedy streams and accounting


@pytest.mark.parametrize("k", range(8))
@pytest.mark.parametrize("right", [0, 1, 2, 3, 7])
def test_greedy_stream_is_exact_for_every_draft_length(k: int, right: int) -> None:
    e = engine(drafts=right_for(right), k=k) if k else engine()
    out = run(e, [7], greedy(16))
    assert out.token_ids == STREAM
    assert out.finish_reason == "length"
    assert all_free(e)


@pytest.mark.parametrize("k", range(1, 8))
def test_max_tokens_cuts_a_block_exactly(k: int) -> None:
    out = run(engine(drafts=right_for(99), k=k), [7], greedy(8))
    assert out.token_ids == STREAM[:8]


def test_acceptance_length_counts_the_bonus_token() -> None:
    e = engine(drafts=right_for(2), k=4)
    run(e, [7], greedy(150, ignore_eos=True))
    full = [r for r in e.records if r.drafted == [4]]
    assert len(full) >= 48
    assert all(r.accepted == [2] and r.emitted == [3] for r in full)


def test_tree_follows_later_children() -> None:
    e = engine(drafts=bushy, spec=TREE)
    out = run(e, [7], greedy(15))
    assert out.token_ids == STREAM[:15]
    assert [r.accepted[0] for r in e.records[:4]] == [2, 2, 2, 2]


@pytest.mark.parametrize("spec,drafts", [(TreeSpec.chain(5), right_for(3)), (TREE, bushy)])
def test_requests_of_different_lengths_share_a_batch(spec: TreeSpec, drafts: Callable) -> None:
    prompts = [[(i * 7 + j) % V for j in range(1 + 5 * i)] for i in range(8)]
    wants = [[8, 3, 20, 1, 13, 40, 2, 9][i] for i in range(8)]
    plain = engine().generate(prompts, [greedy(n) for n in wants])
    e = engine(drafts=drafts, spec=spec, max_num_requests=3, max_prefill_tokens=7)
    spec_out = e.generate(prompts, [greedy(n) for n in wants])
    assert [o.token_ids for o in spec_out] == [o.token_ids for o in plain]
    assert [len(o.token_ids) for o in spec_out] == wants
    assert all_free(e)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65])
def test_page_edges(page_size: int, length: int) -> None:
    prompt = [(3 * i) % V for i in range(length)]
    want = run(engine(), prompt, greedy(12)).token_ids
    e = engine(drafts=bushy, spec=TREE, page_size=page_size, max_prefill_tokens=16)
    assert run(e, prompt, greedy(12)).token_ids == want


def test_minus_one_drafts_are_never_taken() -> None:
    e = engine(drafts=lambda prefix, k: [after(prefix[-1]), -1, -1], k=3)
    out = run(e, [7], greedy(12))
    assert out.token_ids == STREAM[:12]
    assert all(r.accepted[0] <= 1 and r.drafted[0] <= 1 for r in e.records)


def test_first_draft_that_is_wrong_is_not_committed() -> None:
    model = ScriptedModel(8, lambda prefix: [5.0 if i == 2 else 0.0 for i in range(8)], max_model_len=64)
    out = run(engine(model, drafts=lambda p, k: [1], k=1), [1, 1, 1], greedy(1))
    assert out.token_ids == [2]


# ------------------------------------------------------------------ stops and limits


@pytest.mark.parametrize("k", [0, 1, 4, 7])
def test_end_of_sequence_inside_a_block_ends_the_request_there(k: int) -> None:
    e = engine(target(eos_token_ids=(43,)), drafts=right_for(99) if k else None, k=k)
    out = run(e, [7], greedy(16))
    assert out.token_ids == STREAM[:4] and out.finish_reason == "stop"
    assert e.records[-1].emitted == [1] or k
    again = run(e, [7] + out.token_ids + [9], greedy(5))
    assert again.token_ids == run(engine(), [7] + out.token_ids + [9], greedy(5)).token_ids


def test_stop_tokens_min_tokens_and_ignore_eos() -> None:
    model = target(eos_token_ids=(8,))
    e = engine(model, drafts=right_for(99), k=4)
    assert run(e, [7], greedy(16, stop_token_ids=(26,), ignore_eos=True)).token_ids == STREAM[:5]
    assert run(e, [7], greedy(16, ignore_eos=True)).token_ids == STREAM
    masked = run(e, [7], greedy(16, min_tokens=5)).token_ids
    assert 8 not in masked[:4] and masked == run(engine(model), [7], greedy(16, min_tokens=5)).token_ids
    with pytest.raises(RequestError, match="min_tokens: found 2 with every token id a stop id"):
        e.submit([7], greedy(4, min_tokens=2, stop_token_ids=tuple(range(model.vocab_size))))


@pytest.mark.parametrize("k", [0, 1, 2, 3, 7])
def test_stop_string_across_accepted_tokens(k: int) -> None:
    text = lambda ids: "".join(f"<{i}>" for i in ids)  # noqa: E731
    e = engine(drafts=right_for(99) if k else None, k=k, detokenize=text)
    out = run(e, [7], greedy(16, stop=("8><4",), logprobs=1))
    assert out.token_ids == STREAM[:4]
    assert out.text == "<38><1><"
    assert len(out.logprobs) == 4 and out.finish_reason == "stop"


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(RequestError, match="stop"):
        engine().submit([7], greedy(4, stop=("x",)))


@pytest.mark.parametrize("spec,drafts", [(TreeSpec.chain(4), right_for(99)), (TREE, bushy)])
def test_context_limit_cuts_a_block(spec: TreeSpec, drafts: Callable) -> None:
    seen: list[int] = []

    def watched(prefix: tuple[int, ...]) -> list[float]:
        seen.append(len(prefix))
        return logits(prefix)

    prompt = [7] * 13
    e = engine(ScriptedModel(V, watched, max_model_len=16), drafts=drafts, spec=spec)
    out = run(e, prompt, greedy(50))
    assert out.token_ids == [38, 1, 8] and out.finish_reason == "length"
    assert max(seen) <= 15  # the last position that is ever computed is index 14


# ------------------------------------------------------------------ errors of one request


def test_bad_requests_are_refused_by_name() -> None:
    e = engine()
    for prompt, field in (([], "prompt"), ([1] * 256, "prompt"), ([1, 64], "64"), ([-1], "-1")):
        with pytest.raises(RequestError, match=field):
            e.submit(prompt, greedy(4))
    outs = e.generate([[7], [], [7, 99]], greedy(4))
    assert [o.finish_reason for o in outs] == ["length", "error", "error"]
    assert outs[0].token_ids == STREAM[:4] and "99" in outs[2].error


def test_broken_logits_end_one_request_and_no_other() -> None:
    def poisoned(prefix: tuple[int, ...]) -> list[float]:
        row = logits(prefix)
        if prefix[0] == 9 and len(prefix) > 6:
            row[3] = float("nan")
        return row

    e = engine(ScriptedModel(V, poisoned, max_model_len=64), drafts=right_for(2), k=3)
    good, bad = e.generate([[7], [9]], greedy(16))
    assert good.token_ids == STREAM and good.finish_reason == "length"
    assert bad.finish_reason == "error" and "NaN" in bad.error
    assert all_free(e)


def test_draft_outside_the_vocabulary_ends_one_request() -> None:
    def drafts(prefix: tuple[int, ...], k: int) -> list[int]:
        return [200] if prefix[0] == 9 else [after(prefix[-1])]

    e = engine(drafts=drafts, k=2)
    good, bad = e.generate([[7], [9]], greedy(8))
    assert good.token_ids == STREAM[:8]
    assert bad.finish_reason == "error" and "200" in bad.error and "63" in bad.error


def test_combinations_that_do_not_fit_are_refused() -> None:
    drafter = ScriptedDrafter(right_for(1))
    with pytest.raises(ConfigError, match="without a drafter"):
        Engine(target(), spec=TreeSpec.chain(3))
    with pytest.raises(ConfigError, match="max_model_len"):
        Engine(target(), max_model_len=1000)
    with pytest.raises(ConfigError, match="cuda"):
        Engine(target(), cuda_graph=True)
    with pytest.raises(ConfigError, match="rejection_sample_method|nonsense"):
        Engine(target(), drafter, spec=TreeSpec.chain(2), rejection_sample_method="nonsense")
    e = engine(drafts=right_for(1))
    e.submit([7], greedy(4))
    with pytest.raises(ConfigError, match="idle"):
        e.configure(TreeSpec.chain(1))
    drafter.vocab_size = 32
    with pytest.raises(ConfigError, match="vocabulary"):
        Engine(target(), drafter)


# ------------------------------------------------------------------ pages


@pytest.mark.parametrize("right", [0, 1, 3, 5])
def test_preemption_loses_no_token(right: int) -> None:
    prompts = [[i + 1] * (3 + i) for i in range(6)]
    want = [run(engine(), p, greedy(30)).token_ids for p in prompts]
    e = engine(drafts=right_for(right), k=5, page_size=4, num_pages=26, max_num_requests=6)
    outs = e.generate(prompts, greedy(30))
    assert [o.token_ids for o in outs] == want
    assert e.num_preemptions > 0
    assert all_free(e)


def test_a_request_that_can_never_fit_is_refused() -> None:
    e = engine(page_size=4, num_pages=5)
    with pytest.raises(RequestError, match="pages"):
        e.submit([7], greedy(40))


def test_soak_leaves_every_page_free() -> None:
    rng = random.Random(0)
    e = engine(drafts=right_for(2), k=3, page_size=4, num_pages=40, max_num_requests=5, max_prefill_tokens=9)
    want: dict[int, list[int]] = {}
    live: list[int] = []
    events = 0
    while events < 3000:
        action = rng.random()
        if action < 0.4 and len(live) < 12:
            prompt = [rng.randrange(V) for _ in range(rng.randint(1, 20))]
            count = rng.randint(1, 12)
            request = e.submit(prompt, greedy(count))
            token, stream = prompt[-1], []
            for _ in range(count):
                token = after(token)
                stream.append(token)
            want[request] = stream
            live.append(request)
        elif action < 0.5 and live:
            request = live.pop(rng.randrange(len(live)))
            e.abort(request)
        else:
            for out in e.step():
                assert out.token_ids == want[out.request_id][: len(out.token_ids)]
                if out.finish_reason:
                    assert out.token_ids == want[out.request_id]
                    live.remove(out.request_id)
        events += 1
        owned = [page for r in e._running for page in r.pages]
        assert len(owned) == len(set(owned)) and len(owned) + e.pool.num_free == e.pool.capacity
    while e.has_work:
        e.step()
    assert all_free(e)


# ------------------------------------------------------------------ sampling through the engine


def soft(prefix: tuple[int, ...]) -> list[float]:
    g = torch.Generator().manual_seed(hash(prefix) & 0xFFFFFFFF)
    return torch.randn(8, generator=g).tolist()


def soft_drafts(prefix: tuple[int, ...], k: int) -> list[int]:
    out: list[int] = []
    for _ in range(k):
        row = soft(prefix + tuple(out))
        out.append(row.index(max(row)))
    return out


@pytest.mark.parametrize("k", [1, 4])
def test_same_seed_same_tokens_whatever_the_batch(k: int) -> None:
    model = lambda: ScriptedModel(8, soft, max_model_len=128)  # noqa: E731
    params = SamplingParams(temperature=1.0, max_tokens=20, seed=42)
    alone = run(Engine(model()), [1, 2], params).token_ids
    e = Engine(model(), ScriptedDrafter(soft_drafts), spec=TreeSpec.chain(k), max_num_requests=4)
    others = [SamplingParams(temperature=t, max_tokens=n, seed=s) for t, n, s in ((0.0, 9, 1), (2.0, 5, 2), (0.7, 30, 3))]
    e.generate([[3]], others[0])  # the engine has run before
    outs = e.generate([[5], [6, 7], [1, 2], [4]], [others[0], others[1], params, others[2]])
    assert outs[2].token_ids == alone  # node sampling on deterministic drafts is coupled to plain sampling


def test_greedy_row_in_a_mixed_batch_breaks_ties_by_lowest_id() -> None:
    model = ScriptedModel(3, lambda prefix: [1.0, 1.0, float("-inf") if len(prefix) % 2 else 0.0], max_model_len=64)
    e = Engine(model, ScriptedDrafter(lambda p, k: [0] * k), spec=TreeSpec.chain(2))
    params = [SamplingParams(temperature=t, max_tokens=12, seed=5, top_k=k) for t, k in ((0.0, 0), (1.0, 2))]
    cold, warm = e.generate([[2], [2]], params)
    assert cold.token_ids == [0] * 12
    assert warm.error is None and set(warm.token_ids) == {0, 1}


def test_frequency_penalty_counts_tokens_of_its_own_block() -> None:
    model = ScriptedModel(3, lambda prefix: [5.0, 4.0, 3.0], max_model_len=64)
    params = greedy(8, frequency_penalty=0.6)
    want = [0, 0, 1, 0, 1, 0, 2, 1]
    for k in (0, 1, 3, 5):
        drafter = ScriptedDrafter(lambda prefix, count: ([0, 0, 1, 0, 1, 0, 2, 1] * 2)[len(prefix) - 1 :][:count])
        e = Engine(model, drafter if k else None, spec=TreeSpec.chain(k))
        assert run(e, [2], params).token_ids == want


@pytest.mark.parametrize("spec,drafts", [(TreeSpec.chain(4), right_for(2)), (TREE, bushy)])
def test_logprobs_equal_those_of_plain_decoding(spec: TreeSpec, drafts: Callable) -> None:
    def wavy(prefix: tuple[int, ...]) -> list[float]:
        return [x + 0.1 * ((i * prefix[-1]) % 7) for i, x in enumerate(logits(prefix))]

    model = ScriptedModel(V, wavy, max_model_len=128)
    params = greedy(15, logprobs=5)
    plain = run(engine(model), [7], params)
    out = run(engine(model, drafts=drafts, spec=spec), [7], params)
    assert out.token_ids == plain.token_ids == STREAM[:15]
    for a, b in zip(out.logprobs, plain.logprobs, strict=True):
        assert a.token_id == b.token_id and a.logprob == pytest.approx(b.logprob, abs=1e-5)
        assert a.top == pytest.approx(b.top, abs=1e-5) and len(a.top) == 5


# ------------------------------------------------------------------ synthetic acceptance


@pytest.mark.parametrize("spec", [TreeSpec.chain(4), TREE])
def test_synthetic_feeds_back_what_it_emits(spec: TreeSpec) -> None:
    contexts: list[tuple[int, ...]] = []

    def watched(prefix: tuple[int, ...], count: int) -> object:
        contexts.append(prefix)
        return (right_for(0)(prefix, count)) if spec.is_chain else bushy(prefix, count)

    model = target()
    e = Engine(model, ScriptedDrafter(watched), spec=spec, synthetic=SyntheticLaw.make(spec.depth, acceptance_length=2.5))
    out = run(e, [7], greedy(40, ignore_eos=True))
    assert contexts[-1] == tuple([7] + out.token_ids)[: len(contexts[-1])]
    emitted = [r.emitted[0] for r in e.records[:-1]]
    assert set(emitted) == {2, 3}


def test_synthetic_fills_what_the_drafter_did_not_propose() -> None:
    law = SyntheticLaw.make(4, acceptance_length=3.0)
    e = Engine(target(), ScriptedDrafter(lambda p, k: []), spec=TreeSpec.chain(4), synthetic=law)
    run(e, [7], greedy(60, ignore_eos=True))
    assert all(r.drafted == [4] for r in e.records[:-3])
    assert all(r.emitted == [3] for r in e.records[:-3])


def test_synthetic_law_must_fit_the_tree() -> None:
    law = SyntheticLaw.make(5, acceptance_length=6.0)
    with pytest.raises(ConfigError, match="depth 5.*depth 4"):
        Engine(target(), ScriptedDrafter(right_for(1)), spec=TreeSpec.chain(4), synthetic=law)


def test_a_branching_tree_for_one_step_is_refused_by_a_chain_rule() -> None:
    e = engine(drafts=right_for(2), k=4, rejection_sample_method="standard")
    e.submit([7], greedy(4))
    with pytest.raises(ConfigError, match="spec: found a tree that branches with the rule 'standard'"):
        e.step(TreeSpec((-1, 0, 0)))


def test_a_detokenizer_that_fails_ends_its_request_alone() -> None:
    def detokenize(ids: list[int]) -> str:
        if len(ids) > 3 and ids[0] == other[0]:
            raise KeyError("no such piece")
        return " ".join(map(str, ids))

    other = run(engine(), [8], greedy(8)).token_ids
    e = engine(detokenize=detokenize)
    kept, failed = e.generate([[7], [8]], greedy(8, stop=("never",)))
    assert kept.token_ids == STREAM[:8] and kept.error is None
    assert failed.finish_reason == "error" and failed.error == "detokenize: KeyError: 'no such piece'"
    assert failed.token_ids == other[: len(failed.token_ids)] and all_free(e)


def test_generate_answers_for_every_prompt() -> None:
    e = engine()
    bad = e.generate([[7], ["a"], 5, [1.5], [8]], greedy(3))
    assert [o.finish_reason for o in bad] == ["length", "error", "error", "error", "length"]
    assert all("prompt: " in o.error for o in bad[1:4]) and not e.has_work
    aborted, whole = e.generate([[7], [8]], greedy(3), on_step=lambda outputs: e.abort(bad[-1].request_id + 1))
    assert aborted.finish_reason == "abort" and whole.finish_reason == "length" and all_free(e)
    with pytest.raises(RequestError, match="params: found 1 for 2 prompts"):
        e.generate([[7], [8]], [greedy(3)])
    assert not e.has_work
