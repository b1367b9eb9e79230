"""Grammars of arguments that are not JSON: Gemma's notation, Python, and text between tags."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inflight.text.output.call_grammar import Rules, counts, errors_of, escape, join, quote
from inflight.text.output.incremental_json import to_json
from inflight.text.output.schemas import (
    OBJECT,
    UNIONS,
    NotEnforceable,
    check_arguments,
    check_known,
    combination,
    kinds,
    listed,
    placed,
    stated,
)
from inflight.text.output.tools import Tool

_KNOWN = OBJECT | {"items", "enum", "const", "$ref", "allOf", *UNIONS}
_KNOWN |= {"minItems", "maxItems", "minLength", "maxLength", "nullable"}
_BARE_KEY, _PYTHON_KEY = (
    re.compile(r"[\w.+\-$@#/]([\w .+\-$@#/]{0,254}[\w.+\-$@#/])?"),
    re.compile(r"[A-Za-z_]\w*", re.ASCII),
)
_MOST_REFERENCES = 32
_RULES = [
    "INTEGER: /-?(0|[1-9][0-9]{0,17})/",
    "NUMBER: /-?(0|[1-9][0-9]{0,17})([.][0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/",
]


@dataclass(frozen=True)
class Spelling:
    """How a format writes values."""

    true: str
    false: str
    null: str
    comma: str
    colon: str
    delimiter: str
    """What stands on both sides of a string."""
    character: str
    """The regular expression of one character of a string."""
    bare_keys: bool
    """Whether keys are written without delimiters."""
    opening: str
    assign: str
    closing: str
    """How the arguments themselves are written."""


GEMMA = Spelling("true", "false", "null", ",", ":", '<|"|>', "(?s:.)", True, "{", ":", "}")
_PYTHON_CHARACTER = r'([^"\\\x00-\x1f\x7f]|\\[\\"nrt])'
PYTHON = Spelling("True", "False", "None", ", ", ": ", '"', _PYTHON_CHARACTER, False, "(", "=", ")")


class Spelled:
    """Makes rules of schemas, one for each place, so that recursive schemas end."""

    def __init__(self, spelling: Spelling, word: Callable[[str], str], max_bytes: int) -> None:
        """``word`` makes an item of Lark of a delimiter, which may be a special token."""
        self._spelling = spelling
        self._quote = word(spelling.delimiter)
        self._special = self._quote.startswith("<[")
        self._strict = True
        self._root: dict[str, Any] = {}
        self._references: dict[str, str] = {}
        self._has_any = False
        self.rules = Rules(max_bytes)
        for rule in _RULES:
            self.rules.add(rule)

    def arguments(self, tool: Tool) -> str:
        """Return the item of a tool's arguments.

        Raises:
            InvalidRequest: the schema has what this notation cannot enforce; unless strict, that is left out.
        """
        self._root, self._references, self._strict = tool.schema, {}, tool.strict
        spelling = self._spelling
        with errors_of(tool):
            with placed(""):
                schema = self._object_of(tool.schema)
                if self._strict:
                    check_arguments(schema)
            body = self._object(schema, "", spelling.assign, top=True)
        return join(quote(spelling.opening), body, quote(spelling.closing))

    def _object_of(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the schema of arguments that a reference leads to; a circle of references allows any."""
        for _ in range(_MOST_REFERENCES):
            made = combination(
                {key: one for key, one in schema.items() if key != "type"}, self._root, strict=self._strict
            )
            if made is None or made[0] in UNIONS:
                return schema
            [schema] = made[1]
        raise NotEnforceable("'$ref' in a circle")

    def _value(self, schema: Any, place: str) -> str:
        """Return the item of a value."""
        if schema is True or (isinstance(schema, dict) and not stated(schema)):
            return self._any()
        if not isinstance(schema, dict):
            raise _error(place, json.dumps(schema))
        with placed(place):
            if self._strict:
                check_known(schema, _KNOWN)
            values = listed(schema, strict=self._strict)
            made = None if values is not None else combination(schema, self._root, strict=self._strict)
            literals = [self._literal(value) for value in values or ()]
        if values is not None:
            return self._rule(" | ".join(literals))
        if made is not None:
            return self._combined(*made, schema, place)
        types = kinds(schema)
        if types and schema.get("nullable"):
            types.append("null")
        return self._rule(" | ".join(self._typed(kind, schema, place) for kind in types or ["any"]))

    def _combined(self, key: str, members: list[Any], schema: dict[str, Any], place: str) -> str:
        if key == "$ref":
            return self._reference(str(schema["$ref"]), members[0])
        return self._rule(" | ".join(self._value(one, f"{place}/{key}") for one in members))

    def _typed(self, kind: str, schema: dict[str, Any], place: str) -> str:
        spelling = self._spelling
        match kind:
            case "string":
                return self._string(schema, place)
            case "integer" | "number":
                return kind.upper()
            case "boolean":
                return f"{quote(spelling.true)} | {quote(spelling.false)}"
            case "null":
                return quote(spelling.null)
            case "array":
                return self._array(schema, place)
            case "object":
                return join(quote("{"), self._object(schema, place, spelling.colon), quote("}"))
            case "any":
                return self._any()
        raise _error(place, f"type {kind!r}")

    def _counts(self, schema: dict[str, Any], least: str, most: str, place: str) -> tuple[int, int | None]:
        """Return two bounds of a schema; unless the schema must hold, those that cannot be enforced are left out."""
        try:
            with placed(place):
                return counts(schema, least, most)
        except NotEnforceable:
            if self._strict:
                raise
            return 0, None

    def _string(self, schema: dict[str, Any], place: str) -> str:
        least, most = self._counts(schema, "minLength", "maxLength", place)
        size = f"{{{least},{'' if most is None else most}}}" if least or most is not None else "*"
        name = f"STRING_{self.rules.number()}"
        excluded = (
            ""
            if self._special or self._spelling.delimiter == '"'
            else f" & ~/(?s:.*){escape(self._spelling.delimiter)}(?s:.*)/"
        )
        self.rules.add(f"{name}: /({self._spelling.character}){size}/{excluded}")
        return join(self._quote, name, self._quote)

    def _array(self, schema: dict[str, Any], place: str) -> str:
        item = self._value(schema.get("items", True), f"{place}/items")
        least, most = self._counts(schema, "minItems", "maxItems", place)
        if most == 0:
            return quote("[]")
        more = f"({quote(self._spelling.comma)} {item}){{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        inside = f"({item} {more})" + ("" if least else "?")
        return join(quote("["), inside, quote("]"))

    def _object(self, schema: dict[str, Any], place: str, colon: str, top: bool = False) -> str:
        """Return the item of an object's entries, in the order of the schema."""
        properties = {key: one for key, one in (schema.get("properties") or {}).items() if self._spells(key, top)}
        required = set(schema.get("required") or ())
        if self._strict and (missing := required - set(properties)):
            raise _error(place, f"required {sorted(missing)[0]!r} without a schema of it")
        if not properties:
            return "" if schema.get("additionalProperties") is False else self._entries(schema, place, colon, top)
        entries = []
        for key, one in properties.items():
            value = self._value(one, f"{place}/properties/{key}")
            with placed(place):
                entries.append((join(self._key(key, top), quote(colon), value), key in required))
        rest = ""
        alternatives: list[str] = []
        comma = quote(self._spelling.comma)
        for entry, needed in reversed(entries):
            if needed:
                alternatives = []
            alternatives.append(self._rule(join(entry, rest)))
            following = join(comma, entry)
            rest = self._rule(join(following if needed else f"({following})?", rest))
        optional = not any(needed for _, needed in entries)
        return f"({' | '.join(alternatives)})" + ("?" if optional else "")

    def _entries(self, schema: dict[str, Any], place: str, colon: str, top: bool) -> str:
        """Return the item of the entries of an object whose keys the schema does not name."""
        value = self._value(schema.get("additionalProperties", True), f"{place}/additionalProperties")
        key = "KEY" if top or self._spelling.bare_keys else self._string({}, place)
        entry = join(key, quote(colon), value)
        self.rules.add_once("KEY: /[a-zA-Z_][a-zA-Z0-9_]{0,63}/")
        return f"({entry} ({quote(self._spelling.comma)} {entry})*)?"

    def _any(self) -> str:
        if not self._has_any:
            self._has_any = True  # from here on, for the values inside it
            types = ("string", "number", "boolean", "null", "array", "object")
            self.rules.add("any: " + " | ".join(self._typed(kind, {}, "") for kind in types))
        return "any"

    def _reference(self, reference: str, schema: Any) -> str:
        if reference not in self._references:
            name = self._references[reference] = f"r{self.rules.number()}"
            self.rules.add(f"{name}: {self._value(schema, reference.removeprefix('#'))}")
        return self._references[reference]

    def _literal(self, value: Any) -> str:
        """Return the item of one value. Raises NotEnforceable: it cannot be written."""
        spelling = self._spelling
        if value is None or isinstance(value, bool):
            return quote(spelling.null if value is None else spelling.true if value else spelling.false)
        if isinstance(value, str):
            if spelling.delimiter in value and not self._special and spelling.delimiter != '"':
                raise NotEnforceable(f"the value {value!r}")
            text = json.dumps(value, ensure_ascii=False)[1:-1] if spelling.delimiter == '"' else value
            return join(self._quote, quote(text), self._quote)
        if isinstance(value, int | float):
            return quote(to_json(value))
        comma = f" {quote(spelling.comma)} "
        if isinstance(value, list):
            return join(quote("["), comma.join(map(self._literal, value)), quote("]"))
        entries = (
            join(self._key(key, top=False), quote(spelling.colon), self._literal(one)) for key, one in value.items()
        )
        return join(quote("{"), comma.join(entries), quote("}"))

    def _spells(self, key: str, top: bool) -> bool:
        """Return whether a property can be written; unless the schema must hold, one that cannot be is left out."""
        pattern = self._pattern(top)
        return self._strict or pattern is None or pattern.fullmatch(key) is not None

    def _pattern(self, top: bool) -> re.Pattern[str] | None:
        """Return what a key may be that has no delimiters; None: it has some."""
        return _BARE_KEY if self._spelling.bare_keys else _PYTHON_KEY if top else None

    def _key(self, key: str, top: bool) -> str:
        """Return the item of a key. Raises NotEnforceable: it cannot be written."""
        pattern = self._pattern(top)
        if pattern is None:
            return self._literal(key)
        if not pattern.fullmatch(key):
            raise NotEnforceable(f"the property {key!r}")
        return quote(key)

    def _rule(self, items: str) -> str:
        if not items or re.fullmatch(r"\w+", items):
            return items
        name = f"r{self.rules.number()}"
        self.rules.add(f"{name}: {items}")
        return name


def _error(place: str, what: str) -> NotEnforceable:
    return NotEnforceable(f"{what} at {place or '/'}")
