"""The grammar of calls that are written as tags."""

from __future__ import annotations

import json
import re
from typing import Any

from inflight.text.output.call_grammar import TEXT, Rules, counts, errors_of, join, json_schema, quote, rule_of_schema
from inflight.text.output.incremental_json import to_json
from inflight.text.output.schemas import (
    NotEnforceable,
    apart,
    check_arguments,
    check_known,
    combination,
    kinds,
    listed,
    placed,
    schema_types,
    stated,
    types_of,
)
from inflight.text.output.tools import Tool
from inflight.text.output.xml_calls import END_CALL, convert

_END, _END_FUNCTION = "</parameter>", "</function>"
_SIZES = frozenset({"type", "minLength", "maxLength"})
_MOST_SEEN = 10_000
"""The schemas that the unions of one tool may have; each property counts those that its references lead to."""
_NAME = re.compile(r"[^>\n]*")
_FREE = rf"{TEXT} & ~/(?s:.*){_END}(?s:.*)/ & ~/(?s:.*){_END_FUNCTION}[ \t\r\n]*{END_CALL}(?s:.*)/".replace(
    "</", "<\\/"
)
"""A text that no tag ends."""


class XmlArguments:
    """Makes the items and rules of the parameters of tools."""

    def __init__(self, max_bytes: int) -> None:
        self.rules = Rules(max_bytes)
        self._json_rules: dict[str, str] = {}
        self._seen = 0

    def arguments(self, tool: Tool) -> str:
        """Return the items of a tool's parameters, in the order of its schema.

        Raises:
            InvalidRequest: the schema has what tags cannot enforce; if the tool is not strict, that is left out.
        """
        self._json_rules, self._seen = {}, 0
        with errors_of(tool):
            return self._parameters(tool)

    def _parameters(self, tool: Tool) -> str:
        schema = tool.schema
        properties = [key for key in schema.get("properties") or {} if tool.strict or _NAME.fullmatch(key)]
        required = set(schema.get("required") or ())
        if tool.strict:
            with placed("/"):
                check_arguments(schema)
        if not properties and schema.get("additionalProperties") is not False:
            return self._free_parameters(tool)
        items = [self._parameter(tool, key) for key in properties]
        return join(*(item if key in required else f"({item})?" for key, item in zip(properties, items, strict=True)))

    def _free_parameters(self, tool: Tool) -> str:
        """Return the item of parameters that the schema does not name.

        Nothing can keep their names apart, nor their values to a schema, so a strict tool has none of them.
        """
        if tool.strict:
            if "additionalProperties" in tool.schema:
                raise NotEnforceable("'additionalProperties' without 'properties' at /")
            return ""
        self.rules.add_once("KEY: /[^>\\n]{1,64}/")
        return join("(", quote("<parameter="), "KEY", quote(">\n"), self._text({}), ")*")

    def _parameter(self, tool: Tool, key: str) -> str:
        if not _NAME.fullmatch(key):
            raise NotEnforceable(f"the property {key!r} at /properties")
        try:
            with placed(f"/properties/{key}"):
                value = self._value(tool, key)
        except NotEnforceable:
            if tool.strict:
                raise
            value = self._text({})
        return join(quote(f"<parameter={key}>\n"), value)

    def _value(self, tool: Tool, key: str) -> str:
        """Return the item of a value with its closing tag: JSON, a text, or one of the values that are listed."""
        root, strict = tool.schema, tool.strict
        schema, field = root["properties"][key], f"{tool.path}.properties.{key}"
        types = schema_types(schema, root)
        closing = quote(f"\n{_END}\n")
        if "string" not in types:
            return join(self._json(schema, root, field), closing)
        if self._seen > _MOST_SEEN:
            raise NotEnforceable("unions of too many schemas")
        seen: set[int] = set()
        leaves = _leaves(schema, root, strict, seen)
        self._seen += len(seen)
        if not leaves:
            raise NotEnforceable("'$ref' in a circle")
        texts = [leaf for leaf in leaves if _is_text(leaf)]
        others = [leaf for leaf in leaves if not _is_text(leaf)]
        if not texts:
            items = (_listed(leaf, types) if "enum" in leaf else self._simple(leaf, root, field) for leaf in others)
            return f"({' | '.join(items)}) {closing}"
        if strict:
            for leaf in texts:
                check_known(leaf, _SIZES if len(leaves) == 1 else frozenset({"type"}))
            for leaf in others:
                _check_beside_text(leaf)
        return self._text(texts[0] if len(leaves) == 1 else {})

    def _simple(self, leaf: dict[str, Any], root: dict[str, Any], field: str) -> str:
        """Return the item of a schema beside texts that are listed."""
        if leaf["type"] in ("array", "object"):
            raise NotEnforceable(f"type {leaf['type']!r} beside 'enum'")
        return self._json(leaf, root, field)

    def _json(self, schema: Any, root: dict[str, Any], field: str) -> str:
        """Return the item of JSON that follows a schema, which the request has in ``field``; equal ones share it."""
        written = json.dumps(schema)
        if written not in self._json_rules:
            name = self._json_rules[written] = f"json_{self.rules.number()}"
            self.rules.add(rule_of_schema(f"{name}: {json_schema(apart(schema, root))}", field))
        return self._json_rules[written]

    def _text(self, schema: dict[str, Any]) -> str:
        """Return the item of a text that ends at the first closing tag."""
        least, most = counts(schema, "minLength", "maxLength")
        number = self.rules.number()
        size = f" & /(?s:.){{{least},{'' if most is None else most}}}/" if least or most is not None else ""
        closing = quote(f"\n{_END}\n")
        self.rules.add(f"TEXT_{number}: {_FREE}{size}")
        self.rules.add(f"text_{number}[lazy]: TEXT_{number} {closing}")
        return f"text_{number}"


