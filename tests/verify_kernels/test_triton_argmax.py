"""The arg-max in Triton's interpreter against torch's own."""

from __future__ import annotations

import pytest
import torch

from tests.verify_kernels.triton_cases import DEVICE, kernels, poisoned  # noqa: F401

arg_max = kernels()["arg_max"]
BLOCK = 4096  # `verify_kernels.triton.argmax.BLOCK`


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", [1, 97, BLOCK, 3 * BLOCK + 5])
def test_ids_and_values_are_torchs(dtype: torch.dtype, vocab: int) -> None:
    g = torch.Generator().manual_seed(vocab)
    # Few values, so that there are ties; rows that lie apart.
    logits = torch.randint(-3, 3, (9, vocab + 3), generator=g).to(dtype)[:, :vocab]
    logits[1] = torch.randn(vocab, generator=g).to(dtype)
    logits[2] = float("-inf")
    logits[3] = -logits[3].abs() - 1
    logits[4, vocab // 2] = float("nan")
    logits[5] = -torch.zeros(vocab)
    logits[5, vocab // 2 :] = 0.0
    logits[6, vocab - 1] = float("inf")
    logits[7] = float("-inf")
    logits[7, vocab - 1] = -1e30 if dtype != torch.float16 else -6e4
    ids, values = arg_max(logits.to(DEVICE))
    want, at = logits.float().max(dim=1)
    assert ids.tolist() == at.tolist()
    assert torch.equal(values.cpu().nan_to_num(1e38), want.nan_to_num(1e38)) and values.isnan().tolist() == want.isnan().tolist()
