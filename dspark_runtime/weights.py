"""Reading checkpoints: safetensors, GGUF, or seeded random weights. Never pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from dspark_runtime.errors import CheckpointError
from dspark_runtime.models.config import ModelConfig, from_gguf
from dspark_runtime.models.transformer import tensor_shapes
from verify_kernels.quantized import BLOCK

if TYPE_CHECKING:
    from gguf import GGUFReader


class Safetensors(Mapping[str, Tensor]):
    """The tensors of a folder's *.safetensors files, read one at a time. Raises CheckpointError for a broken folder."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        files = sorted(folder.glob("*.safetensors"))
        index = folder / "model.safetensors.index.json"
        if index.exists():
            try:
                named = {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
            except (ValueError, KeyError, TypeError, AttributeError):
                raise CheckpointError(f"{index}: weight_map: expected an object of tensor names and files") from None
            missing = sorted(path.name for path in named if not path.exists())
            if missing:
                raise CheckpointError(f"{index}: {missing[0]}: missing file")
            files = sorted(named)
        if not files:
            other = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt"))
            found = f"only {other[0].name}" if other else "no weights"
            raise CheckpointError(f"{folder}: found {found}, expected *.safetensors (pickled weights are never loaded)")
        self._where: dict[str, object] = {}
        for path in files:
            try:
                opened = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None
            self._where |= dict.fromkeys(opened.keys(), opened)

    def __getitem__(self, key: str) -> Tensor:
        return self._where[key].get_tensor(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


_GGUF_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def _dequantized(reader: GGUFReader, path: Path) -> dict[str, Tensor]:
    from gguf.quants import dequantize

    tensors: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(f"{path}: {tensor.name}: cannot dequantise {tensor.tensor_type.name} ({error})") from None
        tensors[tensor.name] = torch.from_numpy(values.copy() if not values.flags.writeable else values)
    return tensors


def _unpermuted(weight: Tensor, heads: int) -> Tensor:
    """Undo the row order that GGUF's llama files use for interleaved rotary embedding."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def read_gguf(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Architecture and float32 tensors (Hugging Face names) of a .gguf file. Raises CheckpointError or ConfigError."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, IndexError) as error:
        raise CheckpointError(f"{path}: not a readable GGUF file ({error})") from None
    found = _dequantized(reader, path)
    if "token_embd.weight" not in found:
        raise CheckpointError(f"{path}: token_embd.weight: missing")
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tied = "output.weight" not in found
    config = from_gguf(metadata, found["token_embd.weight"].shape[0], tied, str(path))

    tensors: dict[str, Tensor] = {}
    for name, tensor in found.items():
        if name in _GGUF_TOP:
            tensors[_GGUF_TOP[name]] = tensor
            continue
        block, _, rest = name.removeprefix("blk.").partition(".")
        prefix = f"model.layers.{block}."
        if name.startswith("blk.") and rest == "ffn_gate_exps.weight":
            up = found[f"blk.{block}.ffn_up_exps.weight"]
            tensors[prefix + "mlp.experts.gate_up_proj"] = torch.cat((tensor, up), dim=1)
        elif name.startswith("blk.") and rest in _GGUF_NAMES:
            if config.architecture == "llama" and rest in ("attn_q.weight", "attn_k.weight"):
                heads = config.num_attention_heads if rest == "attn_q.weight" else config.num_key_value_heads
                tensor = _unpermuted(tensor, heads)
            tensors[prefix + _GGUF_NAMES[rest]] = tensor
        elif not (name.startswith("blk.") and rest == "ffn_up_exps.weight"):
            raise CheckpointError(f"{path}: {name}: not a tensor that this project knows for {config.architecture}")
    return config, tensors


_SCALE = "_scale_inv"


class DummyTensors(Mapping[str, Tensor]):
    """Seeded random weights of an architecture, made when asked for, on their device and in their dtype.

    Norms are one, matrices are normal with standard deviation 0.02. For timing: the text means nothing. quantization:
    "fp8", projections and experts in blocks of 128 x 128 as published checkpoints have them, or "none".
    """

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        dtype: torch.dtype,
        device: torch.device | str,
        quantization: Literal["none", "fp8"] = "none",
    ) -> None:
        self._shapes = tensor_shapes(config)
        self._order = {name: i for i, name in enumerate(self._shapes)}
        self._seed, self._dtype, self._device = seed, dtype, device
        self._fp8 = {n for n, s in self._shapes.items() if "_proj" in n and len(s) > 1 and quantization == "fp8"}
        for name in self._fp8:
            *lead, n, k = self._shapes[name]
            self._shapes[name + _SCALE] = (*lead, -(-n // BLOCK), -(-k // BLOCK))

    def __getitem__(self, key: str) -> Tensor:
        shape = self._shapes[key]
        if key.endswith(_SCALE):
            return torch.full(shape, 0.02, dtype=torch.float32, device=self._device)
        if "norm" in key:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(self._seed * 1_000_003 + self._order[key])
        wide = 1.0 if key in self._fp8 else 0.02  # times the scale
        matrix = torch.empty(shape, dtype=self._dtype, device=self._device).normal_(0, wide, generator=generator)
        return matrix.to(torch.float8_e4m3fn) if key in self._fp8 else matrix

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
