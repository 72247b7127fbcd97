"""vLLM in a process of its own, and small checkpoints for it. Optional: DSPARK_VLLM_PYTHON names the python of an
environment made by tests/vllm/make_venv.sh."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drafters.dspark.dialects import parse
from drafters.dspark.network import tensor_shapes as drafter_shapes
from dspark_runtime.models.transformer import tensor_shapes
from dspark_runtime.targets import target_config
from tests.drafters import planted
from tests.drafters.dspark_cases import noise
from tests.drafters.dspark_cases import write as write_checkpoint

PYTHON = os.environ.get("DSPARK_VLLM_PYTHON", "")
ENVIRONMENT = dict(
    VLLM_TRITON_ON_CPU="1", VLLM_USE_V2_MODEL_RUNNER="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1", OMP_NUM_THREADS="1",
)  # fmt: skip
OFF = dict(DSPARK_VLLM_PLUGIN="0")
K, TOKENS, V = 4, 24, 48
SHARED = dict(model_type="qwen3", hidden_act="silu", tie_word_embeddings=False, torch_dtype="float32")
DIMS = planted.DIMS | SHARED | dict(attention_bias=False, hidden_size=64, num_hidden_layers=6)
CONFIG = planted.CONFIG | DIMS | dict(num_hidden_layers=2, target_layer_ids=[0, 2, 4], markov_rank=12)


@functools.cache
def why_not() -> str:
    """Why the group is skipped; empty if it can run."""
    if not PYTHON:
        return "DSPARK_VLLM_PYTHON: not set, expected the python of an environment made by tests/vllm/make_venv.sh"
    try:
        done = subprocess.run(
            [PYTHON, "-c", "import vllm"], env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=300
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"DSPARK_VLLM_PYTHON: {PYTHON} does not run ({error})"
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return f"DSPARK_VLLM_PYTHON: {PYTHON} cannot import vllm ({last})" if done.returncode else ""


def python(arguments: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """vLLM's python in an empty folder; skips the test where there is none."""
    if reason := why_not():
        pytest.skip(reason)
    variables = os.environ | ENVIRONMENT | environment
    return subprocess.run(
        [PYTHON, *arguments], env=variables, cwd=folder, capture_output=True, text=True, timeout=500
    )


def run(jobs: list[dict[str, Any]], folder: Path, **environment: str) -> tuple[dict[str, Any], str]:
    """See vllm_jobs.py -> (its OUT, its log)."""
    asked, out = folder / "jobs.json", folder / "out.json"
    asked.write_text(json.dumps(jobs))
    script = Path(__file__).with_name("vllm_jobs.py")
    done = python([str(script), str(asked), str(out)], folder, **environment)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-3000:]
    return json.loads(out.read_text()), log


def speculative(drafter: Path, method: str = "greedy", k: int = K, **more: Any) -> dict[str, Any]:
    return dict(method="dspark", model=str(drafter), num_speculative_tokens=k, draft_sample_method=method) | more


def random_target(folder: Path) -> Path:
    """Its next token depends strongly on its context."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(DIMS | dict(architectures=["Qwen3ForCausalLM"])))
    weights = noise(tensor_shapes(target_config(str(folder))), 0.25, 4)
    save_file(weights, folder / "model.safetensors")
    return folder


def random_drafter(folder: Path, **changes: Any) -> Path:
    """A drafter of `random_target` in DeepSpec's dialect with embedding and head of its own: every weight counts."""
    config = CONFIG | changes
    rows = config.get("draft_vocab_size", V)
    tensors = noise(drafter_shapes(parse(config, "random")), 0.3, 5)
    tensors |= noise({"embed_tokens.weight": (V, 64), "lm_head.weight": (rows, 64)}, 0.3, 6)
    if rows < V:
        ids = torch.randperm(V, generator=torch.Generator().manual_seed(5))[:rows].sort().values
        tensors["d2t"] = ids - torch.arange(rows)
    return write_checkpoint(folder, config, tensors)


def planted_pair(folder: Path) -> tuple[Path, Path]:
    """A target and a drafter that is often right."""
    dims = planted.DIMS | SHARED
    config, tensors = planted.CONFIG | dims | dict(num_hidden_layers=1), planted.drafter_tensors(planted.target())
    w2 = tensors["markov_head.markov_w2.weight"]
    w2 += 0.5 * w2.std() * noise({"x": tuple(w2.shape)}, 1.0, 7)["x"]
    target = folder / "target"
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(dims | dict(architectures=["Qwen3ForCausalLM"])))
    save_file({key: x.contiguous() for key, x in planted.target_tensors()[1].items()}, target / "model.safetensors")
    return target, write_checkpoint(folder / "drafter", config, tensors)


def prompts(lengths: tuple[int, ...], seed: int = 3) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(V, (n,), generator=g).tolist() for n in lengths]
