"""Configurations of every dialect, without weights; and one line for every mistake."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drafters.dspark.dialects import is_drafter, parse
from drafters.dspark.load import load_drafter
from drafters.dspark.network import tensor_shapes
from drafters.taps import Mixed
from tests.drafters.dspark_cases import DEEPSPEC, DIMS, LAYERS, TAPS, V, block_tensors, pruned, target, write
from tests.drafters.test_dspark import make, speculators
from verify_kernels.rope import Rope, inverse_frequencies

YARN = dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=32768, rope_theta=50000.0, beta_fast=32,
            beta_slow=1, mscale=1.0, mscale_all_dim=1.0)  # fmt: skip
K3 = dict(  # Inferact/Kimi-K3-DSpark, as public loaders' tests state it
    architectures=["K3DSparkModel"], model_type="k3_dspark", vocab_size=163840, draft_vocab_size=163840,
    hidden_size=7168, intermediate_size=14336, num_hidden_layers=5, num_attention_heads=64, num_key_value_heads=64,
    rms_norm_eps=1e-5, max_position_embeddings=1048576, num_target_layers=5, target_num_hidden_layers=93,
    target_hidden_size=7168, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, mla_use_nope=False, mla_use_output_gate=False, target_layer_ids=[2, 23, 47, 71, 89],
    mask_token_id=163837, markov_rank=256, markov_head_type="vanilla", enable_confidence_head=True,
    confidence_head_with_markov=True, rope_theta=50000.0, rope_parameters=YARN,
)  # fmt: skip
GEMMA = DEEPSPEC | dict(
    architectures=["Gemma4DSparkModel"], global_head_dim=16, attention_k_eq_v=True, num_global_key_value_heads=1,
    hidden_act=None, hidden_activation="gelu_pytorch_tanh", final_logit_softcapping=30.0,
)  # fmt: skip


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k != key}


def test_default_layers_come_from_the_targets_depth() -> None:
    zlab = DIMS | dict(architectures=["DFlashDraftModel"], block_size=16, dflash_config=dict(mask_token_id=3))
    assert parse(zlab | dict(num_hidden_layers=5), "x", 36).taps == (1, 9, 17, 25, 33)
    assert parse(zlab | dict(num_hidden_layers=1), "x", 36).taps == (18,)
    assert parse(without(speculators(), "aux_hidden_state_layer_ids"), "x", 36).taps == (1, 17, 32)
    eagle = DIMS | dict(architectures=["LlamaForCausalLM"], num_hidden_layers=1, draft_vocab_size=32)
    assert parse(eagle, "x", 32).taps == (1, 15, 28)
    for config in (zlab, without(speculators(), "aux_hidden_state_layer_ids"), eagle):
        with pytest.raises(ValueError, match="x: .*layer_ids: missing"):
            parse(config, "x")


def test_slots_and_drafts() -> None:
    assert parse(DEEPSPEC, "x").num_drafts == 4
    assert parse(make("z-lab").config, "x").num_drafts == 4  # a block of 5
    inside = DIMS | dict(architectures=["DFlashDraftModel"],
                         dflash_config=dict(mask_token_id=3, target_layer_ids=TAPS, block_size=16))  # fmt: skip
    assert parse(inside, "x").num_drafts == 15
    assert parse(speculators(), "x").num_drafts == 4
    assert parse(without(speculators(), "sample_from_anchor"), "x").num_drafts == 3
    assert parse(DEEPSPEC | dict(loss_decay_gamma=9.0), "x").num_drafts == 4


def test_kimi_k3s_drafters_as_published() -> None:
    k3 = parse(K3, "x", 93)
    assert (k3.layers, k3.head_dim, k3.block_size, k3.num_target_layers) == ("mla", 192, 7, 93)
    assert k3.taps == k3.tapped == (2, 23, 47, 71, 89) and not any(isinstance(tap, Mixed) for tap in k3.tapped)
    assert (k3.confidence, k3.markov_head_type, k3.sample_from_anchor) == ("markov", "vanilla", True)
    shapes = tensor_shapes(k3)
    assert len(shapes) == 67  # and the embedding
    layer = "layers.4.self_attn."
    for name, shape in {
        "fc.weight": (7168, 35840),
        f"{layer}q_a_proj.weight": (1536, 7168),
        f"{layer}q_b_proj.weight": (12288, 1536),
        f"{layer}kv_a_proj_with_mqa.weight": (576, 7168),
        f"{layer}kv_b_proj.weight": (16384, 512),
        f"{layer}o_proj.weight": (7168, 8192),
        "confidence_head.proj.weight": (1, 7424),
    }.items():
        assert shapes[name] == shape
    assert sum(map(math.prod, shapes.values())) + 163840 * 7168 == 3_562_312_961

    nested = dict(attention_mode="gqa", confidence_head_alpha=1.0, confidence_head_with_markov=True,
                  enable_confidence_head=True, markov_head_type="vanilla", markov_rank=256, mask_token_id=163824,
                  projector_type="dspark", target_layer_ids=[7, 23, 51, 67, 83])  # fmt: skip
    radixark = parse(dict(
        architectures=["DSparkDraftModel"], model_type="qwen3", attention_bias=False, block_size=7, head_dim=64,
        dflash_config=nested, hidden_act="silu", hidden_size=7168, intermediate_size=14336, num_attention_heads=64,
        layer_types=["full_attention"] * 5, max_position_embeddings=1048576, num_hidden_layers=5,
        num_key_value_heads=16, num_target_layers=93, rms_norm_eps=1e-5, sliding_window=None, vocab_size=163840,
        rope_parameters=dict(factor=16.0, original_max_position_embeddings=65536, rope_theta=1e4, rope_type="yarn"),
    ), "x", 93)  # fmt: skip
    assert radixark.tapped == (7, 23, 51, 67, 83) and all(isinstance(tap, Mixed) for tap in radixark.tapped)
    assert sum(map(math.prod, tensor_shapes(radixark).values())) == 2_249_289_601


def test_kimi_k3s_rotary_embedding_is_deepseeks() -> None:
    """The factors of vLLM's deepseek_yarn: on cosines and sines, and on scores."""

    def factors(**rope: Any) -> tuple[float, float]:
        c = parse(K3 | dict(rope_parameters={k: v for k, v in (YARN | rope).items() if v is not None}), "x", 93)
        return inverse_frequencies(c)[1], c.mla.score_factor

    m = 0.1 * math.log(32) + 1
    assert factors() == pytest.approx((1.0, m**2))
    assert factors(mscale=None, mscale_all_dim=None) == pytest.approx((m, 1.0))
    assert factors(mscale=2.0) == pytest.approx(((0.2 * math.log(32) + 1) / m, m**2))
    assert factors(attention_factor=1.0) == pytest.approx((1.0, 1.0))
    plain = parse(without(without(K3, "rope_parameters"), "rope_theta"), "x", 93)
    assert plain.rope == Rope(rope_theta=50000.0) and plain.mla.score_factor == 1.0
    older = without(K3, "rope_parameters") | dict(rope_scaling=dict(without(YARN, "rope_type"), type="yarn"))
    assert parse(older, "x", 93) == parse(K3, "x", 93)


