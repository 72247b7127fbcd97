"""The bench: its arithmetic on hand-made step records, its sweep, and whole runs of a tiny target."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from drafters.dspark.network import tensor_shapes
from drafters.taps import Mixed
from drafters.tree import TreeSpec
from dspark_runtime.cost.facts import load_architecture
from dspark_runtime.errors import ConfigError, DsparkError
from dspark_runtime.records import StepRecord
from dspark_runtime.synthetic import SyntheticLaw
from eval import report
from eval.bench import (
    Point, Repeat, acceptance_numbers, bench, drafter_config as shape_of, finish_row, load, make_drafter, plan,
    sampling_error, time_numbers,
)  # fmt: skip
from eval.floor import Ceilings, ModelCost, floor_ms, known_hardware, model_cost
from dspark_runtime.prompts import encode, load_prompts, random_ids
from eval.schema import BenchConfig, Run, bench_config
from tests.eval.rows import row


def step(emitted: dict[int, int], drafted: int, ms: float, verify: float | None = None) -> StepRecord:
    """One step; accepted = emitted - 1."""
    verify = ms if verify is None else verify
    n = len(emitted)
    return StepRecord(
        list(emitted), [drafted] * n, [e - 1 for e in emitted.values()], list(emitted.values()),
        n * (drafted + 1), 10 * n, {"draft": 0.0, "verify": verify, "accept": 0.0, "other": ms - verify, "total": ms},
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ recipe


def test_ranges_and_lists() -> None:
    config = bench_config(dict(num_speculative_tokens="0-3,7", num_requests="1,8,32", acceptance_length="real,3.24"))
    assert config.num_speculative_tokens == [0, 1, 2, 3, 7]
    assert config.num_requests == [1, 8, 32]
    assert config.acceptance_length == ["real", 3.24]
    assert bench_config(dict(num_requests=4, acceptance_length=2)).acceptance_length == [2.0]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (dict(num_requests="many"), "num_requests: found 'many', allowed: numbers and ranges such as 0-7 or 1,8,32"),
        (dict(num_requests=[0]), "num_requests: found 0, allowed: 1 to 4096"),
        (dict(num_speculative_tokens="64"), "num_speculative_tokens: found 64, allowed: 0 to 63"),
        (dict(acceptance_length="0.5"), "acceptance_length: found 0.5, allowed: 1 to 64 (the bonus token counts)"),
        (dict(acceptance_length="fast"), "acceptance_length: found 'fast', allowed: numbers separated by commas"),
        (dict(repeats=0), "repeats: found 0, allowed: greater than or equal to 1"),
        (dict(max_tokens="x"), "max_tokens: found 'x', allowed: a valid integer, unable to parse string as an integer"),
        (dict(dtype="int4"), "dtype: found 'int4', allowed: 'auto', 'float32', 'bfloat16' or 'float16'"),
        (dict(synthetic_acceptance_rates="0.2,0.5"), "synthetic_acceptance_rates: found [0.2, 0.5], allowed: never"),
        (dict(acceptance_length=2, synthetic_acceptance_rates=[0.5]), "synthetic_acceptance_rates: found together"),
        (dict(prompts="a", context_len=5), "context_len: found together with prompts"),
        (dict(reqests=3), "reqests: unknown field, allowed: target, drafter,"),
    ],
)  # fmt: skip
def test_a_bad_field_is_one_line_that_names_it(values: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        bench_config(values)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------------- sweep


def test_every_sweep_has_a_plain_line_for_each_number_of_requests() -> None:
    points = plan(bench_config(dict(num_speculative_tokens="2,3", num_requests="1,4", acceptance_length="real,3")))
    lines = [(p.num_requests, p.spec.num_drafts, p.requested) for p in points]
    one = [(0, None), (2, None), (3, None), (2, 3.0), (3, 3.0)]
    assert lines == [(b, k, al) for b in (1, 4) for k, al in one]
    assert points[4].law.describe() == "SYNTHETIC AL 3.00 (min_variance)"


def test_a_length_that_a_shape_cannot_reach_is_a_line_that_says_what_it_needs() -> None:
    points = plan(bench_config(dict(num_speculative_tokens="0-4", acceptance_length="3.24")))
    assert [p.error for p in points] == [None, "AL 3.24 needs k >= 3", "AL 3.24 needs k >= 3", None, None]
    with pytest.raises(ConfigError, match=r"acceptance_length: found 3.24, allowed: 1 to 3 with up to 2 drafts"):
        plan(bench_config(dict(num_speculative_tokens="0-2", acceptance_length="3.24")))


def test_rates_fit_one_depth_only() -> None:
    points = plan(bench_config(dict(num_speculative_tokens="2,3", synthetic_acceptance_rates="0.9,0.5")))
    assert points[1].law.survival == (0.9, 0.5) and points[1].requested == pytest.approx(2.4)
    assert points[2].error.startswith("synthetic_acceptance_rates: found 2 values, allowed: 3")


def test_drafter_none_measures_plain_lines_only() -> None:
    assert [p.spec.num_drafts for p in plan(bench_config(dict(drafter="none", num_requests="1,2")))] == [0, 0]
    with pytest.raises(ConfigError, match="drafter: found none with a synthetic acceptance"):
        plan(bench_config(dict(drafter="none", acceptance_length="2")))


# ----------------------------------------------------------------------------------------------------- numbers


def test_length_counts_the_bonus_token_and_is_told_from_accepted_and_rate() -> None:
    """Two of four drafts accepted in each of 100 steps: AL 3.0, accepted/step 2.0, draft rate 0.5."""
    numbers = acceptance_numbers([Repeat([step({0: 3}, 4, 1.0)] * 100, 0.0)], depth=4)
    assert numbers["spec_decode_acceptance_length"] == 3.0
    assert numbers["accepted_per_step"] == 2.0
    assert numbers["draft_acceptance_rate"] == 0.5
    assert numbers["spec_decode_per_position_acceptance_rates"] == [1.0, 1.0, 0.0, 0.0]
    assert numbers["spec_decode_conditional_acceptance_rates"] == [1.0, 1.0, 0.0, None]
    assert numbers["emitted_histogram"] == [0, 0, 100, 0, 0]


def test_pooled_and_per_request_length_differ() -> None:
    """10 steps at AL 4 and 1000 steps at AL 2: pooled 2040 / 1010, mean of requests 3.0."""
    records = [step({0: 4}, 3, 1.0)] * 10 + [step({1: 2}, 3, 1.0)] * 1000
    numbers = acceptance_numbers([Repeat(records, 0.0)], depth=3)
    assert numbers["spec_decode_acceptance_length"] == pytest.approx(2040 / 1010)
    assert numbers["spec_decode_acceptance_length_per_request"] == 3.0


def test_the_same_request_id_in_two_repeats_is_two_requests() -> None:
    repeats = [Repeat([step({0: 4}, 3, 1.0)], 0.0), Repeat([step({0: 2}, 3, 1.0)] * 3, 0.0)]
    assert acceptance_numbers(repeats, 3)["spec_decode_acceptance_length_per_request"] == 3.0


def test_length_is_one_plus_the_sum_of_the_rates() -> None:
    records = [step({0: 1 + i % 4, 1: 1 + i % 3}, 3, 1.0) for i in range(11)]
    numbers = acceptance_numbers([Repeat(records, 0.0)], depth=3)
    rates = numbers["spec_decode_per_position_acceptance_rates"]
    assert numbers["spec_decode_acceptance_length"] == pytest.approx(1 + sum(rates))
    assert rates == sorted(rates, reverse=True) and sum(numbers["emitted_histogram"]) == 22


def test_nothing_proposed_gives_no_rate() -> None:
    assert acceptance_numbers([Repeat([step({0: 1}, 0, 1.0)], 0.0)], 3)["draft_acceptance_rate"] is None


def test_four_tokens_in_ten_milliseconds() -> None:
    """AL 4 at 10 ms a step: TPOT 2.5 ms, chunk gap 10 ms, 400 tokens/s, however the tokens arrive."""
    numbers = time_numbers([Repeat([step({0: 4}, 3, 10.0, verify=8.0)] * 6, 5.0)] * 3, 1)
    assert numbers["tpot_ms"] == pytest.approx(2.5) and numbers["chunk_gap_ms"] == 10.0
    assert numbers["output_throughput"] == pytest.approx(400) and numbers["prefill_ms"] == 5.0
    assert numbers["step_ms"].model_dump() == dict(draft=0.0, verify=8.0, accept=0.0, other=2.0, total=10.0)
    assert numbers["spread"].repeats == numbers["spread"].prompts == 0.0


def test_times_come_from_steps_in_which_all_requests_ran() -> None:
    records = [step({0: 2, 1: 4}, 3, 20.0)] * 4 + [step({0: 2}, 3, 500.0)] * 9
    numbers = time_numbers([Repeat(records, 0.0)] * 2, 2)
    assert numbers["output_throughput"] == pytest.approx(300) and numbers[
        "output_throughput_per_user"
    ] == pytest.approx(150)
    assert numbers["tpot_ms"] == pytest.approx(1e3 / 150) and numbers["chunk_gap_ms"] == 20.0
    with pytest.raises(DsparkError, match="never ran 3 requests at once"):
        time_numbers([Repeat(records, 0.0)], 3)


def test_spread_over_repeats_is_told_from_spread_over_prompts() -> None:
    """Prompts of AL 1 and 3 on a steady machine, then equal prompts on a machine that wavers by 10 %."""
    steady = [Repeat([step({0: al}, 3, 10.0)] * 5, 0.0) for al in (1, 3, 1, 3)]
    spread = time_numbers(steady, 1)["spread"]
    assert spread.repeats == 0.0 and spread.prompts == pytest.approx(math.sqrt(4 / 3) / 2)
    wavering = [Repeat([step({0: 2, 1: 2}, 3, ms)] * 5, 0.0) for ms in (9.0, 10.0, 11.0)]
    assert time_numbers(wavering, 2)["spread"].repeats == pytest.approx(0.1)


def test_the_number_is_the_median_of_repeats() -> None:
    repeats = [Repeat([step({0: 1}, 0, ms)] * 3, 0.0) for ms in (10.0, 10.0, 10.0, 10.0, 1000.0)]
    assert time_numbers(repeats, 1)["output_throughput"] == pytest.approx(100)


def point(k: int, al: float | None = None) -> Point:
    law = SyntheticLaw.make(k, acceptance_length=al) if al else None
    return Point(1, "chain", TreeSpec.chain(k), law, al)


def test_speedup_break_even_and_floor() -> None:
    plain = row(0, 100.0, step_ms=dict(draft=0, verify=7, accept=0, other=1, total=8.0))
    line = finish_row(row(3, 150.0), point(3), plain, floor_ms=4.0)
    assert line.speedup == 1.5 and line.break_even_acceptance_length == 10.0 / 8.0 and line.time_over_floor == 2.5
    assert line.error is None and line.warning is None


def test_a_realised_length_that_is_not_the_requested_one_is_an_error() -> None:
    wrong = row(3, 150.0, emitted_histogram=[5000, 5000, 0, 0])
    assert finish_row(wrong, point(3, 2.5), None, 1.0).error == "asked for AL 2.50, realised 1.50"
    right = row(3, 150.0, emitted_histogram=[5000, 5000, 0, 0])
    assert finish_row(right, point(3, 1.5), None, 1.0).error is None


def test_a_drafter_that_proposes_nothing_is_named() -> None:
    assert finish_row(row(3, 1.0, proposed_per_step=0.0), point(3), None, 1.0).warning == "drafter proposed nothing"
    assert finish_row(row(0, 1.0, proposed_per_step=0.0), point(0), None, 1.0).warning is None


def test_sampling_error_of_a_length() -> None:
    """Minimum variance at AL 3.24: one Bernoulli of 0.24. Geometric: variance by enumeration."""
    assert sampling_error(SyntheticLaw.make(7, acceptance_length=3.24), 100) == pytest.approx(
        math.sqrt(0.24 * 0.76 / 100)
    )
    p = SyntheticLaw.make(4, acceptance_length=2.5, law="geometric").survival
    mass = [a - b for a, b in zip((1.0, *p), (*p, 0.0))]
    mean = sum(i * m for i, m in enumerate(mass))
    variance = sum((i - mean) ** 2 * m for i, m in enumerate(mass))
    assert sampling_error(SyntheticLaw.make(4, acceptance_length=2.5, law="geometric"), 9) == pytest.approx(
        math.sqrt(variance / 9)
    )


# --------------------------------------------------------------------------------------------------- a whole run


def test_a_model_of_stated_shape_with_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny architecture, 2 requests of 24 random ids, a chain and a tree of 8 drafts at AL 2.5."""
    monkeypatch.setattr("eval.floor.measure_ceilings", lambda device, dtype: Ceilings(1.0, 1000.0, "fixed"))
    run = bench(
        bench_config(
            dict(
                target="tiny", weights="dummy", dtype="float32", device="cpu", context_len=24, num_requests=2,
                num_speculative_tokens=4, tree="tree-8", acceptance_length=2.5, max_tokens=20, repeats=2,
            )
        )
    )  # fmt: skip
    plain, chain, tree = run.results
    assert [r.tree for r in run.results] == ["chain", "chain", "tree-8"] and not any(r.error for r in run.results)
    assert (plain.verified_tokens, chain.verified_tokens, tree.verified_tokens) == (2, 10, 18)
    for r in (chain, tree):
        assert r.spec_decode_acceptance_length == pytest.approx(2.5, abs=0.1) and r.synthetic
    # At 1 GB/s the floor is bytes / 1e6 milliseconds: weights once, and the keys and values of both contexts.
    from dspark_runtime.targets import load_target

    target = load_target("tiny", dtype="float32", device="cpu", weights="dummy")
    weights = sum(
        w.numel() * 4 for layer in target.model.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)
    )
    weights += target.model.lm_head.numel() * 4
    c = target.config
    kv = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 4
    context = plain.floor_ms * 1e6 - weights
    assert 2 * 23 * kv <= context <= 2 * (24 + 20) * kv


