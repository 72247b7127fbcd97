"""Prompts of the measuring commands: the project's own set, a file, or random token ids of a stated length."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_runtime.errors import ConfigError

DEFAULT = Path(__file__).resolve().parent.parent / "configs" / "prompts" / "mixed.jsonl"


@dataclass(frozen=True)
class PromptSet:
    name: str
    sha256: str
    texts: tuple[str, ...]


def load_prompts(path: str | Path | None = None) -> PromptSet:
    """First turns of a JSONL file: one object a line with "turns": [str, ...]. Raises ConfigError naming the line."""
    path = Path(path) if path is not None else DEFAULT
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"prompts: {path}: {error.strerror or error}") from None
    texts = []
    try:
        lines = raw.decode().split("\n")  # not splitlines: U+2028 may stand in a text
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompts: {path}: not UTF-8 (byte {error.start})") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            turns = json.loads(line)["turns"]
        except (ValueError, KeyError, TypeError, RecursionError):
            turns = None
        if not (isinstance(turns, list) and turns and isinstance(turns[0], str) and is_text(turns[0])):
            raise ConfigError(f'prompts: {path}:{number}: expected one JSON object with "turns": [text, ...]')
        texts.append(turns[0])
    if not texts:
        raise ConfigError(f"prompts: {path}: found no prompt")
    return PromptSet(path.name, hashlib.sha256(raw).hexdigest(), tuple(texts))


def is_text(value: str) -> bool:
    """Not empty, and free of lone surrogates, which JSON can spell and UTF-8 cannot."""
    return value != "" and not any("\ud800" <= c <= "\udfff" for c in value)


def encode(tokenizer: Any, text: str, chat: bool = True) -> list[int]:
    """Token ids of one prompt, in the chat template where there is one (chat=False: the text as it stands)."""
    if chat and getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(text)["input_ids"])


def random_ids(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` random ids."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
