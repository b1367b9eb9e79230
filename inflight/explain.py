"""What is wrong with settings, in one line that names the key, what is allowed, and the nearest known key."""

from __future__ import annotations

from typing import Any, get_args

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
    sections = [model]
    for part in location:
        fields = [section.model_fields[str(part)] for section in sections if part in section.model_fields]
        if fields:
            sections = [inner for field in fields for inner in _models(field.annotation)]
        elif isinstance(part, str):  # the tag of a union; an index stays in the same section
            sections = [section for section in sections if _is_tagged(section, part)]
    return [key for section in sections for key in section.model_fields]


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that an annotation names: itself, or any inside of it, as in a list or a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def _is_tagged(section: type[BaseModel], tag: str) -> bool:
    return any(tag in get_args(field.annotation) for field in section.model_fields.values())
