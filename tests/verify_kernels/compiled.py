"""What the compiler says of a kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from verify_kernels.cute import compile as kernels
from verify_kernels.cute.variants import AnyVariant

ROOT = Path(__file__).parents[2]


def compile_remarks(variant: AnyVariant, folder: Path) -> str:
    """ptxas's words about a variant, and its PTX in the folder. In a process of its own: the DSL reads its environment
    once."""
    code = (
        "from verify_kernels.cute.compile import compile_variant\n"
        "from verify_kernels.cute.variants import *\n"
        f"compile_variant({variant!r}, \"--ptxas-options '-v'\")"
    )
    environment = {
        "CUTE_DSL_ARCH": kernels.ARCH,
        "CUTE_DSL_NO_CACHE": "1",
        "CUTE_DSL_KEEP": "ptx",
        "CUTE_DSL_DUMP_DIR": str(folder),
        "CUTE_DSL_COMPILER_OPT": "remarks{ptx}",
        "HOME": str(folder),
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
