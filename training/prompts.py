"""User turns to train on: files, and turns that the target writes itself. Never the evaluation prompts.

A self-written turn is what the target puts after a few examples of one kind, or after the bare chat template's user
header. Every turn is kept once, and none that shares a 13-gram of words with an evaluation set.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from training.config import Domain, PromptPlan
from dspark_runtime.errors import ConfigError

GRAM = 13
"""Words in a row that must not be shared with an evaluation prompt (the usual contamination check)."""
_WORDING, _COMMON = 8, 5


class Forbidden:
    """The 13-grams of evaluation prompts, of words without case and punctuation.

    Prompts of fewer words count as one gram. A run of 8 words that 5 or more of a set's prompts share is that set's
    wording ("please reason step by step ..."), not its content: 13-grams that hold one are allowed.
    """

    def __init__(self, suites: Iterable[Sequence[str]]) -> None:
        self._wording: set[tuple[str, ...]] = set()
        self._grams: set[tuple[str, ...]] = set()
        texts = []
        for suite in suites:
            words = [_words(text) for text in suite]
            counts = Counter(gram for text in words for gram in set(_ngrams(text, _WORDING)))
            self._wording.update(gram for gram, count in counts.items() if count >= _COMMON)
            texts += words
        for text in texts:
            self._grams.update(self._content(text))

    def _content(self, words: list[str]) -> Iterable[tuple[str, ...]]:
        if 0 < len(words) < GRAM:
            yield tuple(words)
        for gram in _ngrams(words, GRAM):
            if not any(part in self._wording for part in _ngrams(gram, _WORDING)):
                yield gram

    def shared(self, text: str) -> str | None:
        """The first 13 words in a row of `text` that an evaluation prompt has too, None if there are none."""
        for gram in self._content(_words(text)):
            if gram in self._grams:
                return " ".join(gram)
        return None


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _ngrams(words: Sequence[str], n: int) -> Iterable[tuple[str, ...]]:
    return zip(*(words[i:] for i in range(n)))


def from_file(path: Path, forbidden: Forbidden) -> list[dict[str, Any]]:
    """The prompts of a JSONL file (`turns`, the first is used). Raises ConfigError for one that must not be trained on."""
    from dspark_runtime.prompts import load_prompts

    found = []
    for number, text in enumerate(load_prompts(path).texts, start=1):
        shared = forbidden.shared(text)
        if shared is not None:
            raise ConfigError(
                f'prompts: {path}: prompt {number} shares 13 words with an evaluation prompt ("{shared}"); evaluation '
                "prompts are never trained on: remove it"
            )
        found.append({"turns": [text], "source": path.name})
    return found


def self_write(
    engine: Any,
    tokenizer: Any,
    plan: PromptPlan,
    forbidden: Forbidden,
    seed: int,
    report: Callable[[int, int], None],
    part: tuple[int, int] = (0, 1),
) -> list[dict[str, Any]]:
    """Turns that the engine's target writes: of all, part (i, n) is every n-th, from the i-th. report(done, total) is
    called as they come. Deterministic in `seed`."""
    from dspark_runtime.sampling import SamplingParams
    from training.rollout import generate

    draw = random.Random(seed)
    newline = [i for i, text in enumerate(_token_texts(tokenizer)) if "\n" in text]
    marks = [i for i, text in enumerate(_token_texts(tokenizer)) if text.startswith("###")]
    domains: list[Domain | None] = [None, *plan.domains]
    shares = [1.0]
    if plan.domains:
        scale = (1 - plan.free_share) / sum(d.share for d in plan.domains)
        shares = [plan.free_share, *(d.share * scale for d in plan.domains)]
    jobs, params = [], []
    for i in range(plan.self_written):
        domain = draw.choices(domains, shares)[0]
        stop = () if domain is None else tuple(marks if "###" in domain.separator else newline)
        jobs.append((domain, _opening(domain, tokenizer, draw)))
        params.append(
            SamplingParams(
                temperature=plan.temperature, min_p=0.05, max_tokens=plan.max_tokens, stop_token_ids=stop, seed=seed + i
            )
        )
    jobs, params = jobs[part[0] :: part[1]], params[part[0] :: part[1]]
    outputs: dict[int, Any] = {}

    def done(at: int, output: Any) -> None:
        outputs[at] = output
        report(len(outputs), len(jobs))

    generate(engine, [tokenizer(text, add_special_tokens=False)["input_ids"] for _, text in jobs], params, done)
    found: dict[str, dict[str, Any]] = {}
    for i, (domain, _) in enumerate(jobs):
        output = outputs[i]
        if output is None or output.finish_reason != "stop":  # refused, cut off, or broken
            continue
        text = tokenizer.decode(output.token_ids, skip_special_tokens=True)
        turn = text.strip() if domain is None else _finish(domain, text)
        if turn is None or not 4 <= len(_words(turn)) or turn in found or forbidden.shared(turn) is not None:
            continue
        found[turn] = {"turns": [turn], "source": "self:free" if domain is None else f"self:{domain.title}"}
    return list(found.values())


def _token_texts(tokenizer: Any) -> list[str]:
    return tokenizer.batch_decode([[i] for i in range(len(tokenizer))])


def _opening(domain: Domain | None, tokenizer: Any, draw: random.Random) -> str:
    """What the target continues: a few examples in random order and the start of a new one, or the user's header."""
    if domain is None:
        mark = "\x00"
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
        return rendered[: rendered.index(mark)]
    shots = draw.sample(domain.examples, min(domain.shots, len(domain.examples)))
    if domain.separator == "\n":
        lines = [f"{i}. {shot.strip()}" for i, shot in enumerate(shots, start=1)]
        return f"{domain.title}:\n\n" + "\n".join([*lines, f"{len(shots) + 1}. {domain.opening}".rstrip(" ")])
    return domain.separator.join([f"{domain.title}:", *(s.strip() for s in shots), domain.opening.rstrip(" ")])


def _finish(domain: Domain, text: str) -> str | None:
    """The user turn made of what the target wrote, or None where it is unusable."""
    # A first word brings its own space, which belongs between the opening and itself.
    text = (domain.opening.rstrip(" ") + text.removesuffix("###")).strip()
    if domain.separator != "\n":
        if text.count('"""') < 2:  # a stub without its docstring
            return None
        end = text.index('"""', text.index('"""') + 3) + 3
        text = text[:end] + "\n"
    return domain.template.replace("<turn>", text)


def write(path: Path, prompts: list[dict[str, Any]]) -> None:
    """One JSON object a line, in place at once."""
    temporary = path.with_suffix(".partial")
    temporary.write_text("".join(json.dumps(p, ensure_ascii=False) + "\n" for p in prompts))
    temporary.replace(path)
