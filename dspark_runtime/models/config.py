"""The shape of a target model, from any of the places that state it. No torch here.

Whatever a checkpoint asks for and the decoder does not do is refused by name; nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dspark_runtime.errors import ConfigError
from dspark_runtime.validation import checked
from verify_kernels.rope import Rope, rope_values

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


class ModelConfig(BaseModel):
    """Architecture of a Llama, Qwen3 or Qwen3-MoE model, under the names of its config.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: Literal["llama", "qwen3", "qwen3_moe"]
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    rms_norm_eps: float = Field(gt=0)
    max_position_embeddings: int = Field(ge=1, le=2**24)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    rope: Rope = Rope()
    eos_token_ids: tuple[int, ...] = ()
    num_experts: int = Field(default=0, ge=0)
    num_experts_per_tok: int = Field(default=0, ge=0)
    moe_intermediate_size: int = Field(default=0, ge=0)
    norm_topk_prob: bool = False
    decoder_sparse_step: int = Field(default=1, ge=1)
    mlp_only_layers: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads: found {self.num_key_value_heads}, "
                f"allowed: divisors of num_attention_heads ({self.num_attention_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: found {self.head_dim}, allowed: even numbers")
        if self.architecture == "qwen3_moe":
            for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
                if getattr(self, name) < 1:
                    raise ValueError(f"{name}: found {getattr(self, name)}, allowed: 1 or more for qwen3_moe")
            if self.num_experts_per_tok > self.num_experts:
                raise ValueError(
                    f"num_experts_per_tok: found {self.num_experts_per_tok}, allowed: at most num_experts ({self.num_experts})"
                )
        return self

    @property
    def qk_norm(self) -> bool:
        return self.architecture != "llama"

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has routed experts in place of a dense MLP."""
        if self.architecture != "qwen3_moe" or layer in self.mlp_only_layers:
            return False
        return (layer + 1) % self.decoder_sparse_step == 0


def _refuse(found: Any, unsupported: bool, field: str, where: str, allowed: str) -> None:
    if unsupported:
        raise ConfigError(f"{where}: {field}: found {found!r}, allowed: {allowed}")


def _check_quantization(found: Any, where: str) -> None:
    """Which quantised weights are read; how they are stored shows in the tensors' names."""
    if found is None:
        return
    method = found.get("quant_method") if isinstance(found, Mapping) else found
    field, allowed = "quantization_config", "none, fp8 in blocks of 128 x 128, compressed-tensors of mxfp4-pack-quantized"
    _refuse(method, method not in ("fp8", "compressed-tensors"), f"{field}.quant_method", where, allowed)
    if method == "fp8":
        block = found.get("weight_block_size")
        _refuse(block, block != [128, 128], f"{field}.weight_block_size", where, "[128, 128] with fp8")
        _refuse(found.get("fmt"), found.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"), f"{field}.fmt", where, "e4m3")
    else:
        form = found.get("format")
        _refuse(form, form != "mxfp4-pack-quantized", f"{field}.format", where, "mxfp4-pack-quantized")


def from_hf(config: Mapping[str, Any], where: str) -> ModelConfig:
    """From a checkpoint's config.json (transformers 4 and 5 spellings)."""
    names = config.get("architectures") or []
    _refuse(names, not isinstance(names, list), "architectures", where, ", ".join(ARCHITECTURES))
    known = [ARCHITECTURES[name] for name in names if name in ARCHITECTURES]
    _refuse(names, not known, "architectures", where, ", ".join(ARCHITECTURES))
    act = config.get("hidden_act", "silu")
    _refuse(act, act not in ("silu", "swish"), "hidden_act", where, "silu")
    for field in ("use_sliding_window", "mlp_bias"):
        _refuse(config.get(field), bool(config.get(field)), field, where, "false")
    for field in ("rope_parameters", "rope_scaling"):
        _refuse(config.get(field), not isinstance(config.get(field) or {}, Mapping), field, where, "an object")
    for field in ("hidden_size", "num_attention_heads", "vocab_size"):
        _refuse(config.get(field), not isinstance(config.get(field, 1), int), field, where, "an integer")
    layer_types = config.get("layer_types") or []
    _refuse(layer_types, not isinstance(layer_types, list), "layer_types", where, "full_attention")
    _refuse(layer_types, set(layer_types) - {"full_attention"}, "layer_types", where, "full_attention")
    partial = config.get("partial_rotary_factor", 1.0)
    _refuse(partial, partial != 1.0, "partial_rotary_factor", where, "1.0")
    _check_quantization(config.get("quantization_config"), where)
    eos = config.get("eos_token_id")
    heads = config.get("num_attention_heads")
    values: dict[str, Any] = {
        "architecture": known[0],
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or (config["hidden_size"] // heads if heads else None),
        "rope": rope_values(config),
        "eos_token_ids": tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
    }
    if known[0] == "qwen3_moe":
        values["num_experts"] = config.get("num_experts") or config.get("num_local_experts") or 0  # transformers 5 saves the latter
        values |= {
            name: config.get(name)
            for name in ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
            if config.get(name) is not None
        }
        values["decoder_sparse_step"] = config.get("decoder_sparse_step") or 1
        values["mlp_only_layers"] = tuple(config.get("mlp_only_layers") or ())
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "attention_bias",
    ):
        if config.get(name) is not None:
            values[name] = config[name]
    return checked(ModelConfig, values, where)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a checkpoint of this shape: `from_hf` backwards."""
    rope = config.rope.model_dump(exclude_defaults=True)
    values = config.model_dump(exclude={"architecture", "rope", "eos_token_ids"})
    if config.architecture != "qwen3_moe":
        moe = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step")
        values = {name: x for name, x in values.items() if name not in (*moe, "mlp_only_layers")}
    return values | {
        "architectures": [name for name, kind in ARCHITECTURES.items() if kind == config.architecture],
        "model_type": config.architecture,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": config.rope.rope_type, "rope_theta": config.rope.rope_theta} | rope,
        "eos_token_id": list(config.eos_token_ids) or None,
        "torch_dtype": "bfloat16",
    }


def from_gguf(metadata: Mapping[str, Any], vocab_size: int, tied: bool, where: str) -> ModelConfig:
    """From a GGUF file's metadata. vocab_size: rows of its embedding; tied: it has no output matrix."""
    arch = metadata.get("general.architecture")
    names = {"llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
    _refuse(arch, arch not in names, "general.architecture", where, ", ".join(names))

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        return float(f"{value:.7g}") if isinstance(value, float) else value  # stored in 32 bits: 1e-05, not 9.99999974e-06

    scaling = get("rope.scaling.type", "none")
    _refuse(scaling, scaling not in ("none", "yarn"), "rope.scaling.type", where, "none, yarn")
    rope = {"rope_theta": get("rope.freq_base", 10000.0)}
    if scaling == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": get("rope.scaling.factor"),
            "original_max_position_embeddings": get("rope.scaling.original_context_length"),
        }
    heads, hidden = get("attention.head_count"), get("embedding_length")
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    values = {
        "architecture": names[arch],
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length") or (hidden // heads if hidden and heads else None),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": tied,
        "rope": rope,
        "eos_token_ids": () if eos is None else (eos,),
    }
    if arch == "qwen3moe":
        values |= {
            "num_experts": get("expert_count"),
            "num_experts_per_tok": get("expert_used_count"),
            "moe_intermediate_size": get("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
    return checked(ModelConfig, {k: v for k, v in values.items() if v is not None}, where)
