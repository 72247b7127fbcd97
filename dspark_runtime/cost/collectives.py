"""Microseconds of a collective among ranks that this machine does not have: measured latencies, and the link's rate for
what goes beyond their messages. The latencies are the field all_reduce of a file of configs/kernels; on GPUs that are
here, `python -m eval.bench_comm` measures them and prints that field. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from dspark_runtime.configs import names
from dspark_runtime.cost.facts import Hardware, load_hardware
from dspark_runtime.cost.kernels import Interval, Kernels, load_kernels
from dspark_runtime.cost.step import BORROWED
from dspark_runtime.errors import ConfigError

LENDER = "gb300"
"""Its measured latencies stand in where a machine has none of its own."""


@dataclass(frozen=True)
class Fabric:
    """What joins `ranks` GPUs of a machine. source: of the latencies; notes: what is assumed."""

    machine: Hardware
    kernels: Kernels
    ranks: int
    borrowed: bool
    notes: tuple[str, ...]

    @property
    def source(self) -> str:
        found = self.kernels.source_of("all_reduce")
        return f"{found.source} [{found.status}]"

    def us(self, kind: str, size: int) -> Interval:
        """One collective with a message of `size` bytes a rank. kind: all_reduce, all_gather, reduce_scatter or
        all_to_all.

        Up to the largest measured message it takes the measured latencies of an all-reduce, whichever it is (a one-shot
        all-reduce is an all-gather and a sum). Beyond it an all-reduce moves the rest twice over a rank's link, as
        the cost model's steps count it; an all-gather the rest of what a rank receives, the others of what it sends.
        """
        up_to, low, mid, high = self.kernels.all_reduce
        moved = {"all_reduce": size, "all_gather": size * (self.ranks - 1)}.get(kind, size)
        rest = max(0.0, moved - up_to)
        wire = 1e6 * (2 if kind == "all_reduce" else 1) * rest / (self.machine.datasheet.link_gbps * 1e9)
        top = max(mid, self.kernels.all_reduce_large_high_us) if rest else high
        us = Interval(low + wire, mid + wire, top + wire)
        return us.widen(*BORROWED) if self.borrowed else us


def fabric(name: str, ranks: int) -> Fabric:
    """Of a machine of configs/hardware. Raises ConfigError for one without a link."""
    machine = load_hardware(name)
    if machine.datasheet.link_gbps is None:
        linked = [n for n in names("hardware") if load_hardware(n).datasheet.link_gbps]
        raise ConfigError(f"hardware: found {name}, whose file states no link_gbps, allowed: {', '.join(linked)}")
    own = load_kernels(machine.kernels) if machine.kernels else None
    borrowed = machine.borrowed or own is None or own.all_reduce is None
    kernels = own if own is not None and own.all_reduce is not None else load_kernels(load_hardware(LENDER).kernels)
    notes = [f"latencies were measured among {kernels.all_reduce_ranks} ranks"]
    if borrowed:
        notes.append(f"{machine.title} has none of its own: widened by {BORROWED[0]:g} to {BORROWED[1]:g}")
    if ranks > machine.datasheet.domain:
        notes.append(
            f"{ranks} ranks exceed the {machine.datasheet.domain} that the link joins; the network between hosts is "
            "not in configs/hardware and counts as the link"
        )
    return Fabric(machine, kernels, ranks, borrowed, tuple(notes))
