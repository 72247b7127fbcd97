"""One rank of a small model of Kimi-K3's form, from the command line to its JSON, on a CPU."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import eval.cli
from dspark_runtime.cost.collectives import fabric
from dspark_runtime.errors import ConfigError
from dspark_runtime.models.kimi_k3 import kimi_k3_config, tensor_shapes
from dspark_runtime.models.shards import Shard
from eval.rank import DRAWS, make_group, ranks_experts
from eval.reported import load_reported
from eval.reproduce import beginning, find_row, rank_text, ranks_measured
from eval.schema import BenchConfig, RankRun
from tests.dspark_runtime.kimi_k3_ranks import divisible

TOKENS, HIDDEN, LATENT, VOCAB, SIZE = 8, 64, 32, 128, 4


def dspark(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        eval.cli.main(list(arguments))
    return end.value.code


def bench(target: str, *more: str) -> int:
    shape = ("--context", "40", "--tokens", "12", "--repeats", "2", "--warmup", "0", "--quiet")
    return dspark("bench", "--target", target, "--weights", "dummy", "--device", "cpu", "--al", "6", *shape, *more)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return divisible(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("parallel", ["tp", "ep"])
def test_a_rank_from_end_to_end(target: str, parallel: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "rank.json"
    assert bench(target, "--rank-of", str(SIZE), "--parallel", parallel, "--json", str(path)) == 0
    captured = capsys.readouterr()
    assert "rank 0 of 4" in captured.err and "MB of weights" in captured.err
    head = captured.out.splitlines()[0]
    assert head.startswith("SYNTHETIC ACCEPTANCE") and head.endswith("one rank measured, communication modelled")
    run = RankRun.model_validate(json.loads(path.read_text()))
    plain, row = run.results
    assert [r.num_speculative_tokens for r in run.results] == [0, 7] and row.verified_tokens == TOKENS
    assert row.stamp == "one rank measured, communication modelled" and row.synthetic and not plain.synthetic
    assert row.spec_decode_acceptance_length == pytest.approx(6, abs=0.05)
    assert plain.spec_decode_acceptance_length == 1

    part = kimi_k3_config(target).of_rank(Shard(0, SIZE, parallel))
    sizes = {None: 2, "wide": 4, torch.uint8: 1}
    assert row.weight_bytes == sum(math.prod(shape) * sizes[kind] for shape, kind in tensor_shapes(part).values())
    # latents of one layer in bf16: 40 + 16 + 8 tokens and 64 of a tree in pages of 16, and one page; states in float32
    # and windows in bf16 of three layers
    assert row.cache_bytes == 9 * 16 * 40 * 2 + 3 * (1 * 32 * 32 * 4 + 3 * 3 * 32 * 2)

    sent = {m.name: (m.kind, m.count, m.bytes) for m in row.messages}
    assert sent == {
        "embedding": ("all_reduce", 1, TOKENS * HIDDEN * 2),
        "attention": ("all_reduce", 4, TOKENS * HIDDEN * 2),
        "mlp": ("all_reduce", 4, TOKENS * HIDDEN * 2),
        "latent": ("all_gather", 3, TOKENS * LATENT // SIZE * 2),
        "experts": ("all_reduce", 3, TOKENS * LATENT * 2),
        "best token": ("all_gather", 1, TOKENS * 16),
    }
    # every message is below 32 KiB: the latencies of configs/kernels/gb300.yaml
    count = sum(m.count for m in row.messages)
    assert row.communication_ms == pytest.approx([count * us / 1e3 for us in (3.4, 7.2, 8.5)])
    assert "GB300" in row.communication_source and "[measured]" in row.communication_source
    own = next(op for op in row.operations if op.name == "routed experts")
    x = row.experts
    assert row.straggler_ms == pytest.approx(own.ms * (x.slowest_rank - x.mean_rank) / x.this_rank)
    for i in range(3):
        step = row.step_ms.total + row.communication_ms[i] + row.straggler_ms
        assert row.implied_step_ms[i] == pytest.approx(step)
        assert row.implied_output_throughput[2 - i] == pytest.approx(1e3 * row.spec_decode_acceptance_length / step)

    # 8 tokens of 2 of 8 experts: no law sends them all to one rank
    assert x.law == "uniform" and x.expected == pytest.approx(8 * (1 - 0.75**8)) and 4 < x.counted <= 8
    if parallel == "ep":
        assert 0 < x.this_rank <= 2 and x.mean_rank == pytest.approx(x.expected / SIZE, rel=0.05)
        assert x.mean_rank <= x.slowest_rank <= 2
    else:
        assert x.mean_rank == x.slowest_rank == pytest.approx(x.expected, rel=0.05) and 4 < x.this_rank <= 8

    operations = {op.name: op for op in row.operations}
    assert {name: op.count for name, op in operations.items() if op.group == "attention projections"} == {
        "kda q, k, v, gate, beta and forget gate, down": 3, "kda forget gate, up": 3, "kda output": 3,
        "mla compression and gate": 1, "mla query": 1, "mla absorbed keys": 1, "mla absorbed values": 1,
        "mla output": 1,
    }  # fmt: skip
    assert {"router", "latent down", "latent up", "top-k", "head", "mlp down", "shared experts down", "mla cache",
            "kda convolution and state", "kda state commit", "attention residual",
            "embedding"} <= set(operations)  # fmt: skip
    inner = 128 // (SIZE if parallel == "tp" else 1)
    per_expert = 3 * inner * LATENT * (0.5 + 1 / 32)
    assert own.bytes == pytest.approx(per_expert * 3 * x.this_rank)
    assert operations["kda output"].bytes == 3 * HIDDEN * 32 * 2
    assert operations["kda output"].flops == 3 * 2 * HIDDEN * 32 * TOKENS
    assert operations["head"].bytes == VOCAB // SIZE * HIDDEN * 2
    assert operations["kda convolution and state"].bytes == 3 * 32 * 32 * 4
    assert all(op.ms > 0 and op.backend.startswith("verify_kernels.") for op in row.operations)
    assert all(op.floor_ms == 0 for op in row.operations if not op.bytes and not op.flops)


def test_trees_requests_and_no_communication(target: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "rank.json"
    more = ("--tree", "tree-8", "-b", "2", "--al", "2.5", "--collectives", "none", "--json", str(path))
    assert bench(target, "--rank-of", "2", *more) == 0
    assert "one rank measured, no communication" in capsys.readouterr().out.splitlines()[0]
    row = RankRun.model_validate(json.loads(path.read_text())).results[1]
    assert row.tree == "tree-8" and row.verified_tokens == 2 * 9 and row.communication_ms is None
    assert {m.us for m in row.messages} == {None} and sum(m.count for m in row.messages) == 16
    assert row.implied_step_ms[0] == row.implied_step_ms[2] == pytest.approx(row.step_ms.total)
    rate = 1e3 * 2 * row.spec_decode_acceptance_length / row.step_ms.total
    assert row.implied_output_throughput[1] == pytest.approx(rate)


@pytest.mark.parametrize("parallel", ["tp", "ep"])
def test_real_collectives_between_processes(target: str, parallel: str, tmp_path: Path) -> None:
    """Two ranks in two processes: they go through the same steps, and the first reports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--rank-of", "2", "--parallel", parallel, "--collectives", "real", "--context", "40", "--tokens", "12"]
    command = [sys.executable, "-m", "eval.cli", "bench", "--target", target, "--weights", "dummy", "--device", "cpu"]
    command += [*options, "--al", "6", "--repeats", "1", "--warmup", "0", "--json", str(tmp_path / "rank.json")]
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(command, env=env | {"RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    (first, error), (other, _) = (rank.communicate(timeout=120) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], error
    assert first.splitlines()[0].endswith("all ranks measured") and not other
    row = RankRun.model_validate(json.loads((tmp_path / "rank.json").read_text())).results[1]
    assert row.communication_ms is None and row.straggler_ms == 0 and row.implied_step_ms[1] == row.step_ms.total
    assert sum(m.count for m in row.messages) == 16 and row.spec_decode_acceptance_length == pytest.approx(6, abs=0.05)


def test_short_runs_are_taken_apart_at_full_width(target: str, capsys) -> None:
    assert bench(target, "--rank-of", "2", "--tokens", "1", "-k", "7", "--al", "8", "-o", "json") == 0
    row = RankRun.model_validate_json(capsys.readouterr().out).results[1]
    assert next(m.bytes for m in row.messages if m.name == "attention") == TOKENS * HIDDEN * 2


def test_messages_between_processes() -> None:
    """The group of the processes against sums and joins by hand."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(collect, (port,), nprocs=3)


def collect(rank: int, port: int) -> None:
    os.environ |= {"WORLD_SIZE": "3", "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group = make_group(BenchConfig(rank_of=3, weights="dummy", device="cpu", collectives="real"))
    parts = [torch.arange(8.0).view(2, 4) + 10 * r for r in range(3)]
    assert (group.rank, group.size) == (rank, 3)
    assert torch.equal(group.all_reduce(parts[rank].clone(), "sum"), sum(parts))
    assert torch.equal(group.all_gather(parts[rank], "join"), torch.cat(parts, dim=1))
    assert group.sent == {("sum", "all_reduce", 32): 1, ("join", "all_gather", 32): 1}
    torch.distributed.destroy_process_group()


def test_the_documented_target_runs_by_experts(tmp_path: Path, capsys) -> None:
    path = tmp_path / "rank.json"
    assert bench("kimi-k3-tiny", "--rank-of", "2", "--parallel", "ep", "-o", "json", "--json", str(path)) == 0
    assert json.loads(capsys.readouterr().out)["results"] and json.loads(path.read_text())["results"]


def test_reproduce_shows_it_beside_the_report(target: str, tmp_path: Path) -> None:
    named = tmp_path / "kimi-k3.yaml"  # a result of this name, in small
    named.write_text(Path(target).read_text())
    folder = tmp_path / "results"
    path = folder / "cpu" / "small.json"
    path.parent.mkdir(parents=True)
    assert bench(str(named), "--rank-of", "2", "-k", "4,7", "--al", "5", "--json", str(path)) == 0
    run = json.loads(path.read_text())
    run["results"][2]["spec_decode_acceptance_length"] = 6.0  # as the report's, with as many verified tokens
    path.write_text(json.dumps(run))
    row = find_row("kimi-k3-gb300")
    assert row.name == "kimi-k3-gb300-vllm-2026-09/al6"
    ranks = ranks_measured(row.entry, folder)
    assert {r.name for r in ranks} == {"cpu/small.json"}
    assert [r.reported and r.reported.value for r in ranks] == [None, None, 840]
    text = "\n".join(rank_text(row.entry, ranks))
    for said in ("one rank measured, communication modelled", "> 840 tokens/s/user", "1 of 2 tp, GB300"):
        assert said in text
    assert ranks_measured(load_reported("qwen3-8b-h200-vllm"), folder) == [] and rank_text(row.entry, []) == []
    assert beginning("kimi-k3-gb300")[0] == "kimi-k3-gb300-vllm-2026-09" and beginning("kimi-k3-gb200") == []


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("--rank-of", "3"), "rank_of: found 3, allowed: numbers of ranks that divide the 32 of"),
        (("--rank-of", "1"), "rank_of: found 1, allowed: greater than or equal to 2"),
        (("--parallel", "ep"), "parallel: found without rank_of, allowed: with it"),
        (("--rank-of", "2", "--parallel", "pp"), "parallel: found 'pp', allowed: 'tp' or 'ep'"),
        (("--rank-of", "2", "--collectives", "none", "--hardware", "gb300"), "hardware: found with collectives none"),
        (("--rank-of", "2", "--hardware", "mi355x"), "hardware: found mi355x, whose file states no link_gbps"),
        (("--rank-of", "2", "--collectives", "real"), "collectives: found real with 1 process, allowed: 2, one a rank"),
        (("--rank-of", "2", "--weights", "auto"), "weights: found 'auto' with rank_of, allowed: dummy"),
        (("--rank-of", "2", "--target", "tiny"), "rank_of: found target tiny, allowed: architectures of Kimi-K3"),
        (("--rank-of", "2", "--target", "smollm2"), "rank_of: found target smollm2"),
        (("--rank-of", "2", "--al", "9"), "acceptance_length: found 9, allowed: 1 to 8"),
        (("--rank-of", "2", "--context", "4000"), "context_len: found 4000, .* one step 4024, allowed: at most 2048"),
        (("--rank-of", "2", "-o", "csv"), "output: found csv, jsonl or a plot with rank_of, allowed: md, json"),
        (("--rank-of", "2", "--target", "kimi-k3"), r"rank 0 of 2 of kimi-k3 \(tp\) takes 781.* GB of weights"),
    ],
)
def test_what_does_not_go_is_named(target: str, arguments: tuple[str, ...], message: str, capsys) -> None:
    assert bench(target, *arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(message, error), error


def test_experts_of_the_ranks_are_counted() -> None:
    """Against counting with sets, pass by pass."""
    g = torch.Generator().manual_seed(0)
    draws = [torch.stack([torch.randperm(12, generator=g)[:3] for _ in range(10)]).view(2, 5, 3) for _ in range(DRAWS)]
    mean = slowest = 0.0
    for ids in draws:
        for layer in ids:
            ranks = [len({e for e in layer.flatten().tolist() if e // 3 == rank}) for rank in range(4)]
            mean, slowest = mean + sum(ranks) / 4, slowest + max(ranks)
    pending = iter(draws)
    found = ranks_experts(lambda batch: next(pending), None, 12, 4)
    assert found == pytest.approx((mean / 2 / DRAWS, slowest / 2 / DRAWS))


def test_modelled_collectives() -> None:
    own = fabric("gb300", 16)
    assert not own.borrowed and own.us("all_reduce", 1000) == own.us("all_gather", 1000)
    us = own.us("all_reduce", 32768 + 900_000)
    assert (us.low, us.mid) == pytest.approx((3.4 + 2, 7.2 + 2)) and us.high == pytest.approx(26 + 2)
    assert own.us("all_gather", 65536).low == pytest.approx(3.4 + (15 * 65536 - 32768) / 900e3)
    lent = fabric("h200", 16)
    assert lent.borrowed and lent.us("all_reduce", 8).high == pytest.approx(8.5 * 1.4)
    assert any("16 ranks exceed the 8" in note for note in lent.notes)
    with pytest.raises(ConfigError, match="hardware: found 'nothere'"):
        fabric("nothere", 2)
