"""Lengths, rates and confidence scores of `dspark eval` against runs whose every step is known in advance."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.dspark.calibration import read
from drafters.dspark.load import load_drafter
from drafters.scripted import ScriptedDrafter
from drafters.tree import DraftTree, TreeSpec
from dspark_runtime.engine import Engine
from dspark_runtime.errors import ConfigError
from dspark_runtime.models.scripted import ScriptedModel
from dspark_runtime.records import StepRecord
from dspark_runtime.sampling import SamplingParams
from eval.evaluate import (
    SUITES, Shape, Timed, acceptance_numbers, budget, confidence_numbers, measure, read_suites, roll_out, shapes,
    speed_numbers, steps_of,
    trace_of,
)  # fmt: skip
from eval.evaluate_report import plot, tables
from dspark_runtime.prompts import DEFAULT, PromptSet, load_prompts
from dspark_runtime.tuning.acceptance import read_acceptance
from eval.schema import EvalConfig, EvalRow
from tests.drafters.dspark_cases import DEEPSPEC, V, block_tensors, eagle_tensors, target, write
from tests.drafters.scripted_cases import PROMPT, STREAM, logits, right_for
from tests.drafters.scripted_cases import V as SCRIPTED_V

Q = PromptSet("q.jsonl", "0" * 64, ("one", "two", "three"))


def numbers(drafter: ScriptedDrafter, depth: int, max_tokens: int, *eos: int, prompts: int = 1) -> dict[str, Any]:
    engine = Engine(ScriptedModel(SCRIPTED_V, logits, eos_token_ids=eos), drafter, max_num_requests=2)
    config = EvalConfig(max_tokens=max_tokens)
    records = roll_out(engine, Shape("chain", "chain", TreeSpec.chain(depth)), [PROMPT] * prompts, config, 0.0)
    return acceptance_numbers(steps_of(records, depth, head=False), depth)


@pytest.mark.parametrize(
    "right,tokens,eos,steps,emitted,survival,conditional",
    [
        # Three tokens a step. Five are asked for; the second step counts in full.
        (2, 5, [], 2, 6, [1, 1, 0, 0], [1, 1, 0, None]),
        # The fifth token ends the request. It is the second draft of the second step: no bonus, positions 3 and 4 of
        # that step were never judged.
        (2, 99, [STREAM[4]], 2, 5, [1, 1, 0, 0], [1, 1, 0, None]),
        # The sixth token ends it: the token behind the accepted drafts. The third draft was judged and refused.
        (2, 99, [STREAM[5]], 2, 6, [1, 1, 0, 0], [1, 1, 0, None]),
        # The first draft of all ends it, so that nothing is known of the positions behind.
        (4, 99, [STREAM[0]], 1, 1, [1, None, None, None], [1, None, None, None]),
        # All right, five a step; the seventh token, the second draft of the second step, ends it.
        (4, 99, [STREAM[6]], 2, 7, [1, 1, 1, 1], [1, 1, 1, 1]),
        # All right, and the last draft ends it: nothing is unknown, only the bonus token is missing.
        (4, 99, [STREAM[3]], 1, 4, [1, 1, 1, 1], [1, 1, 1, 1]),
        # Never right: plain decoding.
        (0, 3, [], 3, 3, [0, 0, 0, 0], [0, None, None, None]),
    ],
)
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_scripted_run_gives_the_numbers_counted_by_hand(
    right: int, tokens: int, eos: list[int], steps: int, emitted: int, survival: list, conditional: list, prompts: int
) -> None:
    found = numbers(ScriptedDrafter(right_for(right)), 4, tokens, *eos, prompts=prompts)
    assert (found["steps"], found["tokens"]) == (steps * prompts, emitted * prompts)
    assert found["spec_decode_acceptance_length"] == pytest.approx(emitted / steps)
    assert found["spec_decode_per_position_acceptance_rates"] == survival
    assert found["spec_decode_conditional_acceptance_rates"] == conditional


def test_a_drafter_that_proposes_less_is_charged_for_it() -> None:
    """Two right drafts of four slots: the rates of positions 3 and 4 are 0, not unknown."""
    found = numbers(ScriptedDrafter(lambda prefix, count: right_for(2)(prefix, 2)), 4, 6)
    assert found["spec_decode_per_position_acceptance_rates"] == [1, 1, 0, 0]
    assert found["spec_decode_acceptance_length"] == 3


STEP = st.tuples(st.integers(0, 4), st.integers(0, 4))  # accepted drafts, and how many tokens a stop left of them


@given(st.lists(STEP, min_size=1, max_size=40))
def test_rates_equal_an_enumeration(steps: list[tuple[int, int]]) -> None:
    depth = 4
    lines = [(a, kept if 0 < kept <= a else a + 1) for a, kept in steps]
    records = [StepRecord([0], [depth], [a], [e], depth + 1, 9) for a, e in lines]
    found = acceptance_numbers(steps_of(records, depth, head=False), depth)
    for i in range(1, depth + 1):
        # (accepted, judged) of the steps in which position i was judged.
        judged = [a for a, e in lines if e == a + 1 or i <= e]
        hits = sum(a >= i for a in judged)
        reached = sum(a >= i - 1 for a in judged)
        assert found["spec_decode_per_position_acceptance_rates"][i - 1] == (hits / len(judged) if judged else None)
        assert found["spec_decode_conditional_acceptance_rates"][i - 1] == (hits / reached if reached else None)
    assert found["spec_decode_acceptance_length"] == pytest.approx(sum(e for _, e in lines) / len(lines))
    if all(e == a + 1 for a, e in lines):
        survival = found["spec_decode_per_position_acceptance_rates"]
        assert found["spec_decode_acceptance_length"] == pytest.approx(1 + sum(survival))


def test_confidence_is_held_against_the_prefixes() -> None:
    """Three steps of two drafts, the last of them stopped by its first draft; sums by hand."""
    records = [
        StepRecord([0, 1], [2, 2], [2, 0], [3, 1], 6, 9, confidence=[[0.8, 0.5], [0.6, 0.5]]),
        StepRecord([0], [2], [2], [1], 3, 9, confidence=[[0.9, 0.1]]),
    ]
    steps = steps_of(records, 2, head=True)
    assert steps.accepted.tolist() == [2, 0, 1] and steps.judged.tolist() == [2, 2, 1]
    assert np.isnan(steps.logits).tolist() == [[False, False], [False, False], [False, True]]
    found = confidence_numbers(steps, None)
    assert found["ece_before_by_position"] == pytest.approx([(0.2 + 0.6 + 0.1) / 3, (0.6 + 0.3) / 2])
    # Predictions 0.8 0.4 | 0.6 0.3 | 0.9 for the labels 1 1 | 0 0 | 1, each in a bin of its own.
    assert found["ece_before"] == pytest.approx((0.2 + 0.6 + 0.6 + 0.3 + 0.1) / 5)
    assert found["auc_before"] == pytest.approx((2 + 2 + 1) / 6)
    assert found["auc_before_by_position"] == [1.0, 1.0] and "ece_after" not in found
    scaled = confidence_numbers(steps, [2.0, 0.5])
    half = [1 / (1 + math.sqrt(1 / p - 1)) for p in (0.8, 0.6, 0.9)]  # sigmoid(z / 2)
    assert scaled["ece_after_by_position"][0] == pytest.approx(
        (1 - half[0] + half[1] + 1 - half[2]) / 3
    )
    assert scaled["ece_before"] == found["ece_before"]


def test_a_trace_says_what_was_judged(tmp_path: Path) -> None:
    """Two whole steps, one that was stopped by its second draft, one without drafts; temperatures scale the logits."""
    records = [
        StepRecord([4, 5], [2, 2], [2, 0], [3, 1], 6, 9, confidence=[[0.8, 0.5], [0.6, 0.5]]),
        StepRecord([4], [3], [3], [2], 4, 9, confidence=[[0.9, 0.5, 0.1]]),
        StepRecord([5], [0], [0], [1], 1, 9, confidence=[[]]),
    ]
    plain = [dict(request=r, suite="s", accepted=a) for r, a in ((4, 2), (5, 0), (4, 2), (5, 0))]
    drafted = [2, 2, 2, 0]
    assert trace_of(records, "s", False, None) == [line | {"drafted": d} for line, d in zip(plain, drafted)]
    raw = [[0.8, 0.5], [0.6, 0.5], [0.9, 0.5], []]
    assert trace_of(records, "s", True, None) == [line | {"confidence": c} for line, c in zip(plain, raw)]
    scaled = trace_of(records, "s", True, [0.5, 1.0, 1.0])
    squared = [round(x * x / (x * x + (1 - x) ** 2), 5) for x in (0.8, 0.6, 0.9)]  # sigmoid(2 z)
    assert [line["confidence"][:1] for line in scaled] == [[x] for x in squared] + [[]]
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in scaled))
    (suite,) = read_acceptance(file)
    assert suite.survival == (0.5, 0.5) and suite.drafted.tolist() == drafted and suite.requests.tolist() == [4, 5, 4, 5]


def test_speed_is_tokens_over_seconds_and_spreads_over_prompts() -> None:
    found = speed_numbers([Timed(30, 1.0), Timed(20, 1.0)], [Timed(20, 2.0), Timed(40, 2.0)])
    assert found["output_throughput"] == 25 and found["plain_throughput"] == 15
    assert found["speedup"] == pytest.approx(25 / 15) and found["num_timed"] == 2
    assert found["spread"] == pytest.approx(math.sqrt(2) / (25 / 15))  # ratios 3 and 1
    assert speed_numbers([Timed(30, 1.0)], [Timed(20, 2.0)])["spread"] == 0


@given(st.integers(2, 64), st.integers(1, 16))
def test_a_budget_has_the_nodes_and_no_more_than_the_depth(nodes: int, depth: int) -> None:
    spec = budget(nodes, depth)
    assert spec.num_nodes == nodes and spec.depth == min(depth, nodes - 1)


# ------------------------------------------------------------------------------------------------ a random checkpoint


class Letters:
    """A tokenizer of the random target: id = character modulo its vocabulary."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % V for c in text]}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[SimpleNamespace, Path]:
    folder = write(tmp_path / "drafter", DEEPSPEC, block_tensors(DEEPSPEC))
    return SimpleNamespace(model=target(), tokenizer=Letters(), name="random"), folder


