"""The one dispatch point: every operation of the verify pass is called through this module.

Each operation has a torch reference in `verify_kernels.reference` (its specification: shapes, dtypes and semantics are
in its docstring there) and may have faster implementations, registered per operation under a backend name. Which
backend runs is decided here and nowhere else:

- `use("auto")` (the default): on a CPU what `verify_kernels.cpu` offers, on CUDA the CuTe DSL kernels of
  `verify_kernels.cute`, the small ones of `verify_kernels.triton`, and the reference for operations that they do not
  have. A GPU or a shape that the kernels do not serve is an error (`errors.KernelError`, ValueError), never a silent
  fallback. What asks for gradients (a drafter in training) is the reference's: kernels have no backward;
- `use("unmeasured")`: as "auto", and with the kernels that are not served until they have passed on a GPU;
- `use("reference")`: the torch reference, always.

`chosen()` reports what runs on a device, so that no command has to guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verify_kernels.reference import attention, drafting, elementwise, growth, latent, latent_moe, linear as _linear, moe
from verify_kernels.reference import recurrence, trees

_REFERENCE: dict[str, Callable[..., Any]] = {
    "embedding": elementwise.embedding,
    "rms_norm": elementwise.rms_norm,
    "add_rms_norm": elementwise.add_rms_norm,
    "silu_and_mul": elementwise.silu_and_mul,
    "rope": elementwise.rope,
    "pack_linear": _linear.pack_linear,
    "linear": _linear.linear,
    "linear_silu_and_mul": _linear.linear_silu_and_mul,
    "linear_add_rms_norm": _linear.linear_add_rms_norm,
    "normed": _linear.normed,
    "logits": _linear.logits,
    "greedy_logits": _linear.greedy_logits,
    "arg_max": _linear.arg_max,
    "moe_route": moe.moe_route,
    "pack_experts": moe.pack_experts,
    "moe_experts": moe.moe_experts,
    "plan_attention": attention.plan_attention,
    "paged_tree_attention": attention.paged_tree_attention,
    "append_kv": attention.append_kv,
    "commit_path": attention.commit_path,
    "plan_latent_attention": attention.plan_attention,
    "append_latents": latent.append_latents,
    "latent_attention": latent.latent_attention,
    "head_linear": latent.head_linear,
    "sigmoid_and_mul": latent.sigmoid_and_mul,
    "attention_residual": latent.attention_residual,
    "situ_and_mul": latent_moe.situ_and_mul,
    "situ_experts": latent_moe.situ_experts,
    "plan_recurrence": recurrence.plan_recurrence,
    "kda_verify": recurrence.kda_verify,
    "kda_prefill": recurrence.kda_prefill,
    "commit_states": recurrence.commit_states,
    "gated_rms_norm": recurrence.gated_rms_norm,
    "append_context": drafting.append_context,
    "top": drafting.top,
    "draft_chain": drafting.draft_chain,
    "draw_chain": drafting.draw_chain,
    "candidate_logits": growth.candidate_logits,
    "grow_level": growth.grow_level,
    "best_tree": growth.best_tree,
    "tree_masks": trees.tree_masks,
    "prune_tree": trees.prune_tree,
    "place_tree": trees.place_tree,
    "place_block": trees.place_block,
    "follow_tree": trees.follow_tree,
    "synthetic_drafts": trees.synthetic_drafts,
    "reach_tree": trees.reach_tree,
    "commit_tokens": trees.commit_tokens,
}

_loaded: dict[str, dict[str, Callable[..., Any]]] = {}  # device type -> op -> implementation
MODES = ("auto", "unmeasured", "reference")
_mode = "auto"
_record: Callable[..., None] | None = None


def use(mode: str) -> None:
    """Choose implementations: one of `MODES`. Affects every later call of this process."""
    global _mode
    if mode not in MODES:
        raise ValueError(f"kernel backend: found {mode!r}, allowed: {', '.join(map(repr, MODES))}")
    _mode = mode
    _loaded.clear()


def mode() -> str:
    """What `use` chose."""
    return _mode


@contextmanager
def recording(record: Callable[..., None]) -> Iterator[None]:
    """Inside, `record(name, implementation, arguments, keywords)` hears of every operation before it runs."""
    global _record
    _record = record
    try:
        yield
    finally:
        _record = None


@contextmanager
def serving(device_type: str, implementations: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside, operations on devices of this type are these, and the reference's where there is none."""
    before = _loaded.get(device_type)
    _loaded[device_type] = _REFERENCE | implementations
    try:
        yield
    finally:
        del _loaded[device_type]
        if before is not None:
            _loaded[device_type] = before


