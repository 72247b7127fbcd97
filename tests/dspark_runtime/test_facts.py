"""Architectures and machines as data: published totals come out of the shapes, and every number has a source."""

from __future__ import annotations

import pytest

from dspark_runtime.configs import find, names, read_yaml
from dspark_runtime.cost.facts import BYTES, Architecture, checked, is_facts, load_architecture, load_hardware
from dspark_runtime.errors import ConfigError

FACTS = [name for name in names("models") if is_facts(name)]


def test_the_models_and_machines_are_there() -> None:
    assert {
        "kimi-k3", "kimi-k3-dspark-inferact", "kimi-k3-dspark-radixark", "kimi-k3-dspark-redhat", "qwen3.8-2.4t-a95b",
        "qwen3-8b", "qwen3-30b-a3b", "deepseek-v4-flash", "deepseek-v4-pro", "smollm2-135m",
    } <= set(names("models"))  # fmt: skip
    assert {"gb300", "b300", "gb200", "b200", "h200", "h100", "mi355x", "tpu-v7", "rubin", "cpu"} <= set(
        names("hardware")
    )


def test_totals_of_kimi_k3() -> None:
    k3 = load_architecture("kimi-k3")
    assert k3.total_params == pytest.approx(2.78e12, rel=0.002)
    assert k3.active_params == pytest.approx(104e9, rel=0.005)
    assert k3.checkpoint_bytes == pytest.approx(1.561e12, rel=0.002)
    # One expert 33.03 M weights, 17.55 MB; 111.1 GB of BF16 read a step; 434 MB of state and 27.6 KB a token of cache.
    expert = k3.ffn.moe.expert_params(k3.hidden_size)
    assert expert == 33_030_144 and expert * BYTES["mxfp4"] == pytest.approx(17.55e6, rel=1e-3)
    assert (k3.other_params + k3.embedding_params) * 2 == pytest.approx(111.1e9, rel=2e-3)
    assert k3.state_values_per_request() * 4 == pytest.approx(434e6, rel=1e-3)
    assert k3.kv_values_per_token() * 2 == 27_648


@pytest.mark.parametrize("name", ["kimi-k3-dspark-inferact", "kimi-k3-dspark-radixark"])
def test_totals_of_its_drafters_to_the_unit(name: str) -> None:
    drafter = load_architecture(name)
    assert drafter.total_params == drafter.published.total_params


def test_totals_of_qwen_and_llama() -> None:
    qwen = load_architecture("qwen3.8-2.4t-a95b")
    assert qwen.checkpoint_bytes == pytest.approx(qwen.published.checkpoint_bytes, rel=1e-3)
    assert qwen.active_params == pytest.approx(95e9, rel=0.02)
    # Sizes that the makers print on the models: 8.2 B, 30.5 B of which 3.3 B active (embedding included), 8.03 B, 134.5
    # M.
    assert load_architecture("qwen3-8b").total_params == 8_190_735_360
    assert load_architecture("qwen3-30b-a3b").total_params == 30_532_122_624
    assert load_architecture("llama-3.1-8b").total_params == 8_030_261_248
    assert load_architecture("smollm2-135m").total_params == 134_515_008


@pytest.mark.parametrize(
    "name", [n for n in FACTS if load_architecture(n).published != type(load_architecture(n).published)()]
)
def test_published_totals_come_out(name: str) -> None:
    facts = load_architecture(name)
    for field in type(facts.published).model_fields:
        stated = getattr(facts.published, field)
        assert stated is None or getattr(facts, field) == pytest.approx(stated, rel=0.02), field


@pytest.mark.parametrize("name", names("hardware"))
def test_machines_are_valid(name: str) -> None:
    machine = load_hardware(name)
    low, value, high = machine.bandwidth()
    assert 0 < low <= value <= high
    assert machine.source_of("datasheet.memory_bandwidth_gbps").source
    if machine.read_bandwidth_gbps:  # a measurement above the datasheet would be a mistake in one of the two
        assert machine.read_bandwidth_gbps <= machine.datasheet.memory_bandwidth_gbps
        assert machine.matmul_tflops["bfloat16"] <= machine.datasheet.tflops["bf16"]


BROKEN = [
    (lambda v: v.pop("hidden_size"), "sources: hidden_size: no such field"),
    (lambda v: v.update(hiden_size=1), "hiden_size: no source"),
    (lambda v: v["attention"]["kda"].update(layers=68), "ffn: found 93 layers, allowed: as many as attention has (92)"),
    (lambda v: v["attention"]["kda"].update(heads="many"), "attention.kda.heads: found 'many'"),
    (lambda v: v["ffn"]["moe"].update(num_experts_per_tok=900), "num_experts_per_tok: found 900, allowed: at most 896"),
    (lambda v: v["sources"][0]["fields"].remove("vocab_size"), "vocab_size: no source"),
    (lambda v: v["sources"][1]["fields"].append("vocab_size"), "sources: vocab_size: found 2 times"),
    (lambda v: v["sources"][0].update(status="rumour"), "sources.0.status: found 'rumour'"),
    (lambda v: v.pop("sources"), "sources: missing"),
]


@pytest.mark.parametrize(("spoil", "message"), BROKEN, ids=[m for _, m in BROKEN])
def test_a_broken_file_names_the_field(spoil, message: str) -> None:
    values = read_yaml(find("models", "kimi-k3"))
    spoil(values)
    with pytest.raises(ConfigError) as error:
        checked(Architecture, values, "k3.yaml")
    assert str(error.value).startswith("k3.yaml: ") and message in str(error.value) and "\n" not in str(error.value)
