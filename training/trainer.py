"""The training loop: the target is run online, every step is a pure function of (seed, step), state is kept in plain
safetensors, so a killed run goes on where it was."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafters.dspark.dialects import parse
from drafters.dspark.load import build, load_network
from drafters.dspark.network import DraftNetwork, tensor_shapes
from training.config import Optimisation, Shape, TrainConfig, drafter_config
from training.data import Packed, epoch_order, pack, split
from training.loss import block_losses
from training.passes import (
    Step, TargetPass, block_mask, choose, dense_attention, dense_mask, draft_pass, flex, heads_pass,
)  # fmt: skip
from dspark_runtime.errors import ConfigError
from dspark_runtime.validation import read_fields
from verify_kernels.rope import cos_sin_table

SHARD_BYTES = 15_000_000
"""Largest safetensors file of an exported drafter: it lives in a git repository."""


def new_network(shape: Shape, target: Any, seed: int) -> DraftNetwork:
    """An untrained drafter in float32, on the target's device; Markov w2 starts at zero, so the head starts silent.

    target: a `dspark_runtime.targets.Target`. Raises ValueError for a shape that does not fit it.
    """
    config = parse(drafter_config(shape, target.config), "drafter", target.model.num_layers)
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, size in tensor_shapes(config).items():
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones(size)
        elif name.endswith(".bias") or name == "markov_head.markov_w2.weight" or name.startswith("confidence"):
            tensors[name] = torch.zeros(size)
        elif name == "markov_head.markov_w1.weight":
            tensors[name] = torch.randn(size, generator=draw) * size[1] ** -0.5
        else:
            scale = size[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                scale /= math.sqrt(2 * config.num_hidden_layers)
            tensors[name] = torch.randn(size, generator=draw) * scale
    return trainable(config, tensors, target.model)


STATE = 2
"""Version of a run's state: it holds parameters as the network does, whose layout may change."""


def trainable(config: Any, tensors: Mapping[str, Tensor], model: Any) -> DraftNetwork:
    """A network of float32 parameters that take gradients, around the target's frozen tables."""

    class _Float32:  # the target as `build` sees it, but for the dtype of what is trained
        device, dtype, embed, lm_head = model.device, torch.float32, model.embed, model.lm_head

    return build(config, tensors, _Float32, "drafter").requires_grad_(True)


class Schedule:
    """Linear warm-up, then a cosine to 0."""

    def __init__(self, plan: Optimisation) -> None:
        self.steps, self.warm = plan.steps, max(int(plan.warmup * plan.steps), 1)

    def __call__(self, step: int) -> float:
        if step < self.warm:
            return (step + 1) / self.warm
        return 0.5 * (1 + math.cos(math.pi * (step - self.warm) / max(self.steps - self.warm, 1)))


