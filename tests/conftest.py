"""Fixtures shared by all tests."""

from __future__ import annotations

import os

import pytest
import torch

# Without a GPU, Triton's kernels run in its interpreter, which is chosen before Triton is first imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Workers of a parallel run share the cores; a fixed thread count also fixes the order of sums.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2():
    """The embedded target in float32 with its tokenizer (fetched once into the user's cache)."""
    from dspark_runtime.targets import load_target

    return load_target("smollm2", dtype="float32", device="cpu", max_model_len=1024)
