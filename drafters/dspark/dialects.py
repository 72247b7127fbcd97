"""Published checkpoint configurations, normalised to one `DrafterConfig` (fact sheet §1.1, §1.8 to §1.13). No torch.

The dialect is read off the config itself: `architectures`, `model_type`, `speculators_model_type`. What a config asks
for and is not built is refused by name. ValueError, one line: `file: field: found X, allowed: Y`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from drafters.dspark.config import DrafterConfig
from verify_kernels.rope import rope_values

_EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_KNOWN = (
    "Qwen3DSparkModel, DSparkDraftModel, DFlashDraftModel, Qwen3Eagle3Model, Eagle3DraftModel, LlamaForCausalLMEagle3, "
    "K3DSparkModel, Gemma4DSparkModel, or a speculators_model_type"
)


class _Fields:
    """A (nested) config whose mistakes name the file and the full field."""

    def __init__(self, values: Any, where: str, prefix: str = "") -> None:
        self.where, self.prefix = where, prefix
        if not isinstance(values, Mapping):
            field = prefix.rstrip(".") or "config"
            raise ValueError(f"{where}: {field}: found {type(values).__name__}, allowed: an object")
        self.values = values

    def fail(self, key: str, message: str) -> ValueError:
        return ValueError(f"{self.where}: {self.prefix}{key}: {message}")

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        found = self.values.get(key)
        return default if found is None else found

    def need(self, key: str) -> Any:
        if self.values.get(key) is None:
            raise self.fail(key, "missing")
        return self.values[key]

    def sub(self, key: str) -> _Fields:
        return _Fields(self.need(key), self.where, f"{self.prefix}{key}.")

    def refuse(self, key: str, *allowed: Any) -> None:
        """A field that, if present, must have one of these values."""
        found = self.values.get(key)
        if found is not None and found not in allowed:
            raise self.fail(key, f"found {found!r}, allowed: {', '.join(map(str, allowed)) or 'none'}")

    def number(self, key: str, default: float | None = None) -> float:
        found = self.need(key) if default is None else self.get(key, default)
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            raise self.fail(key, f"found {found!r}, allowed: a number")
        return found

    def ids(self, key: str) -> tuple[int, ...]:
        found = self.need(key)
        if not isinstance(found, (list, tuple)) or any(type(i) is not int for i in found):
            raise self.fail(key, f"found {found!r}, allowed: a list of integers")
        return tuple(found)


def is_drafter(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a drafter rather than a whole language model."""
    return _dialect(config) is not None


def parse(config: Mapping[str, Any], where: str, num_target_layers: int | None = None) -> DrafterConfig:
    """The description behind a config.json. where: its path, for errors. num_target_layers: the target's depth, from
    which layers that a config leaves out are derived."""
    reader = _dialect(config)
    if reader is None:
        found = config.get("architectures") or config.get("model_type")
        raise ValueError(f"{where}: architectures: found {found!r}, allowed: {_KNOWN}")
    values = reader(_Fields(config, where), num_target_layers)
    try:
        return DrafterConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "missing" or first["input"] is None and first["type"] != "value_error":
            message = "missing"
        elif first["type"] != "value_error":
            message = f"found {first['input']!r}, allowed: {message[0].lower()}{message[1:]}"
        raise ValueError(": ".join(part for part in (where, field, message) if part)) from None


def _dialect(config: Mapping[str, Any]) -> Callable[[_Fields, int | None], dict[str, Any]] | None:
    names = set(config.get("architectures") or [])
    if "speculators_model_type" in config:
        return _speculators
    if "dspark_block_size" in config:
        return _deepseek_v4
    if config.get("model_type") == "k3_dspark" or "K3DSparkModel" in names:
        return _kimi_k3
    if "Gemma4DSparkModel" in names:
        return _gemma4
    if "Qwen3DSparkModel" in names:
        return _deepspec
    nested = config.get("dflash_config")
    if "DSparkDraftModel" in names or (isinstance(nested, Mapping) and nested.get("projector_type") == "dspark"):
        return _specforge
    if "DFlashDraftModel" in names:
        return _dflash
    if names & {"Qwen3Eagle3Model", "Eagle3DraftModel"} and config.get("target_layer_ids") is not None:
        return _deepspec_eagle3
    # The published drafters of the mainstream call themselves LlamaForCausalLM; only they have a draft vocabulary.
    if names & set(_EAGLE3) and ("draft_vocab_size" in config or "LlamaForCausalLM" not in names):
        return _eagle3
    return None


# ------------------------------------------------------------------------------------------------ shared pieces


