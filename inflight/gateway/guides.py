"""What an answer must be: ``response_format`` and the fields of vLLM and SGLang, as the engine's guide."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from inflight.gateway.body import check_text
from inflight.gateway.errors import invalid
from inflight.gateway.fields import Fields
from inflight.gateway.values import boolean, string, wrong
from inflight.json_text import shown, size
from inflight.sampling import Guide, GuideKind, unique_keys

ANY_OBJECT = Guide("json_schema", '{"type": "object"}')
"""What ``json_object`` asks for. The engine's own kind ``json`` is any value: a number is one too."""
_TYPES = ("text", "json_object", "json_schema", "structural_tag")
_TYPE_OF = {
    "schema": "json_object",
    "json_schema": "json_schema",
    "format": "structural_tag",
    "structures": "structural_tag",
    "triggers": "structural_tag",
}
"""Fields of a response_format, and the type that each belongs to."""
_ABOUT_SCHEMA = {"name": string(), "description": string(), "strict": boolean()}


class FieldGuide(NamedTuple):
    """A guide, and the field that asks for it."""

    guide: Guide
    param: str


def read_guide(fields: Fields, most: int) -> FieldGuide | None:
    """Return the guide of a request; None: the answer may be anything. One of more bytes than ``most`` is not read.

    Raises:
        ApiError: 400: two fields ask for one, or a value is none. The engine judges schemas and grammars.
    """
    found = [_response_format(fields["response_format"], most)] if "response_format" in fields else []
    found += [_guide(*_KINDS[name], fields[name], name, most) for name in _KINDS if name in fields]
    if "structured_outputs" in fields:
        found.append(_structured_outputs(fields["structured_outputs"], most))
    given = [one for one in found if one is not None]
    if len(given) > 1:
        raise invalid(f"{given[0].param} and {given[1].param} are both given; an answer has one form", given[1].param)
    return given[0] if given else None


_KINDS: dict[str, tuple[GuideKind]] = {
    "guided_json": ("json_schema",),
    "guided_regex": ("regex",),
    "guided_choice": ("choice",),
    "guided_grammar": ("ebnf_grammar",),
    "regex": ("regex",),
    "ebnf": ("ebnf_grammar",),
}
_OF_STRUCTURED: dict[str, GuideKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf_grammar",
    "structural_tag": "structural_tag",
}


def _response_format(value: Any, most: int) -> FieldGuide | None:
    path = "response_format"
    if not isinstance(value, dict):
        raise wrong(path, value, "an object with type")
    kind = value.get("type")
    if kind not in _TYPES:
        raise invalid(f"{path}.type is {shown(kind)}; it must be one of {', '.join(_TYPES)}", f"{path}.type")
    for name, needed in _TYPE_OF.items():
        if value.get(name) is not None and kind != needed:
            raise invalid(f"{path}.{name} is given; it needs the type {needed}, and not {kind}", f"{path}.{name}")
    if kind == "text":
        return None
    if kind == "json_object":  # llama.cpp's clients put a schema beside it
        schema = value.get("schema")
        return FieldGuide(ANY_OBJECT, path) if schema is None else _guide("json_schema", schema, f"{path}.schema", most)
    if kind == "structural_tag":
        return _guide("structural_tag", value, path, most)
    described = value.get("json_schema")
    if not isinstance(described, dict):
        raise wrong(f"{path}.json_schema", described, "an object with name and schema")
    path += ".json_schema"
    for name, wanted in _ABOUT_SCHEMA.items():
        if described.get(name) is not None:
            wanted.read(described[name], f"{path}.{name}")
    schema = described.get("schema")
    return _guide("json_schema", {} if schema is None else schema, f"{path}.schema", most)


def _structured_outputs(value: dict[str, Any], most: int) -> FieldGuide | None:
    given = {name: one for name, one in value.items() if (name, one) != ("json_object", False)}
    if len(given) > 1:
        names = " and ".join(given)
        raise invalid(f"structured_outputs has {names}; an answer has one form", "structured_outputs")
    for name, one in given.items():
        path = f"structured_outputs.{name}"
        return FieldGuide(ANY_OBJECT, path) if name == "json_object" else _guide(_OF_STRUCTURED[name], one, path, most)
    return None


def _guide(kind: GuideKind, value: Any, path: str, most: int) -> FieldGuide:
    """Return a guide with the text of a value: schemas may come as JSON text or as the value itself.

    Raises:
        ApiError: 400: it has what is no character, or more bytes than ``most``, of which what has as many characters is
            not read.
    """
    if (found := len(value) if isinstance(value, str) else size(value, most)) > most:
        raise invalid(f"{path} has {found} bytes or more; the limit is {most}", path)
    if kind in ("json_schema", "structural_tag"):
        text = _json(value, path)
    else:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    check_text(text, path)  # JSON text may have had it in an escape
    if (found := len(text.encode())) > most:
        raise invalid(f"{path} has {found} bytes; the limit is {most}", path)
    return FieldGuide(Guide(kind, text), path)


def _json(value: Any, path: str) -> str:
    """Return an object, or JSON text of one, as JSON text that we wrote: it becomes a part of grammars.

    Raises:
        ApiError: 400: it is neither.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise invalid(f"{path} is a string that is not valid JSON: {error}", path) from None
    if not isinstance(value, dict | bool):
        raise wrong(path, value, "an object, or JSON text of one")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise invalid(f"{path} has a number that JSON does not have", path) from None
