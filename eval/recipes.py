"""Reading and checking YAML files of the command line, without torch."""

from __future__ import annotations

from pathlib import Path

import yaml

from dspark_runtime.errors import ConfigError

DEFAULT = Path(__file__).resolve().parent.parent / "configs" / "bench" / "default.yaml"


def read_recipe(path: Path) -> dict[str, object]:
    """The fields of a YAML file. Raises ConfigError with file and line."""
    try:
        text = path.read_text()
        values = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file") from None
    except yaml.YAMLError as error:
        # Where the broken value starts; the field is the last one named up to there.
        mark = getattr(error, "context_mark", None) or getattr(error, "problem_mark", None)
        lines = text.splitlines()[: mark.line + 1] if mark is not None else []
        fields = [line.partition(":")[0].strip() for line in lines if ":" in line]
        where = f":{mark.line + 1}" if mark is not None else ""
        field = f"{fields[-1]}: " if fields else ""
        raise ConfigError(f"{path}{where}: {field}not YAML ({getattr(error, 'problem', None) or 'broken'})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: found {type(values).__name__}, allowed: fields with values (name: value)")
    return values


def check_file(path: Path) -> str:
    """Check a bench recipe, a model architecture or a tree by what it holds; returns one line that says what it is."""
    values = read_recipe(path)
    if "parents" in values:
        from dspark_runtime.configs import load_tree

        return f"{path}: tree, {load_tree(str(path)).num_drafts} drafts"
    if "hidden_size" in values:
        from dspark_runtime.configs import load_model_config

        return f"{path}: model, {load_model_config(path)}"
    from eval.schema import bench_config

    config = bench_config(values, str(path))
    return f"{path}: bench recipe, {config.model_dump_json(exclude_defaults=True)}"
