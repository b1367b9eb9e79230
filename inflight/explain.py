"""What is wrong with settings, in one line that names the key, what is allowed, and the nearest known key."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from inflight.errors import nearest


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Say every fault of a configuration in one line; ``model`` is what it was validated as."""
    return "; ".join(
        _explain_one(detail["loc"], detail["type"], detail["msg"], detail["input"], model) for detail in error.errors()
    )


def _explain_one(location: tuple[int | str, ...], kind: str, message: str, value: Any, model: type[BaseModel]) -> str:
    key = ".".join(map(str, location))
    if kind == "extra_forbidden":
        return f"unknown key `{key}`{nearest(str(location[-1]), _known_keys(model, location[:-1]))}"
    if kind == "missing":
        return f"`{key}` is missing"
    message = message.removeprefix("Value error, ")
    if isinstance(value, dict):  # a section as a whole: the message names its keys
        return f"{key}: {message}" if key else message
    return f"`{key}` is {value!r}: {message[:1].lower()}{message[1:]}"


def _known_keys(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    section = model
    for part in location:
        section = section.model_fields[str(part)].annotation  # type: ignore[assignment]
    return list(section.model_fields)
