"""Checkpoints with quantised experts: the model that they make, and one line for what is wrong with them."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from dspark_runtime.errors import CheckpointError, ConfigError
from dspark_runtime.models.config import ModelConfig, from_hf
from dspark_runtime.models.transformer import Transformer
from dspark_runtime.targets import load_target
from dspark_runtime.weights import DummyTensors
from eval.floor import model_cost
from tests.dspark_runtime.passes import Pages
from tests.dspark_runtime.test_forced_routing import MOE
from tests.eval.test_routing import hugging_face
from verify_kernels.quantized import Fp8Blocks, Quantized, quantize_fp8, quantize_mxfp4

WIDE = MOE.model_copy(
    update=dict(hidden_size=160, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2, intermediate_size=64)
)
QUANTIZATION = {
    "fp8": dict(quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic", fmt="e4m3"),
    "mxfp4": dict(quant_method="compressed-tensors", format="mxfp4-pack-quantized", config_groups={}),
}


def separate(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Random weights, one set for each expert, as published checkpoints have them."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in DummyTensors(config, 0, torch.float32, "cpu").items():
        prefix, stacked, part = name.partition("mlp.experts.")
        if not stacked:
            tensors[name] = tensor
            continue
        for e, expert in enumerate(tensor):
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
            for one, matrix in zip(names, expert.chunk(len(names))):
                tensors[f"{prefix}mlp.experts.{e}.{one}.weight"] = matrix.contiguous()
    return tensors


def quantized(
    kind: str, everything: bool, config: ModelConfig = WIDE
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(stored tensors, the same dequantised). everything: attention too, as FP8 checkpoints have it."""
    stored, exact = {}, {}
    for name, tensor in separate(config).items():
        chosen = ".experts." in name or (everything and "_proj.weight" in name)
        if not chosen:
            stored[name] = exact[name] = tensor
        elif kind == "fp8":
            q = quantize_fp8(tensor)
            scales = q.scales.bfloat16()  # as Qwen3 stores them
            stored |= {name: q.values, f"{name}_scale_inv": scales}
            exact[name] = type(q)(q.values, scales.float()).dequantize(torch.float32)
        else:
            q = quantize_mxfp4(tensor)
            stem = name.removesuffix("weight")
            stored |= {f"{stem}weight_packed": q.values, f"{stem}weight_scale": q.scales}
            exact[name] = q.dequantize(torch.float32)
    return stored, exact


def save(folder, tensors: dict[str, torch.Tensor], kind: str, config: ModelConfig = WIDE) -> str:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hugging_face(config) | {"quantization_config": QUANTIZATION[kind]}))
    return str(folder)


@pytest.mark.parametrize(("kind", "everything"), [("fp8", True), ("fp8", False), ("mxfp4", False), ("mxfp4", True)])
def test_a_quantised_checkpoint_is_the_model_of_its_dequantised_weights(tmp_path, kind: str, everything: bool) -> None:
    stored, exact = quantized(kind, everything)
    ours = load_target(save(tmp_path / kind, stored, kind), dtype="float32", device="cpu").model
    plain = Transformer(WIDE, exact, name="plain", dtype=torch.float32, device="cpu")
    assert isinstance(ours.layers[0].gate_up, Quantized) and isinstance(ours.layers[1].gate_up, torch.Tensor)
    outs = []
    for model in (ours, plain):
        pages = Pages(model, 1, 16, 4)
        hidden, _ = model.forward(pages.batch([0], [0], [[3, 1, 4, 1, 5, 9, 2]]), pages.cache)
        outs.append(model.logits(hidden))
    assert (outs[0] - outs[1]).abs().max() < 1e-5
    costs = [model_cost(m, 1) for m in (ours, plain)]
    held = sum(w.nbytes for layer in ours.layers for w in (layer.gate_up, layer.down) if isinstance(w, Quantized))
    assert costs[0].expert_bytes == held < costs[1].expert_bytes / 3.9
    assert costs[0].flops_per_token == costs[1].flops_per_token and costs[0].num_experts == 4


