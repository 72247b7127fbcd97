"""Fixtures of the training tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training import tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target's folder."""
    return tiny.write_target(tmp_path_factory.mktemp("target"))
