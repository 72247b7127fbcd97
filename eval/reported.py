"""Reported results as data: one YAML file of configs/reported for each system, with the points it was reported at."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from dspark_runtime.configs import find, names, read_yaml
from dspark_runtime.cost.facts import (
    Architecture,
    Hardware,
    Sourced,
    Strict,
    Weights,
    load_architecture,
    load_hardware,
)
from dspark_runtime.cost.routing import Routing
from dspark_runtime.cost.step import Load, Parallelism
from dspark_runtime.validation import checked

STEP_METRICS = ("output_throughput", "output_throughput_per_user", "tpot_ms", "step_ms")


class Shards(Strict):
    """Ways of splitting a model, under the names of `Parallelism`."""

    tp: int = Field(default=1, ge=1)
    dp: int = Field(default=1, ge=1)
    ep: int = Field(default=1, ge=1)
    cp: int = Field(default=1, ge=1)


class Against(Strict):
    hardware: str
    gpus: int = Field(ge=1)


class Point(Strict):
    """One reported number. tokens: verified a request and step (root and drafts). use: "fit" points set the constant of
    their software, "held" points are predicted with it, "shown" ones are neither, because a step time cannot be had
    from them. collapsed: dummy weights whose tokens all pick the same experts."""

    name: str
    metric: Literal[
        "output_throughput", "output_throughput_per_user", "tpot_ms", "step_ms", "total_throughput_per_gpu", "ratio"
    ]
    value: float = Field(gt=0)
    requests: int = Field(default=1, ge=1)
    tokens: int = Field(default=1, ge=1)
    acceptance_length: float = Field(default=1.0, ge=1)
    context: int | None = Field(default=None, ge=1)
    gpus: int | None = Field(default=None, ge=1)
    prefill_gpus: int | None = Field(default=None, ge=1)
    decode_gpus: int | None = Field(default=None, ge=1)
    synthetic: bool = False
    collapsed: bool = False
    use: Literal["fit", "held", "shown"]

    @model_validator(mode="after")
    def _possible(self) -> Point:
        if self.acceptance_length > self.tokens:
            raise ValueError(
                f"acceptance_length: found {self.acceptance_length:g}, allowed: at most tokens ({self.tokens})"
            )
        if self.metric not in STEP_METRICS and self.use != "shown":
            raise ValueError(f"use: found {self.use} with metric {self.metric}, allowed: shown")
        if self.metric == "total_throughput_per_gpu" and not (self.prefill_gpus and self.decode_gpus):
            raise ValueError("prefill_gpus: missing, total_throughput_per_gpu needs prefill_gpus and decode_gpus")
        return self

    @property
    def step_ms(self) -> float | None:
        """Milliseconds of a step: AL x requests / (tokens/s). None for a metric that says nothing about a step."""
        al, v = self.acceptance_length, self.value
        return {
            "output_throughput": 1e3 * al * self.requests / v,
            "output_throughput_per_user": 1e3 * al / v,
            "tpot_ms": al * v,
            "step_ms": v,
        }.get(self.metric)


class Reported(Sourced):
    """A system and what was reported of it. parallelism: None where it is not stated. before: the software whose
    constant says what the same system did earlier. weights: where they differ from the model's."""

    title: str
    model: str
    drafter: str | None = None
    weights: Weights | None = None
    hardware: str
    gpus: int = Field(ge=1)
    parallelism: Shards | None = None
    against: Against | None = None
    stack: str
    before: str | None = None
    kv: Literal["bf16", "fp8"] = "bf16"
    context: int = Field(ge=1)
    prompt: int | None = Field(default=None, ge=1)
    output: int | None = Field(default=None, ge=1)
    at_least: bool = False  # reported as "more than"
    points: tuple[Point, ...] = Field(min_length=1)
    not_stated: tuple[str, ...]

    free = ("sources", "title", "not_stated")

    @model_validator(mode="after")
    def _consistent(self) -> Reported:
        p = self.parallelism
        if p and p.tp * p.dp > self.gpus:
            raise ValueError(f"parallelism: found tp {p.tp} x dp {p.dp}, allowed: at most gpus ({self.gpus})")
        seen: set[str] = set()
        for point in self.points:
            if point.name in seen:
                raise ValueError(f"points: found {point.name} twice, allowed: distinct names")
            seen.add(point.name)
            if point.metric == "ratio" and self.against is None:
                raise ValueError(f"against: missing, the ratio of point {point.name} needs it")
            if point.metric == "total_throughput_per_gpu" and not (self.prompt and self.output):
                raise ValueError(f"prompt: missing, point {point.name} needs prompt and output")
        return self

    @property
    def architecture(self) -> Architecture:
        model = load_architecture(self.model)
        return model.model_copy(update={"weights": self.weights}) if self.weights else model

    @property
    def machine(self) -> Hardware:
        return load_hardware(self.hardware)

    def split(self, point: Point) -> Parallelism:
        """As stated; where nothing is, tensor parallel over all GPUs."""
        gpus = point.gpus or point.decode_gpus or self.gpus
        p = self.parallelism
        if p is None or p.tp * p.dp > gpus:
            return Parallelism(tp=gpus)
        if (
            p.tp * p.dp < gpus and gpus % p.tp == 0
        ):  # a decode pool larger than one group: groups of tp, experts over all
            return Parallelism(tp=p.tp, dp=gpus // p.tp, ep=gpus, cp=p.cp)
        return Parallelism(**p.model_dump())

    def load(self, point: Point) -> Load:
        return Load(point.requests, point.tokens, point.context or self.context, self.kv)

    def drafts(self, point: Point) -> Architecture | None:
        return load_architecture(self.drafter) if self.drafter and point.tokens > 1 else None

    def routing(self, point: Point) -> Routing:
        moe = self.architecture.ffn.moe
        return Routing("recorded", recorded=(float(moe.num_experts_per_tok),)) if point.collapsed and moe else Routing()


def load_reported(name: str) -> Reported:
    """An entry of configs/reported, or a YAML file. Raises ConfigError naming file and field; its references are
    checked."""
    path = find("reported", name)
    entry = checked(Reported, read_yaml(path), str(path))
    load_architecture(entry.model), load_hardware(entry.hardware)
    if entry.drafter:
        load_architecture(entry.drafter)
    if entry.against:
        load_hardware(entry.against.hardware)
    return entry


@lru_cache(maxsize=1)
def all_reported() -> dict[str, Reported]:
    """The entries of configs/reported, in order of their names."""
    return {name: load_reported(name) for name in names("reported")}


def entry_name(name: str) -> tuple[str, str | None]:
    """ "file" or "file/point" -> (file, point); a path that ends in .yaml is a file."""
    if name.endswith((".yaml", ".yml")) or Path(name).is_file():
        return name, None
    file, _, point = name.partition("/")
    return file, point or None
