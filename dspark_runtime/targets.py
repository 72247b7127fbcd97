"""Loading a target by name: the embedded model, a local or hub checkpoint, a GGUF file, or a bare architecture."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from dspark_runtime import smollm2
from dspark_runtime.configs import load_model_config, names
from dspark_runtime.cost.facts import is_facts
from dspark_runtime.errors import CheckpointError, ConfigError, DownloadError
from dspark_runtime.models.config import ModelConfig, from_hf, to_hf
from dspark_runtime.models.kimi_k3 import KimiK3, KimiK3Config, dummy_kimi_k3, kimi_k3_config
from dspark_runtime.models.transformer import Transformer
from dspark_runtime.weights import DummyTensors, Safetensors, read_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Target:
    """A model and, where the checkpoint has one, its tokenizer."""

    name: str
    model: Transformer | KimiK3
    tokenizer: PreTrainedTokenizerBase | None
    config: ModelConfig | KimiK3Config


def load_target(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    weights: str = "auto",
    seed: int = 0,
    max_model_len: int | None = None,
    quantization: Literal["none", "fp8"] = "none",
) -> Target:
    """Load a target.

    name: "smollm2" (fetched once), a local folder or .gguf file, an architecture of configs/models or a .yaml file (with
    weights="dummy"), or a hub id (safetensors). dtype "auto" is bfloat16; device "auto" is CUDA where there is one.
    weights "dummy": seeded random weights of the named architecture; quantization is theirs, a checkpoint says itself what
    it is. Raises ConfigError, CheckpointError or
    DownloadError, one line each. No remote code is run.
    """
    torch_dtype, torch_device = _dtype(dtype), device_of(device)
    if weights not in ("auto", "dummy"):
        raise ConfigError(f"weights: found {weights!r}, allowed: auto, dummy")
    if quantization != "none" and weights != "dummy":
        raise ConfigError(f"quantization: found {quantization} with a checkpoint, which says itself what it is; allowed: none")
    if name.endswith((".yaml", ".yml")) or name in names("models"):
        config = target_config(name)
        if weights != "dummy":
            raise ConfigError(f"target: {name} is an architecture without weights; add --weights dummy for timing")
        return _dummy(Path(name).stem, config, torch_dtype, torch_device, seed, max_model_len, quantization)
    path = _locate(name)
    if path.suffix == ".gguf":
        if weights == "dummy":
            raise ConfigError(f"weights: found dummy with the file {path.name}, allowed: auto, or an architecture YAML")
        config, tensors = read_gguf(path)
        tokenizer = _gguf_tokenizer(path, cached=name == "smollm2")
    else:
        config = _folder_config(path)
        if weights == "dummy":
            return _dummy(name, config, torch_dtype, torch_device, seed, max_model_len, quantization)
        tensors = Safetensors(path)
        tokenizer = _folder_tokenizer(path)
    model = Transformer(
        config,
        tensors,
        name=name,
        dtype=torch_dtype,
        device=torch_device,
        max_model_len=max_model_len,
        source=str(path),
    )
    return Target(name, model, tokenizer, config)


def hf_folder(
    name: str, folder: Path, weights: str = "auto"
) -> tuple[Path, ModelConfig, PreTrainedTokenizerBase | None]:
    """A target for engines that read Hugging Face folders: (its folder, its shape, its tokenizer).

    name and weights as for `load_target`. What is no such folder is written into `folder`, in bfloat16; with weights
    "dummy" no more than its config.json. Raises ConfigError, CheckpointError or DownloadError.
    """
    if weights not in ("auto", "dummy"):
        raise ConfigError(f"weights: found {weights!r}, allowed: auto, dummy")
    tensors = tokenizer = None
    if name.endswith((".yaml", ".yml")) or name in names("models"):
        config = attention_config(name)
        if weights != "dummy":
            raise ConfigError(f"target: {name} is an architecture without weights; add --weights dummy for timing")
    else:
        path = _locate(name)
        if path.suffix != ".gguf":
            return path, _folder_config(path), None if weights == "dummy" else _folder_tokenizer(path)
        if weights == "dummy":
            raise ConfigError(f"weights: found dummy with the file {path.name}, allowed: auto, or an architecture YAML")
        config, tensors = read_gguf(path)
        if config.num_experts:
            raise ConfigError(f"target: found {name}, a mixture of experts, allowed: .gguf files without experts")
        tokenizer = _gguf_tokenizer(path, cached=name == "smollm2")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_hf(config), indent=1))
    if tensors is not None:
        from safetensors.torch import save_file

        halves = {key: x.to(torch.bfloat16).contiguous() for key, x in tensors.items()}
        save_file(halves, folder / "model.safetensors", {"format": "pt"})
    return folder, config, tokenizer


def cache_status() -> dict[str, str]:
    """What `dspark doctor` says of fetched files."""
    return {
        "cache": str(smollm2.cache_folder()),
        "smollm2": "in the cache" if smollm2.is_cached() else "not fetched yet (98 MB from the Python index at first use)",
    }


def _dummy(
    name: str,
    config: ModelConfig | KimiK3Config,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    max_model_len: int | None,
    quantization: Literal["none", "fp8"],
) -> Target:
    if isinstance(config, KimiK3Config):
        if quantization != "none":
            raise ConfigError(f"quantization: found {quantization} with {name}, allowed: none (its experts are mxfp4)")
        return Target(name, dummy_kimi_k3(name, config, dtype, device, seed, max_model_len), None, config)
    tensors = DummyTensors(config, seed, dtype, device, quantization)
    model = Transformer(config, tensors, name=name, dtype=dtype, device=device, max_model_len=max_model_len)
    return Target(name, model, None, config)


def _dtype(name: str) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16
    if name not in DTYPES:
        raise ConfigError(f"dtype: found {name!r}, allowed: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def device_of(name: str) -> torch.device:
    """auto: CUDA where there is one. Raises ConfigError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: found {name!r}, allowed: auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device: found {name!r}, allowed: this machine has {torch.cuda.device_count()} CUDA devices")
    # With its index, as tensors have it: devices are compared.
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else device