def drafter_config(**changes: object) -> BenchConfig:
    values = dict(
        target="tiny", drafter="tiny-dspark", weights="dummy", dtype="float32", device="cpu", context_len=16,
        num_requests=2, num_speculative_tokens=3, acceptance_length=2, max_tokens=8, repeats=1, warmup=0,
    )  # fmt: skip
    return bench_config(values | changes)


def test_a_drafter_of_stated_shape_with_random_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter of configs/models runs whole steps, chain and tree, and its weights follow from the seed."""
    monkeypatch.setattr("eval.floor.measure_ceilings", lambda device, dtype: Ceilings(1.0, 1000.0, "fixed"))
    monkeypatch.chdir(tmp_path)
    Path("shallow.yaml").write_text("parents: [-1, 0, 0, 1, 1, 2, 3]\n")
    run = bench(drafter_config(tree="shallow.yaml", num_speculative_tokens="3"))
    _, chain, tree = run.results
    assert not chain.error and not tree.error and chain.method == "dspark:tiny-dspark"
    assert chain.spec_decode_acceptance_length == 2 and tree.verified_tokens == 14
    target = load(run.config.target, run.config)
    a, b = (make_drafter("tiny-dspark", target, drafter_config(seed=seed)) for seed in (0, 1))
    again = make_drafter("tiny-dspark", target, drafter_config())
    assert torch.equal(a.network.fc, again.network.fc) and not torch.equal(a.network.fc, b.network.fc)
    c = a.config
    assert (c.num_hidden_layers, c.block_size, c.markov_rank, c.confidence) == (2, 4, 16, "markov")
    assert a.network.embed is target.model.embed and c.rope == target.config.rope


@pytest.mark.parametrize("name", ["kimi-k3-tiny-dspark", "kimi-k3-tiny-dspark-gqa"])
def test_drafters_of_kimi_k3s_form_with_random_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent layers and layers with heads of their own, behind a target with recurrent and latent layers."""
    monkeypatch.setattr("eval.floor.measure_ceilings", lambda device, dtype: Ceilings(1.0, 1000.0, "fixed"))
    monkeypatch.chdir(tmp_path)
    Path("shallow.yaml").write_text("parents: [-1, 0, 0, 1, 1, 2, 3]\n")
    changes = dict(target="kimi-k3-tiny", drafter=name, tree="shallow.yaml", num_speculative_tokens="3")
    run = bench(drafter_config(**changes))
    _, chain, tree = run.results
    assert not chain.error and not tree.error and chain.method == f"dspark:{name}"
    assert chain.spec_decode_acceptance_length == 2 and tree.verified_tokens == 14
    target = load("kimi-k3-tiny", run.config)
    drafter = make_drafter(name, target, run.config)
    assert (drafter.config.mla is None) == name.endswith("gqa") and drafter.max_depth == 7
    assert list(map(int, drafter.taps)) == [0, 2]
    assert all(isinstance(tap, Mixed) for tap in drafter.taps) == name.endswith("gqa")


