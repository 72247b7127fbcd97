"""Reading a drafter checkpoint: config.json and safetensors, checked against the target it is meant for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.base import Drafter
from drafters.dspark import calibration
from drafters.dspark.config import DrafterConfig
from drafters.dspark.dialects import parse
from drafters.dspark.drafter import BlockDrafter
from drafters.dspark.eagle3 import Eagle3Drafter
from drafters.dspark.latent_drafter import LatentBlockDrafter
from drafters.dspark.network import DraftNetwork, tensor_shapes

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
"""The drafters that ship with this package, each in a folder of its name."""

_PREFIXES = (("model.", ""), ("midlayer.", "layers.0."))
_MLA = (("context_proj.", "fc."), ("context_norm.", "hidden_norm."), ("final_norm.", "norm."))
_TABLES = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d", "mask_embedding")
_IGNORED = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")


def locate(name: str | Path) -> Path:
    """A checkpoint's folder: a path, or the name of one that ships with this package."""
    shipped = CHECKPOINTS / name
    return shipped if not Path(name).is_dir() and shipped.is_dir() else Path(name)


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises ValueError naming the file."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: config.json: missing")
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: found {type(values).__name__}, allowed: an object")
    return values


def canonical(name: str) -> str:
    """A checkpoint's tensor name as DeepSpec writes it."""
    for old, new in (*_PREFIXES, *_MLA):
        name = new + name.removeprefix(old) if name.startswith(old) else name
    return name


def _spelled(c: DrafterConfig, name: str) -> str:
    """A tensor's name as the drafter's own dialect has it: `canonical` backwards, for errors."""
    for old, new in _MLA if c.layers == "mla" else ():
        name = old + name.removeprefix(new) if name.startswith(new) else name
    return name


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder's *.safetensors files, under DeepSpec's names."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: found no weights, expected *.safetensors (pickled weights are never loaded)")
    found: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                for key in opened.keys():
                    found[canonical(key)] = opened.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: not a readable safetensors file ({error})") from None
    return found


def load_network(folder: str | Path, target: Any) -> DraftNetwork:
    """The draft network of a checkpoint folder (see `locate`), on its target's device and in its dtype.

    target: a `dspark_runtime` transformer, whose embedding and LM head are used where the checkpoint has none of its
    own or the same ones. Raises ValueError, one line, that names file, key, found and expected.
    """
    folder = locate(folder)
    path = folder / "config.json"
    config = parse(read_config(folder), str(path), target.num_layers)
    _check_target(config, target, path)
    if config.layers == "gemma4":
        raise ValueError(
            f"{path}: architectures: found a {config.kind} drafter with {config.layers} layers, which are not built; "
            "allowed: layers of the qwen3, llama and mla design"
        )
    return build(config, read_tensors(folder), target, str(folder))


def load_drafter(folder: str | Path, target: Any, **options: Any) -> Drafter:
    """The drafter of a checkpoint folder, with the confidence temperatures of its calibration.json if there is one.

    options: those of `BlockDrafter` or `Eagle3Drafter`. See `load_network` and `calibration.read` for errors.
    """
    folder = locate(folder)
    network = load_network(folder, target)
    found = calibration.read(folder)
    if found is not None:
        drafts = network.config.num_drafts if network.confidence is not None else 0
        if len(found.temperatures) != drafts:
            raise ValueError(
                f"{folder / calibration.FILE}: temperatures: found {len(found.temperatures)}, expected {drafts}"
                + (", one for each draft" if drafts else ": this drafter has no confidence head")
            )
        options.setdefault("temperatures", found.temperatures)
    name = f"{network.config.kind}:{folder.resolve().name}"
    if network.config.kind == "eagle3":
        for option in options.keys() & {"confidence", "stop_below", "temperatures"}:
            raise ValueError(f"{option}: not an option of {name}, which has no confidence head")
        return Eagle3Drafter(network, target, name, **options)
    return block_drafter(network, target, name, **options)


def block_drafter(network: DraftNetwork, target: Any, name: str, **options: Any) -> BlockDrafter:
    """The drafter of a DSpark or DFlash network, with the cache that its layers need."""
    made = BlockDrafter if network.config.mla is None else LatentBlockDrafter
    return made(network, target, name, **options)


def dummy_drafter(config: DrafterConfig, target: Any, name: str, seed: int, own: Sequence[str] = ()) -> BlockDrafter:
    """A drafter of a configuration with seeded random weights, made on the target's device: for timing.

    own: which of embed_tokens and lm_head it has for itself. Norms are one, biases zero, matrices normal with standard
    deviation 0.02. Raises ValueError, one line, where configuration and target do not fit.
    """
    _check_target(config, target, name)
    generator = torch.Generator(target.device).manual_seed(seed)

    def draw(key: str, shape: tuple[int, ...]) -> Tensor:
        x = torch.empty(shape, dtype=target.dtype, device=target.device)
        if "norm" in key:
            return x.fill_(1)
        return x.zero_() if key.endswith(".bias") else x.normal_(0, 0.02, generator=generator)

    shapes = tensor_shapes(config)
    tables = {"embed_tokens": config.vocab_size, "lm_head": config.draft_vocab_size}
    shapes |= {f"{table}.weight": (tables[table], config.hidden_size) for table in own}
    tensors = {key: draw(key, shape) for key, shape in shapes.items()}
    return block_drafter(build(config, tensors, target, name), target, f"{config.kind}:{name}")


