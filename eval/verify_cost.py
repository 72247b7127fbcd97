"""What a verify pass costs against a pass of one token, and a plain step against transformers' own.

    python -m eval.verify_cost [--threads 2] [--context 256] [--json FILE]

Everything is timed in one process, in turns (one pass of each kind, then the next round), on the embedded target in
bfloat16, so that a busy machine disturbs all of them alike. A pass is the whole forward with LM head and arg-max. The
peer is transformers' own decode step with a dynamic cache, cropped back after each pass.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

TOKENS = (1, 2, 4, 8, 16, 32, 64)


def our_passes(model, context: int) -> dict[str, Callable[[], None]]:
    """One closure per number of tokens: a causal pass over `context` cached tokens."""
    import torch

    from verify_kernels.batch import PassBatch

    pages = -(-(context + max(TOKENS)) // 16)
    cache = model.allocate(pages + 1, 16)
    table = torch.arange(1, pages + 1, dtype=torch.int32)[None]
    ids = torch.randint(0, model.vocab_size, (context + max(TOKENS),), generator=torch.Generator().manual_seed(0))

    def batch(start: int, count: int) -> PassBatch:
        positions = torch.arange(start, start + count)
        return PassBatch(
            token_ids=ids[start : start + count],
            positions=positions,
            request_offsets=torch.tensor([0, count], dtype=torch.int32),
            context_lens=torch.tensor([start], dtype=torch.int32),
            page_table=table,
            slot_mapping=16 + positions,  # page 0 is the scratch page
            ancestor_masks=None,
            max_query_len=count,
            max_kv_len=start + count,
        )

    model.forward(batch(0, context), cache)

    def one(count: int) -> Callable[[], None]:
        def run() -> None:
            hidden, _ = model.forward(batch(context, count), cache)
            model.greedy(hidden)

        return run

    return {f"dspark T={t}": one(t) for t in TOKENS}


def their_passes(context: int) -> dict[str, Callable[[], None]]:
    """transformers' forward over a dynamic cache, and one step of its own `generate`."""
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    from dspark_runtime.smollm2 import gguf_path
    from dspark_runtime.weights import read_gguf

    shape, tensors = read_gguf(gguf_path())
    fields = shape.model_dump(exclude={"architecture", "rope", "eos_token_ids"})
    model = LlamaForCausalLM(LlamaConfig(**fields, rope_parameters=dict(rope_type="default", rope_theta=shape.rope.rope_theta)))
    model.load_state_dict(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    model = model.to(torch.bfloat16).eval()
    ids = torch.randint(0, model.config.vocab_size, (1, context + max(TOKENS)), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)
    model(ids[:, :context], past_key_values=cache, use_cache=True)

    def one(count: int) -> Callable[[], None]:
        def run() -> None:
            out = model(ids[:, context : context + count], past_key_values=cache, use_cache=True)
            out.logits.argmax(-1)
            cache.crop(-count)

        return run

    passes = {f"transformers T={t}": one(t) for t in (1, 8, 16)}
    # generate's per-step cost is the difference between a long and a short call, so that its prefill drops out.
    prompt = ids[:, :context]
    mask = torch.ones_like(prompt)

    def generate(new: int) -> None:
        model.generate(
            prompt, attention_mask=mask, do_sample=False, min_new_tokens=new, max_new_tokens=new, pad_token_id=0
        )

    def step() -> float:
        start = time.perf_counter()
        generate(1)
        middle = time.perf_counter()
        generate(9)
        return (time.perf_counter() - middle - (middle - start)) / 8

    passes["transformers generate step"] = step
    return passes


def main(
    threads: Annotated[int, typer.Option(help="CPU threads")] = 2,
    context: Annotated[int, typer.Option(help="cached tokens before each pass")] = 256,
    rounds: Annotated[int, typer.Option(help="timed rounds after one warm-up round")] = 15,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
) -> None:
    import torch
    from rich.console import Console
    from rich.table import Table

    from dspark_runtime.targets import load_target
    from eval.environment import write_result

    torch.set_num_threads(threads)
    with torch.inference_mode():
        model = load_target("smollm2", dtype="bfloat16", device="cpu").model
        passes = our_passes(model, context) | their_passes(context)
        times: dict[str, list[float]] = {name: [] for name in passes}
        for round_ in range(rounds + 1):
            for name, run in passes.items():
                start = time.perf_counter()
                seconds = run() or time.perf_counter() - start
                if round_:
                    times[name].append(seconds * 1e3)

    base = {name.split()[0]: statistics.median(t) for name, t in times.items() if name.endswith("T=1")}
    rows = []
    table = Table("pass", "median ms", "min ms", "against T=1", title=f"SmolLM2-135M, bfloat16, context {context}")
    for name, t in times.items():
        median = statistics.median(t)
        rows.append({"pass": name, "ms": median, "min_ms": min(t), "ratio": median / base[name.split()[0]]})
        table.add_row(name, f"{median:.2f}", f"{min(t):.2f}", f"{rows[-1]['ratio']:.2f}")
    Console().print(table)
    if json_file:
        command = f"python -m eval.verify_cost --threads {threads} --context {context} --rounds {rounds}"
        write_result(json_file, command, rows, threads=threads)


if __name__ == "__main__":
    typer.run(main)
