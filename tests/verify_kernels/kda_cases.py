"""Kimi delta attention written out token by token in float64 numpy, and random passes over it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafters.topology import TreeSpec
from drafters.tree import DraftTree
from verify_kernels.batch import PassBatch

BOUND = -5.0


@dataclass
class Layer:
    """Parameters of one layer, H heads of D channels."""

    heads: int
    dim: int
    conv: Tensor  # [3 H D, K]
    a_log: Tensor  # [H]
    dt_bias: Tensor  # [H, D]

    @classmethod
    def random(cls, heads: int, dim: int, width: int, seed: int, dtype: torch.dtype = torch.float64) -> Layer:
        g = torch.Generator().manual_seed(seed)
        conv = torch.randn(3 * heads * dim, width, generator=g, dtype=dtype)
        a_log = torch.randn(heads, generator=g, dtype=dtype) * 0.5
        return cls(heads, dim, conv, a_log, torch.randn(heads, dim, generator=g, dtype=dtype) - 2)

    @functools.cached_property
    def values(self) -> tuple[np.ndarray, ...]:
        return tuple(t.double().numpy() for t in (self.conv, self.a_log, self.dt_bias))

    @property
    def channels(self) -> int:
        return 3 * self.heads * self.dim

    def tokens(self, count: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        """(x, raw_gate, raw_beta) of `count` tokens."""
        g = torch.Generator().manual_seed(seed)
        shapes = (self.channels, self.heads * self.dim, self.heads)
        return tuple(torch.randn(count, n, generator=g, dtype=torch.float64).to(dtype) for n in shapes)

    def arguments(self) -> tuple:
        return self.conv, self.a_log, self.dt_bias, BOUND


@dataclass
class Written:
    """A layer run token by token: state [H, D(value), D(key)], the inputs so far."""

    layer: Layer
    state: np.ndarray
    inputs: list[np.ndarray]

    @classmethod
    def empty(cls, layer: Layer) -> Written:
        return cls(layer, np.zeros((layer.heads, layer.dim, layer.dim)), [])

    def fork(self) -> Written:
        return Written(self.layer, self.state.copy(), list(self.inputs))

    def window(self) -> np.ndarray:
        width = self.layer.conv.shape[1]
        missing = [np.zeros(self.layer.channels)] * (width - 1)
        return np.stack((missing + self.inputs)[-(width - 1) :])

    def step(self, x: Tensor, raw_gate: Tensor, raw_beta: Tensor) -> np.ndarray:
        """The next token; returns its output [H, D]."""
        layer, d = self.layer, self.layer.dim
        conv, a_log, dt_bias = layer.values
        self.inputs.append(x.double().numpy())
        mixed = np.zeros(layer.channels)
        for back in range(conv.shape[1]):
            if back < len(self.inputs):
                mixed += conv[:, conv.shape[1] - 1 - back] * self.inputs[-1 - back]
        mixed = mixed / (1 + np.exp(-mixed))
        q, k, v = mixed.reshape(3, layer.heads, d)
        gate, beta = raw_gate.double().numpy().reshape(layer.heads, d), raw_beta.double().numpy()
        out = np.zeros((layer.heads, d))
        for h in range(layer.heads):
            query = q[h] / np.sqrt((q[h] ** 2).sum() + 1e-6) / np.sqrt(d)
            key = k[h] / np.sqrt((k[h] ** 2).sum() + 1e-6)
            decay = np.exp(BOUND / (1 + np.exp(-np.exp(a_log[h]) * (gate[h] + dt_bias[h]))))
            s = self.state[h] * decay[None, :]
            s = s + np.outer((v[h] - s @ key) / (1 + np.exp(-beta[h])), key)
            self.state[h] = s
            out[h] = s @ query
        return out


def make_pass(
    counts: list[int],
    contexts: list[int],
    rows: list[int],
    trees: list[TreeSpec] | None = None,
    speculative: bool = True,
) -> PassBatch:
    """A pass without pages: what recurrent layers need of it."""
    masks = None
    if trees is not None:
        drafted = [DraftTree.from_spec(t, torch.zeros(1, t.num_nodes, dtype=torch.int64)) for t in trees]
        masks = torch.cat([t.masks()[0] for t in drafted])
    n = sum(counts)
    return PassBatch(
        token_ids=torch.zeros(n, dtype=torch.int64),
        positions=torch.zeros(n, dtype=torch.int64),
        request_offsets=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        page_table=torch.zeros(len(counts), 1, dtype=torch.int32),
        slot_mapping=torch.zeros(n, dtype=torch.int64),
        ancestor_masks=masks,
        max_query_len=max(counts),
        max_kv_len=max(counts) + max(contexts),
        state_rows=torch.tensor(rows),
        speculative=speculative,
    )
