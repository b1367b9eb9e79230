"""``text`` of the Responses API to the fields of chat completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inflight.gateway.reading import JsonValue
from inflight.gateway.values import boolean, mapping, one_of


@dataclass(frozen=True)
class TextFormat:
    """The form that the text must have."""

    chat: dict[str, Any]
    """The fields of chat completions that say so: ``response_format`` and ``verbosity``, if they are asked for."""
    shown: dict[str, Any]
    """``text`` of the response, but for the hint."""


def read_text_format(text: JsonValue | None) -> TextFormat:
    """Return the format that ``text`` asks for.

    Raises:
        ApiError: naming the field and what is wrong with it.
    """
    chat: dict[str, Any] = {}
    shown: dict[str, Any] = {"format": {"type": "text"}}
    if text is None:
        return TextFormat(chat, shown)
    text.only(("format", "verbosity"))
    if (verbosity := text.get("verbosity")) is not None:
        chat["verbosity"] = verbosity.text()
    if (form := text.get("format")) is None:
        return TextFormat(chat, shown)
    kind = form.need("type").read(one_of("text", "json_object", "json_schema"))
    if kind == "json_schema":
        schema = _read_schema(form)
        given = {name: value for name, value in schema.items() if value is not None}
        chat["response_format"] = {"type": kind, "json_schema": given}
        return TextFormat(chat, shown | {"format": {"type": kind} | schema})
    form.only(("type",))
    if kind == "json_object":
        chat["response_format"] = {"type": kind}
    return TextFormat(chat, shown | {"format": {"type": kind}})


def _read_schema(form: JsonValue) -> dict[str, Any]:
    """Return the form of JSON as the response repeats it, with what is absent as null."""
    form.only(("type", "name", "schema", "strict", "description"))
    description, strict = form.get("description"), form.get("strict")
    return {
        "name": form.need("name").name(),
        "description": description and description.text(),
        "schema": form.need("schema").read(mapping()),
        "strict": bool(strict is not None and strict.read(boolean())),
    }
