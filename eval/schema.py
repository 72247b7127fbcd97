"""File formats of the measuring commands: the bench recipe that goes in, the run that comes out. No torch here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from drafters.topology import MAX_NODES
from dspark_runtime.configs import names
from dspark_runtime.errors import ConfigError
from dspark_runtime.forced_routing import split as split_routing
from dspark_runtime.scheduling.names import split as split_scheduler
from dspark_runtime.validation import read_json, shown

SCHEMA_VERSION = 1
REAL = "real"


class Strict(BaseModel):
    """Unknown fields are errors: a misspelt option must not be ignored."""

    model_config = ConfigDict(extra="forbid")


MAX_REQUESTS = 4096
"""Requests at once that a run may ask for, and the longest range of numbers."""


# ---------------------------------------------------------------------------------------------------- recipe


def int_list(value: object) -> object:
    """ "0-7", "1,8,32", "0-3,7" or one number -> list of int, in order, without repetition."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if not isinstance(value, str):
        return value
    out: list[int] = []
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and 0 <= int(last) - int(first) <= MAX_REQUESTS):
            raise ValueError(f"found {part.strip()!r}, allowed: numbers and ranges such as 0-7 or 1,8,32")
        out += range(int(first), int(last) + 1)
    return list(dict.fromkeys(out))


def float_list(value: object) -> object:
    """ "1,0.8,0.4" or one number -> list of float."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return [value]
    if not isinstance(value, str):
        return value
    try:
        return [float(part) for part in value.split(",")]
    except ValueError:
        raise ValueError(f"found {value!r}, allowed: numbers separated by commas") from None


def length_list(value: object) -> object:
    """As `float_list`; the word "real" stands for the drafter's own acceptance."""
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list):
        return float_list(value)
    parts = [part.strip() if isinstance(part, str) else part for part in value]
    for part in parts:
        if part != REAL and (isinstance(part, bool) or not isinstance(part, (int, float, str))):
            raise ValueError(f"found {part!r}, allowed: numbers and the word {REAL}")
    return [part if part == REAL else float_list(part)[0] for part in parts]