def _table(device_type: str) -> dict[str, Callable[..., Any]]:
    table = _loaded.get(device_type)
    if table is None:
        table = dict(_REFERENCE)
        if _mode != "reference" and device_type == "cpu":
            from verify_kernels import cpu

            table.update(cpu.implementations())
        if _mode != "reference" and device_type == "cuda":
            from verify_kernels import cute, triton

            unmeasured = _mode == "unmeasured"
            table.update(triton.implementations(unmeasured=unmeasured))
            table.update(cute.implementations(unmeasured=unmeasured))
        _loaded[device_type] = table
    return table


def chosen(device_type: str) -> dict[str, str]:
    """Which module implements each operation on a device: {"linear": "verify_kernels.cpu.linear", ...}."""
    return {name: fn.__module__ for name, fn in _table(device_type).items()}


def _op(name: str) -> Callable[..., Any]:
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = (a for a in (x, *args, *kwargs.values()) if isinstance(a, torch.Tensor))
        if torch.is_grad_enabled() and any(a.requires_grad for a in tensors):
            return _REFERENCE[name](x, *args, **kwargs)
        implementation = _table(_device_of(x).type)[name]
        if _record is not None:
            _record(name, implementation, (x, *args), kwargs)
        return implementation(x, *args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = _REFERENCE[name].__doc__
    return call


def _device_of(x: Any) -> torch.device:
    """Device of a tensor, a PassBatch, a KVCache, or what a backend gives as normed."""
    if hasattr(x, "device"):
        return x.device
    return x.token_ids.device if hasattr(x, "token_ids") else x.k.device


embedding = _op("embedding")
rms_norm = _op("rms_norm")
add_rms_norm = _op("add_rms_norm")
silu_and_mul = _op("silu_and_mul")
rope = _op("rope")
pack_linear = _op("pack_linear")
linear = _op("linear")
linear_silu_and_mul = _op("linear_silu_and_mul")
linear_add_rms_norm = _op("linear_add_rms_norm")
normed = _op("normed")
logits = _op("logits")
greedy_logits = _op("greedy_logits")
arg_max = _op("arg_max")
moe_route = _op("moe_route")
pack_experts = _op("pack_experts")
moe_experts = _op("moe_experts")
plan_attention = _op("plan_attention")
paged_tree_attention = _op("paged_tree_attention")
append_kv = _op("append_kv")
commit_path = _op("commit_path")
plan_latent_attention = _op("plan_latent_attention")
append_latents = _op("append_latents")
latent_attention = _op("latent_attention")
head_linear = _op("head_linear")
sigmoid_and_mul = _op("sigmoid_and_mul")
attention_residual = _op("attention_residual")
situ_and_mul = _op("situ_and_mul")
situ_experts = _op("situ_experts")
plan_recurrence = _op("plan_recurrence")
kda_verify = _op("kda_verify")
kda_prefill = _op("kda_prefill")
commit_states = _op("commit_states")
gated_rms_norm = _op("gated_rms_norm")
append_context = _op("append_context")
top = _op("top")
draft_chain = _op("draft_chain")
draw_chain = _op("draw_chain")
candidate_logits = _op("candidate_logits")
grow_level = _op("grow_level")
best_tree = _op("best_tree")
tree_masks = _op("tree_masks")
prune_tree = _op("prune_tree")
place_tree = _op("place_tree")
place_block = _op("place_block")
follow_tree = _op("follow_tree")
synthetic_drafts = _op("synthetic_drafts")
reach_tree = _op("reach_tree")
commit_tokens = _op("commit_tokens")
