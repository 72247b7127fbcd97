"""Kimi-K3's operations against vLLM 0.33's Triton kernels, run by Triton's interpreter. Optional: see `cases`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.dspark.dialects import parse
from tests.drafters.test_dialects import K3
from tests.verify_kernels.kda_cases import make_pass
from verify_kernels import ops
from verify_kernels.reference.recurrence import short_conv
from verify_kernels.rope import cos_sin_table

PYTHON = os.environ.get("DSPARK_VLLM_PYTHON", "")


@pytest.mark.skipif(
    not PYTHON, reason="DSPARK_VLLM_PYTHON: not set, expected the python of an environment made by tests/vllm/make_venv.sh"
)
def test_operations_equal_those_of_vllm(tmp_path: Path) -> None:
    heads, dim, tokens, hidden = 2, 32, 7, 48
    g = torch.Generator().manual_seed(0)
    shapes = dict(
        x=(tokens, 3 * heads * dim), raw_gate=(tokens, heads * dim), raw_beta=(tokens, heads), conv=(3 * heads * dim, 4),
        a_log=(heads,), dt_bias=(heads, dim), state=(heads, dim, dim), window=(3, 3 * heads * dim),
        prefix=(5, hidden), delta=(5, hidden), blocks=(5, 3, hidden), norm=(hidden,), score=(hidden,), out_norm=(hidden,),
    )  # fmt: skip
    t = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    t["rotary_at"] = torch.tensor([0, 1, 2, 5, 11, 20])  # far ones differ by the rounding of frequencies
    t |= {f"rotary_{x}": torch.randn(6, heads, 64, generator=g) for x, heads in (("q", 3), ("k", 1))}
    save_file(t, tmp_path / "in.safetensors")
    script = Path(__file__).with_name("vllm_kimi_k3.py")
    done = subprocess.run(
        [PYTHON, str(script), "in.safetensors", "out.safetensors"], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"VLLM_TRITON_ON_CPU": "1"}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = load_file(tmp_path / "out.safetensors")

    def near(found: torch.Tensor, name: str) -> None:
        want = theirs[name].view(found.shape)
        assert (found - want).abs().max() < 2e-6 * max(1.0, float(want.abs().max())), name

    batch = make_pass([tokens], [9], [0])
    plan = ops.plan_recurrence(batch, 4)
    near(short_conv(t["x"][None], t["window"][None], t["conv"], plan.taps), "causal_conv1d_update")
    state, window = t["state"][None].clone(), t["window"][None].clone()
    gates = (t["raw_gate"], t["raw_beta"], t["conv"], t["a_log"], t["dt_bias"], -5.0)
    out, records = ops.kda_verify(t["x"], *gates, state, window, plan)
    near(out, "fused_recurrent_kda_fwd")
    path = torch.arange(tokens)[None]
    ops.commit_states(state[None], window[None], [records], batch.state_rows, batch.context_lens, path)
    near(state[0], "state")
    assert torch.equal(window[0], theirs["window"])
    mixed = ops.attention_residual(
        t["prefix"] + t["delta"], list(t["blocks"].unbind(1)), t["norm"], t["score"], 1e-5, t["out_norm"]
    )
    near(mixed, "attn_res")

    # Of the MLA drafter, whose rows are reordered from neighbours to halves.
    c = parse(K3, "x", 93).model_copy(update=dict(head_dim=64))
    table = cos_sin_table(c, 21, "cpu")
    for name in ("rotary_q", "rotary_k"):
        halves = t[name].unflatten(-1, (32, 2)).transpose(-1, -2).flatten(-2)
        near(ops.rope(halves, t["rotary_at"], table).unflatten(-1, (2, 32)).transpose(-1, -2).flatten(-2), name)
