"""The sequential stage on CUDA: the kernels of `verify_kernels.triton.markov` with vLLM's own random numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import _log1p_neg_stable, murmur3_uniform32, spec_step_seed

from dspark_runtime.vllm.markov import DRAFT_SALT
from verify_kernels.markov import Markov
from verify_kernels.triton.markov import vocabulary_chain

_SALT = tl.constexpr(DRAFT_SALT)


def why_not(speculator: Any, head: Markov | None, base: Tensor) -> str | None:
    """Why these kernels do not serve a step; None if they do."""
    if head is None:
        return "a drafter without a Markov head"
    if speculator._d2t_scatter_index is not None or speculator.model.draft_id_to_target_id is not None:
        return "a reduced draft vocabulary"
    if not base.dtype == head.w1.dtype == head.w2.dtype:
        return f"base logits in {base.dtype} beside a Markov head in {head.w2.dtype}"
    cache = speculator.draft_logits
    if cache is not None and cache.dtype != base.dtype:
        return f"base logits in {base.dtype}, their cache in {cache.dtype}"
    return None


@triton.jit
def _gumbel(seeds, step, positions, tokens):
    u = murmur3_uniform32(spec_step_seed(seeds, step), positions - 1 + _SALT, tokens)
    return -tl.log(-_log1p_neg_stable(u))


def chain(head: Markov, base: Tensor, hidden: Tensor, anchors: Tensor, speculator: Any) -> Tensor:
    """As `markov.chain` with the draws of `speculator`: base [R, K, V], hidden [R, K, d], anchors [R] int64 -> ids
    [R, K] int64. Writes speculator.draft_logits where there is one. No host reads."""
    cache = speculator.draft_logits
    if cache is None:
        return vocabulary_chain(head, base, hidden, anchors)
    r, k = base.shape[:2]
    return vocabulary_chain(
        head, base, hidden, anchors, logits=cache, temperature=speculator.temperature, seeds=speculator.seeds,
        request=speculator.sample_idx_mapping[: r * k], positions=speculator.sample_pos[: r * k], noise=_gumbel,
    )  # fmt: skip