def json_object(value: object) -> object:
    """A JSON text -> what it says."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"found {shown(value)}, allowed: a JSON object ({error})") from None


def scheduler_name(value: str) -> str:
    """Checked as far as that goes without its file."""
    if value != "none":
        try:
            split_scheduler(value)
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("scheduler: ")) from None
    return value


def name_list(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


IntList = Annotated[list[int], BeforeValidator(int_list)]
FloatList = Annotated[list[float], BeforeValidator(float_list)]
NameList = Annotated[list[str], BeforeValidator(name_list)]


class Pair(Strict):
    """A target, a drafter, and what both run on."""

    target: str = "smollm2"
    drafter: str = "ngram"
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    weights: str = "auto"
    backend: Literal["auto", "unmeasured", "reference"] = "auto"
    seed: int = Field(default=0, ge=0, lt=2**30)  # with repeat and request beside it, it fits in 64 bits

    @field_validator("drafter")
    @classmethod
    def _drafter(cls, value: str) -> str:
        named = value in ("none", "ngram") or (value.startswith("draft:") and len(value) > 6)
        if not named and not (value and (Path(value).is_dir() or value in names("models"))):
            allowed = "none, ngram, draft:NAME, draft:self, a drafter's folder or an architecture of configs/models"
            raise ValueError(f"found {value!r}, allowed: {allowed}")
        return value


class BenchConfig(Pair):
    """One bench run: the sweep is every tree shape times every number of requests times every acceptance.

    The plain line (k = 0) is always measured. `acceptance_length` holds "real" or synthetic lengths, which count the
    bonus token; rates or a trace are a synthetic law of their own. `context_len`: prompts of that many random token
    ids in place of the texts of `prompts`. scheduler: each speculative shape once with every one of them ("none": all
    drafts are verified), see `dspark_runtime.scheduling.names`. routing: the law of an MoE target's expert choices, see
    `dspark_runtime.forced_routing` (None: uniform with dummy weights, else the model's own). quantization: of dummy
    weights, e4m3 in blocks of 128 x 128.

    engine: this project's, or vLLM with the same options, see `eval.bench_vllm`; speculative_config: vLLM's, in place of
    drafter and num_speculative_tokens.

    rank_of: one rank of so many is measured in place of the whole target, see `eval.rank`; its experts are divided as
    parallel says, its collectives are those of `hardware` (None: this machine's, or the cost model's lender).
    """

    engine: Literal["dspark", "vllm"] = "dspark"
    speculative_config: Annotated[dict[str, Any] | None, BeforeValidator(json_object)] = None
    num_speculative_tokens: IntList = Field(default=[3, 7], min_length=1)
    tree: NameList = []
    scheduler: NameList = []
    num_requests: IntList = Field(default=[1], min_length=1)
    acceptance_length: Annotated[list[float | Literal["real"]], BeforeValidator(length_list)] = []
    synthetic_acceptance_law: Literal["min_variance", "geometric"] = "min_variance"
    synthetic_acceptance_rates: FloatList | None = None
    synthetic_acceptance_trace: str | None = None
    context_len: int | None = Field(default=None, ge=1)
    max_tokens: int = Field(default=64, ge=1)
    prompts: str | None = None
    temperature: float = Field(default=0.0, ge=0.0)
    rejection_sample_method: str = "auto"
    routing: str | None = None
    quantization: Literal["none", "fp8"] = "none"
    cuda_graph: bool | None = None
    repeats: int = Field(default=5, ge=1)
    warmup: int = Field(default=1, ge=0)
    rank_of: int | None = Field(default=None, ge=2)
    parallel: Literal["tp", "ep"] = "tp"
    collectives: Literal["none", "modelled", "real"] = "modelled"
    hardware: str | None = None

    @field_validator("num_speculative_tokens")
    @classmethod
    def _k_range(cls, value: list[int]) -> list[int]:
        for k in value:
            if not 0 <= k <= 63:
                raise ValueError(f"found {k}, allowed: 0 to 63")
        return value

    @field_validator("scheduler")
    @classmethod
    def _schedulers(cls, value: list[str]) -> list[str]:
        return list(dict.fromkeys(map(scheduler_name, value)))

    @field_validator("routing")
    @classmethod
    def _routing(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                split_routing(value)
            except ConfigError as error:
                raise ValueError(str(error).removeprefix("routing: ")) from None
        return value

    @field_validator("num_requests")
    @classmethod
    def _b_range(cls, value: list[int]) -> list[int]:
        for b in value:
            if not 1 <= b <= MAX_REQUESTS:
                raise ValueError(f"found {b}, allowed: 1 to {MAX_REQUESTS}")
        return value

    @field_validator("acceptance_length")
    @classmethod
    def _al_range(cls, value: list[float | str]) -> list[float | str]:
        for al in value:
            if al != REAL and not 1.0 <= al <= 64.0:
                raise ValueError(f"found {al!r}, allowed: 1 to 64 (the bonus token counts)")
        return value

    @field_validator("synthetic_acceptance_rates")
    @classmethod
    def _rates(cls, value: list[float] | None) -> list[float] | None:
        if value is None:
            return None
        if any(not 0.0 <= r <= 1.0 for r in value):
            raise ValueError(f"found {value}, allowed: values from 0 to 1")
        if any(b > a for a, b in zip(value, value[1:])):
            raise ValueError(
                f"found {value}, allowed: never increasing (share of steps that accept position i and all before)"
            )
        return value

    @model_validator(mode="after")
    def _quantization(self) -> BenchConfig:
        if self.quantization != "none":
            for field, wrong, allowed in (
                ("weights", self.weights != "dummy", "dummy (a checkpoint says itself what it is)"),
                ("rank_of", self.rank_of is not None, "none (its experts are mxfp4)"),
                ("engine", self.engine != "dspark", "dspark"),
            ):
                if wrong:
                    raise ValueError(f"{field}: found {getattr(self, field)!r} with quantization, allowed: {allowed}")
        return self

    @model_validator(mode="after")
    def _one_rank(self) -> BenchConfig:
        fields = ((name, type(self).model_fields[name].default) for name in ("parallel", "collectives", "hardware"))
        given = [name for name, default in fields if getattr(self, name) != default]
        if self.rank_of is None and given:
            raise ValueError(f"{given[0]}: found without rank_of, allowed: with it")
        if self.rank_of is not None and self.weights != "dummy":
            raise ValueError(f"weights: found {self.weights!r} with rank_of, allowed: dummy")
        if self.hardware is not None and self.collectives != "modelled":
            raise ValueError(f"hardware: found with collectives {self.collectives}, allowed: with modelled")
        if self.rank_of is not None and self.scheduler:
            raise ValueError("scheduler: found with rank_of, allowed: without it (a rank's time is that of its shape)")
        return self

    @model_validator(mode="after")
    def _of_vllm(self) -> BenchConfig:
        if self.speculative_config is not None and self.engine != "vllm":
            raise ValueError(f"speculative_config: found with engine {self.engine}, allowed: with vllm")
        if self.rank_of is not None and self.engine == "vllm":
            raise ValueError("rank_of: found with engine vllm, allowed: with dspark")
        return self

    @model_validator(mode="after")
    def _one_law(self) -> BenchConfig:
        given = [
            name
            for name, value in (
                ("acceptance_length", [al for al in self.acceptance_length if al != REAL]),
                ("synthetic_acceptance_rates", self.synthetic_acceptance_rates),
                ("synthetic_acceptance_trace", self.synthetic_acceptance_trace),
            )
            if value
        ]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: found together with {given[0]}, allowed: one of them")
        named = next((name for name in self.scheduler if name != "none"), None)
        if named is not None and given:
            raise ValueError(
                f"scheduler: found {named!r} with {given[0]}, allowed: real acceptance (a law forces what is accepted, "
                "whatever the confidence)"
            )
        if self.routing not in (None, "model") and self.weights != "dummy" and (REAL in self.acceptance_length or not given):
            raise ValueError(
                f"routing: found {self.routing!r} with real acceptance, allowed: model, or synthetic acceptance, or "
                "dummy weights (text of forced experts means nothing)"
            )
        if named is not None and self.drafter == "none":
            raise ValueError(f"scheduler: found {named!r} with drafter none, allowed: a drafter")
        if self.synthetic_acceptance_law != "min_variance" and given != ["acceptance_length"]:
            raise ValueError("synthetic_acceptance_law: found without an acceptance_length, allowed: with one")
        if self.prompts is not None and self.context_len is not None:
            raise ValueError("context_len: found together with prompts, allowed: one of them")
        return self


def tree_list(value: object) -> object:
    """ "chain,16,32" -> ["chain", 16, 32]."""
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.split(",")]
    return list(dict.fromkeys(int(part) if part.isdecimal() else part for part in parts))


class EvalConfig(Pair):
    """One evaluation: every suite of prompts (none: the project's own) times temperature times shape.

    trees: "chain" of as many drafts as the drafter makes, and grown trees of so many nodes, root included; hybrid: the
    trees once more, with matches of the request's own text. limit: prompts of each suite; speed: of these, how many are
    timed, one request at a time (0: none); num_requests: requests at once elsewhere. fit_calibration: a prompt file
    whose roll-outs give the confidence temperatures. scheduler: what trims the drafts of every shape.
    """

    prompts: list[str] = []
    fit_calibration: str | None = None
    trees: Annotated[list[str | int], BeforeValidator(tree_list)] = ["chain", 16, 32, 64]
    hybrid: bool = False
    temperature: FloatList = Field(default=[0.0, 1.0], min_length=1)
    max_tokens: int = Field(default=128, ge=1)
    limit: int | None = Field(default=None, ge=1)
    num_requests: int = Field(default=8, ge=1, le=MAX_REQUESTS)
    speed: int = Field(default=5, ge=0)
    scheduler: str = "none"

    @field_validator("scheduler")
    @classmethod
    def _scheduler(cls, value: str) -> str:
        return scheduler_name(value)

    @model_validator(mode="after")
    def _whole_blocks(self) -> EvalConfig:
        if self.scheduler != "none" and self.fit_calibration is not None:
            raise ValueError("fit_calibration: found with a scheduler, allowed: without (it needs every draft judged)")
        return self

    @field_validator("trees")
    @classmethod
    def _trees(cls, value: list[str | int]) -> list[str | int]:
        for tree in value:
            if tree != "chain" and not (isinstance(tree, int) and 2 <= tree <= MAX_NODES):
                raise ValueError(f"found {tree!r}, allowed: chain and numbers of nodes from 2 to {MAX_NODES}")
        return value

    @field_validator("temperature")
    @classmethod
    def _temperature(cls, value: list[float]) -> list[float]:
        for t in value:
            if not 0 <= t <= 100:
                raise ValueError(f"found {t}, allowed: 0 to 100")
        return list(dict.fromkeys(value))


def eval_config(values: dict[str, object]) -> EvalConfig:
    """A checked evaluation. Raises ConfigError with one line that names the field."""
    try:
        return EvalConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(one_line(error)) from None


def one_line(error: ValidationError, where: str = "") -> str:
    """The first problem of a pydantic error as "field: what is wrong"."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-"))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = f"unknown field, allowed: {', '.join(BenchConfig.model_fields)}"
    elif first["type"] == "missing":
        message = "missing"
    elif first["type"] != "value_error":
        wish = message.removeprefix("Input should be ")
        message = f"found {shown(first['input'])}, allowed: {wish}"
    return ": ".join(part for part in (where, field, message) if part)


