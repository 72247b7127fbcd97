"""A block drafter with latent attention."""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.dspark.drafter import BlockDrafter
from drafters.dspark.network import Attend
from verify_kernels import ops
from verify_kernels.batch import KVCache, PassBatch
from verify_kernels.rope import cos_sin_table


class LatentBlockDrafter(BlockDrafter):
    """A `BlockDrafter` whose cache holds latents: [layers, pages, page_size, 1, rank + rotary channels]."""

    def _cos_sin_table(self, device: torch.device) -> Tensor:
        c = self.config
        rotated = c.model_copy(update={"head_dim": c.mla.qk_rope_head_dim})
        return cos_sin_table(rotated, self.max_positions, device)

    def _cache(self, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> KVCache:
        c = self.config
        k = torch.zeros(c.num_hidden_layers, pages, page_size, 1, c.mla.width, dtype=dtype, device=device)
        return KVCache(k, k[..., :0])

    def _remember(self, batch: PassBatch, features: Tensor) -> None:
        network = self.network
        latents, own = network.latents(network.fuse(features))
        own = ops.rope(own, batch.positions.clamp(max=self.max_positions - 1), self._cos_sin)
        for i, layer in enumerate(torch.cat((latents, own), dim=-1).unbind(1)):
            ops.append_latents(layer, self.cache.k[i], batch)

    def _attention(self, batch: PassBatch) -> Attend:
        m, pages = self.config.mla, self.cache.k
        plan = ops.plan_latent_attention(batch, self.cache.page_size, mask="full")
        scale = m.head_dim**-0.5 * m.score_factor

        def attend(i: int, q: Tensor, rotary: Tensor, latent: Tensor, own: Tensor) -> Tensor:
            rotary, own = (ops.rope(x, batch.positions, self._cos_sin) for x in (rotary, own[:, None]))
            ops.append_latents(torch.cat((latent, own[:, 0]), dim=-1), pages[i], batch)
            y = ops.latent_attention(torch.cat((q, rotary), dim=-1), pages[i], plan, m.kv_lora_rank, scale)
            return ops.head_linear(y, self.network.layers[i].up_v)

        return attend
