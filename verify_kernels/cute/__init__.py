"""CuTe DSL kernels for NVIDIA Hopper (sm_90a). `implementations` gives them the reference's signatures."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verify_kernels import ops
from verify_kernels.batch import KVCache, PassBatch, Records
from verify_kernels.cute import compile as kernels
from verify_kernels.cute.attention import run
from verify_kernels.cute.latent import run as latent_run
from verify_kernels.cute.linear import run as linear_run
from verify_kernels.cute.linear.pack import PackedLinear, pack_linear
from verify_kernels.cute.moe import run as moe_run
from verify_kernels.cute.moe.pack import PackedExperts, pack_experts
from verify_kernels.cute.recurrence import run as recurrence_run
from verify_kernels.cute.variants import AnyVariant, AppendVariant, LatentVariant, Variant
from verify_kernels.errors import INSTEAD, KernelError
from verify_kernels.quantized import Quantized, Scaled
from verify_kernels.reference import elementwise, linear as reference, recurrence

UNMEASURED = (
    "pack_linear", "moe_route", "pack_experts", "moe_experts", "situ_experts", "plan_latent_attention", "latent_attention",
    "plan_recurrence", "kda_verify", "commit_states", "gated_rms_norm",
)  # fmt: skip
"""Operations whose kernels are there but not served: torch runs them until their bench (`eval.bench_moe`,
`eval.bench_latent`, `eval.bench_recurrence`; of packed e4m3 weights a whole step) has passed on a GPU."""

TORCH_RUNS = {
    name: "torch's product beyond 64 tokens, for dtypes of more than 16 bits and where rows are no multiple of 16 bytes apart"
    for name in ("linear", "linear_silu_and_mul", "linear_add_rms_norm", "logits", "greedy_logits")
}
"""What an operation of `implementations` leaves to torch, by rule; see `multiplies`."""


def check_machine() -> None:
    """Raises KernelError where the kernels cannot run, with what would help."""
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if capability != (9, 0):
        raise KernelError(f"GPU: found {name} (sm_{capability[0]}{capability[1]}), allowed: sm_90 (Hopper), {INSTEAD}")
    if importlib.util.find_spec("tvm_ffi") is None:
        raise KernelError(f"apache-tvm-ffi: not installed, needed to load kernels (pip install '.[cuda]'), {INSTEAD}")


def check_kv(q: Tensor, pages: Tensor, k_scale: Tensor | None) -> None:
    """Raises KernelError for keys and values of another dtype than q's.

    The e4m3 kernels exist and compile; they are refused until they have passed `eval.bench_attention` on a GPU.
    """
    if pages.dtype != q.dtype or k_scale is not None:
        raise KernelError(f"k_pages: dtype is {pages.dtype}, allowed: {q.dtype} without scales, {INSTEAD}")


def multiplies(x: Tensor | Normed, weight: Tensor | PackedLinear) -> bool:
    """Whether the small-T linear serves x [T, K] and weight [N, K], which has x's dtype or is packed.

    Past 64 tokens the weights' reading no longer is what takes the time, and torch's product is as good. TMA wants rows
    that lie multiples of 16 bytes apart.
    """
    if isinstance(x, Normed):
        x = x.rows.values
    packed = isinstance(weight, PackedLinear)
    return (
        x.dim() == weight.dim() == 2
        and 1 <= x.shape[0] <= linear_run.MAX_TOKENS
        and x.dtype == (torch.bfloat16 if packed else weight.dtype)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[1] % 8 == 0
        and all(
            t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 for t in ((x,) if packed else (x, weight))
        )
    )


@dataclasses.dataclass
class Normed:
    """RMSNorm(residual) * norm but for 1 / rms, which the product that reads it applies to its sums.

    rows: residual * norm, and what adds up to the squares of residual. See `linear.run`.
    """

    rows: linear_run.Rows
    residual: Tensor
    norm: Tensor
    eps: float

    @property
    def device(self) -> torch.device:
        return self.residual.device


@dataclasses.dataclass
class PassPlan:
    """One pass's schedules, made at the first layer that needs them: heads and sizes are known there only."""

    page_size: int
    mask: str
    schedules: dict[Variant, run.Plan] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class LatentPlan:
    """One pass over latents; its schedules as in `PassPlan`."""

    batch: PassBatch
    mask: str
    schedules: dict[LatentVariant, run.Plan] = dataclasses.field(default_factory=dict)


