"""Products with what is fused into them, on every backend that a CPU can run, against float64; and which kernels a model's
pass asks for."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from drafters.dspark.load import load_drafter
from drafters.dspark.network import products as network_products
from drafters.tree import TreeSpec
from dspark_runtime.engine import Engine
from dspark_runtime.models.config import from_hf
from dspark_runtime.models.transformer import Transformer, products, tensor_shapes
from dspark_runtime.sampling import SamplingParams
from tests.drafters.dspark_cases import DEEPSPEC, block_tensors, noise, target, write
from tests.dspark_runtime.passes import Pages
from tests.verify_kernels.cute import linear_on_cpu
from verify_kernels import cute, ops
from verify_kernels.cute.linear.run import variants_of
from verify_kernels.layouts import interleave

EPS = 1e-5
BACKENDS = ["reference", "cpu", "cute"]


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    if request.param == "cute":
        linear_on_cpu.serve(monkeypatch)
    else:
        monkeypatch.setattr(ops, "_loaded", {})
        monkeypatch.setattr(ops, "_mode", "reference" if request.param == "reference" else "auto")
    return request.param


def close(found: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    rounding = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1.2e-2}[dtype]
    assert found.dtype == dtype and found.shape == want.shape
    assert (found.double() - want).abs().max() <= rounding * want.abs().max(), (found.double() - want).abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_a_block_of_products_against_float64(backend, dtype, seed):
    """residual += product with bias; norm; SwiGLU; and a biased product of the norm: as a decoder chains them."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    t = rng.choice([1, 7, 8, 33, 64, 65])
    k, h, inner, n = (8 * rng.randint(1, 40), 8 * rng.randint(1, 40), 8 * rng.randint(1, 30), rng.randint(1, 200))
    if seed % 4 == 0:
        k, h = k + 4, h + 3  # rows that TMA cannot read

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(dtype)

    apart = 8 * (seed % 3)  # rows of x may lie apart
    x, w, bias = rand(t, k + apart)[:, :k], rand(h, k) / k**0.5, rand(h)
    residual, norm = rand(t, h), rand(h)
    gate, up = rand(inner, h) / h**0.5, rand(inner, h) / h**0.5
    after, after_bias = rand(n, h) / h**0.5, rand(n)

    rows, total = ops.linear_add_rms_norm(x, w, bias if seed % 2 else None, residual, norm, EPS)
    sums = residual.double() + x.double() @ w.double().T + (bias.double() if seed % 2 else 0)
    close(total, sums, dtype)
    want = total.double()  # from what was rounded on: one rounding a comparison
    want = want * torch.rsqrt(want.square().mean(1, keepdim=True) + EPS) * norm.double()
    close(ops.normed(rows), want, dtype)
    close(ops.linear(rows, after, after_bias), want @ after.double().T + after_bias.double(), dtype)
    swiglu = torch.nn.functional.silu(want @ gate.double().T) * (want @ up.double().T)
    close(ops.linear_silu_and_mul(rows, interleave(gate, up)), swiglu, dtype)
    plain = ops.normed(rows)
    close(ops.linear(plain, after), plain.double() @ after.double().T, dtype)
    swiglu = torch.nn.functional.silu(plain.double() @ gate.double().T) * (plain.double() @ up.double().T)
    close(ops.linear_silu_and_mul(plain, interleave(gate, up)), swiglu, dtype)

    logits = ops.logits(plain, after)
    ids, best = ops.greedy_logits(plain, after)
    assert logits.dtype == best.dtype == torch.float32 or dtype == torch.float64
    assert torch.equal(ids, logits.argmax(1)) and torch.equal(best.float(), logits.amax(1).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("inner", [8, 24, 40, 1536])
def test_an_interleaved_activation_is_the_plain_one(dtype, inner):
    """Bit for bit what `silu_and_mul` of gates before ups gives."""
    torch.manual_seed(inner)
    x, gate, up = (torch.randn(n, 64).to(dtype) / 4 for n in (5, inner, inner))
    want = ops.silu_and_mul(ops.linear(x, torch.cat([gate, up])))
    assert torch.equal(ops.linear_silu_and_mul(x, interleave(gate, up)), want)


def test_interleave_puts_both_of_a_channel_eight_rows_apart():
    gate, up = torch.randn(24, 5), torch.randn(24, 5)
    both = interleave(gate, up)
    for c in range(24):
        row = c // 8 * 16 + c % 8
        assert torch.equal(both[row], gate[c]) and torch.equal(both[row + 8], up[c])
    with pytest.raises(ValueError, match="gate, up: found 12 rows each, allowed: multiples of 8"):
        interleave(gate[:12], up[:12])


def test_what_the_small_t_linear_multiplies():
    x, w = torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(5, 64, dtype=torch.bfloat16)
    assert cute.multiplies(x, w) and cute.multiplies(x.half(), w.half())
    wide = torch.zeros(65, 72, dtype=torch.bfloat16)
    left = {
        "no tokens": (x[:0], w),
        "65 tokens": (wide[:, :64], w),
        "float32": (x.float(), w.float()),
        "two dtypes": (x, w.half()),
        "60 columns": (x[:, :60].contiguous(), w[:, :60].contiguous()),
        "columns apart": (x.T.contiguous().T, w),
        "address": (wide[:8, 4:68], w),
        "three dimensions": (x[None], w),
    }
    assert not [why for why, (a, b) in left.items() if cute.multiplies(a, b)]


SMALL = dict(
    vocab_size=97, hidden_size=64, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
)  # fmt: skip
# Every token takes every expert: which ones it picks would turn on rounding.
EXPERTS = dict(num_experts=3, num_experts_per_tok=3, moe_intermediate_size=24, mlp_only_layers=[1])
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama biased": (LlamaForCausalLM, LlamaConfig, dict(attention_bias=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "qwen3 moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, EXPERTS),
}