def bench_config(values: dict[str, object], where: str = "") -> BenchConfig:
    """A checked recipe. Raises ConfigError with one line that names the field (and the file)."""
    try:
        return BenchConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(one_line(error, where)) from None


# ---------------------------------------------------------------------------------------------------- results


class Environment(Strict):
    """Where a number comes from."""

    machine: str
    system: str
    cpu: str
    cores: int
    gpu: str | None
    driver: str | None
    python: str
    torch: str
    vllm: str | None = None
    transformers: str | None
    cutlass: str | None
    commit: str | None
    dirty: bool | None
    seed: int
    ops: dict[str, str]
    cpu_kernels: str | None
    cuda_graph: bool
    prompts: str | None
    prompts_sha256: str | None
    read_bandwidth_gbps: float | None
    matmul_tflops: float | None
    ceilings: str | None


class StepMs(Strict):
    """Median milliseconds over the steps in which all requests ran. Phases are medians of their own; None where the engine
    does not tell them apart."""

    draft: float | None = None
    verify: float | None = None
    accept: float | None = None
    other: float | None = None
    total: float


class Spread(Strict):
    """Standard deviations of tokens/s/user: of the repeats' medians, and of single requests (prompts) in a repeat."""

    repeats: float
    prompts: float


class BenchRow(Strict):
    """One point of a sweep. `error` says why a point could not run (then there are no numbers) or why it is wrong.

    spec_decode_acceptance_length: tokens emitted / (request, step) pairs, the bonus token included, pooled;
    ..._per_request: the mean of the requests' own lengths. Rates: unconditional = share of pairs whose first i drafts
    were all accepted; conditional = given that the ones before were. emitted_histogram[i]: pairs that emitted i + 1.
    draft_acceptance_rate: accepted / proposed drafts. tpot_ms: per output token of one request; chunk_gap_ms: between
    two steps, which is what a client sees between chunks. unique_experts_per_layer: different experts that a step's
    tokens meet, mean over MoE layers and steps; expected_...: by the law that `routing` names. break_even:
    the length at which speculation gains nothing. vllm_metrics: vLLM's counters of the measured repeats, by its names;
    acceptance of engine "vllm" (stock) and "vllm+plugin" is theirs.
    """

    engine: str = "dspark"
    target: str
    drafter: str
    method: str
    acceptance: str
    synthetic: bool
    num_requests: int
    context_len: int | None = None
    context: str = ""
    num_speculative_tokens: int
    tree: str
    scheduler: str | None = None
    dtype: str
    temperature: float = 0.0
    max_tokens: int
    requested_acceptance_length: float | None = None
    error: str | None = None
    warning: str | None = None

    spec_decode_acceptance_length: float | None = None
    spec_decode_acceptance_length_per_request: float | None = None
    spec_decode_per_position_acceptance_rates: list[float] | None = None
    spec_decode_conditional_acceptance_rates: list[float | None] | None = None
    accepted_per_step: float | None = None
    proposed_per_step: float | None = None
    draft_acceptance_rate: float | None = None
    emitted_histogram: list[int] | None = None
    output_throughput: float | None = None
    output_throughput_per_user: float | None = None
    tpot_ms: float | None = None
    chunk_gap_ms: float | None = None
    prefill_ms: float | None = None
    step_ms: StepMs | None = None
    verified_tokens: float | None = None
    floor_ms: float | None = None
    time_over_floor: float | None = None
    speedup: float | None = None
    break_even_acceptance_length: float | None = None
    routing: str | None = None
    unique_experts_per_layer: float | None = None
    expected_experts_per_layer: float | None = None
    repeats: int = 0
    steps: int = 0
    num_prompts: int = 0
    spread: Spread | None = None
    vllm_metrics: dict[str, int | list[int]] | None = None

    @property
    def ran(self) -> bool:
        return self.output_throughput is not None