def test_every_shape_and_temperature_has_a_row(pair: tuple[SimpleNamespace, Path], tmp_path: Path) -> None:
    where, folder = pair
    config = EvalConfig(drafter=str(folder), trees="chain,6,12", hybrid=True, max_tokens=12, speed=2, num_requests=2)
    seen: list[tuple[int, int]] = []
    other = PromptSet("other.jsonl", "1" * 64, ("aaaabbbbaaaa", "x"))
    drafter = load_drafter(folder, where.model)
    found = measure(config, [Q, other], None, where, drafter, lambda text, done, total: seen.append((done, total)))
    keys = [(r.suite, r.temperature, r.shape) for r in found.rows]
    names = ["chain", "tree-6", "tree-12", "hybrid-6", "hybrid-12"]
    assert keys == [(s, t, n) for s in ("q", "other") for t in (0.0, 1.0) for n in names]
    for r in found.rows:
        assert r.num_prompts == (3 if r.suite == "q" else 2) and r.num_timed == 2 and r.speedup > 0
        assert r.tokens >= 12 * r.num_prompts and len(r.spec_decode_per_position_acceptance_rates) == 4
        assert r.spec_decode_acceptance_length == pytest.approx(1 + sum(r.spec_decode_per_position_acceptance_rates))
        assert (r.ece_before is not None) == (r.shape == "chain") and r.ece_after is None
        assert EvalRow.model_validate(json.loads(r.model_dump_json())) == r
    assert seen[-1][0] == seen[-1][1] and [d for d, _ in seen] == sorted(d for d, _ in seen)
    chains = [r for r in found.rows if r.shape == "chain"]
    for r in chains:
        lines = [line for line in found.trace if line["suite"] == f"{r.suite}, T={r.temperature:g}"]
        assert len(lines) == r.steps and len({line["request"] for line in lines}) == r.num_prompts
        assert sum(line["accepted"] + 1 for line in lines) == r.tokens and all(line["confidence"] for line in lines)
    assert sum(r.steps for r in chains) == len(found.trace)
    titles = [t.title for t in tables(found)]
    assert titles == ["Acceptance and speed", "Acceptance by position", "Confidence"]
    plot(found, tmp_path / "eval.png")
    assert (tmp_path / "eval.png").read_bytes()[:4] == b"\x89PNG"


