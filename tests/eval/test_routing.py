"""Forced routing in the bench, and `dspark trace-routing`, on a tiny mixture of experts."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from safetensors.torch import save_file

from dspark_runtime.errors import ConfigError
from dspark_runtime.forced_routing import load_trace
from dspark_runtime.models.config import ModelConfig
from dspark_runtime.weights import DummyTensors
from eval import floor, report
from eval.bench import bench
from eval.cli import main
from eval.floor import ModelCost
from eval.schema import bench_config
from tests.dspark_runtime.test_forced_routing import MOE


@pytest.fixture(scope="module")
def architecture(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("moe") / "tiny-moe.yaml"
    path.write_text(yaml.safe_dump(json.loads(MOE.model_dump_json())))
    return str(path)


def run(architecture: str, **changes: object):
    values = dict(
        target=architecture, weights="dummy", drafter="draft:self", num_speculative_tokens="3", acceptance_length=2,
        context_len=6, max_tokens=40, repeats=3, warmup=0, device="cpu", dtype="float32",
    )  # fmt: skip
    return bench(bench_config(values | changes))


def test_dummy_experts_are_routed_uniformly_unless_asked_otherwise(architecture: str) -> None:
    plain, drafted = run(architecture).results
    assert plain.routing == drafted.routing == "uniform"
    assert plain.unique_experts_per_layer == plain.expected_experts_per_layer == 3.0
    assert drafted.expected_experts_per_layer == pytest.approx(8 * (1 - (5 / 8) ** 4))
    assert abs(drafted.unique_experts_per_layer - drafted.expected_experts_per_layer) < 0.6

    own = run(architecture, routing="model")
    assert [row.routing for row in own.results] == ["model", "model"]
    assert own.results[1].expected_experts_per_layer is None and own.results[1].unique_experts_per_layer
    assert "DUMMY WEIGHTS" in report.markdown(own)


def test_reports_name_the_law_and_the_floor_counts_the_experts(architecture: str, monkeypatch) -> None:
    found = run(architecture, routing="zipf:2")
    text = report.markdown(found)
    assert "FORCED ROUTING: zipf:2" in text and "experts/layer | expected" in text
    cost = ModelCost(dense_bytes=100, expert_bytes=800, num_experts=8, experts_per_token=2, flops_per_token=1, kv_bytes_per_token=0)
    assert cost.bytes_of_step(5, 0, 3.5) == 100 + 350
    assert cost.bytes_of_step(1, 0) == 100 + 200
    assert found.results[1].unique_experts_per_layer < run(architecture).results[1].unique_experts_per_layer
    drafted = found.results[1]
    monkeypatch.setattr(floor, "floor_ms", lambda ceilings, passes: passes[0][3])
    assert run(architecture, routing="zipf:2").results[1].floor_ms == drafted.unique_experts_per_layer


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(weights="auto", acceptance_length="real"), "routing: found 'uniform' with real acceptance, allowed: model"),
        (dict(weights="auto", acceptance_length="real,2"), "routing: found 'uniform' with real acceptance, allowed: model"),
        (dict(routing="zipf:a"), "routing: found 'zipf:a', allowed: uniform, zipf:EXPONENT"),
    ],
)  # fmt: skip
def test_a_law_for_text_that_counts_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        bench_config(dict(routing="uniform") | changes)
    assert str(error.value).startswith(words)


@pytest.fixture
def checkpoint(smollm2, tmp_path):
    """A tiny mixture of experts that reads SmolLM2's tokens."""
    config = MOE.model_copy(update=dict(vocab_size=smollm2.config.vocab_size, max_position_embeddings=512))
    folder = tmp_path / "moe"
    folder.mkdir()
    weights = DummyTensors(config, 0, torch.float32, "cpu")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hugging_face(config)))
    smollm2.tokenizer.save_pretrained(folder)
    return folder


def hugging_face(c: ModelConfig) -> dict[str, object]:
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "num_experts",
        "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    )  # fmt: skip
    own = {name: getattr(c, name) for name in names}
    return own | {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": list(c.mlp_only_layers), "rope_theta": 1e4}


def test_recorded_choices_are_those_of_the_model_and_come_back_as_a_law(checkpoint, capsys, monkeypatch) -> None:
    monkeypatch.chdir(checkpoint.parent)
    (checkpoint.parent / "p.jsonl").write_text('{"turns": ["One two three"]}\n{"turns": ["Four"]}\n')
    where = ["--target", str(checkpoint), "--device", "cpu", "--dtype", "float32"]
    with pytest.raises(SystemExit) as end:
        main(["trace-routing", "t.safetensors", "--prompts", "p.jsonl", "--tokens", "20", "--quiet", *where])
    assert end.value.code == 0
    assert "of one text" in capsys.readouterr().out
    trace = load_trace("t.safetensors")
    assert trace.experts.shape == (trace.offsets[-1], 2, 3) and len(trace.offsets) == 3

    with pytest.raises(SystemExit) as end:
        main([
            "bench", *where, "--drafter", "draft:self", "-k", "3", "--al", "2", "--routing", "trace:t.safetensors",
            "--tokens", "12", "--repeats", "2", "--warmup", "0", "--context", "8", "--quiet",
        ])  # fmt: skip
    assert end.value.code == 0
    assert "FORCED ROUTING: trace:t.safetensors" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main(["trace-routing", "t.json", *where])
    assert end.value.code == 2
    assert "out: found 't.json', allowed: a file that ends in .safetensors" in capsys.readouterr().err


def test_a_dense_target_has_nothing_to_record(capsys, tmp_path) -> None:
    with pytest.raises(SystemExit) as end:
        main(["trace-routing", str(tmp_path / "t.safetensors"), "--target", "smollm2", "--tokens", "2", "--quiet"])
    assert end.value.code == 2
    assert "target: smollm2 has no experts" in capsys.readouterr().err
