"""Ahead-of-time compilation of the CuTe DSL kernels: no GPU needed to build, no DSL needed to run.

`build` compiles one variant to a shared library that needs libcudart and apache-tvm-ffi only, and keeps it in a folder
under a name that holds all it depends on: a changed source, constant, DSL or architecture never loads a stale kernel.
`load` opens it. Importing this module imports neither the DSL nor tvm-ffi.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import logging
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verify_kernels.errors import KernelError

_log = logging.getLogger(__name__)

ARCH = "sm_90a"
_DSL = "nvidia-cutlass-dsl"

# The one symbol tvm-ffi kernels want from the DSL's own runtime; the caller sees the CUDA error anyway.
_SHIM = "void CuteDSLRT_TVMFFISetRaisedCudaError(int error) { (void)error; }\n"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A compiled kernel's constants; see `attention.verify.VerifyAttention`."""

    dtype: str  # "bfloat16" or "float16"
    head_dim: int
    heads: int
    kv_heads: int
    page_size: int
    mask: str
    rows: int
    blocks: int = 1
    tile_n: int = 64
    stages: int = 4
    softcap: bool = False
    fp8: bool = False  # keys and values in e4m3

    @property
    def name(self) -> str:
        cap = ("_cap" if self.softcap else "") + ("_e4m3" if self.fp8 else "")
        return (
            f"verify_{self.dtype}_d{self.head_dim}_h{self.heads}_{self.kv_heads}_p{self.page_size}_{self.mask}"
            f"_m{self.rows}x{self.blocks}_n{self.tile_n}_s{self.stages}{cap}"
        )


@dataclasses.dataclass(frozen=True)
class PlanVariant:
    """Constants of the schedule kernel; see `attention.schedule.schedule`."""

    group: int
    kv_heads: int
    block_rows: int
    tile_n: int
    causal: bool
    setup: int

    @property
    def name(self) -> str:
        order = "causal" if self.causal else "any"
        return f"plan_g{self.group}_h{self.kv_heads}_m{self.block_rows}_n{self.tile_n}_{order}_c{self.setup}"


@dataclasses.dataclass(frozen=True)
class AppendVariant:
    """Constants of the cache's write side; see `attention.append.AppendKV`."""

    dtype: str
    head_dim: int
    heads: int
    kv_heads: int
    norm: bool
    fp8: bool = False  # keys and values in e4m3

    @property
    def name(self) -> str:
        ends = ("_norm" if self.norm else "") + ("_e4m3" if self.fp8 else "")
        return f"append_{self.dtype}_d{self.head_dim}_h{self.heads}_{self.kv_heads}{ends}"


@dataclasses.dataclass(frozen=True)
class CommitVariant:
    """Constants of the accepted path's compaction; see `attention.commit.CommitPath`."""

    words: int

    @property
    def name(self) -> str:
        return f"commit_w{self.words}"


@dataclasses.dataclass(frozen=True)
class LinearVariant:
    """Constants of the small-T linear; see `linear.kernel.Linear`.

    tokens: columns of the product, 8, 16, 32 or 64, of which a call may use fewer; rows, tile_k: the tile of weights
    that a stage holds; rms_in, rms_out: the norm before and the norm after; early: dependents may launch from the start
    on, not from the last read of weights on.
    """

    dtype: str
    tokens: int
    rows: int
    tile_k: int
    stages: int
    bias: bool = False
    residual: bool = False
    swiglu: bool = False
    rms_in: bool = False
    rms_out: bool = False
    pdl: bool = True
    early: bool = False

    @property
    def name(self) -> str:
        flags = {"bias": self.bias, "res": self.residual, "swiglu": self.swiglu, "rmsin": self.rms_in, "rmsout": self.rms_out, "early": self.early, "nopdl": not self.pdl}
        ends = "".join(f"_{name}" for name, on in flags.items() if on)
        return f"linear_{self.dtype}_t{self.tokens}_m{self.rows}_k{self.tile_k}_s{self.stages}{ends}"


