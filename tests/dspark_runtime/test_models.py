"""Every architecture against transformers, float32, on small random models and on the real embedded target."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from drafters.tree import DraftTree, TreeSpec
from dspark_runtime.errors import CheckpointError, ConfigError
from dspark_runtime.models.config import from_hf
from dspark_runtime.models.transformer import Transformer, tensor_shapes
from tests.dspark_runtime.passes import Pages

SMALL = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    attn_implementation="eager",
)
LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24)
CASES = {
    "llama": (LlamaForCausalLM, LlamaConfig, dict(rope_parameters=dict(rope_type="default", rope_theta=1e4))),
    "llama tied, llama3 rope": (LlamaForCausalLM, LlamaConfig, dict(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama biased, yarn rope": (LlamaForCausalLM, LlamaConfig, dict(rope_parameters=YARN, attention_bias=True)),
    "yarn with mscale": (LlamaForCausalLM, LlamaConfig, dict(rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=1.3))),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, dict(rope_parameters=dict(rope_type="default", rope_theta=1e6))),
    "qwen3 moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, EXPERTS | dict(norm_topk_prob=True)),
    "qwen3 moe, mixed layers": (Qwen3MoeForCausalLM, Qwen3MoeConfig, EXPERTS | dict(mlp_only_layers=[1], norm_topk_prob=False)),
}
TREE = TreeSpec((-1, 0, 0, 1, 1, 2, 3, 3, 5))


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def pair(request):
    """(transformers' model, ours) with the same random weights."""
    cls, config_cls, options = CASES[request.param]
    torch.manual_seed(1)
    theirs = cls(config_cls(**(SMALL | options))).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():  # norms and biases away from their trivial values
            p.copy_(torch.randn_like(p) * 0.3 + (1.0 if "norm" in name else 0.0))
    config = from_hf(theirs.config.to_dict() | {"architectures": [cls.__name__]}, "test")
    ours = Transformer(config, theirs.state_dict(), name="test", dtype=torch.float32, device="cpu")
    return theirs, ours


def reference(theirs, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return theirs(torch.tensor([ids])).logits[0]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a - b).abs().max() < 1e-4


@pytest.mark.parametrize("chunks", [[23], [7, 1, 15], [1] * 23])
@pytest.mark.parametrize("page_size", [4, 16])
def test_prompts_in_any_chunks(pair, chunks: list[int], page_size: int) -> None:
    theirs, ours = pair
    ids = torch.randint(0, 97, (23,)).tolist()
    pages = Pages(ours, 1, 40, page_size)
    got, start = [], 0
    for n in chunks:
        hidden, _ = ours.forward(pages.batch([0], [start], [ids[start : start + n]]), pages.cache)
        got.append(ours.logits(hidden))
        start += n
    close(torch.cat(got), reference(theirs, ids))


def test_requests_of_different_lengths_in_one_pass(pair) -> None:
    theirs, ours = pair
    prompts = [torch.randint(0, 97, (n,)).tolist() for n in (5, 1, 17, 90)]
    pages = Pages(ours, 4, 100, 8)
    hidden, _ = ours.forward(pages.batch([2, 0, 3, 1], [0] * 4, prompts), pages.cache)
    close(ours.logits(hidden), torch.cat([reference(theirs, p) for p in prompts]))
    greedy, best = ours.greedy(hidden)
    want = ours.logits(hidden).max(-1)
    assert torch.equal(greedy, want.indices) and torch.equal(best, want.values)


def test_tree_passes_equal_each_path(pair) -> None:
    theirs, ours = pair
    prompts = [torch.randint(0, 97, (n,)).tolist() for n in (7, 1, 30)]
    pages = Pages(ours, 3, 64, 8)
    ours.forward(pages.batch([0, 1, 2], [0] * 3, prompts), pages.cache)
    tokens = torch.randint(0, 97, (3, TREE.num_nodes))
    hidden, _ = ours.forward(pages.batch([0, 1, 2], [7, 1, 30], tokens.tolist(), TREE), pages.cache)
    got = ours.logits(hidden).view(3, TREE.num_nodes, -1)
    above = DraftTree.from_spec(TREE, tokens).ancestors()
    for r, prompt in enumerate(prompts):
        for node in range(TREE.num_nodes):
            path = tokens[r][above[r, node]].tolist()
            close(got[r, node], reference(theirs, prompt + path)[-1])


def test_taps_are_layer_outputs(pair) -> None:
    theirs, ours = pair
    ids = torch.randint(0, 97, (11,)).tolist()
    pages = Pages(ours, 1, 16, 4)
    _, features = ours.forward(pages.batch([0], [0], [ids]), pages.cache, taps=(1, 0))
    with torch.inference_mode():
        states = theirs(torch.tensor([ids]), output_hidden_states=True).hidden_states
    close(features, torch.cat((states[2][0], states[1][0]), -1))
    with pytest.raises(ConfigError, match="taps.*0 to 2"):
        ours.forward(pages.batch([0], [0], [ids]), pages.cache, taps=(3,))


def test_embedded_target_equals_transformers(smollm2) -> None:
    from transformers import AutoModelForCausalLM

    from dspark_runtime.smollm2 import gguf_path

    path = gguf_path()
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    ids = smollm2.tokenizer("The quick brown fox jumps over the lazy dog. 1 + 1 =")["input_ids"]
    pages = Pages(smollm2.model, 1, 64, 16)
    hidden, _ = smollm2.model.forward(pages.batch([0], [0], [ids]), pages.cache)
    close(smollm2.model.logits(hidden), reference(theirs, ids))


def test_embedded_architecture_is_the_one_in_configs(smollm2) -> None:
    from dspark_runtime.configs import load_model_config

    assert load_model_config("smollm2-135m") == smollm2.config


def test_embedded_tokenizer_speaks_its_template(smollm2) -> None:
    tokenizer = smollm2.tokenizer
    text = "Tabs\tand  spaces, ünïcode, 12345!"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(chat)["input_ids"]
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == chat.count("<|im_start|>")
    assert smollm2.model.eos_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)


# ------------------------------------------------------------------ refusals

BASE = SMALL | {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6}
BASE.pop("attn_implementation")


@pytest.mark.parametrize(
    "change,field",
    [
        ({"architectures": ["MistralForCausalLM"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*fp8"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope.rope_type.*longrope"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(change: dict, field: str) -> None:
    from_hf(BASE, "config.json")
    with pytest.raises(ConfigError, match=f"config.json.*{field}") as error:
        from_hf({k: v for k, v in (BASE | change).items() if v is not None}, "config.json")
    assert "\n" not in str(error.value)


def test_bad_tensors_are_named() -> None:
    config = from_hf(BASE, "config.json")
    good = {name: torch.zeros(shape) for name, shape in tensor_shapes(config).items()}
    key = "model.layers.1.self_attn.k_proj.weight"

    def build(tensors: dict[str, torch.Tensor]) -> Transformer:
        return Transformer(config, tensors, name="x", dtype=torch.float32, device="cpu", source="x.safetensors")

    build(good)
    build(good | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    with pytest.raises(CheckpointError, match=f"x.safetensors.*{key}.*missing.*32, 48"):
        build({k: v for k, v in good.items() if k != key})
    with pytest.raises(CheckpointError, match=f"{key}.*32, 47.*32, 48"):
        build(good | {key: torch.zeros(32, 47)})
    with pytest.raises(CheckpointError, match=f"{key}.*int8"):
        build(good | {key: torch.zeros(32, 48, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match="model.layers.0.extra"):
        build(good | {"model.layers.0.extra": torch.zeros(1)})
