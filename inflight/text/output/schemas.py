"""JSON schemas of arguments, as far as parsers and grammars of notations other than JSON look into them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, unquote

NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$comment", "$defs", "definitions"}
)
"""Keywords that allow and forbid nothing."""
OBJECT = frozenset({"type", "properties", "required", "additionalProperties"})
UNIONS = ("anyOf", "oneOf")
_MAPS = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies"})
"""Keywords that have schemas by names."""
_VALUES = frozenset({"enum", "const", "default", "examples"})
"""Keywords that have values."""
_OF_ROOTS = frozenset({"$id", "$schema"})
"""Keywords that change what references and keywords mean."""
_SPECIAL = frozenset({"$ref", "$defs", "definitions"}) | _VALUES | _OF_ROOTS
_DEFINED = re.compile(r"#/(\$defs|definitions)/([^/#%~]+)")
_COMBINING = ("$ref", "allOf", *UNIONS)
_KIND_OF = {
    **dict.fromkeys(("minLength", "maxLength"), "string"),
    **dict.fromkeys(("items", "minItems", "maxItems"), "array"),
    **dict.fromkeys(("properties", "required", "additionalProperties"), "object"),
}


def _is_type(value: Any) -> bool:
    return isinstance(value, str | None) or (isinstance(value, list) and all(isinstance(one, str) for one in value))


def _is_count(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value >= 0)


_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, "a text or a list of texts"),
    "enum": (lambda value: isinstance(value, list), "a list"),
    "$ref": (lambda value: isinstance(value, str), "a text"),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), (_is_count, "a count")),
    **dict.fromkeys(("allOf", *UNIONS), (lambda value: isinstance(value, list) and value != [], "a list of schemas")),
    **dict.fromkeys(
        ("properties", "$defs", "definitions"), (lambda value: isinstance(value, dict | None), "an object")
    ),
}
"""What the value of a keyword must be, and that in words."""


class NotEnforceable(Exception):
    """A schema has what a notation other than JSON cannot enforce; the message is what, and where."""


class NoSchema(Exception):
    """What should be a JSON schema is none; the message says why, and where."""


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Add to NotEnforceable where in the schema of the arguments the fault is: a JSON pointer, or "/" for all of it."""
    try:
        yield
    except NotEnforceable as error:
        raise NotEnforceable(f"{error} at {place or '/'}") from None


def check_shape(schema: dict[str, Any]) -> None:
    """Check the values of the keywords that notations other than JSON read. Raises NoSchema: one has a wrong type."""
    left: list[tuple[Any, str]] = [(schema, "")]
    while left:
        part, place = left.pop()
        if not isinstance(part, dict):
            continue
        for key, (is_right, wanted) in _SHAPES.items():
            if key in part and not is_right(part[key]):
                raise NoSchema(f"{key!r} at {place or '/'} is not {wanted}")
        for key in part.keys() & {*_COMBINING, "items", "additionalProperties"}:
            inside = part[key] if isinstance(part[key], list) else [part[key]]
            left += [(one, f"{place}/{key}") for one in inside]
        for key in part.keys() & {"properties", "$defs", "definitions"}:
            left += [(one, f"{place}/{key}/{name}") for name, one in (part[key] or {}).items()]