def optimisers(network: DraftNetwork, plan: Optimisation) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices of fusion and layers (updates scaled to AdamW's) and AdamW for
    tables, norms and heads. No weight decay."""
    named = dict(network.named_parameters())
    matrices = [p for name, p in named.items() if p.dim() == 2 and not name.startswith(("markov", "confidence"))]
    chosen = {id(p) for p in matrices} if plan.muon_lr else set()
    rest = [p for p in named.values() if id(p) not in chosen]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=plan.lr, weight_decay=0.0, fused=True)]
    if chosen:
        found.append(torch.optim.Muon(matrices, lr=plan.muon_lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return found


class Trainer:
    """One run. tokens, lengths: the conversations (`rollout.load_shards`). folder: state, curve and drafter go there.

    Resumes from the folder's state if there is one; a new run starts at random, or at the weights of the drafter in
    `init`. compile: torch.compile with FlexAttention (CUDA); otherwise a dense mask.
    """

    def __init__(
        self,
        config: TrainConfig,
        target: Any,
        tokens: np.ndarray,
        lengths: np.ndarray,
        folder: Path,
        compile: bool,
        init: Path | None = None,
    ) -> None:
        self.config, self.plan, self.target, self.folder = config, config.training, target, folder
        self.network = new_network(config.drafter, target, config.seed)
        if init is not None:
            try:
                start = load_network(init, target.model)
            except ValueError as error:
                raise ConfigError(f"init: {error}") from None
            found = start.tensors()
            for name, x in self.network.tensors().items():
                if name not in found or found[name].shape != x.shape:
                    raise ConfigError(f"init: {init}: {name}: found {_shape(found.get(name))}, expected {list(x.shape)}")
            self.network.load_state_dict(start.state_dict(), strict=False)  # it may have heads that this one lacks
        self.optimisers = optimisers(self.network, self.plan)
        self.schedule = Schedule(self.plan)
        self.tokens, self.lengths = tokens, lengths
        self.training, self.held_out = split(len(lengths), self.plan.held_out, config.seed)
        self.device = target.model.device
        self.target_pass = TargetPass(target.model, self.plan.rows, self.plan.row_length)
        self.cos_sin = cos_sin_table(self.network.config, self.plan.row_length + 64, self.device)
        self._packed: tuple[int, Packed] | None = None
        self._epoch_start = 0  # the first step of the packed epoch
        self.done, self.seconds = 0, 0.0
        self.curve: list[dict[str, float]] = []
        self._mask, self._attention, self._draft = dense_mask, dense_attention, draft_pass
        if compile:
            self._mask, self._attention = torch.compile(block_mask, dynamic=False), flex
            self._draft = torch.compile(draft_pass, dynamic=False)
        if (folder / "state.json").is_file():
            self._resume()

    # ------------------------------------------------------------------ one step

    def _rows(self, step: int) -> tuple[Packed, np.ndarray]:
        """The packed epoch of a step and the rows of it that the step takes."""
        if step < self._epoch_start:
            self._packed, self._epoch_start = None, 0
        epoch, at = 0 if self._packed is None else self._packed[0], step - self._epoch_start
        while True:
            if self._packed is None or self._packed[0] != epoch:
                order = epoch_order(self.training, self.config.seed, epoch)
                self._packed = (epoch, pack(self.tokens, self.lengths, self.plan.row_length, order))
            per_epoch = max(len(self._packed[1]) // self.plan.rows, 1)
            if at < per_epoch:
                break
            # Epochs have nearly, not exactly, as many rows: walk them from the first, as an uninterrupted run did.
            at, epoch = at - per_epoch, epoch + 1
            self._epoch_start += per_epoch
        shuffled = np.random.default_rng((self.config.seed, epoch, 1)).permutation(len(self._packed[1]))
        return self._packed[1], shuffled[at * self.plan.rows : (at + 1) * self.plan.rows]

    def losses(self, packed: Packed, rows: np.ndarray, seed: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """-> (loss, its parts [4 + γ]: cross-entropy, ‖q - p‖₁, confidence loss, tau, distance by slot), on the device."""
        plan, network = self.plan, self.network
        c = network.config
        step = choose(packed, rows, plan.anchors, c.block_size, seed, self.device)
        features, target_hidden = self.target_pass(step, packed.documents[rows], c.taps)
        with torch.no_grad():
            target_logits = target_hidden @ self.target.model.lm_head.T
        amp = torch.autocast(self.device.type, torch.bfloat16, enabled=self.target.model.dtype == torch.bfloat16)
        with amp:
            mask = self._mask(step.documents, step.anchors, c.block_size)
            hidden = self._draft(network, step, features, self.cos_sin, mask, self._attention)
            z, confidence = heads_pass(network, step, hidden)
        # Slots without a label are left out altogether.
        real = step.supervised.flatten().nonzero().squeeze(1)
        length = step.tokens.shape[1]
        row = torch.arange(len(rows), device=self.device)[:, None, None] * length
        slots = torch.arange(c.block_size, device=self.device)
        before = (row + step.anchors[..., None] + slots).flatten()[real]  # whose logits speak of the label
        weight = torch.exp(-slots / plan.decay).expand(step.supervised.shape).flatten()[real]
        weight = weight / weight.sum()
        flat = hidden.flatten(0, 1)[real]
        loss, ce, tv = block_losses(
            flat,
            None if z is None else z.flatten(0, 1)[real],
            network.lm_head,
            None if network.markov is None else network.markov.w2,
            target_logits,
            before,
            step.labels.flatten()[real],
            plan.ce * weight,
            plan.tv * weight,
        )
        sure = torch.zeros((), device=self.device)
        if confidence is not None:
            overlap = 1 - tv / 2
            each = torch.nn.functional.binary_cross_entropy_with_logits(
                confidence.flatten()[real].float(), overlap, reduction="none"
            )
            sure = (weight * each).sum()
            loss = loss + plan.confidence * sure
        with torch.no_grad():
            distance = torch.ones(step.supervised.numel(), device=self.device)
            distance = distance.index_put((real,), tv / 2).view(-1, c.block_size)
            whole = step.supervised.flatten(0, 1)[:, -1]  # blocks with every label: survival of all slots is known
            kept = ((1 - distance).cumprod(1) * whole[:, None]).sum(0) / whole.sum().clamp(min=1)
            parts = torch.stack(((weight * ce).sum(), (weight * tv).sum(), sure.detach(), 1 + kept.sum()))
        return loss, torch.cat((parts, kept))

    def step(self) -> Tensor:
        """One update; returns the parts of its loss."""
        packed, rows = self._rows(self.done)
        loss, parts = self.losses(packed, rows, (self.config.seed, self.done, 2))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.plan.clip, foreach=True)
        scale = self.schedule(self.done)
        for optimiser, lr in zip(self.optimisers, (self.plan.lr, self.plan.muon_lr)):
            for group in optimiser.param_groups:
                group["lr"] = lr * scale
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.done += 1
        return parts

    @torch.no_grad()
    def evaluate(self) -> dict[str, float] | None:
        """Held-out parts of the loss, averaged; None where nothing is held out."""
        if not len(self.held_out):
            return None
        packed = pack(self.tokens, self.lengths, self.plan.row_length, self.held_out)
        found = []
        for start in range(0, max(len(packed) - self.plan.rows, 0) + 1, self.plan.rows):
            rows = np.arange(start, start + self.plan.rows) % len(packed)  # always a full step: shapes are compiled
            found.append(self.losses(packed, rows, (self.config.seed, start, 3))[1])
        return _named(torch.stack(found).mean(0).tolist())

    def run(self, report: Callable[[int, int, dict[str, float]], None], until: float | None = None) -> bool:
        """Train to the end; True when it is reached. until: seconds of this call after which to stop and save."""
        began, plan = time.perf_counter(), self.plan
        before = self.seconds
        logged: list[Tensor] = []
        while self.done < plan.steps:
            logged.append(self.step())
            if self.done % plan.log_every == 0 or self.done == plan.steps:
                parts = _named(torch.stack(logged).mean(0).tolist())
                logged = []
                if not math.isfinite(parts["ce"]):
                    raise ConfigError(f"training: the loss is {parts['ce']} at step {self.done}; lower lr or clip")
                self.seconds = before + time.perf_counter() - began
                self.curve.append({"step": self.done, "seconds": round(self.seconds, 1)} | parts)
                report(self.done, plan.steps, parts)
                if until is not None and time.perf_counter() - began > until:
                    break
            if self.done % plan.save_every == 0:
                self.save()
        self.seconds = before + time.perf_counter() - began
        self.save()
        return self.done >= plan.steps

    # ------------------------------------------------------------------ state

    def _state(self) -> dict[str, Tensor]:
        found = {f"network.{name}": p for name, p in self.network.named_parameters()}
        for i, optimiser in enumerate(self.optimisers):
            for j, values in optimiser.state_dict()["state"].items():
                found |= {f"optimiser.{i}.{j}.{name}": torch.as_tensor(x) for name, x in values.items()}
        return found

    def save(self) -> None:
        """State of the run, its curve and the drafter as it is, each in place at once."""
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: x.detach().contiguous().cpu() for name, x in self._state().items()}
        name = f"state-{self.done}.safetensors"
        save_file(tensors, self.folder / "state.partial")
        (self.folder / "state.partial").replace(self.folder / name)
        state = {"version": STATE, "step": self.done, "seconds": self.seconds, "file": name}
        state["config"] = self.config.model_dump(mode="json")
        _write(self.folder / "state.json", json.dumps(state | {"curve": self.curve}))
        for old in self.folder.glob("state-*.safetensors"):
            if old.name != name:
                old.unlink()
        export(self.network, self.config.drafter, self.target.config, self.folder / "drafter")

    def _resume(self) -> None:
        from safetensors.torch import load_file

        state = read_fields(self.folder / "state.json", "version", "config", "file", "step", "seconds", "curve")
        if state["version"] != STATE:
            raise ConfigError(f"{self.folder}: state.json: version: found {state['version']}, allowed: {STATE}")
        if state["config"] != self.config.model_dump(mode="json"):
            raise ConfigError(f"{self.folder}: holds a run of another recipe; use another folder, or that recipe")
        tensors = load_file(self.folder / state["file"], device=str(self.device))
        with torch.no_grad():
            for name, p in self.network.named_parameters():
                p.copy_(tensors[f"network.{name}"])
        for i, optimiser in enumerate(self.optimisers):
            values: dict[int, dict[str, Tensor]] = {}
            for key, x in tensors.items():
                kind, _, rest = key.partition(".")
                if kind == "optimiser" and rest.startswith(f"{i}."):
                    _, j, name = rest.split(".", 2)
                    values.setdefault(int(j), {})[name] = x
            whole = optimiser.state_dict()
            optimiser.load_state_dict(whole | {"state": values})
        self.done, self.seconds, self.curve = state["step"], state["seconds"], state["curve"]


def _shape(x: Tensor | None) -> list[int] | str:
    return "nothing" if x is None else list(x.shape)


def _named(parts: list[float]) -> dict[str, float]:
    ce, tv, confidence, tau, *kept = parts
    named = {"ce": ce, "tv": tv, "confidence": confidence, "tau": tau}
    return {name: round(x, 4) for name, x in (named | {f"survival_{k}": x for k, x in enumerate(kept, 1)}).items()}


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".partial")
    temporary.write_text(text)
    temporary.replace(path)


def export(network: DraftNetwork, shape: Shape, target_config: Any, folder: Path) -> None:
    """A checkpoint folder in the DeepSpec dialect, bf16, without the target's own tables, in files of at most 15 MB."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: x.detach().to(torch.bfloat16).contiguous().cpu() for name, x in network.tensors().items()}
    files: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, x in tensors.items():
        if size + x.nbytes > SHARD_BYTES and files[-1]:
            files.append({})
            size = 0
        files[-1][name] = x
        size += x.nbytes
    index: dict[str, str] = {}
    for i, part in enumerate(files, start=1):
        name = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(part, name)
    for old in folder.glob("*.safetensors"):
        if old.name not in index.values():
            old.unlink()
    total = sum(x.nbytes for x in tensors.values())
    whole = {"metadata": {"total_size": total}, "weight_map": index}
    _write(folder / "model.safetensors.index.json", json.dumps(whole, indent=1) + "\n")
    _write(folder / "config.json", json.dumps(drafter_config(shape, target_config), indent=1) + "\n")
