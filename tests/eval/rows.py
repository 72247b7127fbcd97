"""Hand-made rows and runs for the tests of reports."""

from __future__ import annotations

from eval.schema import BenchConfig, BenchRow, Environment, Run, Spread, StepMs


def environment(**changes: object) -> Environment:
    facts = dict(
        machine="box", system="Linux 6", cpu="Some CPU", cores=2, gpu=None, driver=None, python="3.11.0",
        torch="2.13.0",
        transformers="5.24.0", cutlass=None, commit="abc123", dirty=False, seed=0, ops={"linear": "verify_kernels.x"},
        cpu_kernels=None, cuda_graph=False, prompts="mixed.jsonl", prompts_sha256="f" * 64, read_bandwidth_gbps=20.0,
        matmul_tflops=0.1, ceilings="measured",
    )  # fmt: skip
    return Environment(**(facts | changes))


def row(k: int, rate: float, acceptance: str = "real", b: int = 1, **changes: object) -> BenchRow:
    values = dict(
        target="tiny", drafter="ngram", method="ngram" if k else "plain", acceptance=acceptance if k else "real",
        synthetic=acceptance.startswith("SYNTHETIC") and k > 0, num_requests=b, num_speculative_tokens=k, tree="chain",
        dtype="float32", max_tokens=8, spec_decode_acceptance_length=1.5, spec_decode_acceptance_length_per_request=1.4,
        spec_decode_per_position_acceptance_rates=[0.5] + [0.0] * (k - 1) if k else [],
        spec_decode_conditional_acceptance_rates=[0.5, 0.0, None][:k], accepted_per_step=0.5, proposed_per_step=1.0,
        draft_acceptance_rate=0.5, emitted_histogram=[5, 5] + [0] * (k - 1) if k else [10], output_throughput=rate,
        output_throughput_per_user=rate / b, tpot_ms=1e3 * b / rate, chunk_gap_ms=10.0, prefill_ms=1.0,
        step_ms=StepMs(draft=1, verify=7, accept=1, other=1, total=10), verified_tokens=k + 1, floor_ms=5.0,
        time_over_floor=2.0, speedup=1.5, break_even_acceptance_length=1.25, repeats=5, steps=10, num_prompts=5,
        spread=Spread(repeats=0.01, prompts=0.2),
    )  # fmt: skip
    return BenchRow(**(values | changes))


def run(*rows: BenchRow, **changes: object) -> Run:
    values = dict(command="dspark bench", synthetic=any(r.synthetic for r in rows), environment=environment(), seed=0)
    return Run(**(values | dict(config=BenchConfig(), results=list(rows)) | changes))
