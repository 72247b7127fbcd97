"""What `--scheduler` may say: NAME:ARGUMENT. No torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from drafters.topology import MAX_NODES
from dspark_runtime.errors import ConfigError
from dspark_runtime.tuning.curve import Curve, load_curve
from dspark_runtime.validation import read_json

if TYPE_CHECKING:
    from dspark_runtime.scheduling.policies import Policy

NAMES = {
    "fixed": "DRAFTS or a file of dspark tune --json",
    "threshold": "PROBABILITY or a file of dspark tune --json",
    "budget": "TOKENS of a pass",
    "early-stop": "a curve of dspark profile --json",
    "async": "a curve of dspark profile --json",
}
ALLOWED = "none, " + ", ".join(f"{name}:{what}" for name, what in NAMES.items())


def split(text: str) -> tuple[str, str]:
    """(name, argument), checked as far as that goes without reading a file. Raises ConfigError."""
    name, _, argument = text.partition(":")
    if name not in NAMES or not argument:
        raise ConfigError(f"scheduler: found {text!r}, allowed: {ALLOWED}")
    if name == "budget":
        _number(argument, text, int, lambda x: x >= 1, "1 or more tokens")
    elif name in ("early-stop", "async") and not argument.endswith(".json"):
        raise ConfigError(f"scheduler: found {text!r}, allowed: {name}:FILE.json, {NAMES[name]}")
    elif name == "fixed" and not argument.endswith(".json"):
        _number(argument, text, int, lambda x: 0 <= x < MAX_NODES, f"0 to {MAX_NODES - 1} drafts")
    elif name == "threshold" and not argument.endswith(".json"):
        _number(argument, text, float, lambda x: 0 <= x <= 1, "a probability, 0 to 1")
    return name, argument


def label(text: str) -> str:
    """The name of a policy in a table: without the folder of its file."""
    name, argument = split(text)
    return f"{name}:{Path(argument).name}"


def make_policy(text: str, check: Callable[[Curve, str], None] = lambda curve, where: None) -> Policy:
    """The policy that `text` names. check(curve, file) may refuse a curve, by raising. Raises ConfigError."""
    from dspark_runtime.scheduling import policies

    name, argument = split(text)
    file = Path(argument) if argument.endswith(".json") else None
    if name == "budget":
        return policies.Budget(int(argument))
    if name == "fixed":
        return policies.FixedLength(int(argument) if file is None else {b: k for b, (k, _) in tuned(file).items()})
    if name == "threshold":
        return policies.Threshold(float(argument) if file is None else tuned(file, thresholds=True))
    curve = load_curve(file)
    check(curve, str(file))
    return policies.EarlyStop(curve) if name == "early-stop" else policies.Lagged(curve)


def tuned(path: Path, thresholds: bool = False) -> dict[int, tuple[int, float]]:
    """{requests at once: (drafts, threshold)} of a tuning: its best chains, or with `thresholds` its confidence
    policies where they pay (threshold 0: verify all). Raises ConfigError naming the file and the field."""
    values = read_json(path)
    if not isinstance(values, dict) or values.get("kind") != "tuning":
        raise ConfigError(f"{path}: not a tuning, allowed: a file of `dspark tune --json`")
    found: dict[int, tuple[int, float]] = {}
    try:
        for row in values["choices"]:
            policy = row["confidence"]
            k, threshold = row["best_chain"]["num_speculative_tokens"], 0.0
            if thresholds and policy is None:
                raise ConfigError(f"{path}: confidence: missing, allowed: a tuning on a trace with confidences")
            if thresholds and policy["pays"]:
                k, threshold = policy["k"], policy["threshold"]
            found[int(row["num_requests"])] = int(k), float(threshold)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: choices: {type(error).__name__} {error}, allowed: those of `dspark tune`") from None
    if not found:
        raise ConfigError(f"{path}: choices: found none, allowed: one or more")
    return found


def _number(
    argument: str, text: str, kind: Callable[[str], float], fits: Callable[[float], bool], allowed: str
) -> None:
    try:
        good = fits(kind(argument))
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"scheduler: found {text!r}, allowed: {allowed}")