def _leaves(schema: Any, root: dict[str, Any], strict: bool, seen: set[int]) -> list[dict[str, Any]]:
    """Return the schemas that a schema is a union of: each lists values as ``enum``, or is of one type.

    Those that have been ``seen``, by their ``id``, add nothing to the union.
    """
    if not isinstance(schema, dict) or not stated(schema):
        return [{"type": "string"}]
    if id(schema) in seen:
        return []
    seen.add(id(schema))
    if (values := listed(schema, strict=strict)) is not None:
        return [{"enum": values}]
    if (made := combination(schema, root, strict=strict)) is not None:
        return [leaf for member in made[1] for leaf in _leaves(member, root, strict, seen)]
    return [{**stated(schema), "type": kind} for kind in kinds(schema) or ["string"]]


def _is_text(leaf: dict[str, Any]) -> bool:
    return "enum" not in leaf and "string" in kinds(leaf)


def _check_beside_text(leaf: dict[str, Any]) -> None:
    """Check a schema beside a free text, which a value of its type is read as too. Raises NotEnforceable."""
    if "enum" not in leaf:
        check_known(leaf, frozenset({"type"}))
    elif any(types_of(value) - {"string", "null"} for value in leaf["enum"]):
        raise NotEnforceable("'enum' beside texts")


def _listed(leaf: dict[str, Any], types: frozenset[str]) -> str:
    """Return the item of values that are listed; ``types`` are those that the value may have."""
    texts = {value if isinstance(value, str) else to_json(value): value for value in leaf["enum"]}
    good = [text for text, value in texts.items() if json.loads(convert(text, types)) == value and _is_safe(text)]
    if not good:
        raise NotEnforceable("'enum' without a value that tags can carry")
    return " | ".join(quote(text) for text in good if text) + (' | ""' if "" in good else "")


def _is_safe(text: str) -> bool:
    return _END not in text and _END_FUNCTION not in text
