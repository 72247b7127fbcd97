"""Expert choices of a synthetic run: drawn from a stated law in place of the router's own.

With random weights a router sends every token to the same experts, and with forced acceptance to those of text that
means nothing; how many different experts a pass touches, and with it the time, must then come from a law that is said.
The router still runs and its weights are kept; which experts they belong to is what the law decides.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_runtime.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from dspark_runtime.models.config import ModelConfig
    from verify_kernels.batch import PassBatch

ALLOWED = "uniform, zipf:EXPONENT, trace:FILE of dspark trace-routing, model (the router's own choices)"
LINE = 2048
"""Tokens drawn in advance from a law; passes read them one after the other, round and round."""


def split(text: str) -> tuple[str, str]:
    """(law, argument), checked as far as that goes without reading a file. Raises ConfigError. No torch."""
    law, colon, argument = text.partition(":")
    wrong = ConfigError(f"routing: found {text!r}, allowed: {ALLOWED}")
    if law in ("uniform", "model") and not colon:
        return law, ""
    if law == "zipf":
        try:
            exponent = float(argument)
        except ValueError:
            raise wrong from None
        if not 0.0 <= exponent <= 10.0:
            raise ConfigError(f"routing: found {text!r}, allowed: zipf exponents from 0 to 10")
        return law, argument
    if law == "trace" and argument:
        if not Path(argument).is_file():
            raise ConfigError(f"routing: {argument}: no such file, allowed: {ALLOWED}")
        return law, argument
    raise wrong


class ForcedRouting:
    """Experts of every token of every pass, without a host read: a captured pass meets new ones at each replay.

    choices [tokens, L, k]: a line of tokens and the experts that they pick in each MoE layer. Independent laws read it
    from end to end. Of a trace, every request of a pass reads a stretch of consecutive tokens of one recorded sequence,
    from a place drawn anew for each pass (the nodes of a tree read as so many tokens in a row).
    """

    def __init__(self, name: str, choices: np.ndarray, num_experts: int, seed: int, device: torch.device) -> None:
        import torch

        self.name, self.num_experts, self._line = name, num_experts, choices
        self._choices = torch.from_numpy(choices).to(device, torch.int64)
        self._passes = torch.full((1,), seed << 20, dtype=torch.int64, device=device)

    def __call__(self, batch: PassBatch) -> Tensor:
        """Expert ids [L, N, k] int64 of a pass, each [N, k] contiguous."""
        return self._choices.index_select(0, self._rows(batch)).transpose(0, 1).contiguous()

    def _rows(self, batch: PassBatch) -> Tensor:
        import torch

        n = batch.num_tokens
        rows = (self._passes + torch.arange(n, device=self._passes.device)) % self._choices.shape[0]
        self._passes += n
        return rows

    def expected(self, counts: Sequence[int]) -> float:
        """Expected distinct experts of a layer, mean over layers, in a pass of so many tokens of each request."""
        raise NotImplementedError


class Independent(ForcedRouting):
    """Every token on its own: expert i of a layer is among its k with the chance pi_i of `cost.routing.inclusion`.

    Systematic sampling in a random order, which gives those chances exactly and k different experts; which expert has
    which chance is drawn for each layer.
    """

    def __init__(
        self, name: str, exponent: float, layers: int, num_experts: int, top_k: int, seed: int, device: torch.device
    ) -> None:
        import numpy as np

        from dspark_runtime.cost.routing import inclusion

        self.exponent, self.top_k = exponent, top_k
        chances = np.array(inclusion(num_experts, top_k, exponent))
        draw = np.random.default_rng((seed, 6))
        line = np.stack([systematic(draw.permutation(chances), LINE, draw) for _ in range(layers)], axis=1)
        super().__init__(name, line, num_experts, seed, device)

    def expected(self, counts: Sequence[int]) -> float:
        from dspark_runtime.cost.routing import Routing

        law = Routing("zipf", self.exponent) if self.exponent else Routing()
        return law.unique(self.num_experts, self.top_k, len(counts), sum(counts))


def systematic(chances: np.ndarray, tokens: int, draw: np.random.Generator) -> np.ndarray:
    """[tokens, k] different items each, item i with probability chances[i]; chances add up to the integer k."""
    import numpy as np

    top_k = round(chances.sum())
    order = draw.random((tokens, len(chances))).argsort(axis=1)
    ends = chances[order].cumsum(axis=1) * (top_k / chances.sum())
    steps = np.floor(ends + draw.uniform(1e-9, 1.0 - 1e-9, (tokens, 1))).astype(np.int64)
    picked = np.diff(steps, axis=1, prepend=0) > 0
    return order[picked].reshape(tokens, top_k)


@dataclass(frozen=True, eq=False)
class Trace:
    """A recorded run: experts [tokens, L, k] int16, and where its sequences begin and end, offsets [S + 1]."""

    experts: np.ndarray
    offsets: np.ndarray
    num_experts: int

    def starts(self, length: int) -> np.ndarray:
        """First tokens of the stretches of `length` tokens inside one sequence; every token where none is that long."""
        import numpy as np

        found = [np.arange(a, b - length + 1) for a, b in zip(self.offsets, self.offsets[1:]) if b - a >= length]
        return np.concatenate(found) if found else np.arange(len(self.experts))

    def save(self, path: Path, facts: dict[str, str]) -> None:
        """facts: strings for the file's metadata (target, prompts, command)."""
        import numpy as np
        from safetensors.numpy import save_file

        arrays = {"experts": self.experts.astype(np.int16), "sequence_offsets": self.offsets.astype(np.int64)}
        save_file(arrays, path, {"format": "dspark routing 1", "num_experts": str(self.num_experts), **facts})


