"""Compiles the kernels on first use, once per machine, compiler and version of the sources, and loads them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import platformdirs
import torch

SOURCES = ("linear.cpp", "attention.cpp", "elementwise.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fvisibility=hidden", "-shared", "-fPIC")

_ptr, _size, _int, _float = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "dspark_pool": (None, [_ptr, _ptr]),
    "dspark_linear": (None, [_int, _ptr, _size, _ptr, _size, _ptr, _ptr, _size, _size, _size, _int]),
    "dspark_logits": (None, [_int, _ptr, _size, _ptr, _size, _ptr, _size, _size, _size, _int]),
    "dspark_greedy": (None, [_int, _ptr, _size, _ptr, _size, _ptr, _ptr, _size, _size, _size, _int]),
    "dspark_attention": (_int, [_int, *[_ptr] * 5, *[_size] * 6, _float, _float, _int]),
    "dspark_rms_norm": (None, [_int, _ptr, _size, _ptr, _ptr, _size, _size, _float]),
    "dspark_add_rms_norm": (None, [_int, *[_ptr] * 5, _size, _size, _float]),
    "dspark_silu_and_mul": (None, [_int, _ptr, _size, _ptr, _size, _size, _size, _int]),
    "dspark_append_kv": (
        _int, [_int, *[_ptr, _size] * 3, *[_ptr] * 8, *[_size] * 6, _float]
    ),
}  # fmt: skip


class BuildError(Exception):
    """Why there are no compiled kernels, in one line."""


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded kernels. Raises BuildError."""
    lib = _load(_built())
    run, barrier = _thread_pool()
    lib.dspark_pool(run, barrier)
    return lib


def cache_folder() -> Path:
    """Where compiled kernels are kept: $DSPARK_CACHE, or the user's cache folder."""
    return Path(os.environ.get("DSPARK_CACHE") or platformdirs.user_cache_dir("dspark-runtime")) / "cpu-kernels"


def _compiler() -> list[str]:
    named = os.environ.get("CXX")
    for command in [shlex.split(named)] if named else [["g++"], ["clang++"], ["c++"]]:
        if command and shutil.which(command[0]):
            return command
    raise BuildError(f"no C++ compiler found (looked for {named or 'g++, clang++, c++'})")


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return platform.machine() + "".join(sorted({x for x in lines if x.startswith(("flags", "Features", "model name"))}))


def _built() -> Path:
    """Path of the shared library, compiled now if this machine has not compiled these sources before."""
    compiler = _compiler()
    here = Path(__file__).parent
    try:
        asked = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler[0]} --version failed: {error}") from error
    key = hashlib.sha256("\0".join([*compiler, asked.stdout, *FLAGS, _cpu(), torch.__version__]).encode())
    for name in ("simd.cpp", *SOURCES):
        key.update((here / name).read_bytes())
    target = cache_folder() / f"{key.hexdigest()[:24]}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Each process compiles into a folder of its own; the rename is atomic, so the last of several wins harmlessly.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            output = Path(folder) / "kernels.so"
            command = [*compiler, *FLAGS, *(str(here / name) for name in SOURCES), "-o", str(output)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode:
                lines = [line.strip() for line in done.stderr.splitlines() if "error" in line]
                raise BuildError(f"{compiler[0]} failed: {(lines or [f'exit code {done.returncode}'])[0]}")
            os.replace(output, target)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"kernels could not be compiled into {target.parent}: {error}") from error
    return target


def _load(path: Path) -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise BuildError(f"compiled kernels could not be loaded: {error}") from error
    return lib


def _thread_pool() -> tuple[int | None, int | None]:
    """GOMP_parallel and GOMP_barrier of the OpenMP library that torch has loaded; (None, None): kernels use one thread.

    These two entry points are part of the OpenMP ABI of Linux (libgomp, and libomp for compatibility).
    """
    try:
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    except OSError:
        return None, None
    torch_folder = str(Path(torch.__file__).parent.parent)
    names = [x for x in mapped if Path(x).name.startswith(("libgomp", "libomp", "libiomp"))]
    for name in sorted(names, key=lambda x: not x.startswith(torch_folder)):
        pool = ctypes.CDLL(name)
        if hasattr(pool, "GOMP_parallel") and hasattr(pool, "GOMP_barrier"):
            return (ctypes.cast(pool.GOMP_parallel, _ptr).value, ctypes.cast(pool.GOMP_barrier, _ptr).value)
    return None, None


def threads() -> str:
    """How the kernels are threaded, for people."""
    return "torch's threads" if _thread_pool()[0] else "one thread: torch's OpenMP library was not found"
