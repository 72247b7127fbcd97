"""`dspark kernels`: which CuTe DSL kernels a model and its drafter need, building them, and trying them on a GPU."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_runtime.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from dspark_runtime.models.config import ModelConfig
    from dspark_runtime.models.kimi_k3 import KimiK3, KimiK3Config
    from dspark_runtime.models.transformer import Transformer
    from verify_kernels.cute.variants import AnyVariant

Progress = Callable[[str, int, int], None]
LONGEST = 2048
"""Tokens of a request, in passes without values."""


def variants(
    targets: Sequence[str],
    drafter: str | None,
    dtype: str,
    page_size: int,
    *,
    rank_of: int | None = None,
    parallel: str = "tp",
    quantization: str | None = None,
) -> list[AnyVariant]:
    """Every kernel that passes of these architectures may ask for with --backend unmeasured, and those of a DSpark, DFlash
    or EAGLE-3 drafter (a checkpoint or a name of configs/models) for each of them. rank_of, parallel: of one rank of so
    many; quantization: "fp8" for checkpoints whose projections and experts have 128 x 128 blocks. Raises KernelError for a shape that the kernels do not
    serve, ConfigError for what does not fit together."""
    import torch

    from drafters.dspark import network
    from eval.bench import drafter_config
    from verify_kernels.cute.attention.run import block_variants_of, variants_of
    from verify_kernels.cute.linear.run import variants_of as linears_of

    kind = getattr(torch, dtype)
    found: list[AnyVariant] = []
    for target in targets:
        c = architecture(target, rank_of, parallel, quantization)
        found += asked_for(c, kind, page_size, quantization)
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


def architecture(
    target: str, rank_of: int | None = None, parallel: str = "tp", quantization: str | None = None
) -> ModelConfig | KimiK3Config:
    """A target's shape, or one rank's. Raises ConfigError."""
    from dspark_runtime.models.kimi_k3 import KimiK3Config
    from dspark_runtime.models.shards import Shard
    from dspark_runtime.targets import target_config

    config = target_config(target)
    if quantization is not None and (quantization != "fp8" or isinstance(config, KimiK3Config)):
        raise ConfigError(f"quantization: found {quantization} with {target}, allowed: fp8, of Llama, Qwen3 and Qwen3-MoE")
    if rank_of is None:
        return config
    if not isinstance(config, KimiK3Config):
        raise ConfigError(f"rank_of: found target {target}, allowed: architectures of Kimi-K3's form")
    return config.of_rank(Shard(0, rank_of, parallel))


def asked_for(
    config: ModelConfig | KimiK3Config, dtype: torch.dtype, page_size: int, quantization: str | None = None
) -> list[AnyVariant]:
    """The kernels that an engine's passes ask for: they are run on torch's meta device, whose tensors have shapes and no
    values. Prompts, chains and trees of every size, of 1 to 32 requests, with the commit after them."""
    import torch

    from drafters.tree import MAX_NODES
    from dspark_runtime.models.config import ModelConfig
    from verify_kernels import cute, ops
    from verify_kernels.cute.recurrence.run import MAX_NODES as KDA_NODES

    found: dict[AnyVariant, None] = {}

    def load(variant: AnyVariant) -> Callable[..., None]:
        found[variant] = None
        return lambda *arguments: None

    with ops.serving("meta", cute.implementations(unmeasured=True, load=load)), torch.inference_mode():
        model = shapes_of(config, dtype, quantization)
        model.layers = unlike(model.layers)
        for requests, nodes, mask in passes(MAX_NODES if isinstance(config, ModelConfig) else KDA_NODES):
            run_pass(model, page_size, requests, nodes, mask)
    return list(found)


def shapes_of(
    config: ModelConfig | KimiK3Config, dtype: torch.dtype, quantization: str | None = None
) -> Transformer | KimiK3:
    """A model on the meta device."""
    import torch

    from dspark_runtime.models import kimi_k3, transformer
    from verify_kernels.comm import Alone
    from verify_kernels.quantized import BLOCK

    def empty(shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    options = dict(name="shapes", dtype=dtype, device="meta", max_model_len=LONGEST)
    if isinstance(config, kimi_k3.KimiK3Config):
        kinds = {None: dtype, kimi_k3.WIDE: torch.float32}
        named = {n: empty(shape, kinds.get(kind, kind)) for n, (shape, kind) in kimi_k3.tensor_shapes(config).items()}
        return kimi_k3.KimiK3(config, named, group=Alone(config.shard.rank, config.shard.size), **options)
    named = {}
    for name, shape in transformer.tensor_shapes(config).items():
        if quantization and "_proj" in name and len(shape) > 1:  # as published checkpoints have it
            *lead, n, k = shape
            named[f"{name}_scale_inv"] = empty((*lead, -(-n // BLOCK), -(-k // BLOCK)), torch.float32)
            named[name] = empty(shape, torch.float8_e4m3fn)
        else:
            named[name] = empty(shape, dtype)
    return transformer.Transformer(config, named, **options)


def unlike(layers: Sequence[Any]) -> list[Any]:
    """Layers without those that, like the ones before them, are as some before: they ask for nothing new."""

    def form(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return type(value).__name__, *(form(getattr(value, f.name)) for f in dataclasses.fields(value))
        return tuple(value.shape) if hasattr(value, "shape") else value

    forms, seen, kept = [form(layer) for layer in layers], set(), []
    for i, own in enumerate(forms):
        before = forms[i - 1] if i else None
        if (before, own) in seen:
            continue
        seen.add((before, own))
        kept += [i - 1, i] if kept and forms[kept[-1]] != before else [i]
    return [layers[i] for i in kept]


def passes(most: int) -> Iterator[tuple[int, int, str]]:
    """(requests, new tokens of each, "chain", "tree" or "prompt"). most: tokens of a chain or tree. What numbers of
    requests, and tokens of longer prompts, share a kernel are wider apart than these."""
    for mask in ("chain", "tree"):
        yield from ((1, nodes, mask) for nodes in range(1, most + 1))
        yield from ((requests, nodes, mask) for requests in (2, 4, 8, 16, 32) for nodes in (1, 8, 16, 32))
    yield from ((1, tokens, "prompt") for tokens in (*range(8, 65, 8), *range(80, 257, 16), 300, 400))


def run_pass(model: Transformer | KimiK3, page_size: int, requests: int, nodes: int, mask: str) -> None:
    """One pass and what the engine does after it."""
    import torch

    from verify_kernels import ops
    from verify_kernels.batch import PassBatch

    def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    width, rows = -(-LONGEST // page_size), requests * nodes
    cache = model.allocate(width + 1, page_size, requests)
    batch = PassBatch(
        token_ids=ints(rows),
        positions=ints(rows),
        request_offsets=ints(requests + 1, dtype=torch.int32),
        context_lens=ints(requests, dtype=torch.int32),
        page_table=ints(requests, width, dtype=torch.int32),
        slot_mapping=ints(rows),
        ancestor_masks=ints(rows) if mask == "tree" else None,
        max_query_len=nodes,
        max_kv_len=LONGEST,
        state_rows=ints(requests),
        speculative=mask != "prompt",
    )
    hidden, _ = model.forward(batch, cache)
    if mask == "prompt":
        return
    model.greedy(hidden)
    model.logits(hidden)
    path = ints(requests, nodes)
    if mask == "tree":
        ops.commit_path(cache, batch.page_table, batch.context_lens, path)
    if (states := cache.states) is not None:
        ops.commit_states(states.state, states.window, states.records, batch.state_rows, batch.context_lens, path)


def listing(
    targets: Sequence[str], drafter: str | None, dtype: str, page_size: int, folder: Path | None, **part: Any
) -> str:
    """A table: kernel, whether its library is there, kilobytes. part: of `variants`."""
    from eval.report import table
    from verify_kernels.cute import compile as kernels
    from verify_kernels.errors import KernelError

    rows = []
    for variant in variants(targets, drafter, dtype, page_size, **part):
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
    **part: Any,
) -> str:
    """Compile what is missing, in `jobs` processes (the compiler is not safe in threads). part: of `variants`."""
    from verify_kernels.cute import compile as kernels

    kernels.check_install()
    wanted = variants(targets, drafter, dtype, page_size, **part)
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
