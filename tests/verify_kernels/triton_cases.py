"""Triton kernels on whatever there is: a GPU, or Triton's interpreter on a CPU (see tests/conftest.py)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def kernels() -> dict:
    from verify_kernels.triton import implementations

    return implementations(unmeasured=True)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is nonsense, never a zero that happens to be right."""
    original = torch.Tensor.new_empty

    def new_empty(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        out = original(self, *args, **kwargs)
        return out.fill_(float("nan") if out.is_floating_point() else -77)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


def on_device(x: object) -> object:
    return x.to(DEVICE) if isinstance(x, torch.Tensor) else x


def same(found: object, wanted: object) -> None:
    """Tensors and tuples of them, exactly equal."""
    if wanted is None:
        assert found is None
    elif isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        assert torch.equal(found.cpu(), wanted), (found, wanted)
    else:
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted):
            same(a, b)
