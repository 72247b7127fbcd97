"""Sequential temperature scaling (STS) of a drafter's confidence, and how good a confidence is (fact sheet §3.2).

Confidence c_k = sigmoid(z_k / T_k) says how likely draft k is accepted, given that those before it were; its survival
is the product up to k. Everything here is float64 on the host. A position that was never judged (a stop token ended the
step before it) has the logit NaN, and so have those after it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

FILE = "calibration.json"
BINS = 20
GRID = 2.0 ** np.linspace(-3, 3, 193)
"""Temperatures that `fit` tries: 1/8 to 8 in steps of 2.2 %, 1 among them."""


class Calibration(BaseModel):
    """calibration.json beside a checkpoint, with SGLang's field names. The errors are of the samples fitted on."""

    temperatures: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    dataset: str
    num_samples: int = Field(ge=1)
    ece_before: float = Field(ge=0, le=1)
    ece_after: float = Field(ge=0, le=1)


def read(folder: str | Path) -> Calibration | None:
    """The folder's calibration.json, None without one. Raises ValueError naming file and field."""
    path = Path(folder) / FILE
    if not path.exists():
        return None
    try:
        return Calibration.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        found = "missing" if first["type"] == "missing" else f"found {first['input']!r}, {first['msg']}"
        raise ValueError(f"{path}: {field}: {found}" if field else f"{path}: {first['msg']}") from None


def survival(logits: NDArray, temperatures: NDArray | list[float] | float = 1.0) -> NDArray[np.float64]:
    """logits [N, k] -> probability [N, k] that a draft and all before it are accepted."""
    with np.errstate(over="ignore"):  # exp overflows to the right answer, 0
        return (1 / (1 + np.exp(-np.asarray(logits, np.float64) / temperatures))).cumprod(1)


def prefixes(accepted: NDArray, depth: int) -> NDArray[np.bool_]:
    """accepted [N], the number of accepted drafts -> [N, depth]: whether a draft and all before it were accepted."""
    return np.asarray(accepted)[:, None] > np.arange(depth)


def ece(predicted: NDArray, happened: NDArray) -> float | None:
    """Expected calibration error over 20 bins of equal width: mean distance between what is predicted and how often it
    happens, weighted by the bins' samples. Any shapes, the same for both; NaN is left out. None without samples."""
    seen = ~np.isnan(predicted)
    p, y = predicted[seen], happened[seen]
    if not p.size:
        return None
    bins = np.minimum((p * BINS).astype(int), BINS - 1)
    return float(np.abs(np.bincount(bins, p - y, BINS)).sum() / p.size)


def auc(predicted: NDArray, happened: NDArray) -> float | None:
    """Probability that a sample that happened is predicted above one that did not, equal predictions counting half.
    Shapes and NaN as in `ece`; None unless there are samples of both kinds."""
    seen = ~np.isnan(predicted)
    values, which = np.unique(predicted[seen], return_inverse=True)
    yes = np.bincount(which, happened[seen], len(values))
    no = np.bincount(which, ~happened[seen], len(values))
    count = yes.sum() * no.sum()
    return float((yes * (no.cumsum() - no / 2)).sum() / count) if count else None


def fit(logits: NDArray, accepted: NDArray) -> list[float]:
    """Temperatures of the k drafts, one after the other: each minimises the ECE of the survival up to its draft, with
    those before it fixed; among equals the one nearest to 1.

    logits [N, k] of the confidence head; accepted [N], the number of accepted drafts of each step.
    """
    happened = prefixes(accepted, logits.shape[1])
    nearest = GRID[np.argsort(np.abs(np.log(GRID)), kind="stable")]
    before = np.ones(len(logits))
    temperatures = []
    for k in range(logits.shape[1]):
        tries = [before * survival(logits[:, k : k + 1], t)[:, 0] for t in nearest]
        errors = [ece(p, happened[:, k]) for p in tries]
        best = 0 if errors[0] is None else int(np.argmin(errors))
        temperatures.append(float(nearest[best]))
        before = tries[best]
    return temperatures