def test_eagle3_is_evaluated_as_chain_and_as_grown_trees(tmp_path: Path) -> None:
    config = DEEPSPEC | dict(architectures=["Qwen3Eagle3Model"], num_hidden_layers=1)
    folder = write(tmp_path, config, eagle_tensors(3))
    where = SimpleNamespace(model=target(), tokenizer=Letters(), name="random")
    asked = EvalConfig(drafter=str(folder), trees="chain,12", hybrid=True, max_tokens=12, speed=0)
    found = measure(asked, [Q], None, where, load_drafter(folder, where.model), lambda *_: None)
    assert [(r.temperature, r.shape) for r in found.rows] == [
        (t, shape) for t in (0.0, 1.0) for shape in ("chain", "tree-12", "hybrid-12")
    ]
    for r in found.rows:
        assert r.num_speculative_tokens == (7 if r.shape == "chain" else 11) and r.ece_before is None
        assert len(r.spec_decode_per_position_acceptance_rates) == 7 and r.tokens >= 36


def test_shapes_grow_and_draw_what_they_say(pair: tuple[SimpleNamespace, Path]) -> None:
    """Chains and trees are drawn at temperature 1, trees in the drafter's own shape; hybrid ones are grown at every
    temperature."""
    where, folder = pair
    drafter = load_drafter(folder, where.model)
    config = EvalConfig(drafter=str(folder), trees="chain,12", hybrid=True, max_tokens=6)
    for temperature in (0.0, 1.0):
        for shape in shapes(config, drafter):
            trees: list[DraftTree] = []
            propose = type(drafter).propose
            drafter.propose = lambda *a: trees.append(propose(drafter, *a)) or trees[-1]
            engine = Engine(where.model, drafter, max_model_len=64)
            roll_out(engine, shape, [[1, 2, 3]], config, temperature)
            assert (trees[0].probs is not None) == (temperature > 0 and shape.kind != "hybrid")
            assert int(trees[0].num_nodes[0]) == (5 if shape.name == "chain" else 12)
            grown = {tuple(tree.parents[0].tolist()) for tree in trees}
            assert shape.name == "chain" or budget(12, 4).parents not in grown
            del drafter.propose


