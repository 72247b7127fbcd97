"""Other projects' attention on the same cache and queries, where it is installed, for `eval.bench_attention --peers`.

FlashInfer's paged prefill takes the tree as a bit mask over all keys; vLLM's FlashAttention-3 takes a causal chain only, so
it is a bound for chains. Plans and schedules are made before the timed call, as they are for the project's own kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verify_kernels.batch import PassBatch
from verify_kernels.reference.attention import plan_attention

Call = Callable[[Tensor, Tensor], Tensor]
"""(k_pages, v_pages) -> out [N, Hq, D]."""


def flashinfer_tree(q: Tensor, kv_heads: int, page_size: int, batch: PassBatch) -> Call:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    _, heads, dim = q.shape
    lengths = (batch.context_lens + batch.request_offsets.diff()).tolist()
    counts = [-(-n // page_size) for n in lengths]
    offsets = batch.request_offsets.tolist()
    visible = plan_attention(batch, page_size).visible
    masks = [visible[r, : offsets[r + 1] - offsets[r], :n].flatten() for r, n in enumerate(lengths)]
    indices = torch.cat([batch.page_table[r, :n] for r, n in enumerate(counts)])
    ends = torch.tensor([0, *counts]).cumsum(0).int().cuda()
    last = torch.tensor([(n - 1) % page_size + 1 for n in lengths], dtype=torch.int32, device="cuda")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(512 << 20, dtype=torch.uint8, device="cuda"), "NHD")
    wrapper.plan(
        batch.request_offsets, ends, indices, last, heads, kv_heads, dim, page_size,
        custom_mask=torch.cat(masks), sm_scale=dim**-0.5, q_data_type=q.dtype,
    )  # fmt: skip
    return lambda k, v: wrapper.run(q, (k, v))


def flash_attention_3_chain(q: Tensor, kv_heads: int, page_size: int, batch: PassBatch) -> Call:
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    _, heads, dim = q.shape
    lengths = (batch.context_lens + batch.request_offsets.diff()).int()
    longest = int(lengths.max())
    metadata = get_scheduler_metadata(
        batch.num_requests, batch.max_query_len, longest, heads, kv_heads, dim, lengths, q.dtype,
        cu_seqlens_q=batch.request_offsets, page_size=page_size, causal=True,
    )  # fmt: skip
    out = torch.empty_like(q)

    def call(k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_varlen_func(
            q, k, v, batch.max_query_len, batch.request_offsets, longest, seqused_k=lengths, softmax_scale=dim**-0.5,
            causal=True, block_table=batch.page_table, out=out, scheduler_metadata=metadata, fa_version=3,
        )  # fmt: skip

    return call


PEERS: dict[str, Callable[..., Call]] = {
    "flashinfer_tree": flashinfer_tree,
    "flash_attention_3_chain": flash_attention_3_chain,
}


def time_peers(
    q: Tensor, caches: list[Any], batch: PassBatch, ours: Tensor, timer: Callable[[Callable[[int], Any]], float]
) -> dict[str, float | str]:
    """Microseconds of each peer, or why there are none. ours: the tree's result, which a tree peer must reproduce."""
    found: dict[str, float | str] = {}
    _, page_size, kv_heads, _ = caches[0][0].shape
    for name, make in PEERS.items():
        try:
            call = make(q, kv_heads, page_size, batch)
            got = call(*caches[0])
            if name.endswith("_tree"):
                error = ((got.float() - ours.float()).norm() / ours.float().norm()).item()
                if not error <= 1e-2:
                    found[name] = f"differs by {error:.1e}"
                    continue
            found[name] = round(timer(lambda i: call(*caches[i % len(caches)])), 2)
        except (ImportError, RuntimeError, ValueError, AssertionError, OSError) as error:
            found[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error) else ''}"
    return found
