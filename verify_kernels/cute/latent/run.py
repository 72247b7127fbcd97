"""Host side of verify attention over latents: which variant runs, and the call. The plan is `attention.run.plan`'s."""

from __future__ import annotations

import torch
from torch import Tensor

from verify_kernels.cute.attention.run import Kernel, Plan
from verify_kernels.cute.variants import LATENT_RANK, LATENT_WIDTH, LatentVariant
from verify_kernels.errors import INSTEAD, KernelError

MAX_BLOCKS = 6  # a tree of 64 nodes under 6 heads
SETUP = 1  # price of a new request in the schedule: its queries and the old one's results weigh about two tiles


def choose(
    dtype: torch.dtype, heads: int, width: int, rank: int, page_size: int, mask: str, max_query_len: int
) -> LatentVariant:
    """The variant for a shape: as many CTAs of 64 rows (token * heads) abreast as a request needs, up to 6."""
    for field, found, good, allowed in (
        ("dtype", dtype, dtype in (torch.bfloat16, torch.float16), "torch.bfloat16, torch.float16"),
        ("rank and width", (rank, width), (rank, width) == (LATENT_RANK, LATENT_WIDTH), (LATENT_RANK, LATENT_WIDTH)),
        ("heads", heads, 1 <= heads <= 16, "1 to 16"),
        ("page_size", page_size, page_size in (16, 32, 64, 128), "16, 32, 64, 128"),
    ):
        if not good:
            raise KernelError(f"latent attention: {field}: found {found}, allowed: {allowed}, {INSTEAD}")
    if mask not in ("tree", "causal"):
        raise KernelError(f"latent attention: mask: found {mask}, allowed: tree, causal, {INSTEAD}")
    blocks = min(-(-max_query_len * heads // 64), MAX_BLOCKS)
    return LatentVariant(str(dtype).removeprefix("torch."), heads, page_size, mask, blocks)


def run(kernel: Kernel, plan: Plan, q: Tensor, pages: Tensor, out: Tensor, scale: float) -> Tensor:
    """q [N, H, 576], pages [P, page, 1, 576] of one layer -> out [N, H, 512]. Capturable."""
    tables = (plan.page_table, plan.ancestors, plan.segments)
    kernel(q, pages, *tables, out, plan.partial, plan.stats, scale, int(plan.fresh))
    plan.fresh = False
    return out
