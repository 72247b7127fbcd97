"""A whole checkpoint of two small layers (configs/models/tiny.yaml) with a tokenizer of 128 words, and a recipe for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dspark_runtime.configs import load_model_config
from training.config import TrainConfig

END, USER, ASSISTANT, MARK = "<|end|>", "<|user|>", "<|assistant|>", "###"
WORDS = "red blue green river stone cloud table spoon ladder garden window paper music winter summer number".split()
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer() -> Any:
    """Ids of whole words, with and without the space before them; text comes back as it went in."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    texts = [END, "<unk>", USER, ASSISTANT, MARK, "\n", '"""', "def", ":", "(", ")", ".", "?", " ", "1", "2", "3", "4", "\0"]
    texts += [space + word for word in WORDS for space in ("", " ")]
    texts += [f'"""{word}"""' for word in WORDS]  # written, never read: docstrings of a model that cannot write
    texts += [f" w{i}" for i in range(128 - len(texts))]
    inner = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r' ?[a-z]+\d*|\n|"""|###|\d| |[^\w\s]'), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=END, unk_token="<unk>", additional_special_tokens=[USER, ASSISTANT],
        chat_template=TEMPLATE,
    )  # fmt: skip


def write_target(folder: Path) -> Path:
    """The checkpoint, random: every next token is nearly as likely as any other."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = load_model_config("tiny")
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "rms_norm_eps max_position_embeddings tie_word_embeddings"
    )
    config = LlamaConfig(**{name: getattr(c, name) for name in names.split()}, eos_token_id=0, bos_token_id=None)
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p *= 4.0
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def recipe(target: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    """A run of seconds. changes: fields of a section, by its name."""
    values: dict[str, Any] = dict(
        target=str(target),
        seed=3,
        drafter=dict(num_hidden_layers=1, intermediate_size=32, target_layer_ids=[0, 1], block_size=4,
                     mask_token_id=127, markov_rank=4),
        prompts=dict(
            self_written=24, free_share=0.3, max_tokens=64,
            domains=[
                dict(title="Words", examples=["red river stone", "blue cloud table", "green spoon"], shots=2,
                     template="green garden paper: <turn>"),
                dict(title="Functions", examples=['def red():\n"""red river"""', 'def blue():\n"""blue stone"""'],
                     shots=1, separator="\n###\n", opening="def"),
            ],
        ),
        answers=dict(max_tokens=16, num_requests=8, shard=8, answers_per_prompt=2, file_answers=3),
        training=dict(steps=8, rows=2, row_length=96, anchors=8, lr=1e-2, held_out=0.1, log_every=1, save_every=3),
    )  # fmt: skip
    for section, fields in changes.items():
        values[section] = values[section] | fields if isinstance(fields, dict) else fields
    return values


def config(target: Path, **changes: dict[str, Any]) -> TrainConfig:
    return TrainConfig.model_validate(recipe(target, **changes))
