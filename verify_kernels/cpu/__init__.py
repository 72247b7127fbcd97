"""Operations for CPUs whose own matrix instructions do not know bfloat16.

Compiled on first use with the system's C++ compiler. `DSPARK_CPU_KERNELS=0` turns them off.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

_log = logging.getLogger(__name__)


@functools.cache
def _state() -> tuple[bool, str]:
    """(usable, one line for people)."""
    setting = os.environ.get("DSPARK_CPU_KERNELS", "1")
    if setting not in ("0", "1"):
        raise ValueError(f"DSPARK_CPU_KERNELS: found {setting!r}, allowed: '0', '1'")
    if setting == "0":
        return False, "CPU kernels: off (DSPARK_CPU_KERNELS=0)"
    from verify_kernels.cpu import build

    try:
        build.library()
    except build.BuildError as error:
        line = f"CPU kernels: off, {error}; bfloat16 runs in torch, where a pass of 8 tokens costs about 7 passes of 1"
        _log.warning(line)
        return False, line
    return True, f"CPU kernels: compiled, {build.threads()}"


def status() -> str:
    """One line: whether the compiled kernels are in use on this machine, and why not."""
    return _state()[1]


def has_bf16_instructions() -> bool:
    """Whether torch's own products know bfloat16 on this CPU (AVX512_BF16, AMX and their kin)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def implementations() -> dict[str, Callable[..., Any]]:
    """Operations that this machine runs faster than the torch reference; empty where there are none."""
    if not _state()[0]:
        return {}
    from verify_kernels.cpu import attention, elementwise, fused, linear, moe
    from verify_kernels.reference import linear as reference

    ours = not has_bf16_instructions()
    table: dict[str, Callable[..., Any]] = {
        "rms_norm": elementwise.rms_norm,
        "add_rms_norm": elementwise.add_rms_norm,
        "silu_and_mul": elementwise.silu_and_mul,
        "append_kv": elementwise.append_kv,
        "plan_attention": attention.plan_attention,
        "paged_tree_attention": attention.paged_tree_attention,
        **fused.over(linear.linear if ours else reference.linear),
    }
    if ours:
        table |= {
            "linear": linear.linear,
            "logits": linear.logits,
            "greedy_logits": linear.greedy_logits,
            "moe_experts": moe.moe_experts,
        }
    return table