Range = tuple[float, float, float]
"""Low, middle and high of an interval."""


class RankOperation(Strict):
    """One operation of the verify pass on a rank: all its calls of a step, replayed one after the other. bytes and
    flops: what it must read and compute; floor_ms: the longer of the two at the ceilings of the environment; backend:
    the module that ran."""

    name: str
    group: str
    count: int
    ms: float
    floor_ms: float
    bytes: float
    flops: float
    backend: str


class RankCollective(Strict):
    """Collectives of one name in a step. bytes: of one rank's message; us: modelled, of one."""

    name: str
    kind: str
    count: int
    bytes: int
    us: Range | None


class RankExperts(Strict):
    """Different experts of a layer that a pass touches, means over MoE layers: expected by the law and counted for the
    whole model (counted on the measured steps), and on a rank: this one in the measured pass, and over passes drawn
    from the law the mean rank and the slowest of each layer."""

    law: str
    expected: float | None
    counted: float
    this_rank: float
    mean_rank: float | None
    slowest_rank: float | None


class RankRow(Strict):
    """One rank's step, and what it implies for the whole system.

    step_ms: measured on the rank, collectives included only where they are real. floor_ms: of its verify pass.
    between_ms: of the verify phase, what is not in `operations` (small torch operations, gaps, collectives that are
    real). straggler_ms: what the slowest rank's experts take longer than the mean rank's, at this rank's time for one.
    implied_step_ms = step + communication + straggler; implied_output_throughput: tokens/s of all requests, from the
    acceptance length. All three of an interval: low, middle, high.
    """

    target: str
    stamp: str
    rank: int
    rank_of: int
    parallel: str
    collectives: str
    dtype: str
    drafter: str
    acceptance: str
    synthetic: bool
    num_requests: int
    context_len: int
    num_speculative_tokens: int
    tree: str
    verified_tokens: float
    spec_decode_acceptance_length: float
    weight_bytes: int
    cache_bytes: int
    step_ms: StepMs
    spread: Spread
    floor_ms: float
    between_ms: float
    operations: list[RankOperation]
    messages: list[RankCollective]
    communication_ms: Range | None
    communication_source: str
    experts: RankExperts | None
    straggler_ms: float
    implied_step_ms: Range
    implied_output_throughput: Range
    error: str | None = None
    notes: list[str] = []