def test_roll_outs_at_temperature_0_are_plain_decoding(pair: tuple[SimpleNamespace, Path]) -> None:
    where, folder = pair
    prompts = [[1, 2, 3], [9] * 20]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    plain = [o.token_ids for o in Engine(where.model, max_model_len=64).generate(prompts, params)]
    drafter = load_drafter(folder, where.model, suffix=2)
    for shape in shapes(EvalConfig(drafter=str(folder), trees="chain,16"), drafter):
        engine = Engine(where.model, drafter, max_model_len=64)
        texts: dict[int, list[int]] = {}
        step = engine.step

        def watched() -> list[Any]:
            outputs = step()
            texts.update((o.request_id, o.token_ids) for o in outputs)
            return outputs

        engine.step = watched
        roll_out(engine, shape, prompts, EvalConfig(max_tokens=12), 0.0)
        assert [texts[i][:12] for i in sorted(texts)] == plain


def test_fitting_writes_a_file_that_the_next_run_applies(pair: tuple[SimpleNamespace, Path]) -> None:
    where, folder = pair
    fit = PromptSet("fit.jsonl", "2" * 64, tuple("abcdefgh"))
    config = EvalConfig(drafter=str(folder), trees="chain", max_tokens=40, speed=0, fit_calibration="fit.jsonl")
    found = measure(config, [Q], fit, where, load_drafter(folder, where.model), lambda *_: None)
    written = read(folder)
    assert written == found.fitted and written.dataset == "fit.jsonl" and len(written.temperatures) == 4
    assert written.ece_after < written.ece_before and written.num_samples > 100
    again = load_drafter(folder, where.model)
    assert again.temperatures == tuple(written.temperatures)
    plain = config.model_copy(update=dict(fit_calibration=None))
    later = measure(plain, [Q], None, where, again, lambda *_: None)
    assert later.fitted is None
    for a, b in zip(found.rows, later.rows):
        assert a == b and a.ece_after is not None and a.num_timed == 0 and a.speedup is None
    # What was scaled afterwards is what the drafter says itself, once it is loaded with the file.
    engine = Engine(where.model, load_drafter(folder, where.model), max_model_len=128, record_confidence=True)
    prompts = [Letters()(text)["input_ids"] for text in Q.texts]
    chain = Shape("chain", "chain", TreeSpec.chain(4))
    steps = steps_of(roll_out(engine, chain, prompts, plain, 0.0), 4, head=True)
    assert confidence_numbers(steps, None)["ece_before"] == pytest.approx(found.rows[0].ece_after, abs=1e-4)