def _locate(name: str) -> Path:
    """The local folder or file behind a name, fetched first if it is the embedded target or a hub id."""
    if name == "smollm2":
        return smollm2.gguf_path()
    path = Path(name)
    if name and (path.is_dir() or (path.is_file() and path.suffix == ".gguf")):
        return path
    choices = f"smollm2, a folder, a .gguf file, a hub id, or one of {', '.join(names('models'))}"
    if path.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")) or path.suffix == ".gguf":
        raise ConfigError(f"target: found {name!r}, allowed: {choices}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]))
    except HFValidationError:
        raise ConfigError(f"target: found {name!r}, allowed: {choices}") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DownloadError(
            f"target: {name} could not be fetched from the hub ({why}); check the name and the network, or give a local folder"
        ) from None


def target_config(name: str) -> ModelConfig | KimiK3Config:
    """The architecture of a target, without its weights: any name that `load_target` takes."""
    if name.endswith((".yaml", ".yml")) or name in names("models"):
        return kimi_k3_config(name) if is_facts(name) else load_model_config(name)
    path = _locate(name)
    return read_gguf(path)[0] if path.suffix == ".gguf" else _folder_config(path)


def attention_config(name: str) -> ModelConfig:
    """As `target_config`, of a decoder whose layers all have keys and values a head. Raises ConfigError for others."""
    config = target_config(name)
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"target: found {name}, allowed: Llama, Qwen3 and Qwen3-MoE (other kernels are not built)")
    return config


def _folder_config(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: config.json: missing")
    values = _json_object(path)
    generation = folder / "generation_config.json"
    if generation.is_file():  # chat models list their end-of-turn tokens only here
        values["eos_token_id"] = _json_object(generation).get("eos_token_id", values.get("eos_token_id"))
    return from_hf(values, str(path))


def _json_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: found {type(values).__name__}, expected a JSON object")
    return values


def _folder_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever a tokenizer's files may break: the library has no error of its own
        why = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{folder}: tokenizer: cannot be loaded ({type(error).__name__}: {why})") from None


def _gguf_tokenizer(path: Path, cached: bool) -> PreTrainedTokenizerBase:
    """The tokenizer inside a GGUF file. Building it takes seconds, so the embedded target's is kept beside the file."""
    from transformers import AutoTokenizer

    folder = path.parent / "tokenizer"
    if cached and (folder / "complete").is_file():
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    if cached:
        tokenizer.save_pretrained(folder)
        (folder / "complete").write_text(f"{os.path.getsize(path)}\n")
    return tokenizer