def test_kimi_k3s_drafters_have_the_published_shapes() -> None:
    from dspark_runtime.models.kimi_k3 import kimi_k3_config

    target = kimi_k3_config("kimi-k3")
    for name, published, taps, stream in (
        ("kimi-k3-dspark-inferact", 3_562_312_961, (2, 23, 47, 71, 89), "sum"),
        ("kimi-k3-dspark-radixark", 2_249_289_601, (7, 23, 51, 67, 83), "mixture"),
    ):
        config = shape_of(name, target)
        own = load_architecture(name).drafter.embedding * config.vocab_size * config.hidden_size
        assert sum(map(math.prod, tensor_shapes(config).values())) + own == published
        assert (config.taps, config.stream) == (taps, stream)


@pytest.mark.parametrize("changes, said", [
    (dict(drafter="tiny"), "drafter: tiny is a target"),
    (dict(drafter="qwen3-8b-dspark"), "vocab_size: found 151936, expected 128"),
    (dict(drafter="kimi-k3-dspark-inferact"), "vocab_size: found 163840, expected 128"),
    (dict(target="kimi-k3-tiny", drafter="kimi-k3-dspark-radixark"), "vocab_size: found 163840, expected 128"),
    (dict(drafter="kimi-k3-tiny-dspark"), "target layers: found"),
    (dict(drafter="kimi-k3-tiny"), "drafter: kimi-k3-tiny is a target"),
])  # fmt: skip
def test_a_drafter_that_cannot_be_made_is_named(changes: dict[str, str], said: str) -> None:
    config = drafter_config(**changes)
    target = load(config.target, config)
    with pytest.raises(DsparkError, match=said):
        make_drafter(config.drafter, target, config)
    with pytest.raises(ConfigError, match="add --weights dummy"):
        make_drafter("tiny-dspark", target, config.model_copy(update=dict(weights="auto")))