def implementations(
    folder: Path | None = None, *, unmeasured: bool = False, load: Callable[[AnyVariant], run.Kernel] | None = None
) -> dict[str, Callable[..., Any]]:
    """Operation name -> implementation for CUDA tensors on sm_90. unmeasured: with those in `UNMEASURED`. load: called for
    each kernel in place of compiling and loading it, on any machine (for tensors without values: `eval.kernels`).

    Kernels are compiled into `folder` (see `compile.default_folder`) at their first call, which must come before a CUDA
    graph captures it. Raises KernelError where they cannot run.
    """
    if load is None:
        check_machine()

    @functools.cache
    def kernel(variant: AnyVariant) -> run.Kernel:
        return load(variant) if load is not None else kernels.load(kernels.build(variant, folder))

    def plan_attention(batch: PassBatch, page_size: int, *, mask: str = "tree", window: int = 0) -> PassPlan:
        if window:
            raise KernelError(f"verify attention: window is {window}, allowed: 0, {INSTEAD}")
        if mask == "tree" and batch.ancestor_masks is None:
            mask = "causal"
        new = batch.first_query + batch.max_query_len
        if mask == "tree" and new > 64:
            raise KernelError(f"verify attention: a request has up to {new} new tokens, allowed with a tree: 64")
        return PassPlan(page_size, mask)

    def paged_tree_attention(
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: PassBatch,
        *,
        scale: float,
        mask: str = "tree",
        softcap: float = 0.0,
        window: int = 0,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        check_kv(q, k_pages, k_scale)
        page_size, kv_heads = k_pages.shape[1:3]
        passed = batch.plan
        if passed is None:
            passed = plan_attention(batch, page_size, mask=mask, window=window)
        _, heads, head_dim = q.shape
        variant = run.choose(
            q.dtype, head_dim, heads, kv_heads, page_size, passed.mask, batch.max_query_len, softcap > 0
        )
        plan = passed.schedules.get(variant)
        if plan is None:
            plan = passed.schedules[variant] = run.plan(
                variant,
                batch.page_table,
                batch.context_lens,
                batch.request_offsets,
                batch.ancestor_masks if passed.mask == "tree" else None,
                batch.num_tokens,
                kernel=kernel(run.plan_variant(variant)),
                first_query=batch.first_query,
            )
        return run.run(kernel(variant), plan, q, k_pages, v_pages, q.new_empty(q.shape), scale, softcap)

    def plan_latent_attention(batch: PassBatch, page_size: int, *, mask: str = "tree", window: int = 0) -> LatentPlan:
        passed = plan_attention(batch, page_size, mask=mask, window=window)
        return LatentPlan(batch, passed.mask)

    def latent_attention(q: Tensor, pages: Tensor, plan: LatentPlan, rank: int, scale: float) -> Tensor:
        batch = plan.batch
        if pages.dtype != q.dtype:
            raise KernelError(f"latent attention: pages: found {pages.dtype}, allowed: {q.dtype}, {INSTEAD}")
        _, heads, width = q.shape
        variant = latent_run.choose(q.dtype, heads, width, rank, pages.shape[1], plan.mask, batch.max_query_len)
        planned = plan.schedules.get(variant)
        if planned is None:
            planned = plan.schedules[variant] = run.plan(
                variant,
                batch.page_table,
                batch.context_lens,
                batch.request_offsets,
                batch.ancestor_masks if plan.mask == "tree" else None,
                batch.num_tokens,
                kernel=kernel(run.plan_variant(variant, latent_run.SETUP)),
                setup=latent_run.SETUP,
                first_query=batch.first_query,
            )
        return latent_run.run(kernel(variant), planned, q, pages, q.new_empty(len(q), heads, rank), scale)

    def append_kv(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: PassBatch,
        cos_sin: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        check_kv(q, k_pages, k_scale)
        dtype = str(q.dtype).removeprefix("torch.")
        variant = AppendVariant(dtype, q.shape[2], q.shape[1], k.shape[1], q_norm is not None)
        return run.append_kv(
            kernel(variant), q, k, v, k_pages, v_pages, batch.slot_mapping, batch.positions, cos_sin, q_norm, k_norm, eps
        )

    def commit_path(cache: KVCache, page_table: Tensor, context_lens: Tensor, path: Tensor) -> None:
        run.commit_path(kernel(run.commit_variant(cache)), cache, page_table, context_lens, path)

    def product(
        x: Tensor | Normed, weight: Tensor | PackedLinear, width: int, *operands: Tensor | None, **epilogue: bool
    ) -> tuple[Tensor, linear_run.Rows | None]:
        """The small-T linear -> (out [T, width], its rows for a norm after it). operands: bias, residual, norm."""
        bias, residual, norm = operands or (None, None, None)
        before = x if isinstance(x, Normed) else None
        if before is not None:
            x = before.rows.values
        constants = {
            "bias": bias is not None, "residual": residual is not None, "rms_in": before is not None,
            "rms_out": norm is not None, **epilogue,
        }  # fmt: skip
        kind, tiles = ("fp8", weight.tiles) if isinstance(weight, PackedLinear) else ("plain", weight)
        variant = linear_run.choose(x.dtype, x.shape[0], tuple(weight.shape), kind=kind, **constants)
        out = x.new_empty(x.shape[0], width)
        after = linear_run.rows_after(variant, out) if norm is not None else None
        squares, eps = (None, 0.0) if before is None else (before.rows.squares, before.eps)
        linear_run.linear(kernel(variant), variant, x, tiles, out, bias, residual, squares, eps, norm, after)
        return out, after

    def linear(x: Tensor | Normed, weight: Tensor | PackedLinear, bias: Tensor | None = None) -> Tensor:
        if not multiplies(x, weight):
            return reference.linear(normed(x), weight, bias)
        return product(x, weight, weight.shape[0], bias, None, None)[0]

    def linear_silu_and_mul(x: Tensor | Normed, gate_up: Tensor | PackedLinear) -> Tensor:
        if not multiplies(x, gate_up):
            return reference.linear_silu_and_mul(normed(x), gate_up)
        return product(x, gate_up, gate_up.shape[0] // 2, swiglu=True)[0]

    def linear_add_rms_norm(
        x: Tensor, weight: Tensor | PackedLinear, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor | Normed, Tensor]:
        # What comes out is the next product's input, whose rows are as long as these are wide.
        if not multiplies(x, weight) or weight.shape[0] % 8:
            return reference.linear_add_rms_norm(x, weight, bias, residual, norm, eps)
        out, rows = product(x, weight, weight.shape[0], bias, residual, norm)
        return Normed(rows, out, norm, eps), out

    def normed(x: Tensor | Normed) -> Tensor:
        return x if isinstance(x, Tensor) else elementwise.rms_norm(x.residual, x.norm, x.eps)

    def logits(x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight).float()

    def greedy_logits(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return ops.arg_max(linear(x, weight))

    def moe_route(
        router_logits: Tensor,
        top_k: int,
        renormalize: bool,
        *,
        scores: str = "softmax",
        bias: Tensor | None = None,
        num_groups: int = 1,
        top_groups: int = 1,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        variant = moe_run.choose_route(
            router_logits.dtype, router_logits.shape[1], top_k, renormalize,
            scores=scores, bias=bias is not None, num_groups=num_groups, top_groups=top_groups,
        )  # fmt: skip
        return moe_run.route(kernel(variant), variant, router_logits, None if bias is None else bias.float(), scale)

    def moe_experts(
        x: Tensor,
        gate_up: Tensor | Quantized,
        down: Tensor | Quantized,
        weights: Tensor,
        ids: Tensor,
        shared: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        if shared is not None:
            raise KernelError(f"moe_experts: found a shared expert, allowed: one more pick of every token, {INSTEAD}")
        return experts(x, gate_up, down, weights, ids)

    def situ_experts(
        x: Tensor, gate_up: Quantized, down: Quantized, weights: Tensor, ids: Tensor, beta: float, linear_beta: float
    ) -> Tensor:
        return experts(x, gate_up, down, weights, ids, (beta, linear_beta))

    def experts(
        x: Tensor,
        gate_up: Tensor | Quantized,
        down: Tensor | Quantized,
        weights: Tensor,
        ids: Tensor,
        situ: tuple[float, float] | None = None,
    ) -> Tensor:
        """In parts of as many tokens as a launch takes. situ: beta and linear beta, None with SwiGLU."""
        if isinstance(gate_up, Scaled):
            raise KernelError(f"experts: weights are {gate_up.kind} as stored, allowed: 16 bits, packed ones, {INSTEAD}")
        kind, inner = getattr(gate_up, "kind", "plain"), down.shape[2]
        both = [w.tiles if isinstance(w, PackedExperts) else w for w in (gate_up, down)]
        out, most = torch.empty_like(x), moe_run.MAX_TOKENS
        for t in range(0, x.shape[0], most):
            part = slice(t, t + most)
            variants = moe_run.choose(x.dtype, x[part].shape[0], gate_up.shape[0], ids.shape[1], kind, situ)
            run_both = kernel(variants[0]), kernel(variants[1])
            between = x.new_empty(ids[part].numel(), inner)
            moe_run.experts(run_both, variants, x[part], *both, weights[part], ids[part], out[part], between=between)
        return out

    def plan_recurrence(batch: PassBatch, width: int) -> recurrence_run.RecurrencePlan | recurrence.RecurrencePlan:
        """Of a speculative pass; committed tokens are torch's."""
        if not batch.speculative:
            return recurrence.plan_recurrence(batch, width)
        recurrence.check_pass(batch)
        if width != recurrence_run.WIDTH:
            raise KernelError(f"plan_recurrence: width: found {width}, allowed: {recurrence_run.WIDTH}, {INSTEAD}")
        return recurrence_run.RecurrencePlan(batch)

    def kda_verify(
        x: Tensor,
        raw_gate: Tensor,
        raw_beta: Tensor,
        conv: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        lower_bound: float,
        state: Tensor,
        window: Tensor,
        plan: recurrence_run.RecurrencePlan,
    ) -> tuple[Tensor, Records]:
        batch, (heads, dim) = plan.batch, dt_bias.shape
        variant = recurrence_run.choose(
            x.dtype, batch.num_requests, heads, batch.max_query_len, batch.ancestor_masks is not None,
            dim=dim, width=conv.shape[1],
        )  # fmt: skip
        weights = (conv, a_log, dt_bias, lower_bound)
        return recurrence_run.verify(kernel(variant), plan, x, raw_gate, raw_beta, *weights, state, window)

    def commit_states(
        state: Tensor, window: Tensor, records: list[Records], rows: Tensor, context_lens: Tensor, path: Tensor
    ) -> None:
        variant = recurrence_run.choose_commit(window.dtype, path.shape[1])
        recurrence_run.commit(kernel(variant), state, window, records, rows, context_lens, path)

    def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        variant = recurrence_run.choose_norm(x.dtype, x.shape[-1])
        return recurrence_run.gated_norm(kernel(variant), x, weight, gate, eps)

    served = {
        "plan_attention": plan_attention,
        "paged_tree_attention": paged_tree_attention,
        "plan_latent_attention": plan_latent_attention,
        "latent_attention": latent_attention,
        "append_kv": append_kv,
        "commit_path": commit_path,
        "pack_linear": pack_linear,
        "linear": linear,
        "linear_silu_and_mul": linear_silu_and_mul,
        "linear_add_rms_norm": linear_add_rms_norm,
        "normed": normed,
        "logits": logits,
        "greedy_logits": greedy_logits,
        "moe_route": moe_route,
        "pack_experts": pack_experts,
        "moe_experts": moe_experts,
        "situ_experts": situ_experts,
        "plan_recurrence": plan_recurrence,
        "kda_verify": kda_verify,
        "commit_states": commit_states,
        "gated_rms_norm": gated_rms_norm,
    }
    return {name: op for name, op in served.items() if unmeasured or name not in UNMEASURED}
