"""What every section of deployment.yaml has in common: it is strict and frozen, and a key says which engines read it.

A key that an engine does not read is refused where it is given, so that no setting is accepted and ignored. Wrong
settings are explained in one line that names the key, what is allowed, and the nearest known key.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from inflight.errors import nearest

EngineKind = Literal["pytorch", "trtllm", "tensorrtllm", "replay"]
ENGINES_ALONE = "`{key}` needs `engine.kind:` {engines}; it is {kind}"
VALUE_OF_ENGINES_ALONE = "`{key}: {value}` needs `engine.kind:` {engines}; it is {kind}"
NEEDS_A_MODEL = "`{key}` needs an engine with a model; `engine.kind` is {kind}"
COMPILED = "compiled engines are served by `engine.kind: tensorrtllm`"


@dataclass(frozen=True)
class ReadBy:
    """Marks a key, or all keys of a section, as read by these kinds of engine; the others refuse it."""

    engines: tuple[EngineKind, ...]
    refusal: str = ENGINES_ALONE
    """The error, with {key}, {value}, {engines} and {kind} to fill in."""
    values: tuple[str, ...] = ()
    """The values of the key that are concerned, if not all; every engine accepts the others."""
    off_too: bool = True
    """Whether a value that switches the feature off, such as null, is concerned too."""

    def error(self, key: str, value: Any, kind: str) -> str | None:
        """Return why an engine of this kind refuses the key, or None."""
        concerned = value in self.values if self.values else self.off_too or bool(value)
        if kind in self.engines or not concerned:
            return None
        engines = " or ".join(engine for engine in self.engines if engine != "replay")
        return self.refusal.format(key=key, value=value, engines=engines, kind=kind)


PORTABLE_ONLY = ReadBy(("pytorch",))
WITH_A_MODEL = ReadBy(("pytorch", "trtllm", "tensorrtllm"), NEEDS_A_MODEL)


class Section(BaseModel):
    """A mapping of deployment.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    read_by: ClassVar[tuple[ReadBy, ...]] = ()
    """Which engines read the keys of this section. A key's own marks count only for those engines."""


def unread_keys(deployment: Section, kind: str) -> Iterator[str]:
    """Yield an error for each key of a deployment's sections that is given and that the engine does not read."""
    for name, section in deployment:
        if not isinstance(section, Section):
            continue
        for key, field in type(section).model_fields.items():
            if key not in section.model_fields_set:
                continue
            marks = [*section.read_by, *(mark for mark in field.metadata if isinstance(mark, ReadBy))]
            errors = (mark.error(f"{name}.{key}", getattr(section, key), kind) for mark in marks)
            yield from itertools.islice(filter(None, errors), 1)


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
            sections = [
                section
                for section in sections
                if any(part in get_args(field.annotation) for field in section.model_fields.values())
            ]
    return [key for section in sections for key in section.model_fields]


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that an annotation names: itself, or any inside of it, as in a list or a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]
