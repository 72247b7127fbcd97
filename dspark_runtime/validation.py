"""One line for what is wrong in a file. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from dspark_runtime.errors import ConfigError

T = TypeVar("T", bound=BaseModel)


def read_json(path: Path) -> object:
    """What a JSON file holds. Raises ConfigError naming the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({error})") from None


def read_fields(path: Path, *names: str) -> dict[str, Any]:
    """A JSON object that has these fields. Raises ConfigError naming the file and the field."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: found {shown(values)}, allowed: an object")
    for name in names:
        if name not in values:
            raise ConfigError(f"{path}: {name}: missing")
    return values


def shown(value: object) -> str:
    """A value in an error line, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def checked(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """A validated `kind`, or a ConfigError of one line that names `where` and the field."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "missing":
            message = "missing"
        elif first["type"] == "extra_forbidden":
            message = "unknown field"
        elif first["type"] != "value_error":
            message = f"found {shown(first['input'])}, allowed: {message[0].lower()}{message[1:]}"
        raise ConfigError(": ".join(part for part in (where, field, message) if part)) from None
