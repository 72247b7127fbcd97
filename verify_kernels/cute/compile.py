"""Ahead-of-time compilation of the CuTe DSL kernels: no GPU needed to build, no DSL needed to run.

`build` compiles one variant to a shared library that needs libcudart and apache-tvm-ffi only, and keeps it in a folder
under a name that holds all it depends on: a changed source, constant, DSL or architecture never loads a stale kernel.
`load` opens it. Importing this module imports neither the DSL nor tvm-ffi.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import logging
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verify_kernels.cute.variants import AnyVariant
from verify_kernels.errors import KernelError

_log = logging.getLogger(__name__)

ARCH = "sm_90a"
BUILDS_ON = {"latent": ("attention",)}
"""Families whose kernels are made from another's sources too."""

_DSL = "nvidia-cutlass-dsl"

# The one symbol tvm-ffi kernels want from the DSL's own runtime; the caller sees the CUDA error anyway.
_SHIM = "void CuteDSLRT_TVMFFISetRaisedCudaError(int error) { (void)error; }\n"


def default_folder() -> Path:
    return Path(os.environ.get("DSPARK_KERNEL_CACHE", Path.home() / ".cache" / "dspark-runtime" / "kernels"))


@functools.cache
def fingerprint(family: str) -> str:
    """Hash of what a family's kernels are made from (its folder and those in `BUILDS_ON`, but for the host
    side, `run.py`) and for."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    families = (*BUILDS_ON.get(family, ()), family)
    sources = [folder / "fake.py", *(s for name in families for s in sorted((folder / name).rglob("*.py")))]
    for source in [s for s in sources if s.name != "run.py"]:
        digest.update(str(source.relative_to(folder)).encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update(ARCH.encode())
    return digest.hexdigest()


def dsl_version() -> str:
    """Version of the installed DSL, "none" without one (then only libraries built elsewhere can be loaded)."""
    try:
        return importlib.metadata.version(_DSL)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def check_install() -> None:
    """Raises KernelError if the DSL is missing or one of its packages overwrote another's files (its flavours for
    CUDA 12 and 13 share a folder): a file that is not as long as its package's own record says."""
    packages = [d for d in importlib.metadata.distributions() if (d.metadata["Name"] or "").startswith(_DSL)]
    if not packages:
        raise KernelError(f"{_DSL}: not installed, needed to compile kernels (pip install '.[cuda]')")
    for package in packages:
        for file in package.files or ():
            path = Path(str(package.locate_file(file)))
            if file.size is not None and (not path.exists() or path.stat().st_size != file.size):
                found = f"{path.stat().st_size} bytes" if path.exists() else "nothing"
                name = package.metadata["Name"]
                raise KernelError(
                    f"{name}: found {found} in {file}, expected {file.size}; the install is broken: "
                    f"pip uninstall -y {' '.join(sorted(p.metadata['Name'] for p in packages))}, then install it again"
                )


def library(variant: AnyVariant, folder: Path | None = None) -> Path:
    """Where a variant's library lies. Without the DSL: the one built elsewhere from these very sources."""
    folder = folder or default_folder()
    key = hashlib.sha256(f"{fingerprint(variant.family)} {variant}".encode()).hexdigest()[:16]
    if dsl_version() != "none":
        return folder / f"{variant.name}-{key}-dsl{dsl_version()}.so"
    found = sorted(folder.glob(f"{variant.name}-{key}-dsl*.so"))
    if len(found) != 1:
        raise KernelError(
            f"kernel {variant.name}: found {len(found)} libraries of these sources in {folder}, allowed: 1 "
            f"(install {_DSL}, which builds it here, or bring the library from where it is)"
        )
    return found[0]


def build(variant: AnyVariant, folder: Path | None = None) -> Path:
    """Compiles a variant unless the folder holds it; returns the library's path."""
    path = library(variant, folder)
    if not path.exists():
        check_install()
        _log.warning("compiling kernel %s, once", variant.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            compiled = compile_variant(variant)
            compiled.export_to_c(f"{work}/kernel.o", function_name="kernel")
            _link(Path(work))
            os.replace(f"{work}/kernel.so", path)  # atomic: a reader never sees half a library
    return path


def compile_variant(variant: AnyVariant, options: str = "") -> Any:
    """The DSL's compiled function. Shapes are symbolic, so one compilation serves every batch."""
    os.environ.setdefault("CUTE_DSL_ARCH", ARCH)
    family = importlib.import_module(f"verify_kernels.cute.{variant.family}.build")
    return family.compiled(variant, f"--enable-tvm-ffi {options}")


def _link(work: Path) -> None:
    """Links kernel.o with the DSL's static CUDA runtime glue. libcudart and tvm-ffi are found when it is loaded."""
    root = Path(str(importlib.metadata.distribution(_DSL).locate_file("nvidia_cutlass_dsl")))
    static = root / "cu13" / "lib" / "libcuda_dialect_runtime_static.a"
    if not static.exists():
        raise KernelError(f"{_DSL}: {static} is missing, allowed: an install with the extra cu13")
    (work / "shim.c").write_text(_SHIM)
    command = ["gcc", "-shared", "-fPIC", "-o", work / "kernel.so", work / "kernel.o", work / "shim.c", static]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise KernelError(f"gcc could not link the kernel: {done.stderr.strip()}")


@functools.cache
def load(path: Path) -> Callable[..., None]:
    """The kernel of a library; call it with torch tensors, it runs on torch's current stream."""
    import torch  # noqa: F401  brings libcudart into the process
    import tvm_ffi

    _make_global("libcudart.so")
    return tvm_ffi.load_module(str(path)).kernel


def _make_global(name: str) -> None:
    """Makes the symbols of a loaded library visible to libraries loaded later."""
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if name in line}
    if not loaded:
        raise KernelError(f"{name} is not loaded: found a torch build without CUDA, allowed: one for CUDA 13")
    ctypes.CDLL(sorted(loaded)[0], mode=ctypes.RTLD_GLOBAL)
