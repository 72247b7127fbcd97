"""Recipes and checks of YAML files for the command line, without torch."""

from __future__ import annotations

from pathlib import Path

from dspark_runtime.configs import FOLDER, load_model_config, load_tree, read_yaml
from dspark_runtime.cost.facts import load_architecture, load_hardware
from eval.schema import bench_config

DEFAULT = FOLDER / "bench" / "default.yaml"


def check_file(path: Path) -> str:
    """Check a recipe of bench or train, an architecture, a machine, a reported result or a tree by what it holds.

    Returns one line that says what it is. Raises ConfigError, one line that names file and field.
    """
    values = read_yaml(path)
    if "parents" in values:
        spec = load_tree(str(path))
        return f"{path}: tree, {spec.num_drafts} drafts, depth {spec.depth}"
    if values.get("architecture") == "facts":
        facts = load_architecture(str(path))
        total, active = facts.total_params / 1e9, facts.active_params / 1e9
        return f"{path}: architecture facts of {facts.name}, {total:.1f} B parameters, {active:.1f} B active"
    if "datasheet" in values:
        machine = load_hardware(str(path))
        return f"{path}: machine, {machine.title}, {machine.datasheet.memory_bandwidth_gbps:g} GB/s"
    if "points" in values:
        from eval.reported import load_reported

        entry = load_reported(str(path))
        return f"{path}: reported result, {entry.title}, {len(entry.points)} points"
    if "training" in values or isinstance(values.get("drafter"), dict):
        from training.config import load_train_config

        run = load_train_config(str(path))
        plan = run.training
        return (
            f"{path}: training recipe, {run.drafter.num_hidden_layers} layers for {run.target}, {plan.steps} steps of "
            f"{plan.rows} x {plan.row_length} tokens"
        )
    if "hidden_size" in values:
        model = load_model_config(str(path))
        return f"{path}: {model.architecture} model, {model.num_hidden_layers} layers, hidden size {model.hidden_size}"
    return f"{path}: bench recipe, {bench_config(values, str(path)).model_dump_json(exclude_defaults=True)}"
