"""Recipes and checks of YAML files for the command line, without torch."""

from __future__ import annotations

from pathlib import Path

from dspark_runtime.configs import FOLDER, load_model_config, load_tree, read_yaml
from eval.schema import bench_config

DEFAULT = FOLDER / "bench" / "default.yaml"


def check_file(path: Path) -> str:
    """Check a bench recipe, a model architecture or a tree by what it holds; returns one line that says what it is."""
    values = read_yaml(path)
    if "parents" in values:
        spec = load_tree(str(path))
        return f"{path}: tree, {spec.num_drafts} drafts, depth {spec.depth}"
    if "hidden_size" in values:
        model = load_model_config(str(path))
        return f"{path}: {model.architecture} model, {model.num_hidden_layers} layers, hidden size {model.hidden_size}"
    return f"{path}: bench recipe, {bench_config(values, str(path)).model_dump_json(exclude_defaults=True)}"
