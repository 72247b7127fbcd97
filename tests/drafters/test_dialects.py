"""Configurations of every dialect, without weights; and one line for every mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drafters.dspark.dialects import is_drafter, parse
from drafters.dspark.load import load_drafter
from tests.drafters.dspark_cases import DEEPSPEC, DIMS, LAYERS, TAPS, V, block_tensors, pruned, target, write
from tests.drafters.test_dspark import make, speculators
from verify_kernels.rope import Rope

K3 = dict(
    architectures=["K3DSparkModel"], model_type="k3_dspark", vocab_size=163840, hidden_size=7168, intermediate_size=14336,
    num_hidden_layers=5, num_attention_heads=64, rms_norm_eps=1e-5, max_position_embeddings=4096, num_target_layers=5,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512, q_lora_rank=1536, markov_rank=256,
    target_layer_ids=[2, 23, 47, 71, 89], mask_token_id=163824, rope_scaling=dict(type="yarn", factor=32),
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


def test_dialects_whose_layers_are_not_built_are_described(tmp_path: Path) -> None:
    k3, gemma = parse(K3, "x", 93), parse(GEMMA, "x")
    assert (k3.layers, k3.head_dim, k3.block_size, k3.num_target_layers) == ("mla", 192, 7, None)
    assert k3.taps == (2, 23, 47, 71, 89)
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
    (K3 | dict(output_gate=True), "output_gate: found True"),
    (K3 | dict(num_target_layers=93), "num_target_layers: found 93, allowed: 5"),
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