def test_kimi_k3s_optional_fields() -> None:
    assert all(isinstance(x, Mixed) for x in parse(K3 | dict(aux_hidden_stream="attn_res"), "x", 93).tapped)
    assert parse(K3 | dict(block_size=5), "x", 93).num_drafts == 5
    assert parse(without(K3, "enable_confidence_head"), "x", 93).confidence == "none"
    assert parse(without(K3, "confidence_head_with_markov"), "x", 93).confidence == "hidden"


def test_dialects_whose_layers_are_not_built_are_described(tmp_path: Path) -> None:
    gemma = parse(GEMMA, "x")
    assert (gemma.layers, gemma.head_dim, gemma.num_key_value_heads, gemma.markov_rank) == ("gemma4", 16, 1, 5)
    model = target()
    with pytest.raises(ValueError, match="gemma4 layers, which are not built"):
        load_drafter(write(tmp_path, GEMMA, block_tensors(DEEPSPEC)), model)
    with pytest.raises(ValueError, match="DeepSeek-V4"):
        parse(DIMS | dict(dspark_block_size=5), "x")


def test_rope_parameters_are_kept_and_unknown_ones_refused() -> None:
    yarn = DEEPSPEC | dict(rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64))
    rope = Rope(rope_theta=100.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    assert parse(yarn, "x").rope == rope
    five = without(DEEPSPEC, "rope_theta") | dict(rope_parameters=dict(rope_theta=7.0, rope_type="default"))
    assert parse(five, "x").rope.rope_theta == 7.0
    with pytest.raises(ValueError, match="x: rope.rope_type: found 'longrope', allowed"):
        parse(DEEPSPEC | dict(rope_scaling=dict(rope_type="longrope", factor=4.0)), "x")


def test_a_language_model_is_no_drafter() -> None:
    for config in (DIMS | dict(architectures=["LlamaForCausalLM"]), DIMS | dict(architectures=["Qwen3ForCausalLM"]), {}):
        assert not is_drafter(config)
        with pytest.raises(ValueError, match="x: architectures: found .*allowed: Qwen3DSparkModel"):
            parse(config, "x")
    assert is_drafter(DEEPSPEC) and is_drafter(K3)


@pytest.mark.parametrize("config, message", [
    (without(DEEPSPEC, "mask_token_id"), "mask_token_id: missing"),
    (without(DEEPSPEC, "markov_rank"), "markov_rank: missing"),
    (without(DEEPSPEC, "rms_norm_eps"), "rms_norm_eps: missing"),
    (without(DEEPSPEC, "confidence_head_with_markov"), "confidence_head_with_markov: missing"),
    (DEEPSPEC | dict(markov_head_type="lstm"), "markov_head_type: found 'lstm', allowed: vanilla, gated, rnn"),
    (DEEPSPEC | dict(target_layer_ids=[1, 1, 2]), r"target layers: found \[1, 1, 2\], allowed: distinct"),
    (DEEPSPEC | dict(target_layer_ids="1,2"), "target_layer_ids: found '1,2', allowed: a list of integers"),
    (DEEPSPEC | dict(target_layer_ids=[-2, 1]), r"target layers: found \[-2, 1\], allowed"),
    (DEEPSPEC | dict(mask_token_id=V), f"mask_token_id: found {V}, allowed: below vocab_size"),
    (DEEPSPEC | dict(hidden_act="gelu"), "hidden_act: found 'gelu', allowed: silu"),
    (DEEPSPEC | dict(block_size="x"), "block_size: found 'x', allowed"),
    (DEEPSPEC | dict(num_key_value_heads=3), "num_key_value_heads: found 3, allowed: divisors"),
    (DEEPSPEC | dict(layer_types=["chunked"] * 2), "layer_types: found 'chunked', allowed"),
    (DEEPSPEC | dict(quantization_config=dict(quant_method="fp8")), "quantization_config: found"),
    (DIMS | dict(architectures=["DSparkDraftModel"], block_size=4), "dflash_config: missing"),
    (DIMS | dict(architectures=["DFlashDraftModel"], block_size=4, dflash_config=dict(target_layer_ids=[1])),
     "dflash_config.mask_token_id: missing"),
    (DIMS | dict(architectures=["DFlashDraftModel"], block_size=4,
                 dflash_config=dict(target_layer_ids=[1], mask_token_id=3, causal=True)),
     "dflash_config.causal: found True, allowed: False"),
    (speculators(speculators_model_type="mtp"), "speculators_model_type: found 'mtp', allowed"),
    (without(speculators(), "transformer_layer_config"), "transformer_layer_config: missing"),
    (K3 | dict(mla_use_output_gate=True), "mla_use_output_gate: found True, allowed: False"),
    (K3 | dict(mla_use_nope=True), "mla_use_nope: found True, allowed: False"),
    (K3 | dict(mla_use_qk_norm=True), "mla_use_qk_norm: found True, allowed: False"),
    (K3 | dict(dspark_bonus_anchor=True), "dspark_bonus_anchor: found True, allowed: False"),
    (K3 | dict(fc_norm=True), "fc_norm: found True, allowed: False"),
    (K3 | dict(logit_scale=0.5), "logit_scale: found 0.5, allowed: 1.0"),
    (K3 | dict(n_routed_experts=8), "n_routed_experts: found 8, allowed: 0"),
    (K3 | dict(draft_vocab_size=32000), "draft_vocab_size: found 32000, allowed: 163840"),
    (K3 | dict(aux_hidden_stream="raw"), "aux_hidden_stream: found 'raw', allowed: prefix, attn_res"),
    (K3 | dict(num_target_layers=93), "num_target_layers: found 93, allowed: 5"),
    (K3 | dict(markov_rank=0), "markov_rank: found 0, allowed: 1 and up"),
    (K3 | dict(q_lora_rank=None), "q_lora_rank: missing"),
    (K3 | dict(kv_lora_rank="x"), "mla.kv_lora_rank: found 'x', allowed"),
    (K3 | dict(qk_rope_head_dim="x"), "qk_rope_head_dim: found 'x', allowed: a number"),
    (K3 | dict(qk_rope_head_dim=63, qk_nope_head_dim=129), "mla.qk_rope_head_dim: found 63, allowed"),
    (K3 | dict(layer_types=["sliding_attention"] * 5, sliding_window=9), "layer_types: found sliding_attention"),
    (K3 | dict(rope_parameters=YARN | dict(rope_type="llama3")),
     "rope_parameters.rope_type: found 'llama3', allowed: default, yarn"),
    (K3 | dict(rope_parameters=YARN | dict(attention_factor=1.2)),
     "rope_parameters.attention_factor: found 1.2, allowed: 1.0"),
    (K3 | dict(rope_parameters=without(YARN, "original_max_position_embeddings")),
     "rope_parameters.original_max_position_embeddings: missing"),
    (K3 | dict(rope_parameters=YARN | dict(factor="x")), "rope_parameters.factor: found 'x', allowed: a number"),
])  # fmt: skip
def test_a_wrong_config_is_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^dir/config.json: {message}") as caught:
        parse(config, "dir/config.json", LAYERS)
    assert "\n" not in str(caught.value)


def changed(**tensors: Any) -> dict[str, torch.Tensor]:
    base = block_tensors(DEEPSPEC)
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        if tensor is None:
            del base[name]
        else:
            base[name] = tensor
    return base


IDS, TABLES = pruned(30)
PRUNED = speculators(draft_vocab_size=30)


@pytest.mark.parametrize("config, tensors, message", [
    (DEEPSPEC, changed(fc__weight=None), r"fc.weight: missing, expected shape \[16, 48\]"),
    (DEEPSPEC, changed(fc__weight=torch.zeros(16, 32)), r"fc.weight: found shape \[16, 32\], expected \[16, 48\]"),
    (DEEPSPEC, changed(fc__weight=torch.zeros(16, 48, dtype=torch.int8)), "fc.weight: found dtype torch.int8"),
    (DEEPSPEC, changed(extra=torch.zeros(1)), "extra: not a tensor of a dspark drafter in the deepspec dialect"),
    (DEEPSPEC | dict(markov_head_type="gated"), changed(), "markov_head.gate_proj.weight: missing"),
    (DEEPSPEC | dict(vocab_size=64), changed(), "vocab_size: found 64, expected 48, that of the target random"),
    (DEEPSPEC | dict(num_target_layers=9), changed(), "num_target_layers: found 9, expected 8"),
    (DEEPSPEC | dict(target_layer_ids=[1, 8]), changed(), r"target layers: found \[1, 8\] .*allowed: up to 7"),
    (DEEPSPEC | dict(target_hidden_size=32), changed(), "target_hidden_size: found 32, expected 16"),
    (PRUNED, block_tensors(PRUNED), r"d2t: missing, expected shape \[30\]"),
    (PRUNED, block_tensors(PRUNED) | {"d2t": IDS}, "d2t: found target ids from .*offsets"),
    (PRUNED, block_tensors(PRUNED) | TABLES | {"t2d": torch.ones(V, dtype=torch.bool)}, "t2d: found marks of 48 ids"),
    (PRUNED, {k: v for k, v in (block_tensors(PRUNED) | TABLES).items() if k != "lm_head.weight"},
     r"lm_head.weight: missing, expected shape \[30, 16\]"),
])  # fmt: skip
def test_a_wrong_checkpoint_is_one_line(config: dict[str, Any], tensors: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_drafter(write(tmp_path, config, tensors), target())
    assert "\n" not in str(caught.value) and str(caught.value).startswith(str(tmp_path))


def test_broken_folders(tmp_path: Path) -> None:
    model = target()
    with pytest.raises(ValueError, match="config.json: missing"):
        load_drafter(tmp_path, model)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: not JSON"):
        load_drafter(tmp_path, model)
    write(tmp_path, DEEPSPEC, block_tensors(DEEPSPEC))
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load_drafter(tmp_path, model)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="found no weights, expected .*pickled weights are never loaded"):
        load_drafter(tmp_path, model)


def test_equal_tables_are_the_targets_own(tmp_path: Path) -> None:
    model = target()
    tensors = block_tensors(DEEPSPEC) | {"embed_tokens.weight": model.embed, "lm_head.weight": model.lm_head}
    write(tmp_path, DEEPSPEC, tensors)
    network = load_drafter(tmp_path, model).network
    assert network.embed is model.embed and network.lm_head is model.lm_head


def test_a_checkpoint_in_several_files_and_a_mask_vector(tmp_path: Path) -> None:
    tensors, mask = block_tensors(DEEPSPEC), torch.randn(1, 16)
    write(tmp_path, DEEPSPEC, {k: v for k, v in tensors.items() if "layers" not in k} | {"mask_embedding": mask})
    save_file({k: v for k, v in tensors.items() if "layers" in k}, tmp_path / "model-2.safetensors")
    assert torch.equal(load_drafter(tmp_path, target()).network.mask, mask[0])


def test_bench_takes_a_folder_and_says_what_is_wrong(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from dspark_runtime.errors import CheckpointError
    from eval.bench import make_drafter
    from eval.schema import BenchConfig

    holder = SimpleNamespace(model=target())
    write(tmp_path, DEEPSPEC, block_tensors(DEEPSPEC))
    config = BenchConfig(drafter=str(tmp_path))
    assert make_drafter(config.drafter, holder, config).name == f"dspark:{tmp_path.name}"
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config.json: missing"):
        make_drafter(config.drafter, holder, config)
    with pytest.raises(ValueError, match="a drafter's folder"):
        BenchConfig(drafter=str(tmp_path / "nowhere"))
