"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDER = ["verify_kernels", "drafters", "dspark_runtime", "training", "eval"]  # each may import itself and what stands before it


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", ORDER)
def test_imports_run_one_way(package: str) -> None:
    above = set(ORDER[ORDER.index(package) + 1 :]) | {"tests"}
    bad = {
        str(path.relative_to(ROOT)): found
        for path in (ROOT / package).rglob("*.py")
        if (found := imported(path) & above)
    }
    assert not bad


def test_no_pickle_and_no_remote_code() -> None:
    for package in ORDER:
        for path in (ROOT / package).rglob("*.py"):
            assert not imported(path) & {"pickle", "cloudpickle", "dill"}, path
            assert "trust_remote_code=True" not in path.read_text(), path


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["doctor", "--help"]])
def test_help_imports_no_heavy_library(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom eval.cli import main\nsys.argv = ['dspark', *%r]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'cutlass', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n" % (arguments,)
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