def _transformer(f: _Fields, depth_key: str = "num_hidden_layers") -> dict[str, Any]:
    """The draft transformer's own dimensions, under Hugging Face names."""
    f.refuse("hidden_act", "silu", "swish")
    f.refuse("partial_rotary_factor", 1.0)
    f.refuse("quantization_config")
    f.refuse("mlp_bias", False)
    hidden, heads, depth = f.need("hidden_size"), f.need("num_attention_heads"), f.need(depth_key)
    return {
        "vocab_size": f.need("vocab_size"),
        "draft_vocab_size": f.need("vocab_size"),
        "hidden_size": hidden,
        "target_hidden_size": hidden,
        "intermediate_size": f.need("intermediate_size"),
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": f.get("num_key_value_heads", heads),
        "head_dim": f.get("head_dim", hidden // heads),
        "rms_norm_eps": f.need("rms_norm_eps"),
        "max_position_embeddings": f.need("max_position_embeddings"),
        "attention_bias": f.get("attention_bias", False),
        "rope": rope_values(f.values),
        "windows": _windows(f, depth),
    }


def _windows(f: _Fields, depth: int) -> tuple[int, ...]:
    kinds = f.get("layer_types", [])
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise f.fail("layer_types", f"found {kind!r}, allowed: full_attention, sliding_attention")
    if "sliding_attention" not in kinds:
        return ()
    if len(kinds) != depth:
        raise f.fail("layer_types", f"found {len(kinds)} entries, allowed: one for each of {depth} layers")
    window = f.need("sliding_window")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _heads(f: _Fields) -> dict[str, Any]:
    """Markov and confidence heads. A rank of 0 is DFlash."""
    rank = f.need("markov_rank")
    kind = f.need("markov_head_type") if rank else None
    if kind not in (None, "vanilla", "gated", "rnn"):
        raise f.fail("markov_head_type", f"found {kind!r}, allowed: vanilla, gated, rnn")
    confidence = "none"
    if f.need("enable_confidence_head"):
        confidence = "markov" if f.need("confidence_head_with_markov") else "hidden"
    name = "dspark" if rank else "dflash"
    return {"kind": name, "markov_rank": rank, "markov_head_type": kind, "confidence": confidence}


# ------------------------------------------------------------------------------------------------ dialects


def _deepspec(f: _Fields, depth: int | None) -> dict[str, Any]:
    """DeepSpec (§1.1): everything at the top level, layer ids are decoder-layer indices. Its DFlash is rank 0."""
    f.refuse("is_causal", False)
    return _transformer(f) | _heads(f) | {
        "dialect": "deepspec",
        "layers": "qwen3",
        "num_target_layers": f.get("num_target_layers"),
        "taps": f.ids("target_layer_ids"),
        "block_size": f.need("block_size"),
        "sample_from_anchor": f.get("sample_from_anchor", True),
        "mask_token_id": f.need("mask_token_id"),
        "target_hidden_size": f.get("target_hidden_size", f.need("hidden_size")),
        "draft_vocab_size": f.get("draft_vocab_size", f.need("vocab_size")),
    }  # fmt: skip


def _specforge(f: _Fields, depth: int | None) -> dict[str, Any]:
    """SpecForge and RadixArk (§1.9): DeepSpec's fields, nested in dflash_config. Trained behind SGLang, which captures
    what a layer's successor reads: TensorRT-LLM measures 4.5 points of acceptance less for K3's sums (its
    modeling_kimi_linear.py on RadixArk/Kimi-K3-DSpark)."""
    nested = f.sub("dflash_config")
    _plain_attention(nested)
    return _transformer(f) | _heads(nested) | {
        "dialect": "specforge",
        "layers": "qwen3",
        "stream": "mixture",
        "num_target_layers": f.get("num_target_layers"),
        "taps": nested.ids("target_layer_ids"),
        "block_size": f.need("block_size"),
        "mask_token_id": nested.need("mask_token_id"),
        "target_hidden_size": f.get("target_hidden_size", f.need("hidden_size")),
    }  # fmt: skip


def _dflash(f: _Fields, depth: int | None) -> dict[str, Any]:
    """DFlash by z-lab (§1.11): slots fill their own position, so a block of B has B - 1 drafts. For K3 it was trained on
    what a layer's successor reads (vLLM's pull request 50487)."""
    nested = f.sub("dflash_config")
    _plain_attention(nested)
    layers = f.need("num_hidden_layers")
    depth = depth or f.get("num_target_layers")
    if "target_layer_ids" in nested:
        taps = nested.ids("target_layer_ids")
    elif depth is None:
        raise nested.fail("target_layer_ids", "missing")
    elif layers == 1:
        taps = (depth // 2,)
    else:  # evenly from the second layer to the third last
        taps = tuple(round(1 + (depth - 4) * i / (layers - 1)) for i in range(layers))
    return _transformer(f) | {
        "dialect": "dflash",
        "kind": "dflash",
        "layers": "qwen3",
        "stream": "mixture",
        "num_target_layers": f.get("num_target_layers"),
        "taps": taps,
        "block_size": f.get("block_size") if "block_size" in f else nested.need("block_size"),
        "sample_from_anchor": False,
        "mask_token_id": nested.need("mask_token_id"),
    }  # fmt: skip


def _plain_attention(nested: _Fields) -> None:
    nested.refuse("causal", False)
    nested.refuse("use_swa", False)
    nested.refuse("attention_sink_bias", False)


def _speculators(f: _Fields, depth: int | None) -> dict[str, Any]:
    """speculators (§1.10): layer ids count the embeddings as 0, vocabularies may be pruned, dimensions are nested."""
    kind = f.need("speculators_model_type")
    if kind not in ("dspark", "dflash", "eagle3"):
        raise f.fail("speculators_model_type", f"found {kind!r}, allowed: dspark, dflash, eagle3")
    t = f.sub("transformer_layer_config")
    key = "aux_hidden_state_layer_ids"
    key = f"eagle_{key}" if f"eagle_{key}" in f else key
    if key in f:
        ids = f.ids(key)
    elif depth is None:
        raise f.fail(key, "missing")
    else:
        ids = (2, depth // 2, depth - 3)
    values = _transformer(t) | {
        "dialect": "speculators",
        "kind": kind,
        "layers": "qwen3",
        "taps": tuple(i - 1 for i in ids),
        "target_hidden_size": f.get("target_hidden_size", t.need("hidden_size")),
        "draft_vocab_size": f.get("draft_vocab_size", t.need("vocab_size")),
    }
    if kind == "eagle3":
        for flag in ("norm_before_fc", "fc_norm", "norm_output"):
            f.refuse(flag, False)
        norm = f.get("norm_before_residual", False)
        layers = "qwen3" if t.get("model_type") == "qwen3" else "llama"
        return values | {"layers": layers, "norm_before_residual": norm, "block_size": 1}
    if any(values["windows"]) and not f.get("sliding_window_non_causal", False):
        raise f.fail("sliding_window_non_causal", "found false with sliding layers, allowed: true")
    values |= {
        "block_size": f.need("block_size"),
        "sample_from_anchor": f.get("sample_from_anchor", False),
        "mask_token_id": f.need("mask_token_id"),
    }
    return values | (_heads(f) | {"kind": "dspark"} if kind == "dspark" else {})


def _deepspec_eagle3(f: _Fields, depth: int | None) -> dict[str, Any]:
    """EAGLE-3 as trained by DeepSpec (§1.12): five taps, Qwen3 attention, full vocabulary."""
    return _transformer(f, "draft_num_hidden_layers" if "draft_num_hidden_layers" in f else "num_hidden_layers") | {
        "dialect": "deepspec",
        "kind": "eagle3",
        "layers": "qwen3",
        "windows": (),
        "num_target_layers": f.get("num_target_layers"),
        "taps": f.ids("target_layer_ids"),
        "block_size": 1,
    }


def _eagle3(f: _Fields, depth: int | None) -> dict[str, Any]:
    """Mainstream EAGLE-3: three taps and a pruned vocabulary. Without ids: low, middle, high, as its trainers do."""
    nested = f.sub("eagle_config") if "eagle_config" in f else f
    key = "eagle_aux_hidden_state_layer_ids"
    if key in nested:
        taps = tuple(i - 1 for i in nested.ids(key))  # counted like hidden states: 0 is the embedding output
    elif depth is None:
        raise f.fail(key, "missing")
    else:
        taps = (1, depth // 2 - 1, depth - 4)
    for flag in ("norm_before_fc", "fc_norm", "norm_output"):
        f.refuse(flag, False)
    return _transformer(f) | {
        "dialect": "eagle3",
        "kind": "eagle3",
        "layers": "llama",
        "taps": taps,
        "block_size": 1,
        "target_hidden_size": f.get("target_hidden_size", f.need("hidden_size")),
        "draft_vocab_size": f.get("draft_vocab_size", f.need("vocab_size")),
        "norm_before_residual": f.get("norm_before_residual", False),
    }


def _kimi_k3(f: _Fields, depth: int | None) -> dict[str, Any]:
    """Kimi-K3 MLA (§1.8), as vLLM 0.33 reads Inferact's (transformers_utils/configs/k3_dspark.py, models/kimi_k3/
    nvidia/dspark_mla.py): latent attention with rotary keys and no output gate, SwiGLU, the target's LM head.
    num_target_layers counts the taps; the block size is a run-time choice, 7 by custom. A confidence head that the
    config does not name is left unread. aux_hidden_stream (TokenSpeed's): "attn_res" for what a layer's successor
    reads; without it the sums, as vLLM feeds them by default and TokenSpeed to Inferact's."""
    for flag in ("mla_use_nope", "mla_use_output_gate", "mla_use_qk_norm", "dspark_bonus_anchor", "fc_norm"):
        f.refuse(flag, False)
    f.refuse("attention_bias", False)
    f.refuse("logit_scale", 1.0)
    f.refuse("n_routed_experts", 0)
    f.refuse("draft_vocab_size", f.need("vocab_size"))
    f.refuse("aux_hidden_stream", "prefix", "attn_res")
    taps = f.ids("target_layer_ids")
    f.refuse("num_target_layers", len(taps))  # one for each layer id
    rank, windows = f.number("markov_rank"), _windows(f, f.need("num_hidden_layers"))
    if rank < 1:
        raise f.fail("markov_rank", f"found {rank}, allowed: 1 and up")
    if windows:
        raise f.fail("layer_types", "found sliding_attention, allowed: full_attention with latent attention")
    sizes = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    rope, factor = _deepseek_rope(f)
    confidence = "none"
    if f.get("enable_confidence_head", False):
        confidence = "markov" if f.get("confidence_head_with_markov", False) else "hidden"
    return _transformer(f) | {
        "dialect": "k3",
        "kind": "dspark",
        "layers": "mla",
        "num_key_value_heads": f.need("num_attention_heads"),
        "head_dim": f.number("qk_nope_head_dim") + f.number("qk_rope_head_dim"),
        "mla": {name: f.need(name) for name in sizes} | {"score_factor": factor},
        "rope": rope,
        "target_hidden_size": f.get("target_hidden_size", f.need("hidden_size")),
        "num_target_layers": f.get("target_num_hidden_layers"),
        "taps": taps,
        "stream": "mixture" if f.get("aux_hidden_stream") == "attn_res" else "sum",
        "block_size": f.get("block_size", 7),
        "sample_from_anchor": f.get("sample_from_anchor", True),
        "mask_token_id": f.need("mask_token_id"),
        "markov_rank": rank,
        "markov_head_type": f.get("markov_head_type", "vanilla"),
        "confidence": confidence,
    }


def _deepseek_rope(f: _Fields) -> tuple[dict[str, Any], float]:
    """(fields of a `Rope`, factor on scores) as vLLM derives them for DeepSeek's YaRN: the factor on cosines and sines
    is m(mscale) / m(mscale_all_dim), m(x) = 0.1 x log(factor) + 1, and scores get m(mscale_all_dim) squared, unless
    attention_factor is 1. mscale is 1 and mscale_all_dim 0 where they are not given."""
    key = "rope_scaling" if "rope_scaling" in f and "rope_parameters" not in f else "rope_parameters"
    nested = f.sub(key) if key in f else _Fields({}, f.where, f"{key}.")
    rope = rope_values({key: nested.values, "rope_theta": f.get("rope_theta", 50000.0)})
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "yarn", "deepseek_yarn"):
        raise nested.fail("rope_type", f"found {kind!r}, allowed: default, yarn")
    if kind == "default":
        return {"rope_theta": rope["rope_theta"]}, 1.0
    nested.refuse("truncate", True)
    nested.refuse("attention_factor", 1.0)
    nested.need("original_max_position_embeddings")
    factor, on_scores = nested.number("factor"), "attention_factor" not in nested

    def m(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    all_dim = m(nested.number("mscale_all_dim", 0.0))
    rope |= {"rope_type": "yarn", "attention_factor": m(nested.number("mscale", 1.0)) / all_dim}
    return rope, all_dim**2 if on_scores else 1.0


def _gemma4(f: _Fields, depth: int | None) -> dict[str, Any]:
    """Gemma4 (§1.6): DeepSpec's fields around Gemma's attention, norms and softcap."""
    shared = bool(f.get("attention_k_eq_v", False))
    own = ("hidden_act", "layer_types", "rope_parameters", "rope_scaling")
    plain = _Fields({k: v for k, v in f.values.items() if k not in own}, f.where)
    return _transformer(plain) | _heads(f) | {
        "dialect": "gemma4",
        "layers": "gemma4",
        "head_dim": f.get("global_head_dim", f.get("head_dim")),
        "num_key_value_heads": f.get("num_global_key_value_heads") if shared else f.need("num_key_value_heads"),
        "num_target_layers": f.get("num_target_layers"),
        "taps": f.ids("target_layer_ids"),
        "block_size": f.need("block_size"),
        "mask_token_id": f.need("mask_token_id"),
    }  # fmt: skip


def _deepseek_v4(f: _Fields, depth: int | None) -> dict[str, Any]:
    raise f.fail(
        "dspark_block_size", "found a drafter inside a DeepSeek-V4 checkpoint (mtp.*), whose layers are not built"
    )
