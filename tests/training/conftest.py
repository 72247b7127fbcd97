"""Fixtures of the training tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.training import tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target's folder."""
    return tiny.write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Matrices of 64 columns: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