class Recorded(ForcedRouting):
    """Replay of a real model's choices, neighbours of one text together as they were."""

    def __init__(self, name: str, trace: Trace, seed: int, device: torch.device) -> None:
        super().__init__(name, trace.experts, trace.num_experts, seed, device)
        self._trace = trace

    def _rows(self, batch: PassBatch) -> Tensor:
        import torch

        from verify_kernels import rng

        starts = self._starts(batch.max_query_len)
        offsets = batch.request_offsets.long()
        local = torch.arange(batch.num_tokens, device=offsets.device)
        owner = torch.searchsorted(offsets[1:-1].contiguous(), local, right=True)
        requests = torch.arange(batch.num_requests, device=offsets.device)
        drawn = rng.uniform(self._passes, requests, rng.ROUTING)
        first = starts[(drawn * starts.shape[0]).long()]
        self._passes += 1
        return (first[owner] + local - offsets[owner]) % self._choices.shape[0]

    @functools.cache
    def _starts(self, length: int) -> Tensor:
        import torch

        return torch.from_numpy(self._trace.starts(length)).to(self._passes.device)

    @functools.cache
    def _touched(self, count: int, longest: int) -> np.ndarray:
        """[L, E]: share of the places at which a request of `count` tokens touches an expert."""
        import numpy as np

        tokens, layers, _ = self._line.shape
        rows = (self._trace.starts(longest)[:, None] + np.arange(count)) % tokens
        found = np.zeros((layers, self.num_experts))
        for layer in range(layers):
            hit = np.zeros((len(rows), self.num_experts), bool)
            np.put_along_axis(hit, self._line[rows, layer].reshape(len(rows), -1).astype(np.int64), True, axis=1)
            found[layer] = hit.mean(axis=0)
        return found

    def expected(self, counts: Sequence[int]) -> float:
        missed = 1.0
        for count in counts:
            missed = missed * (1.0 - self._touched(count, max(counts)))
        return float((1.0 - missed).sum(axis=1).mean())


def load_trace(path: str | Path) -> Trace:
    """Raises ConfigError naming the file and the field."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            about = file.metadata() or {}
            names = set(file.keys())
            if about.get("format") != "dspark routing 1":
                raise ConfigError(f"{path}: format: found {about.get('format')!r}, allowed: 'dspark routing 1'")
            if names != {"experts", "sequence_offsets"}:
                raise ConfigError(f"{path}: found {sorted(names)}, allowed: experts, sequence_offsets")
            experts, offsets = file.get_tensor("experts"), file.get_tensor("sequence_offsets")
            num_experts = int(about.get("num_experts", ""))
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file ({error})") from None
    except ValueError:
        raise ConfigError(f"{path}: num_experts: found {about.get('num_experts')!r}, allowed: an integer") from None
    if experts.ndim != 3 or not experts.size:
        raise ConfigError(f"{path}: experts: found shape {list(experts.shape)}, allowed: [tokens, layers, top_k]")
    if not 0 <= experts.min() <= experts.max() < num_experts:
        raise ConfigError(f"{path}: experts: found {experts.min()} to {experts.max()}, allowed: 0 to {num_experts - 1}")
    ends = offsets.tolist() if offsets.ndim == 1 else []
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != len(experts) or any(a >= b for a, b in zip(ends, ends[1:])):
        raise ConfigError(f"{path}: sequence_offsets: found {ends[:4]}, allowed: growing, from 0 to {len(experts)}")
    return Trace(experts, offsets, num_experts)


def make(name: str, config: ModelConfig, seed: int, device: torch.device) -> ForcedRouting | None:
    """The law that `name` states for a model; None for "model". Raises ConfigError."""
    law, argument = split(name)
    if law == "model":
        return None
    layers = sum(map(config.is_moe, range(config.num_hidden_layers)))
    if not layers:
        raise ConfigError(f"routing: found {name!r} for a target without experts, allowed: leave it out")
    if law == "trace":
        trace = load_trace(argument)
        found = (*trace.experts.shape[1:], trace.num_experts)
        wanted = (layers, config.num_experts_per_tok, config.num_experts)
        if found != wanted:
            texts = ("{} layers of {} of {} experts".format(*values) for values in (found, wanted))
            raise ConfigError(f"routing: {argument}: found {next(texts)}, allowed: {next(texts)}, the target's")
        return Recorded(f"trace:{Path(argument).name}", trace, seed, device)
    exponent = float(argument or 0)
    return Independent(name, exponent, layers, config.num_experts, config.num_experts_per_tok, seed, device)
