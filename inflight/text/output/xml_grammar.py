"""The grammar of calls that are written as tags."""

from __future__ import annotations

import json
from typing import Any

from inflight.errors import InvalidRequest
from inflight.text.output.call_grammar import TEXT, Asked, counts, join, json_schema, quote
from inflight.text.output.incremental_json import to_json
from inflight.text.output.schemas import (
    NotEnforceable,
    check_arguments,
    check_known,
    combination,
    kinds,
    listed,
    schema_types,
    stated,
    types_of,
)
from inflight.text.output.xml_calls import END_CALL, convert

_END, _END_FUNCTION = "</parameter>", "</function>"
_SIZES = frozenset({"type", "minLength", "maxLength"})
_DEEPEST = 32
_FREE = rf"{TEXT} & ~/(?s:.*){_END}(?s:.*)/ & ~/(?s:.*){_END_FUNCTION}[ \t\r\n]*{END_CALL}(?s:.*)/".replace(
    "</", "<\\/"
)
"""A text that no tag ends."""


class XmlArguments:
    """Makes the items and rules of the parameters of tools."""

    def __init__(self) -> None:
        self.rules: list[str] = []

    def arguments(self, tool: str, calls: Asked) -> str:
        """Return the items of a tool's parameters, in the order of its schema.

        Raises:
            InvalidRequest: the schema has what tags cannot enforce; if the tool is not strict, that is left out.
        """
        schema, strict = calls.schemas[tool], tool in calls.strict
        properties = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        try:
            if strict:
                check_arguments(schema)
        except NotEnforceable as error:
            raise _error(tool, str(error), "/") from None
        if not properties and schema.get("additionalProperties") is not False:
            self.rules += [rule for rule in ("KEY: /[^>\\n]{1,64}/",) if rule not in self.rules]
            return join("(", quote("<parameter="), "KEY", quote(">\n"), self._text({}), ")*")
        items = [self._parameter(tool, key, schema, strict) for key in properties]
        return join(*(item if key in required else f"({item})?" for key, item in zip(properties, items, strict=True)))

    def _parameter(self, tool: str, key: str, schema: dict[str, Any], strict: bool) -> str:
        if ">" in key or "\n" in key:
            raise _error(tool, f"the property {key!r}", "/properties")
        try:
            value = self._value(schema["properties"][key], schema, strict)
        except NotEnforceable as error:
            if strict:
                raise _error(tool, str(error), f"/properties/{key}") from None
            value = self._text({})
        return join(quote(f"<parameter={key}>\n"), value)

    def _value(self, schema: Any, root: dict[str, Any], strict: bool) -> str:
        """Return the item of a value with its closing tag: JSON, a text, or one of the values that are listed."""
        types = schema_types(schema, root)
        closing = quote(f"\n{_END}\n")
        if "string" not in types:
            shared: dict[str, Any] = {name: root[name] for name in ("$defs", "definitions") if name in root}
            return join(json_schema({**shared, **schema} if isinstance(schema, dict) else {}), closing)
        leaves = _leaves(schema, root, strict)
        texts = [leaf for leaf in leaves if "enum" not in leaf and "string" in kinds(leaf)]
        others = [leaf for leaf in leaves if leaf not in texts]
        if not texts:
            return f"({' | '.join(_spelt(leaf, types) for leaf in others)}) {closing}"
        if strict:
            for leaf in texts:
                check_known(leaf, _SIZES if len(leaves) == 1 else frozenset({"type"}))
            for leaf in others:
                _check_beside_text(leaf)
        return self._text(texts[0] if len(leaves) == 1 else {})

    def _text(self, schema: dict[str, Any]) -> str:
        """Return the item of a text that ends at the first closing tag."""
        number = len(self.rules)
        least, most = counts(schema, "minLength", "maxLength")
        size = f" & /(?s:.){{{least},{'' if most is None else most}}}/" if least or most is not None else ""
        closing = quote(f"\n{_END}\n")
        self.rules.append(f"TEXT_{number}: {_FREE}{size}")
        self.rules.append(f"text_{number}[lazy]: TEXT_{number} {closing}")
        return f"text_{number}"


def _leaves(schema: Any, root: dict[str, Any], strict: bool, depth: int = 0) -> list[dict[str, Any]]:
    """Return the schemas that a schema is a union of: each lists values as ``enum``, or is of one type."""
    if depth > _DEEPEST:
        raise NotEnforceable("schemas in a circle")
    if not isinstance(schema, dict) or not stated(schema):
        return [{"type": "string"}]
    if (values := listed(schema, strict=strict)) is not None:
        return [{"enum": values}]
    if (made := combination(schema, root, strict=strict)) is not None:
        return [leaf for member in made[1] for leaf in _leaves(member, root, strict, depth + 1)]
    return [{**stated(schema), "type": kind} for kind in kinds(schema) or ["string"]]


def _check_beside_text(leaf: dict[str, Any]) -> None:
    """Check a schema beside a free text, which a value of its type is read as too. Raises NotEnforceable."""
    if "enum" not in leaf:
        check_known(leaf, frozenset({"type"}))
    elif any(types_of(value) - {"string", "null"} for value in leaf["enum"]):
        raise NotEnforceable("'enum' beside texts")


def _spelt(leaf: dict[str, Any], types: frozenset[str]) -> str:
    """Return the item of a schema beside texts that are listed; ``types`` are those that the value may have."""
    if "enum" not in leaf:
        if leaf["type"] in ("array", "object"):
            raise NotEnforceable(f"type {leaf['type']!r} beside 'enum'")
        return json_schema(leaf)
    texts = {value if isinstance(value, str) else to_json(value): value for value in leaf["enum"]}
    good = [text for text, value in texts.items() if json.loads(convert(text, types)) == value and _is_safe(text)]
    if not good:
        raise NotEnforceable("'enum' without a value that tags can carry")
    return " | ".join(quote(text) for text in good if text) + (' | ""' if "" in good else "")


def _is_safe(text: str) -> bool:
    return _END not in text and _END_FUNCTION not in text


def _error(tool: str, what: str, place: str) -> InvalidRequest:
    return InvalidRequest(
        f"tools: the parameters of {tool!r} have {what} at {place}, which cannot be enforced in the tags in which this "
        "model writes calls"
    )