class EvalRow(Strict):
    """One suite at one temperature with one shape ("chain", "tree-16", "hybrid-16").

    spec_decode_acceptance_length: tokens / steps, the bonus token included; a step counts once for each of its
    requests. Rates by position i: unconditional = share of the steps that accepted the first i drafts; conditional =
    share of those that accepted the first i - 1. A step that a stop token ended inside its drafts has no bonus token
    and takes no part in the rates of the positions behind it. A draft that a scheduler left out counts as not accepted,
    and there are no confidence scores then.

    ece and auc: of the predicted probability that a draft and all before it are accepted, over all positions and by
    position, for the head's own confidence (before) and with its calibration.json (after). output_throughput and
    plain_throughput: tokens/s of `num_timed` prompts, one request at a time; speedup: their ratio, and spread: the
    standard deviation of the prompts' own ratios, divided by speedup.
    """

    engine: str = "dspark"
    target: str
    drafter: str
    dtype: str
    suite: str
    prompts_sha256: str
    temperature: float
    shape: str
    scheduler: str | None = None
    num_speculative_tokens: int
    max_tokens: int
    num_requests: int
    num_prompts: int
    steps: int
    tokens: int
    spec_decode_acceptance_length: float
    spec_decode_per_position_acceptance_rates: list[float | None]
    spec_decode_conditional_acceptance_rates: list[float | None]
    ece_before: float | None = None
    ece_after: float | None = None
    auc_before: float | None = None
    auc_after: float | None = None
    ece_before_by_position: list[float | None] | None = None
    ece_after_by_position: list[float | None] | None = None
    auc_before_by_position: list[float | None] | None = None
    auc_after_by_position: list[float | None] | None = None
    output_throughput: float | None = None
    plain_throughput: float | None = None
    speedup: float | None = None
    spread: float | None = None
    num_timed: int = 0


class Run(Strict):
    """What `dspark bench --json` writes and `dspark compare` reads. interrupted: stopped by hand before its last repeat."""

    schema_version: int = SCHEMA_VERSION
    command: str
    interrupted: bool = False
    synthetic: bool
    environment: Environment
    seed: int
    config: BenchConfig
    results: list[BenchRow]


class RankRun(Strict):
    """What `dspark bench --rank-of N --json` writes."""

    schema_version: int = SCHEMA_VERSION
    command: str
    synthetic: bool
    environment: Environment
    seed: int
    config: BenchConfig
    results: list[RankRow]


def load_run(path: Path) -> Run:
    """Read a run. Raises ConfigError naming the file and the field."""
    raw = read_json(path)
    if not isinstance(raw, dict) or "schema_version" not in raw:
        raise ConfigError(f"{path}: schema_version: missing, allowed: {SCHEMA_VERSION}")
    if raw["schema_version"] != SCHEMA_VERSION:
        raise ConfigError(f"{path}: schema_version: found {raw['schema_version']!r}, allowed: {SCHEMA_VERSION}")
    try:
        return Run.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(one_line(error, str(path))) from None
