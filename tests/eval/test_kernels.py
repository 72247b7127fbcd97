"""Which kernels passes ask for: runs on the meta device against what is known of a model."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from drafters.tree import MAX_NODES
from dspark_runtime.models import transformer
from dspark_runtime.models.kimi_k3 import KimiK3Config, kimi_k3_config
from dspark_runtime.models.shards import Shard
from dspark_runtime.targets import attention_config
from eval.kernels import asked_for, passes, shapes_of, unlike, variants
from verify_kernels import ops
from verify_kernels.cute.attention.run import variants_of
from verify_kernels.cute.linear.run import variants_of as linears_of
from verify_kernels.cute.moe.pack import PackedExperts
from verify_kernels.cute.moe.run import choose
from verify_kernels.cute.variants import CommitVariant, ExpertsVariant, GatedNormVariant, LatentVariant, LinearVariant


def small_k3(layers: int = 4) -> KimiK3Config:
    """A whole small model with heads, latents and convolutions of the sizes that the kernels serve."""
    c = kimi_k3_config("kimi-k3-tiny")
    attention, mla = c.facts.attention, layers // 4
    kda = c.kda.model_copy(update=dict(layers=layers - mla, heads=4, head_dim=128))
    sizes = dict(layers=mla, heads=4, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    mla = c.mla.model_copy(update=sizes)
    moe = c.moe.model_copy(update=dict(layers=layers - 1, intermediate_size=192))
    facts = c.facts.model_copy(
        update=dict(
            num_layers=layers, attention=attention.model_copy(update=dict(kda=kda, mla=mla)),
            ffn=c.facts.ffn.model_copy(update=dict(moe=moe)),
        )
    )  # fmt: skip
    return KimiK3Config(facts, kda, mla, c.dense, moe, c.situ)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_mixture_of_experts_asks_for_its_experts_and_all_that_was_listed(quantization: str | None) -> None:
    c, dtype = attention_config("qwen3-30b-a3b"), torch.bfloat16
    found = set(variants(["qwen3-30b-a3b"], None, "bfloat16", 16, quantization=quantization))
    moe = {v for v in found if v.family == "moe"}
    kind = "fp8" if quantization else "plain"
    assert {v for v in moe if isinstance(v, ExpertsVariant)} == {
        v for tokens in (8, 16, 32, 64) for v in choose(dtype, tokens, 128, 8, kind)
    }
    assert len(moe) == 9  # and the router's
    if quantization is None:
        listed = variants_of(dtype, c.head_dim, c.num_attention_heads, c.num_key_value_heads, 16, c.qk_norm)
        assert found - moe == {*listed, *linears_of(dtype, transformer.products(c))}


def test_a_dense_fp8_checkpoint_asks_for_e4m3_products_but_for_the_lm_head() -> None:
    found = variants(["qwen3-8b"], None, "bfloat16", 16, quantization="fp8")
    kinds = {(v.kind, v.swiglu, v.residual, v.rms_in, v.rms_out) for v in found if isinstance(v, LinearVariant)}
    # qkv after the embedding and later on, o and down, gate and up; the LM head.
    assert kinds == {
        ("fp8", False, False, False, False), ("fp8", False, False, True, False), ("fp8", False, True, False, True),
        ("fp8", True, False, True, False), ("plain", False, False, False, False),
    }  # fmt: skip


@pytest.mark.parametrize("parallel", ["tp", "ep"])
def test_a_small_k3_asks_for_every_family(parallel: str) -> None:
    c = small_k3().of_rank(Shard(1, 2, parallel))
    found = asked_for(c, torch.bfloat16, 16)
    families = Counter(v.family for v in found)
    assert families.keys() == {"attention", "latent", "linear", "moe", "recurrence"}
    held, kind = (4 if parallel == "ep" else 8), ("mxfp4", (4.0, 25.0))
    assert {v for v in found if isinstance(v, ExpertsVariant)} == {
        v for tokens in (8, 16, 32, 64) for v in choose(torch.bfloat16, tokens, held, 2, *kind)
    }
    assert [v for v in found if isinstance(v, CommitVariant)] == [CommitVariant(288, values=False)]
    assert {v.mask for v in found if isinstance(v, LatentVariant)} == {"tree", "causal"}
    assert GatedNormVariant("bfloat16") in found
    if parallel == "ep":
        return
    # More passes find nothing more.
    every = [(r, n, m) for m in ("chain", "tree") for r in (3, 11, 13, 31) for n in (5, 17)]
    every += [(1, n, "prompt") for n in (3, 70, 150)]
    assert set(asked_for_in(c, every)) <= set(found)


def asked_for_in(c: KimiK3Config, some: list[tuple[int, int, str]]) -> list:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eval.kernels.passes", lambda most: some)
        patch.setattr("eval.kernels.unlike", lambda layers: layers)
        return asked_for(c, torch.bfloat16, 16)


def test_experts_are_packed_where_the_kernels_are_asked_for_and_only_there() -> None:
    from verify_kernels import cute

    c = small_k3()
    plain = shapes_of(c, torch.bfloat16)
    assert not isinstance(plain.layers[1].ffn.gate_up, PackedExperts)
    with ops.serving("meta", cute.implementations(unmeasured=True, load=lambda v: None)):
        packed = shapes_of(c, torch.bfloat16)
    assert "meta" not in ops._loaded or ops._loaded["meta"]["pack_experts"] is ops._REFERENCE["pack_experts"]
    for layer in packed.layers[1:]:
        for name in ("gate_up", "down"):
            own, other = getattr(layer.ffn, name), getattr(plain.layers[1].ffn, name)
            assert isinstance(own, PackedExperts) and own.shape == other.shape and own.nbytes == other.nbytes


def test_passes_meet_every_size() -> None:
    found = list(passes(MAX_NODES))
    for mask in ("chain", "tree"):
        assert {n for r, n, m in found if m == mask and r == 1} == set(range(1, MAX_NODES + 1))
        assert {(r, n) for r, n, m in found if m == mask} >= {(r, n) for r in (2, 8, 32) for n in (1, 8, 16, 32)}


def test_layers_that_ask_for_nothing_new_are_left_out() -> None:
    dense = shapes_of(attention_config("qwen3-8b"), torch.bfloat16).layers[:2]
    assert [id(x) for x in unlike([*dense, *dense])] == [id(x) for x in dense]
    forms = "d m m d m d d".split()
    kept = unlike(forms)
    assert set(zip(forms, forms[1:])) == set(zip(kept, kept[1:])) and kept[0] == "d"
