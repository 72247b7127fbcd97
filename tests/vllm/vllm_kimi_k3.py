"""Run by vLLM's own python: vllm_kimi_k3.py IN OUT. Its Kimi-K3 operations on the tensors of IN (safetensors), Triton
kernels in Triton's interpreter; results in OUT under the names of the functions."""

import sys

import torch
import triton.language as tl
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.models.kimi_k3.nvidia.ops.attn_res import attn_res
from vllm.models.kimi_k3.nvidia.ops.third_party.kda import fused_recurrent

# The interpreter replaces tl's functions, not the names that modules gave them.
fused_recurrent.exp = lambda x: tl.exp(x)
fused_recurrent.log = lambda x: tl.log(x)

t = load_file(sys.argv[1])
tokens, (heads, dim) = len(t["x"]), t["dt_bias"].shape
found = {}

window = t["window"].T[None].repeat(2, 1, 1).contiguous()  # row 1 is the request's
one, ends = torch.ones(1, dtype=torch.int32), torch.tensor([0, tokens], dtype=torch.int32)
line = []
for x in t["x"]:  # as plain decoding does
    line.append(causal_conv1d_update(x[None].clone(), window, t["conv"], None, "silu", conv_state_indices=one)[0])
found["causal_conv1d_update"], found["window"] = torch.stack(line), window[1].T.contiguous()

q, k, v = torch.stack(line).view(1, tokens, 3, heads, dim).unbind(2)
state = torch.zeros(3, heads, dim, dim)
state[1] = t["state"]
slots = torch.zeros(1, tokens, dtype=torch.int32)
slots[0, 0], slots[0, -1] = 1, 2  # it starts from row 1, and its last state goes to row 2
found["fused_recurrent_kda_fwd"], _ = fused_recurrent.fused_recurrent_kda_fwd(
    q.contiguous(), k.contiguous(), v.contiguous(), t["raw_gate"].view(1, tokens, heads, dim), t["raw_beta"][None],
    initial_state=state, cu_seqlens=ends, ssm_state_indices=slots, num_accepted_tokens=one, A_log=t["a_log"],
    dt_bias=t["dt_bias"].flatten(), lower_bound=-5.0, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
)  # fmt: skip
found["state"] = state[2].contiguous()

found["attn_res"] = attn_res(
    t["prefix"], t["delta"], t["blocks"], t["norm"], t["score"], t["out_norm"], t["blocks"].shape[1], -1, 1e-5, 1e-5
)

rotary = dict(
    rope_type="deepseek_yarn", rope_theta=50000.0, factor=32.0, original_max_position_embeddings=32768, beta_fast=32,
    beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
)  # fmt: skip
with set_current_vllm_config(VllmConfig()):
    rope = get_rope(64, 1048576, rope_parameters=rotary, is_neox_style=False, dtype=torch.float32)
found["rotary_q"], found["rotary_k"] = rope.forward_native(t["rotary_at"], t["rotary_q"], t["rotary_k"])
save_file(found, sys.argv[2])
