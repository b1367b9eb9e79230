"""What readers ask of ``quantization_config``, and of the names of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from inflight.errors import DeploymentError

LARGEST_GROUP = 1 << 20
SOURCE = "config.json: quantization_config"


def wrong(field: str, value: Any, allowed: str) -> DeploymentError:
    """Return the error for a value that is not supported."""
    return DeploymentError(f"{SOURCE}.{field} is {value!r}; it must be {allowed}")


def chosen(data: Mapping[str, Any], field: str, allowed: Iterable[Any], default: Any = None) -> Any:
    """Return a value that must be one of ``allowed``, or ``default`` where there is none. Raises DeploymentError."""
    value, options = data.get(field), list(allowed)
    value = default if value is None else value
    if not any(type(value) is type(option) and value == option for option in options):
        raise wrong(field, value, f"one of {', '.join(map(repr, options))}")
    return value


def unused(data: Mapping[str, Any], fields: Iterable[str]) -> None:
    """Require that options that are not supported are left out, null, false or empty. Raises DeploymentError."""
    for field in fields:
        if data.get(field):
            raise DeploymentError(f"{SOURCE}.{field} is {data[field]!r}; it is not supported")


def is_group(value: Any) -> bool:
    """Return whether so many inputs, or outputs, may share a scale."""
    return type(value) is int and 1 <= value <= LARGEST_GROUP


def group_size(data: Mapping[str, Any], default: int) -> int:
    """Return how many inputs share a scale; 0: all, which files say as -1. Raises DeploymentError."""
    value = data.get("group_size")
    value = default if value is None else value
    if not is_group(value) and not (type(value) is int and value == -1):
        raise wrong("group_size", value, f"a positive integer up to {LARGEST_GROUP}, or -1")
    return max(value, 0)


def modules(names: frozenset[str], kind: str, required: Iterable[str]) -> list[str]:
    """Return the modules that have a tensor ``kind``, all of which must have those of ``required`` too.

    Raises:
        DeploymentError: one is missing.
    """
    found = sorted(name.removesuffix(f".{kind}") for name in names if name.endswith(f".{kind}"))
    for module in found:
        for other in required:
            if f"{module}.{other}" not in names:
                raise DeploymentError(f"checkpoint: no tensor {module}.{other} beside {module}.{kind}")
    return found