def _check_target(c: DrafterConfig, target: Any, path: Path | str) -> None:
    hidden = target.embed.shape[1]
    for field, found, expected in (
        ("vocab_size", c.vocab_size, target.vocab_size),
        ("target_hidden_size", c.target_hidden_size, hidden),
        ("num_target_layers", c.num_target_layers or target.num_layers, target.num_layers),
    ):
        if found != expected:
            raise ValueError(f"{path}: {field}: found {found}, expected {expected}, that of the target {target.name}")
    if max(c.taps) >= target.num_layers:
        raise ValueError(
            f"{path}: target layers: found {list(c.taps)} (counted from 0), allowed: up to {target.num_layers - 1}, "
            f"the last of the target {target.name}"
        )


def check_tensors(c: DrafterConfig, tensors: Mapping[str, Tensor], source: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a drafter must have, once all are there and nothing is that cannot belong to one.

    tensors: under DeepSpec's names; source: named in errors. Raises ValueError, one line: key, found, expected.
    """
    shapes = tensor_shapes(c)
    for key in tensors:
        unread = c.dialect == "k3" and c.confidence == "none" and key.startswith("confidence_head.")
        if key not in shapes and key not in _TABLES and not key.endswith(_IGNORED) and not unread:
            name = _spelled(c, key)
            raise ValueError(f"{source}: {name}: not a tensor of a {c.kind} drafter in the {c.dialect} dialect")
    for key, shape in shapes.items():
        _take(tensors, key, shape, source, c)
    for key, rows in (("embed_tokens.weight", c.vocab_size), ("lm_head.weight", c.draft_vocab_size)):
        if key in tensors:
            _take(tensors, key, (rows, c.hidden_size), source, c)
    mask = tensors.get("mask_embedding")
    if mask is not None and mask.numel() != c.hidden_size:
        raise ValueError(f"{source}: mask_embedding: found {mask.numel()} entries, expected {c.hidden_size}")
    _target_ids(c, tensors, source, torch.device("cpu"))
    return shapes


def _take(tensors: Mapping[str, Tensor], key: str, shape: tuple[int, ...], source: str, c: DrafterConfig) -> Tensor:
    name = f"{source}: {_spelled(c, key)}"
    if key not in tensors:
        raise ValueError(f"{name}: missing, expected shape {list(shape)}")
    found = tensors[key]
    if tuple(found.shape) != shape:
        raise ValueError(f"{name}: found shape {list(found.shape)}, expected {list(shape)}")
    if not found.is_floating_point():
        raise ValueError(f"{name}: found dtype {found.dtype}, expected a floating-point type")
    return found


def build(c: DrafterConfig, tensors: Mapping[str, Tensor], target: Any, source: str) -> DraftNetwork:
    """A network from tensors under DeepSpec's names. source: named in errors."""
    device, dtype = target.device, target.dtype

    def take(key: str, shape: tuple[int, ...]) -> Tensor:
        return _take(tensors, key, shape, source, c).to(device=device, dtype=dtype)

    def table(key: str, rows: int, shared: Tensor) -> Tensor:
        shape = (rows, c.hidden_size)
        if key not in tensors:
            if shared.shape != shape:
                raise ValueError(
                    f"{source}: {key}: missing, expected shape {list(shape)} (the target's {list(shared.shape)} "
                    "does not fit)"
                )
            return shared
        own = take(key, shape)
        return shared if shared.shape == shape and torch.equal(own, shared) else own

    weights = {key: take(key, shape) for key, shape in check_tensors(c, tensors, source).items()}
    mask = tensors.get("mask_embedding")
    if mask is not None:
        mask = mask.flatten().to(device=device, dtype=dtype)
    return DraftNetwork(
        c,
        weights,
        table("embed_tokens.weight", c.vocab_size, target.embed),
        table("lm_head.weight", c.draft_vocab_size, target.lm_head),
        _target_ids(c, tensors, source, device),
        mask,
    ).requires_grad_(False)


def _target_ids(c: DrafterConfig, tensors: Mapping[str, Tensor], source: str, device: torch.device) -> Tensor | None:
    """Target id of every draft id: d2t holds the differences, t2d marks which target ids there are."""
    rows, vocab = c.draft_vocab_size, c.vocab_size
    if "d2t" not in tensors:
        if rows != vocab:
            raise ValueError(f"{source}: d2t: missing, expected shape [{rows}] for {rows} of {vocab} tokens")
        return None
    d2t = tensors["d2t"].long()
    if tuple(d2t.shape) != (rows,):
        raise ValueError(f"{source}: d2t: found shape {list(d2t.shape)}, expected [{rows}]")
    ids = torch.arange(rows) + d2t
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) < rows:
        raise ValueError(
            f"{source}: d2t: found target ids from {int(ids.min())} to {int(ids.max())}, {len(ids.unique())} of them "
            f"distinct, expected {rows} distinct ids below {vocab} (entries are offsets, target id - draft id)"
        )
    if "t2d" in tensors:
        marked = torch.zeros(vocab, dtype=torch.bool)
        marked[ids] = True
        t2d = tensors["t2d"].bool()
        if t2d.shape != marked.shape or not torch.equal(t2d, marked):
            raise ValueError(f"{source}: t2d: found marks of {int(t2d.sum())} ids, expected the {rows} that d2t names")
    return None if rows == vocab and torch.equal(ids, torch.arange(rows)) else ids.to(device)
