"""vLLM's own DSpark and ours on one checkpoint: the same drafts at the same contexts, the same tokens, the same AL.

Optional: DSPARK_VLLM_PYTHON names the python of an environment made by tests/vllm/make_venv.sh. About 40 s a case.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drafters.dspark.dialects import parse
from drafters.dspark.load import load_drafter
from drafters.dspark.network import tensor_shapes as drafter_shapes
from dspark_runtime.models.transformer import tensor_shapes
from dspark_runtime.targets import load_target
from eval.check_drafter import rebuilt, write
from tests.drafters import planted
from tests.drafters.dspark_cases import noise
from tests.drafters.dspark_cases import write as write_checkpoint

PYTHON = os.environ.get("DSPARK_VLLM_PYTHON", "")
ENVIRONMENT = dict(
    VLLM_TRITON_ON_CPU="1", VLLM_USE_V2_MODEL_RUNNER="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1",
)  # fmt: skip
K, TOKENS = 4, 32
LENGTHS = (1, 5, 16, 17, 63, 64, 65, 150)  # around vLLM's chunks of 64 shared by all requests
RANDOM = planted.DIMS | dict(attention_bias=False, hidden_size=64)


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


def checkpoints(name: str, folder: Path) -> tuple[Path, Path]:
    """Folders of a target and its drafter. random: nothing is accepted, every weight counts. planted: some is."""
    shared = dict(model_type="qwen3", hidden_act="silu", tie_word_embeddings=False, torch_dtype="float32")
    if name == "random":
        dims = RANDOM | shared
        config = planted.CONFIG | dims | dict(num_hidden_layers=2, target_layer_ids=[0, 2, 4], markov_rank=12)
        tensors = noise(drafter_shapes(parse(config, name)), 0.3, 5)
        tensors |= noise({"embed_tokens.weight": (48, 64), "lm_head.weight": (48, 64)}, 0.3, 6)
    else:
        dims = planted.DIMS | shared
        config, tensors = planted.CONFIG | dims | dict(num_hidden_layers=1), planted.drafter_tensors(planted.target())
        w2 = tensors["markov_head.markov_w2.weight"]
        w2 += 0.5 * w2.std() * noise({"x": tuple(w2.shape)}, 1.0, 7)["x"]
    target = folder / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(dims | dict(architectures=["Qwen3ForCausalLM"])))
    if name == "random":
        from dspark_runtime.targets import target_config

        weights = noise(tensor_shapes(target_config(str(target))), 0.25, 4)
    else:
        weights = planted.target_tensors()[1]
    save_file({key: x.contiguous() for key, x in weights.items()}, target / "model.safetensors")
    return target, write_checkpoint(folder / "drafter", config, tensors)


def vllm_run(target: Path, drafter: Path, prompts: list[list[int]], folder: Path) -> dict[str, Any]:
    script = Path(__file__).with_name("vllm_drafts.py")
    out = folder / "vllm.json"
    command = [PYTHON, str(script), str(target), str(drafter), json.dumps(prompts), str(K), str(TOKENS), str(out)]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", ["random", "planted"])
def test_vllm_drafts_and_writes_the_same(name: str, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    target, drafter = checkpoints(name, tmp_path)
    g = torch.Generator().manual_seed(3)
    prompts = [torch.randint(48, (n,), generator=g).tolist() for n in LENGTHS]
    theirs = vllm_run(target, drafter, prompts, tmp_path)

    model = load_target(str(target), dtype="float32", device="cpu").model
    own = load_drafter(drafter, model, candidates=48)
    # Longer than theirs, so that there are whole chains up to their end.
    ours = write(model, own, prompts, TOKENS + K + 1, K)
    assert [ours.texts[i][: n + TOKENS] for i, n in enumerate(LENGTHS)] == theirs["texts"]

    # A near tie may fall either way: chains count that survive a change of the LM head by some times its rounding.
    head = own.network.lm_head
    shaken = rebuilt(own, lm_head=head * (1 + 1e-5 * torch.randn(head.shape, generator=g)))
    again = write(model, shaken, prompts, TOKENS + K + 1, K)
    sure = [(i, n, chain) for i, n, chain in theirs["drafts"] if ours.chains[i, n] == again.chains[i, n]]
    assert len(sure) > 0.95 * len(theirs["drafts"]) and len(sure) > 40
    assert [chain for _, _, chain in sure] == [ours.chains[i, n] for i, n, _ in sure]
    assert len({tuple(chain) for _, _, chain in sure}) > 20

    # Their own count of accepted drafts, from the same chains on the same text. A last step may be cut short.
    counts = [ours.accepted(K)[i, n] for i, n, _ in theirs["drafts"]]
    assert theirs["steps"] == pytest.approx(len(counts), abs=len(prompts))
    assert theirs["accepted"] == pytest.approx(sum(counts), abs=K * len(prompts))
    if name == "planted":
        assert 0.5 < sum(counts) / len(counts) < K
