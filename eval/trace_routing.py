"""`dspark trace-routing`: which experts a real model picks for the tokens that it writes, as a file for `--routing`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from dspark_runtime.engine import Engine
from dspark_runtime.errors import ConfigError
from dspark_runtime.forced_routing import Independent, Recorded, Trace
from dspark_runtime.prompts import encode, load_prompts
from dspark_runtime.sampling import SamplingParams
from eval.bench import Progress, load
from eval.report import table
from verify_kernels.batch import PassBatch

if TYPE_CHECKING:
    from eval.schema import BenchConfig

PAGE_SIZE = 16
WINDOWS = (1, 4, 8, 16, 32, 64)


def choices(model: object, ids: list[int]) -> np.ndarray:
    """[len(ids), L, k] int16: one pass over a whole sequence."""
    n = len(ids)
    pages = -(-n // PAGE_SIZE)
    cache = model.allocate(pages + 1, PAGE_SIZE)
    device = model.device
    local = torch.arange(n, device=device)
    batch = PassBatch(
        token_ids=torch.tensor(ids, device=device),
        positions=local,
        request_offsets=torch.tensor([0, n], dtype=torch.int32, device=device),
        context_lens=torch.zeros(1, dtype=torch.int32, device=device),
        page_table=torch.arange(1, pages + 1, dtype=torch.int32, device=device)[None],
        slot_mapping=local + PAGE_SIZE,
        ancestor_masks=None,
        max_query_len=n,
        max_kv_len=n,
    )
    model.forward(batch, cache)
    return torch.stack(batch.experts, 1).cpu().numpy().astype(np.int16)


def record(config: BenchConfig, limit: int | None, out: Path, command: str, progress: Progress) -> str:
    """Greedy answers to the prompts, and the experts of every token of an answer. Returns a table of how many a run of
    neighbours touches. Raises ConfigError."""
    texts = load_prompts(config.prompts)
    target = load(config.target, config)
    c = target.config
    if not c.num_experts:
        raise ConfigError(f"target: {target.name} has no experts, allowed: a mixture-of-experts model")
    if target.tokenizer is None:
        raise ConfigError(f"target: {target.name} has no tokenizer, so it cannot read prompts")
    model = target.model
    prompts = [encode(target.tokenizer, text) for text in texts.texts[:limit]]
    longest = max(map(len, prompts)) + config.max_tokens
    if longest > model.max_model_len:
        raise ConfigError(f"tokens: prompt and answer make {longest}, allowed: {model.max_model_len} in {target.name}")
    engine = Engine(model, max_num_requests=min(8, len(prompts)), max_model_len=longest)
    progress("answering", 0, 2)
    answers = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=config.max_tokens))
    parts = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers)):
        if answer.error:
            raise ConfigError(f"prompts: {texts.name}, prompt {i + 1}: {answer.error}")
        parts.append(choices(model, prompt + answer.token_ids)[len(prompt) :])
        progress("recording", len(prompts) + i, 2 * len(prompts))
    offsets = np.cumsum([0, *map(len, parts)])
    trace = Trace(np.concatenate(parts), offsets, c.num_experts)
    trace.save(out, {"target": target.name, "prompts": texts.name, "prompts_sha256": texts.sha256, "command": command})
    return summary(trace, config.seed) + f"\n{len(trace.experts)} tokens of {len(parts)} answers: {out}\n"


def summary(trace: Trace, seed: int) -> str:
    """Different experts of a layer in a pass of T neighbours of one text, of T texts, and by the uniform law."""
    cpu = torch.device("cpu")
    recorded = Recorded("trace", trace, seed, cpu)
    _, layers, top_k = trace.experts.shape
    uniform = Independent("uniform", 0.0, layers, trace.num_experts, top_k, seed, cpu)
    longest = int(np.diff(trace.offsets).max())
    rows = [
        (str(t), f"{recorded.expected([t]):.1f}", f"{recorded.expected([1] * t):.1f}", f"{uniform.expected([t]):.1f}")
        for t in WINDOWS
        if t <= longest
    ]
    return table(("tokens", "of one text", "of as many texts", "uniform"), rows) + "\n"