def test_dummy_weights_in_fp8_are_a_model_on_a_cpu_too() -> None:
    config = MOE.model_copy(update=dict(moe_intermediate_size=128, intermediate_size=256))
    tensors = DummyTensors(config, 3, torch.float32, "cpu", "fp8")
    scaled = [name for name in tensors if name.endswith("_scale_inv")]
    assert scaled and all("_proj" in name and tensors[name.removesuffix("_scale_inv")].dtype == torch.float8_e4m3fn for name in scaled)
    stored = Transformer(config, tensors, name="fp8", dtype=torch.float32, device="cpu")
    exact = {n: t for n, t in tensors.items() if n not in scaled}
    for name in scaled:
        key = name.removesuffix("_scale_inv")
        exact[key] = Fp8Blocks(tensors[key], tensors[name]).dequantize(torch.float32)
    plain = Transformer(config, exact, name="plain", dtype=torch.float32, device="cpu")
    outs = []
    for model in (stored, plain):
        pages = Pages(model, 1, 16, 4)
        outs.append(model.logits(model.forward(pages.batch([0], [0], [[3, 1, 4, 1, 5]]), pages.cache)[0]))
    assert torch.allclose(*outs, atol=1e-5)
    assert isinstance(stored.layers[0].qkv, torch.Tensor)  # no kernel here reads them packed


UP, DOWN = "model.layers.0.mlp.experts.1.up_proj.", "model.layers.2.mlp.experts.3.down_proj."


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("fp8", {UP + "weight_scale_inv": torch.ones(1, 1)}, "1.up_proj.weight_scale_inv: found shape [1, 1], expected [1, 2]"),
        ("fp8", {UP + "weight_scale_inv": None}, "1.up_proj.weight: found dtype torch.float8_e4m3fn, expected 16 bits"),
        ("fp8", {UP + "weight": torch.ones(128, 160)}, "1.up_proj.weight: found dtype torch.float32, expected torch.float8_e4m3fn"),
        ("fp8", {UP + "input_scale": torch.ones(1)}, "1.up_proj.input_scale: not a tensor of this architecture"),
        ("mxfp4", {DOWN + "weight_scale": None}, "3.down_proj.weight_scale: missing, expected shape [160, 4]"),
        ("mxfp4", {DOWN + "weight_packed": torch.ones(160, 64)}, "3.down_proj.weight_packed: found dtype torch.float32, expected"),
        (
            "mxfp4",
            {DOWN + "weight_packed": None, DOWN + "weight_scale": None, DOWN + "weight": torch.ones(160, 128)},
            "model.layers.2.mlp.experts.*: found experts in 16 bits or more and mxfp4, expected one kind",
        ),
    ],
)  # fmt: skip
def test_broken_quantised_checkpoints_are_one_line(tmp_path, kind: str, change, words: str) -> None:
    stored, _ = quantized(kind, False)
    stored = {name: tensor for name, tensor in (stored | change).items() if tensor is not None}
    with pytest.raises(CheckpointError, match=re.escape(words)) as error:
        load_target(save(tmp_path / "broken", stored, kind), dtype="float32", device="cpu")
    assert "\n" not in str(error.value)


def test_experts_that_end_inside_a_block_are_refused(tmp_path) -> None:
    narrow = WIDE.model_copy(update=dict(moe_intermediate_size=96))
    stored, _ = quantized("fp8", False, narrow)
    with pytest.raises(CheckpointError, match="rows: found 96 before others, allowed: multiples of 128 for fp8 blocks"):
        load_target(save(tmp_path / "narrow", stored, "fp8", narrow), device="cpu")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (dict(quant_method="awq"), "quant_method: found 'awq', allowed: none, fp8 in blocks of 128 x 128"),
        (dict(quant_method="fp8", weight_block_size=[64, 64]), "weight_block_size: found [64, 64], allowed: [128, 128]"),
        (dict(quant_method="fp8", weight_block_size=[128, 128], fmt="e5m2"), "fmt: found 'e5m2', allowed: e4m3"),
        (dict(quant_method="compressed-tensors", format="int-quantized"), "format: found 'int-quantized', allowed: mxfp4-pack-quantized"),
    ],
)  # fmt: skip
def test_other_formats_are_refused_by_name(found: object, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("quantization_config." + words)):
        from_hf(hugging_face(WIDE) | {"quantization_config": found}, "config.json")