def model(name: str, dtype: torch.dtype) -> Transformer:
    cls, config_cls, options = MODELS[name]
    torch.manual_seed(1)
    theirs = cls(config_cls(**(SMALL | options)))
    with torch.no_grad():
        for key, p in theirs.named_parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (1.0 if "norm" in key else 0.0))
    config = from_hf(theirs.config.to_dict() | {"architectures": [cls.__name__]}, "test")
    return Transformer(config, theirs.state_dict(), name="test", dtype=dtype, device="cpu")


@pytest.mark.parametrize("count", [1, 8, 64, 70])
@pytest.mark.parametrize("name", MODELS)
def test_a_pass_on_the_kernels_is_a_pass(name, count, monkeypatch):
    """bfloat16 with the kernels' roundings is as near to float32 as bfloat16 with the reference's."""
    prompts = torch.randint(0, 97, (max(128 // count, 1), count), generator=torch.Generator().manual_seed(0)).tolist()

    def run(ours: Transformer) -> list[tuple[torch.Tensor, ...]]:
        found = []
        for ids in prompts:
            pages = Pages(ours, 1, 96, 16)
            hidden, features = ours.forward(pages.batch([0], [0], [ids]), pages.cache, taps=(-1, 0, 2))
            found.append((hidden.float(), features.float(), ours.logits(hidden)))
        return [torch.cat(parts) for parts in zip(*found)]

    monkeypatch.setattr(ops, "_loaded", {})
    monkeypatch.setattr(ops, "_mode", "reference")
    half = model(name, torch.bfloat16)
    exact, rounded = run(model(name, torch.float32)), run(half)
    calls = linear_on_cpu.serve(monkeypatch)
    found = run(half)
    for want, reference, got in zip(exact, rounded, found):
        assert (got - want).norm() <= 1.25 * (reference - want).norm()
    if count > 64:
        assert not calls
        return
    kinds = [tuple(k for k in ("bias", "residual", "swiglu", "rms_in", "rms_out") if getattr(v, k)) for v in calls]
    bias = ("bias",) if name == "llama biased" else ()
    first, qkv = bias, (*bias, "rms_in")
    o, gate_up, down = (*bias, "residual", "rms_out"), ("swiglu", "rms_in"), ("residual", "rms_out")
    if name == "qwen3 moe":  # layers 0 and 2 have experts: a router beside them, and plain rows after them
        want_kinds = [first, o, (), first, o, gate_up, down, qkv, o, ()]
    else:
        want_kinds = [first, o, gate_up, down, *2 * [qkv, o, gate_up, down]]
    assert kinds == len(prompts) * [*want_kinds, ()]  # and the head
    tokens = {1: 8, 8: 8, 64: 64}[count]
    listed = {v for v in variants_of(torch.bfloat16, products(half.config)) if v.tokens == tokens}
    assert set(calls) == listed  # what `dspark kernels build` makes


def test_a_draft_pass_on_the_kernels_is_a_draft_pass(monkeypatch, tmp_path):
    """A whole engine with a DSpark drafter in bfloat16: its kernels are those that `dspark kernels build` makes."""
    config = DEEPSPEC | dict(markov_rank=8)
    folder = write(tmp_path / "drafter", config, block_tensors(config))
    own = target()
    monkeypatch.setattr(ops, "_loaded", {})
    monkeypatch.setattr(ops, "_mode", "reference")
    half = Transformer(own.config, noise(tensor_shapes(own.config), 0.6, 1), name="random", dtype=torch.bfloat16, device="cpu")
    drafter = load_drafter(folder, half)
    network, c = drafter.network, drafter.config
    features, anchors = torch.randn(11, 3 * 16).bfloat16(), torch.tensor([3, 40])

    def run() -> list[torch.Tensor]:
        def attend(i, q, k, v):
            return q + torch.cat([k, v], 1)  # stands for any attention

        with torch.inference_mode():
            hidden = network.block(anchors, attend)
            sure = network.confidence(hidden[:, 0], network.markov.embed(anchors))
            z = hidden[:, 0, : network.markov.w2.shape[1]].contiguous()
            context, _ = network.context(network.fuse(features))
            return [hidden, context, network.logits(hidden[0]), sure, ops.logits(z, network.markov.w2)]

    want = run()
    calls = linear_on_cpu.serve(monkeypatch)
    for a, b in zip(run(), want):
        assert (a.double() - b.double()).norm() <= 0.02 * b.double().norm()
    listed = set(variants_of(torch.bfloat16, network_products(c)))
    assert set(calls) <= listed
    assert {(v.rms_in, v.rms_out, v.swiglu, v.bias) for v in calls} == {(v.rms_in, v.rms_out, v.swiglu, v.bias) for v in listed}

    # And as an engine calls it: whatever its passes ask for is listed with the target's.
    calls.clear()
    listed |= set(variants_of(torch.bfloat16, products(half.config)))
    engine = Engine(half, drafter, spec=TreeSpec.chain(4), max_num_requests=2, max_model_len=64)
    for temperature in (0.0, 1.0):
        engine.generate([[5, 6, 7], [9]], SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True))
    assert calls and set(calls) <= listed