@pytest.mark.parametrize("whole", [0, 1, 2])
def test_a_run_stopped_by_hand_keeps_its_whole_repeats(whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.floor.measure_ceilings", lambda device, dtype: Ceilings(1.0, 1000.0, "fixed"))
    config = bench_config(
        dict(
            target="tiny", weights="dummy", dtype="float32", device="cpu", context_len=8, num_speculative_tokens=2,
            acceptance_length=2, max_tokens=6, repeats=3, warmup=1,
        )
    )  # fmt: skip
    calls = 0

    def until(text: str, done: int, total: int) -> None:
        nonlocal calls
        if text.startswith("repeat"):
            calls += 1
            if calls == 2 * whole + 2:  # in the second of two lines
                raise KeyboardInterrupt

    if not whole:
        with pytest.raises(KeyboardInterrupt):
            bench(config, progress=until)
        return
    run = bench(config, progress=until)
    assert run.interrupted and [r.repeats for r in run.results] == [whole, whole]
    assert f"stopped by hand after {whole} of 3 repeats" in report.render(run, "md")
    assert Run.model_validate_json(report.render(run, "json")).interrupted


# ------------------------------------------------------------------------------------------------------- floor


def test_floor_is_the_slower_of_reading_and_computing() -> None:
    machine = Ceilings(read_bandwidth_gbps=10.0, matmul_tflops=1.0, source="")
    cost = ModelCost(10_000_000, 0, 0, 0, 20_000_000, kv_bytes_per_token=1000)
    assert floor_ms(machine, [(cost, 1, 0, None)]) == pytest.approx(1.0)  # 10 MB at 10 GB/s
    assert floor_ms(machine, [(cost, 1, 5000, None)]) == pytest.approx(1.5)  # and 5 MB of keys and values
    assert floor_ms(machine, [(cost, 100, 0, None)]) == pytest.approx(2.0)  # 2 GFLOP at 1 TFLOP/s
    assert floor_ms(machine, [(cost, 1, 0, None), (cost, 1, 0, None)]) == pytest.approx(2.0)


def test_experts_count_by_how_many_distinct_ones_are_read() -> None:
    cost = ModelCost(0, 1000, num_experts=4, experts_per_token=2, flops_per_token=0, kv_bytes_per_token=0)
    assert cost.bytes_of_step(1, 0) == 500 and cost.bytes_of_step(2, 0) == 750


def test_cost_of_a_model_is_read_off_its_tensors() -> None:
    """Two layers of a [6, 4] and experts [3, 5, 4], a head [10, 4] and an embedding; norms and tables do not count."""
    half = torch.bfloat16
    layers = [
        dict(proj=torch.zeros(6, 4, dtype=half), experts=torch.zeros(3, 5, 4, dtype=half), norm=torch.zeros(4))
        for _ in range(2)
    ]
    config = SimpleNamespace(num_experts_per_tok=2)
    embed = torch.zeros(10, 4, dtype=half)
    tied = SimpleNamespace(config=config, layers=layers, embed_tokens=embed, lm_head=embed)
    expected = ModelCost(2 * (2 * 24 + 40), 2 * 2 * 60, 3, 2, 2 * (2 * 24 + 40) + 2 * 2 * 2 * 20, 7)
    assert model_cost(tied, 7) == expected
    untied = SimpleNamespace(config=config, layers=layers, embed_tokens=embed, lm_head=embed.clone())
    assert model_cost(untied, 7) == expected


def test_hardware_is_found_by_the_name_of_the_gpu() -> None:
    assert known_hardware("NVIDIA H200 SXM")["matmul_tflops"]["bfloat16"] == 790
    assert known_hardware("Some other GPU") is None


# ----------------------------------------------------------------------------------------------------- prompts


def test_the_projects_own_prompts() -> None:
    prompts = load_prompts()
    assert len(prompts.texts) >= 60 and len(set(prompts.texts)) == len(prompts.texts) and len(prompts.sha256) == 64


@pytest.mark.parametrize(
    "line", ["not json", "[]", '{"turns": []}', '{"turns": "text"}', '{"turns": [""]}', '{"text": "x"}']
)
def test_a_broken_prompt_file_names_its_line(line: str, tmp_path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["fine"]}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"p\.jsonl:3: expected one JSON object"):
        load_prompts(path)


def test_prompts_go_through_the_chat_template_where_there_is_one() -> None:
    class Tokenizer:
        chat_template = "x"

        def apply_chat_template(self, turns: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
            assert not tokenize and add_generation_prompt
            return f"<{turns[0]['role']}>{turns[0]['content']}"

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [*([0] if add_special_tokens else []), *map(ord, text)]}

    assert encode(Tokenizer(), "a") == [*map(ord, "<user>a")]
    assert encode(Tokenizer(), "a", chat=False) == [0, ord("a")]


def test_random_prompts_follow_from_their_seed() -> None:
    a, b = random_ids(2, 50, 7, seed=1), random_ids(2, 50, 7, seed=2)
    assert a == random_ids(2, 50, 7, seed=1) and a != b and a[0] != a[1]
    assert {len(p) for p in a} == {50} and {t for p in a for t in p} == set(range(7))
