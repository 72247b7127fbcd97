"""The collectives compile for Hopper, and poll 16 bytes at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


def test_collectives_compile_for_sm_90(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "tests.verify_kernels.comm.compile"]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = json.loads(done.stdout.splitlines()[-1])
    assert set(compiled) == {"all_reduce", "exchange", "exchange by counts"}
    assert all(0 < x["shared"] < 2048 for x in compiled.values()), compiled
    for name, x in compiled.items():
        narrow = {load for load in x["polls"] if ".v4." not in load}
        assert x["polls"] and (not narrow or name == "exchange by counts"), (name, x["polls"])
