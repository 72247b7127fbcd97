"""The one reader of `configs/`: data files in YAML, checked field by field. No torch at import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from drafters.topology import TreeSpec
from dspark_runtime.errors import ConfigError
from dspark_runtime.models.config import ModelConfig
from dspark_runtime.validation import checked

FOLDER = Path(__file__).resolve().parents[1] / "configs"


def names(kind: str) -> list[str]:
    """Names of the files in configs/<kind>."""
    return sorted(path.stem for path in (FOLDER / kind).glob("*.yaml"))


def find(kind: str, name: str) -> Path:
    """The file of a name in configs/<kind>, or of a path that ends in .yaml. Raises ConfigError if there is none."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / kind / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"{kind.removesuffix('s')}: found {name!r}, allowed: a .yaml file or one of {', '.join(names(kind))}")
    return path


class _Loader(yaml.SafeLoader):
    """YAML forbids a key twice; PyYAML takes the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"found {key.value!r} twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The fields of a YAML file. Raises ConfigError naming file, line and field."""
    try:
        text = path.read_text(encoding="utf-8")
        values = yaml.load(text, _Loader)
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


def load_model_config(name: str | Path) -> ModelConfig:
    """An architecture from configs/models, or from a YAML file. `source` (where the numbers come from) is a comment."""
    path = find("models", str(name))
    values = read_yaml(path)
    values.pop("source", None)
    return checked(ModelConfig, values, str(path))


def load_tree(name: str | Path) -> TreeSpec:
    """A topology from configs/trees, or from a YAML file: `parents` in breadth-first order, the root's is -1.

    For people: `description`, and the rank acceptances (`profile`) with which the tree has its
    `expected_acceptance_length`.
    """
    path = find("trees", str(name))
    values = read_yaml(path)
    for documentation in ("description", "profile", "expected_acceptance_length"):
        values.pop(documentation, None)
    if set(values) != {"parents"}:
        wrong = sorted(set(values) - {"parents"}) or ["parents"]
        state = "unknown field" if set(values) - {"parents"} else "missing"
        raise ConfigError(f"{path}: {wrong[0]}: {state}")
    parents = values["parents"]
    if not isinstance(parents, list) or any(type(p) is not int for p in parents):
        raise ConfigError(f"{path}: parents: found {parents!r}, allowed: a list of integers")
    try:
        return TreeSpec(tuple(parents))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
