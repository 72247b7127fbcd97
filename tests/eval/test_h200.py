"""The script that runs what a GPU measures: every command of it exists and takes the options that it is given."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from eval.cli import app

SCRIPT = Path(__file__).resolve().parents[2] / "eval" / "h200.sh"
STUB = """#!{python}
import json, sys
open({log!r}, "a").write(json.dumps(sys.argv[1:]) + "\\n")
"""


@pytest.fixture
def run(tmp_path: Path):
    """Runs the script with a python that only writes down what it is asked for."""
    log, stub = tmp_path / "log", tmp_path / "python"
    stub.write_text(STUB.format(python=sys.executable, log=str(log)))
    stub.chmod(0o755)

    def call(*arguments: str) -> tuple[subprocess.CompletedProcess, list[list[str]]]:
        done = subprocess.run(["bash", SCRIPT, *arguments], env={"PYTHON": str(stub), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
        return done, [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    return call


def test_every_part_is_a_command_that_exists(run, tmp_path: Path) -> None:
    parts = re.findall(r"^    ([a-z0-9|]+)\)", SCRIPT.read_text().partition("part() {")[2].partition("esac")[0], re.M)
    names = [name for part in parts for name in part.split("|")]
    assert {"moe", "draft", "step", "dense", "fp8", "latent", "recurrence", "drafter", "kimi", "vllm", "torch", "comm"} == set(names)
    built, commands = run("build", str(tmp_path / "kernels"))
    done, both = run("run", str(tmp_path / "kernels"), str(tmp_path / "out"), *names)
    assert built.returncode == done.returncode == 0, done.stderr
    assert len(both) > len(commands) + len(names)
    dspark = typer.main.get_command(app)
    for minus, module, *options in both:
        assert minus == "-m" and importlib.util.find_spec(module)
        given = {o.partition("=")[0] for o in options if re.match(r"--?[a-z]", o)}
        if module != "eval.cli":
            source = Path(importlib.util.find_spec(module).origin).read_text()
            assert all(f'"{option}"' in source for option in given), (module, given)
            continue
        command = dspark.commands[options[0]]
        known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
        assert given <= known, (options, given - known)


def test_a_wrong_part_does_not_stop_the_others(run, tmp_path: Path) -> None:
    done, commands = run("run", str(tmp_path / "k"), str(tmp_path / "out"), "nothing", "draft")
    assert done.returncode == 1 and "part: found nothing" in done.stderr and "failed: nothing" in done.stderr
    assert [c[1] for c in commands] == ["eval.bench_draft"]
    assert run()[0].returncode == 2
