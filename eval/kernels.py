"""`dspark kernels`: which CuTe DSL kernels a model and its drafter need, building them, and trying them on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_runtime.errors import ConfigError

if TYPE_CHECKING:
    from verify_kernels.cute.variants import AnyVariant

Progress = Callable[[str, int, int], None]


def variants(targets: Sequence[str], drafter: str | None, dtype: str, page_size: int) -> list[AnyVariant]:
    """Every kernel that these architectures' passes may ask for, and those of a DSpark, DFlash or EAGLE-3 drafter (a
    checkpoint or a name of configs/models) for each of them. Raises KernelError for a shape that the kernels do not
    serve."""
    import torch

    from drafters.dspark import network
    from dspark_runtime.models import transformer
    from dspark_runtime.targets import attention_config
    from eval.bench import drafter_config
    from verify_kernels.cute.attention.run import block_variants_of, variants_of
    from verify_kernels.cute.linear.run import variants_of as linears_of

    kind = getattr(torch, dtype)
    found: list[AnyVariant] = []
    for target in targets:
        c = attention_config(target)
        found += variants_of(kind, c.head_dim, c.num_attention_heads, c.num_key_value_heads, page_size, c.qk_norm)
        found += linears_of(kind, transformer.products(c))
        if drafter is not None:
            d = drafter_config(drafter, c)
            if d.mla is not None:
                raise ConfigError(f"drafter: {drafter} has mla layers, allowed: qwen3 and llama (others have no kernels)")
            shape = (kind, d.head_dim, d.num_attention_heads, d.num_key_value_heads, page_size)
            if d.kind == "eagle3":  # its own trees, of any size
                found += variants_of(*shape, d.qk_norm)
            else:
                found += block_variants_of(*shape, d.block_size, d.qk_norm)
            found += linears_of(kind, network.products(d))
    return list(dict.fromkeys(found))


def listing(targets: Sequence[str], drafter: str | None, dtype: str, page_size: int, folder: Path | None) -> str:
    """A table: kernel, whether its library is there, kilobytes."""
    from eval.report import table
    from verify_kernels.cute import compile as kernels
    from verify_kernels.errors import KernelError

    rows = []
    for variant in variants(targets, drafter, dtype, page_size):
        try:
            path = kernels.library(variant, folder)
            size = f"{path.stat().st_size / 1024:.0f}" if path.exists() else "-"
        except KernelError:  # no compiler here and no library either
            size = "-"
        rows.append((variant.name, "no" if size == "-" else "yes", size))
    built = sum(row[1] == "yes" for row in rows)
    where = folder or kernels.default_folder()
    return f"{table(('kernel', 'built', 'kB'), rows)}\n\n{built} of {len(rows)} built for {kernels.ARCH} in {where}\n"


def build(
    targets: Sequence[str],
    drafter: str | None,
    dtype: str,
    page_size: int,
    folder: Path | None,
    jobs: int,
    progress: Progress,
) -> str:
    """Compile what is missing, in `jobs` processes (the compiler is not safe in threads)."""
    from verify_kernels.cute import compile as kernels

    kernels.check_install()
    wanted = variants(targets, drafter, dtype, page_size)
    missing = [v for v in wanted if not kernels.library(v, folder).exists()]
    start = time.perf_counter()
    with ProcessPoolExecutor(jobs) as pool:
        progress("compiling", 0, len(missing))
        for done, future in enumerate(as_completed([pool.submit(kernels.build, v, folder) for v in missing]), 1):
            progress(f"compiled {future.result().name.split('-')[0]}", done, len(missing))
    seconds = time.perf_counter() - start
    where = folder or kernels.default_folder()
    return f"{len(missing)} compiled in {seconds:.1f} s, {len(wanted) - len(missing)} were there: {where}\n"


def check(targets: Sequence[str], dtype: str, page_size: int, folder: Path | None, cases: int, progress: Progress) -> str:
    """Random batches of each model's attention on this GPU against the float32 reference. Raises ConfigError where one
    is off."""
    import torch

    from dspark_runtime.targets import attention_config
    from eval import bench_attention as bench

    need_gpu()
    bad, worst, count = [], 0.0, 0
    for target in targets:
        c = attention_config(target)
        common = (getattr(torch, dtype), c.head_dim, c.num_attention_heads, c.num_key_value_heads, page_size)
        kinds = [(*common, mask, n, False) for mask, n in (("tree", 16), ("tree", 64), ("causal", 8), ("causal", 300))]
        for i in range(cases):
            result = bench.check(kinds[i % len(kinds)], i, folder)
            worst = max(worst, result["error"])
            count += 1
            if not result["error"] <= bench.TOLERANCE:
                bad.append(result)
            progress(f"checking {target}", i + 1, cases)
    if bad:
        raise ConfigError(f"kernels: {len(bad)} of {count} random cases are off, the first: {bad[0]}")
    return f"{count} random cases agree with the float32 reference, largest relative error {worst:.1e}\n"


def bench(targets: Sequence[str], dtype: str, page_size: int, folder: Path | None, progress: Progress) -> str:
    """Time of verify attention on this GPU beside its floor, for some contexts and tree sizes."""
    import torch

    from dspark_runtime.targets import attention_config
    from eval import bench_attention as bench
    from eval.report import table

    need_gpu()
    if dtype != "bfloat16" or page_size != 16:
        raise ConfigError(f"kernels bench: found {dtype} and pages of {page_size}, allowed: bfloat16, 16")
    rates = bench.read_rate(), bench.matrix_rate()
    rows = []
    shapes = [(t, b, length, q) for t in targets for b, length in ((1, 1024), (1, 8192), (1, 131072), (32, 4096)) for q in (8, 16, 32, 64)]
    for i, (target, b, length, q) in enumerate(shapes):
        c = attention_config(target)
        if c.head_dim != 128:
            raise ConfigError(f"kernels bench: {target} has head_dim {c.head_dim}, allowed: 128")
        r = bench.timing((c.num_attention_heads, c.num_key_value_heads, b, length, q), folder, rates, {})
        rows.append((target, str(b), str(length), str(q), f"{r['us']:.1f}", f"{r['floor_us']:.1f}", f"{r['over_floor']:.2f}", f"{r['tbps']:.2f}"))
        progress(f"{target} b={b} context {length} nodes {q}", i + 1, len(shapes))
    header = ("target", "b", "context", "nodes", "us", "floor us", "x floor", "TB/s")
    note = f"{torch.cuda.get_device_name()}; read {rates[0]:.2f} TB/s, matrix {rates[1]:.0f} TFLOP/s measured now"
    return f"{table(header, rows)}\n\n{note}\n"


def need_gpu() -> None:
    import torch

    from verify_kernels.cute import check_machine

    if not torch.cuda.is_available():
        raise ConfigError("device: no usable CUDA GPU, needed to run kernels (list and build do without)")
    check_machine()