@dataclasses.dataclass(frozen=True)
class ExpertsVariant:
    """Constants of the grouped products of a mixture of experts; see `moe.kernel.Experts`.

    tokens: columns, 8, 16, 32 or 64, of which a call may use fewer; top_k of experts; down: the second product; kind:
    of weights, "plain" for 16 bits, "fp8" or "mxfp4" as `moe.pack` has them.
    """

    dtype: str
    tokens: int
    experts: int
    top_k: int
    stages: int
    down: bool
    kind: str = "plain"
    pdl: bool = True

    @property
    def name(self) -> str:
        ends = ("_down" if self.down else "_gate_up") + ("" if self.pdl else "_nopdl")
        return f"experts_{self.dtype}_{self.kind}_t{self.tokens}_e{self.experts}_k{self.top_k}_s{self.stages}{ends}"


AnyVariant = Variant | PlanVariant | AppendVariant | CommitVariant | LinearVariant | ExpertsVariant


def default_folder() -> Path:
    return Path(os.environ.get("DSPARK_KERNEL_CACHE", Path.home() / ".cache" / "dspark-runtime" / "kernels"))


@functools.cache
def fingerprint(family: str) -> str:
    """Hash of a family's kernel sources (its folder and this file) and of the architecture."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for source in [Path(__file__), *sorted((folder / family).rglob("*.py"))]:
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
    family = {LinearVariant: "linear", ExpertsVariant: "moe"}.get(type(variant), "attention")
    key = hashlib.sha256(f"{fingerprint(family)} {variant}".encode()).hexdigest()[:16]
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
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

    from verify_kernels.cute.attention.append import AppendKV
    from verify_kernels.cute.attention.commit import CommitPath
    from verify_kernels.cute.attention.plan import Plan
    from verify_kernels.cute.attention.schedule import RECORD
    from verify_kernels.cute.attention.verify import VerifyAttention
    from verify_kernels.cute.linear.kernel import Linear
    from verify_kernels.cute.moe.kernel import Experts

    f32, i32, size = cutlass.Float32, cutlass.Int32, cute.sym_int32
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi {options}"

    def fake(kind: Any, *shape: Any) -> Any:
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(kind, shape, stride_order=order, assumed_align=16 if len(shape) > 1 else kind.width // 8)

    if isinstance(variant, PlanVariant):
        table = fake(i32, size(), RECORD)
        plan = Plan(**dataclasses.asdict(variant))
        return cute.compile(plan, fake(i32, size()), fake(i32, size()), table, i32(1), i32(0), stream, options=options)
    if isinstance(variant, CommitVariant):
        shape = (size(), size(), size(), variant.words)
        stride = (cute.sym_int64(divisibility=4), cute.sym_int64(divisibility=4), variant.words, 1)
        cache = make_fake_tensor(i32, shape, stride, assumed_align=16)
        index = fake(cutlass.Int64, size())
        path = fake(cutlass.Int64, size(), size())
        table = fake(i32, size(), size())
        return cute.compile(CommitPath(variant.words), cache, cache, table, index, path, stream, options=options)
    constants = dataclasses.asdict(variant)
    dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[constants.pop("dtype")]
    tokens, pages, slots = size(), size(), size()
    if isinstance(variant, LinearVariant):
        rows, k = size(), size(divisibility=8)

        def matrix(*shape: Any, align: int) -> Any:
            """Rows may lie apart: a slice of another product, or weights of more than 2^31 elements."""
            return make_fake_tensor(dtype, shape, (cute.sym_int64(divisibility=align), 1), assumed_align=2 * align)

        groups = variant.rows // 64
        return cute.compile(
            Linear(dtype, **constants),
            matrix(tokens, k, align=8),
            matrix(rows, k, align=8),
            matrix(tokens, size(), align=1),
            fake(f32, slots, groups, variant.tokens // 8, 128, 4),
            fake(i32, size()),
            fake(dtype, rows) if variant.bias else None,
            matrix(tokens, rows, align=1) if variant.residual else None,
            fake(f32, size(), tokens) if variant.rms_in else None,
            f32(0.0),
            fake(dtype, rows) if variant.rms_out else None,
            matrix(tokens, rows, align=1) if variant.rms_out else None,
            fake(f32, size(), tokens) if variant.rms_out else None,
            i32(1),
            i32(1),
            stream,
            options=options,
        )
    if isinstance(variant, ExpertsVariant):
        experts = Experts(dtype, **constants)
        rows, inner, outer = size(), size(divisibility=8), size()
        strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
        picks = (tokens, variant.top_k)
        stacked = make_fake_tensor(dtype, (variant.experts, rows, inner), strides, assumed_align=16)
        if variant.kind != "plain":
            from verify_kernels.cute.moe.pack import BYTES

            size_of = BYTES[variant.kind]
            strides = (cute.sym_int64(divisibility=16), cute.sym_int64(divisibility=16), size_of, 1)
            stacked = make_fake_tensor(cutlass.Uint8, (variant.experts, size(), size(), size_of), strides, assumed_align=16)
        return cute.compile(
            experts,
            make_fake_tensor(dtype, (size(), inner), (cute.sym_int64(divisibility=8), 1), assumed_align=16),
            stacked,
            make_fake_tensor(cutlass.Int64, picks, (size(), 1), assumed_align=8),
            None if variant.down else make_fake_compact_tensor(f32, picks, stride_order=(1, 0), assumed_align=4),
            make_fake_tensor(dtype, (size(), outer), (cute.sym_int64(), 1), assumed_align=2),
            fake(f32, slots, 2, variant.tokens // 8, 128, 4),
            fake(i32, size()),
            i32(1),
            stream,
            options=options,
        )
    if isinstance(variant, AppendVariant):

        def strided(heads: int) -> Any:
            stride = (cute.sym_int64(divisibility=8), variant.head_dim, 1)
            return make_fake_tensor(dtype, (tokens, heads, variant.head_dim), stride, assumed_align=16)

        # Slots are 64-bit indices: a cache may hold more than 2^31 elements.
        shape = (pages, size(), variant.kv_heads, variant.head_dim)
        row = variant.kv_heads * variant.head_dim
        stored = cutlass.Uint8 if variant.fp8 else dtype
        stride = (cute.sym_int64(divisibility=16 if variant.fp8 else 8), row, variant.head_dim, 1)
        cache = make_fake_tensor(stored, shape, stride, assumed_align=16)
        scales = fake(f32, variant.kv_heads) if variant.fp8 else None
        index = fake(cutlass.Int64, tokens)
        weight = make_fake_compact_tensor(dtype, (variant.head_dim,), assumed_align=16) if variant.norm else None
        return cute.compile(
            AppendKV(dtype, **constants),
            strided(variant.heads),
            strided(variant.kv_heads),
            strided(variant.kv_heads),
            cache,
            cache,
            index,
            index,
            fake(f32, size(), variant.head_dim),
            weight,
            weight,
            fake(dtype, tokens, variant.heads, variant.head_dim),
            f32(0.0),
            scales,
            scales,
            stream,
            options=options,
        )
    kernel = VerifyAttention(dtype, **constants)
    queries = fake(dtype, tokens, variant.heads, variant.head_dim)
    stored = cutlass.Uint8 if variant.fp8 else dtype
    cache = fake(stored, pages, variant.page_size, variant.kv_heads, variant.head_dim)
    scales = fake(f32, variant.kv_heads) if variant.fp8 else None
    return cute.compile(
        kernel,
        queries,
        cache,
        cache,
        fake(i32, size(), size()),
        fake(cutlass.Int64, tokens),
        fake(i32, size(), RECORD),
        queries,
        fake(f32, slots, variant.rows, variant.head_dim),
        fake(f32, slots, variant.rows, 2),
        f32(1.0),
        f32(0.0),
        i32(0),
        scales,
        scales,
        stream,
        options=options,
    )


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