def test_drafters_without_trees_or_head_are_said_so(pair: tuple[SimpleNamespace, Path]) -> None:
    where, _ = pair
    plain = ScriptedDrafter(lambda prefix, count: [1] * count)
    assert [s.name for s in shapes(EvalConfig(), plain)] == ["chain"]
    assert shapes(EvalConfig(), plain) == [Shape("chain", "chain", TreeSpec.chain(7))]
    for config, words in (
        (EvalConfig(trees="chain,16"), "trees: found 16 with scripted, allowed: chain"),
        (EvalConfig(hybrid=True), "hybrid: found without a grown tree"),
    ):
        with pytest.raises(ConfigError, match=words):
            shapes(config, plain)
    with pytest.raises(ConfigError, match="fit_calibration: found with scripted, allowed: a drafter with a confid"):
        measure(EvalConfig(), [Q], Q, where, plain, lambda *_: None)
    with pytest.raises(ConfigError, match="max_tokens: prompts of up to 5 tokens, 250 new, 8 of one step make 263"):
        measure(EvalConfig(max_tokens=250), [Q], None, where, plain, lambda *_: None)


# ------------------------------------------------------------------------------------------------------------ prompts


def test_the_projects_suites_are_large_enough_and_share_nothing() -> None:
    sets = [load_prompts(path) for path in SUITES]
    assert [Path(s.name).stem for s in sets] == ["math", "code", "chat", "repeat"]
    assert [len(s.texts) >= n for s, n in zip(sets, (20, 20, 20, 12))] == [True] * 4
    texts = [text for s in [*sets, load_prompts()] for text in s.texts]
    assert len(set(texts)) == len(texts)


def test_suites_are_cut_and_never_fitted_on(tmp_path: Path) -> None:
    suites, fit = read_suites(EvalConfig(limit=2, fit_calibration=str(DEFAULT)))
    assert [len(s.texts) for s in suites] == [2] * 4 and len(fit.texts) == 2
    copy = tmp_path / "copy.jsonl"
    copy.write_text(Path(SUITES[0]).read_text())
    with pytest.raises(ConfigError, match="fit_calibration: found 24 prompts of copy.jsonl in math.jsonl, which is eval"):
        read_suites(EvalConfig(fit_calibration=str(copy), limit=1))
    with pytest.raises(ConfigError, match="prompts: found two files named math, allowed: suites of different names"):
        read_suites(EvalConfig(prompts=[SUITES[0], SUITES[0]]))
