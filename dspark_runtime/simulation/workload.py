"""When requests come and how long they are: Poisson, closed loop, or a trace of sessions. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from dspark_runtime.errors import ConfigError
from dspark_runtime.validation import checked

Lengths = tuple[int, int]
"""Fewest and most tokens; uniform between them."""


@dataclass(frozen=True)
class Workload:
    """N requests. Request i is ready `delay[i]` seconds after the end of request `after[i]` (-1: of none), and not
    before `arrival[i]`.

    arrival, delay [N] float64, seconds; after [N] int64, each request named at most once; prompt, output [N] int64,
    tokens; cached [N] int64: prompt tokens whose keys and values are there already, below prompt.
    """

    name: str
    arrival: np.ndarray
    after: np.ndarray
    delay: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    cached: np.ndarray

    def __len__(self) -> int:
        return len(self.arrival)


def poisson(rate: float, count: int, prompt: Lengths, output: Lengths, rng: np.random.Generator) -> Workload:
    """`rate` requests a second on average, each independent of the others. Raises ConfigError."""
    if not 0 < rate < float("inf"):
        raise ConfigError(f"rate: found {rate:g}, allowed: more than 0 requests a second")
    arrival = rng.exponential(1 / rate, count).cumsum()
    return _generated(f"{rate:g} requests/s", arrival, np.full(count, -1), prompt, output, rng)


def closed_loop(users: int, count: int, prompt: Lengths, output: Lengths, rng: np.random.Generator) -> Workload:
    """Users of whom each sends the next request as soon as the last one has ended."""
    after = np.arange(count) - users
    return _generated(f"{users} users", np.zeros(count), np.maximum(after, -1), prompt, output, rng)


def _generated(
    name: str, arrival: np.ndarray, after: np.ndarray, prompt: Lengths, output: Lengths, rng: np.random.Generator
) -> Workload:
    count = len(arrival)
    if count < 1:
        raise ConfigError(f"requests: found {count}, allowed: 1 or more")
    sizes = [rng.integers(low, high, count, endpoint=True) for low, high in (prompt, output)]
    zeros = np.zeros(count, dtype=np.int64)
    return Workload(name, arrival, after, zeros.astype(float), *sizes, zeros)


class Line(BaseModel):
    """One request of a trace."""

    model_config = ConfigDict(extra="forbid", strict=True)

    arrival: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    delay: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    prompt: int = Field(ge=1)
    output: int = Field(ge=1)
    session: int | str | None = None
    cached: int = Field(default=0, ge=0)


def read_trace(path: Path) -> Workload:
    """A line a request: {"arrival": 0.5, "prompt": 900, "output": 120}, seconds and tokens.

    Requests of one `session` are its turns, in the file's order: a turn waits for the end of the turn before it, and
    may say how many seconds later it comes (`delay`) in the place of `arrival` or beside it. Its prompt holds all that
    was said before, whose keys and values are still there. `cached`: prompt tokens that are there in any case, as of a
    system prompt that all sessions share. Raises ConfigError naming the line and the field.
    """
    try:
        lines = [(i, line) for i, line in enumerate(path.read_text().splitlines(), start=1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not lines:
        raise ConfigError(f"{path}: found no requests, allowed: 1 or more")
    count = len(lines)
    arrival, delay = np.zeros(count), np.zeros(count)
    prompt, output, cached = (np.zeros(count, dtype=np.int64) for _ in range(3))
    after = np.full(count, -1)
    newest: dict[int | str, int] = {}
    for i, (number, text) in enumerate(lines):
        where = f"{path}:{number}"
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON ({error})") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: found {values!r}, allowed: an object with arrival, prompt, output")
        line = checked(Line, values, where)
        before = newest.get(line.session, -1) if line.session is not None else -1
        if before < 0 and line.arrival is None:
            raise ConfigError(f"{where}: arrival: missing, allowed: seconds, 0 or more")
        if before < 0 and line.delay is not None:
            raise ConfigError(f"{where}: delay: found {line.delay:g}, allowed: in the later turns of a session")
        if before >= 0 and line.arrival is None and line.delay is None:
            raise ConfigError(f"{where}: arrival, delay: missing, allowed: one of them or both")
        said = int(prompt[before] + output[before]) if before >= 0 else 0
        if line.prompt < said:
            raise ConfigError(
                f"{where}: prompt: found {line.prompt}, allowed: {said} or more, what session {line.session!r} has said"
            )
        if line.cached >= line.prompt:
            raise ConfigError(f"{where}: cached: found {line.cached}, allowed: below the prompt's {line.prompt}")
        if line.session is not None:
            newest[line.session] = i
        arrival[i], delay[i], after[i] = line.arrival or 0.0, line.delay or 0.0, before
        # The last token of a turn was emitted, not computed.
        prompt[i], output[i], cached[i] = line.prompt, line.output, max(line.cached, said - 1)
    return Workload(f"trace {path.name}", arrival, after, delay, prompt, output, cached)