def stated(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without its notes."""
    return {key: value for key, value in schema.items() if key not in NOTES}


def check_known(schema: dict[str, Any], known: frozenset[str]) -> None:
    """Check the keywords of a schema. Raises NotEnforceable: one is none of ``known`` and no note."""
    if unknown := sorted(set(stated(schema)) - known):
        raise NotEnforceable(repr(unknown[0]))


def check_arguments(schema: dict[str, Any]) -> None:
    """Check the schema of a tool's arguments. Raises NotEnforceable: it says more than which properties there are."""
    check_known(schema, OBJECT)
    if "object" not in kinds(schema):
        raise NotEnforceable(f"type {schema['type']!r}")
    if missing := sorted(set(schema.get("required") or ()) - set(schema.get("properties") or ())):
        raise NotEnforceable(f"required {missing[0]!r} without a schema of it")


def combination(schema: dict[str, Any], root: dict[str, Any], *, strict: bool) -> tuple[str, list[Any]] | None:
    """Return the keyword that makes a schema of others, with these; None: it is none of others.

    Raises:
        NotEnforceable: it is ``strict``, and the keyword is not alone, or members of ``oneOf`` or ``allOf`` overlap.
    """
    given = stated(schema)
    key = next((one for one in _COMBINING if one in given), None)
    if key is None:
        return None
    members = [resolve(str(given[key]), root)] if key == "$ref" else list(given[key])
    if members == [None]:
        raise NotEnforceable(f"$ref {given[key]!r}, which names nothing here")
    if strict and len(given) > 1:
        raise NotEnforceable(f"{key!r} beside {min(set(given) - {key})!r}")
    if key == "allOf" and len(members) != 1:
        if strict:
            raise NotEnforceable("'allOf' of several schemas")
        return None
    if key == "oneOf" and strict and _overlap(members, root):
        raise NotEnforceable("'oneOf' of schemas that may allow the same")
    return key, members


def listed(schema: dict[str, Any], *, strict: bool) -> list[Any] | None:
    """Return the values that a schema lists, as far as its type allows them; None: it lists none.

    Raises:
        NotEnforceable: there is no value; or it is ``strict``, and no value is left, or it has other keywords besides.
    """
    key = next((one for one in ("enum", "const") if one in schema), None)
    if key is None:
        return None
    if strict and (others := set(stated(schema)) - {key, "type"}):
        raise NotEnforceable(f"{key!r} beside {min(others)!r}")
    values = schema["enum"] if key == "enum" else [schema["const"]]
    allowed = set(kinds(schema)) if "type" in schema else None
    fitting = [value for value in values if allowed is None or types_of(value) & allowed]
    if not values or (strict and not fitting):
        raise NotEnforceable(f"{key!r} without a value of its type")
    return fitting or list(values)


def kinds(schema: dict[str, Any]) -> list[str]:
    """Return the JSON types of a schema: those that it states, else those of its keywords; [] for any."""
    declared = schema.get("type")
    if declared is None:
        return sorted({_KIND_OF[key] for key in schema if key in _KIND_OF})
    return [declared] if isinstance(declared, str) else list(declared)


def types_of(value: Any) -> set[str]:
    """Return the JSON types that a value has: an integer is a number too."""
    if value is None or isinstance(value, bool):
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if isinstance(value, int) or value.is_integer() else {"number"}
    return {"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"}


def _overlap(members: list[Any], root: dict[str, Any]) -> bool:
    seen: set[str] = set()
    for member in members:
        types = {"number" if one == "integer" else one for one in schema_types(member, root)}
        if not types or types & seen:
            return True
        seen |= types
    return False


def schema_types(schema: Any, root: dict[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows; none where it does not say."""
    return _types(schema, root, set()) or frozenset()


def _types(schema: Any, root: dict[str, Any], seen: set[str]) -> frozenset[str] | None:
    """Return the types; None: those of a reference that has been ``seen``, which add nothing to a union."""
    if not isinstance(schema, dict):
        return frozenset()
    if isinstance(declared := schema.get("type"), str | list):
        return frozenset([declared] if isinstance(declared, str) else map(str, declared))
    if isinstance(schema.get("enum"), list):
        return frozenset().union(*(_narrowest(value) for value in schema["enum"]))
    if "const" in schema:
        return frozenset(_narrowest(schema["const"]))
    if isinstance(reference := schema.get("$ref"), str):
        if reference in seen:
            return None
        seen.add(reference)
        return _types(resolve(reference, root), root, seen)
    for key in (*UNIONS, "allOf"):
        if isinstance(schema.get(key), list):
            found = [types for one in schema[key] if (types := _types(one, root, seen)) is not None]
            return frozenset() if key in UNIONS and not all(found) else frozenset().union(*found)
    return frozenset()


def resolve(reference: str, root: dict[str, Any]) -> Any:
    """Return what a reference inside a schema names by a JSON pointer, or None."""
    start, *steps = reference.split("/")
    value: Any = root if start == "#" else None
    for step in steps:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            value = dict(enumerate(value)).get(int(name)) if name.isdecimal() else None
        else:
            value = value.get(name) if isinstance(value, dict) else None
    return value


def apart(schema: Any, root: dict[str, Any]) -> Any:
    """Return a schema that means by itself what it means inside of ``root``: it brings what its references name.

    Raises:
        NotEnforceable: a reference names nothing, or the schema changes what references or keywords mean.
    """
    definitions: dict[str, dict[str, Any]] = {}
    made = _moved(schema, root, definitions)
    if not isinstance(made, dict):
        return made
    draft = {"$schema": root["$schema"]} if "$schema" in root else {}
    return draft | made | definitions


def _moved(part: Any, root: dict[str, Any], definitions: dict[str, dict[str, Any]], *, names: bool = False) -> Any:
    """Return a part of a schema whose references lead to ``definitions``, which gets what they name.

    ``names`` says that the keys of the part are names, and no keywords.
    """
    if isinstance(part, list):
        return [_moved(one, root, definitions) for one in part]
    if not isinstance(part, dict):
        return part
    made = {}
    for key, one in part.items():
        if names or key not in _SPECIAL:
            made[key] = _moved(one, root, definitions, names=not names and key in _MAPS)
        elif key == "$ref":
            made[key] = _defined(one, root, definitions)
        elif key in _VALUES:
            made[key] = one
        elif key in _OF_ROOTS and part is not root:
            raise NotEnforceable(f"{key!r} inside of a schema")
    return made


def _defined(reference: Any, root: dict[str, Any], definitions: dict[str, dict[str, Any]]) -> str:
    """Return the reference to the definition of what a reference names, which is made if there is none yet.

    What the schema defines keeps its name; anything else is called as the reference to it.
    """
    own = _DEFINED.fullmatch(reference)
    place, name = (own[1], own[2]) if own else ("$defs", reference)
    made = definitions.setdefault(place, {})
    if name not in made:
        if (named := resolve(str(reference), root)) is None:
            raise NotEnforceable(f"$ref {reference!r}, which names nothing here")
        made[name] = None  # what it names may lead to itself
        made[name] = _moved(named, root, definitions)
    return reference if own else "#/$defs/" + quote(reference.replace("~", "~0").replace("/", "~1"), safe="")


def _narrowest(value: Any) -> set[str]:
    types = types_of(value)
    return {"integer" if isinstance(value, int) else "number"} if "number" in types else types
