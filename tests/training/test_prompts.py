"""User turns: nothing of the evaluation sets gets in, files are refused by name, self-written turns are usable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_runtime.engine import Engine
from dspark_runtime.errors import ConfigError
from dspark_runtime.targets import Target, load_target
from tests.training import tiny
from training.config import Domain, PromptPlan
from training.prompts import GRAM, Forbidden, _finish, from_file, self_write, write

# Three vocabularies that share no word: what two texts have in common is what the test put there.
EVALUATED, BEFORE, AFTER = (
    st.lists(st.integers(0, 400).map(lambda i, kind=kind: f"{kind}{i}"), max_size=30) for kind in ("e", "b", "a")
)
DISTINCT = st.lists(st.integers(0, 400).map("e{}".format), min_size=GRAM, max_size=40, unique=True)
GAPS = st.sampled_from([" ", "  ", ", ", ".\n", " - ", "? (", '"'])


@st.composite
def overlaps(draw: st.DrawFn, count: int) -> tuple[list[str], str, str]:
    """(words of an evaluation prompt, a text with `count` of them in a row between other words, those words)."""
    evaluated = draw(DISTINCT)
    at = draw(st.integers(0, len(evaluated) - count))
    shared = evaluated[at : at + count]
    text = ""
    for word in [*draw(BEFORE), *shared, *draw(AFTER)]:
        text += (word.upper() if draw(st.booleans()) else word) + draw(GAPS)
    return evaluated, text, " ".join(shared)


@settings(max_examples=200, deadline=None)
@given(overlaps(GRAM), st.lists(EVALUATED, max_size=3))
def test_thirteen_words_in_a_row_are_refused_whatever_stands_around_them(case, others) -> None:
    evaluated, text, shared = case
    suites = [[" ".join(words) for words in others], [" ".join(evaluated)]]
    assert Forbidden(suites).shared(text) == shared


@settings(max_examples=200, deadline=None)
@given(overlaps(GRAM - 1))
def test_twelve_words_in_a_row_are_not(case) -> None:
    evaluated, text, _ = case
    assert Forbidden([[" ".join(evaluated)]]).shared(text) is None


@settings(max_examples=100, deadline=None)
@given(DISTINCT, st.integers(1, GRAM - 1))
def test_words_do_not_run_on_from_one_prompt_to_the_next(words: list[str], cut: int) -> None:
    forbidden = Forbidden([[" ".join(words[:cut]), " ".join(words[cut:GRAM])]])
    assert forbidden.shared(" ".join(words)) is None


def test_a_short_evaluation_prompt_is_refused_as_a_whole() -> None:
    forbidden = Forbidden([["Name three rivers."], ["???"]])
    assert forbidden.shared("name THREE rivers") == "name three rivers"
    assert forbidden.shared("Name three rivers of Asia.") is None
    assert forbidden.shared("Name three") is None
    assert forbidden.shared("!") is None, "without a word there is nothing to share"


def test_the_wording_of_a_suite_is_no_content() -> None:
    """What five prompts of a suite say alike may be said by others; what one of them says may not."""
    wording = "please reason step by step and put your final answer within a box"
    content = [" ".join(f"c{i}x{j}" for j in range(20)) for i in range(5)]
    suite = [f"{text} {wording}" for text in content]
    forbidden = Forbidden([suite])
    assert forbidden.shared(f"quite another question {wording}") is None
    assert forbidden.shared(f"{content[2]} and something else") is not None
    # Four prompts are not a wording, and five of different suites are not one suite's.
    assert Forbidden([suite[:4]]).shared(f"quite another question {wording}") is not None
    assert Forbidden([[text] for text in suite]).shared(f"quite another question {wording}") is not None


# ------------------------------------------------------------------------------------------------ files


def test_prompts_come_from_files(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"turns": ["one", "two"]}\n\n{"turns": ["drei \\u2028 vier"]}\n')
    assert from_file(path, Forbidden([])) == [
        {"turns": ["one"], "source": "own.jsonl"}, {"turns": ["drei \u2028 vier"], "source": "own.jsonl"},
    ]  # fmt: skip


@pytest.mark.parametrize("text, words", [
    (None, "prompts: {path}: No such file"),
    ("", "prompts: {path}: found no prompt"),
    ('{"turns": []}\n', "prompts: {path}:1: expected one JSON object"),
    ('{"turns": ["fine"]}\n{"prompt": "x"}\n', "prompts: {path}:2: expected one JSON object"),
    ('{"turns": ["fine"]}\n{"turns": ["' + " ".join(f"E{i}," for i in range(15)) + '"]}\n',
     'prompts: {path}: prompt 2 shares 13 words with an evaluation prompt ("e0 e1 e2 e3 e4 e5 e6 e7 e8 e9 e10 e11 e12")'),
])  # fmt: skip
def test_a_file_that_cannot_be_trained_on_is_one_line(text: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as error:
        from_file(path, Forbidden([[" ".join(f"e{i}" for i in range(13))]]))
    assert words.format(path=path) in str(error.value) and "\n" not in str(error.value)


def test_written_prompts_are_one_object_a_line(tmp_path: Path) -> None:
    prompts = [{"turns": ["a\nb \u2028 é"], "source": "x"}, {"turns": ["c"], "source": "self:free"}]
    write(tmp_path / "p.jsonl", prompts)
    lines = (tmp_path / "p.jsonl").read_text().split("\n")
    assert [json.loads(line) for line in lines if line] == prompts
    assert [p.name for p in tmp_path.iterdir()] == ["p.jsonl"]


# ------------------------------------------------------------------------------------------------ self-written


@pytest.fixture(scope="module")
def target(checkpoint: Path) -> Target:
    return load_target(str(checkpoint), dtype="float32", device="cpu")


def written(target: Target, forbidden: Forbidden, seed: int = 3, **changes: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    plan = PromptPlan.model_validate(tiny.recipe(Path("."))["prompts"] | dict(self_written=60) | changes)
    engine = Engine(target.model, max_num_requests=16, max_model_len=160)
    seen: list[Any] = []
    return self_write(engine, target.tokenizer, plan, forbidden, seed, lambda *x: seen.append(x)), seen


def test_self_written_turns_are_whole_single_and_of_their_domain(target: Target) -> None:
    found, seen = written(target, Forbidden([]))
    assert seen[-1] == (60, 60) and sorted(seen) == seen
    turns = [p["turns"][0] for p in found]
    assert len(set(turns)) == len(turns) and all(p["turns"] == [turn] for p, turn in zip(found, turns))
    sources = {p["source"] for p in found}
    assert sources == {"self:free", "self:Words", "self:Functions"}
    for prompt, turn in zip(found, turns):
        assert not any(mark in turn for mark in (tiny.END, tiny.USER, tiny.ASSISTANT))
        if prompt["source"] == "self:Words":
            assert turn.startswith("green garden paper: ") and "\n" not in turn
        if prompt["source"] == "self:Functions":
            assert turn.startswith("def") and turn.count('"""') == 2 and turn.endswith('"""\n')


def test_self_written_turns_follow_from_the_seed(target: Target) -> None:
    assert written(target, Forbidden([]))[0] == written(target, Forbidden([]))[0]
    assert written(target, Forbidden([]))[0] != written(target, Forbidden([]), seed=4)[0]


def test_self_written_turns_that_are_evaluated_are_dropped(target: Target) -> None:
    found, _ = written(target, Forbidden([]))
    evaluated = [p["turns"][0] for p in found[::2]]
    again, _ = written(target, Forbidden([[text] for text in evaluated]))
    assert not {p["turns"][0] for p in again} & set(evaluated)
    assert again == [p for p in found if p in again] and again


def test_turns_may_come_from_the_bare_template_alone(target: Target) -> None:
    found, _ = written(target, Forbidden([]), domains=[], free_share=0.0)
    assert {p["source"] for p in found} == {"self:free"}


def test_a_stub_is_a_function_up_to_its_docstring() -> None:
    domain = Domain(title="x", examples=("y",), separator="\n###\n", opening="def", template="Solve:\n<turn>")
    assert _finish(domain, ' f(a):\n    """Adds."""\n    return a\n###') == 'Solve:\ndef f(a):\n    """Adds."""\n'
    assert _finish(domain, ' f(a):\n    """Adds.\n###') is None
    question = Domain(title="x", examples=("y",), opening="How ")
    assert _finish(question, " do I?") == "How do I?"
    assert _finish(Domain(title="x", examples=("y",)), " Why?") == "Why?"
