"""`dspark generate`: text as it is made, then its acceptance length and speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dspark_runtime.errors import ConfigError, DsparkError
from eval.bench import load, make_drafter, shapes
from dspark_runtime.prompts import encode
from eval.schema import BenchConfig

REPLACEMENT = "\ufffd"


def stream(engine: object, prompt: Sequence[int], params: object, write: Callable[[str], None]) -> str:
    """Run one request, handing its text to `write` as it grows; returns the closing line.

    A character whose last bytes are still to come is held back. Raises DsparkError if the request fails.
    """
    engine.submit(prompt, params)
    shown, last = "", None
    while engine.has_work:
        for last in engine.step():
            text = last.text if last.finish_reason else last.text.rstrip(REPLACEMENT)
            if text.startswith(shown):
                write(text[len(shown) :])
                shown = text
    if last.error:
        raise DsparkError(last.error)
    seconds = sum(record.ms["total"] for record in engine.records) / 1e3
    length = (last.num_accepted + last.num_steps) / last.num_steps
    return f"AL {length:.2f} · {len(last.token_ids) / seconds:.1f} tok/s"


def generate(
    prompt: str, config: BenchConfig, options: dict[str, object], raw: bool, write: Callable[[str], None]
) -> str:
    """Load target and drafter, stream one completion. options: fields of SamplingParams. Returns the closing line."""
    from drafters.tree import TreeSpec
    from dspark_runtime.engine import Engine
    from dspark_runtime.sampling import SamplingParams

    params = SamplingParams(**options)
    lines = shapes(config)
    spec = lines[-1][1] if lines else TreeSpec.chain(0)
    target = load(config.target, config)
    if target.tokenizer is None:
        raise ConfigError(f"target: {target.name} has no tokenizer, so it cannot generate text")
    drafter = make_drafter(config.drafter, target, config) if spec.num_drafts else None
    ids = encode(target.tokenizer, prompt, chat=not raw)
    engine = Engine(
        target.model,
        drafter,
        spec=spec,
        max_num_requests=1,
        max_model_len=min(target.model.max_model_len, len(ids) + params.max_tokens),
        rejection_sample_method=config.rejection_sample_method,
        detokenize=lambda tokens: target.tokenizer.decode(tokens, skip_special_tokens=True),
    )
    return stream(engine, ids, params, write)
