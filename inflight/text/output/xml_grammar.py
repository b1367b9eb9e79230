"""The grammar of calls that are written as tags."""

from __future__ import annotations

from typing import Any

from inflight.errors import InvalidRequest
from inflight.text.output.json_calls import schema_types
from inflight.text.output.lark import TEXT, Asked, counts, join, json_schema, quote
from inflight.text.output.spelling import NOTES

_END = "</parameter>"
_OBJECT = NOTES | {"type", "properties", "required", "additionalProperties"}
_STRING = NOTES | {"type", "enum", "const", "minLength", "maxLength"}
_UNION = NOTES | {"type", "anyOf", "oneOf", "nullable"}


class XmlArguments:
    """Makes the items and rules of the parameters of tools."""

    def __init__(self) -> None:
        self.rules: list[str] = []

    def arguments(self, tool: str, calls: Asked) -> str:
        """Return the items of a tool's parameters, in the order of its schema.

        Raises:
            InvalidRequest: the schema has what tags cannot enforce; if the tool is not strict, that is left out.
        """
        schema, strict = calls.tools[tool], tool in calls.strict
        if strict and (unknown := sorted(set(schema) - _OBJECT)):
            raise _error(tool, repr(unknown[0]), "/")
        properties = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        if missing := sorted(required - set(properties)):
            raise _error(tool, f"required {missing[0]!r} without a schema of it", "/")
        if not properties and schema.get("additionalProperties") is not False:
            self.rules += [rule for rule in ("KEY: /[^>\\n]{1,64}/",) if rule not in self.rules]
            return join("(", quote("<parameter="), "KEY", quote(">\n"), self._text({}, quote(f"\n{_END}\n")), ")*")
        items = []
        for key, one in properties.items():
            if ">" in key or "\n" in key:
                raise _error(tool, f"the property {key!r}", "/properties")
            opening = quote(f"<parameter={key}>\n")
            item = join(opening, self._value(tool, key, one, schema, strict))
            items.append(item if key in required else f"({item})?")
        return join(*items)

    def _value(self, tool: str, key: str, schema: Any, root: dict[str, Any], strict: bool) -> str:
        """Return the item of a value with its closing tag."""
        types = schema_types(schema, root)
        closing = quote(f"\n{_END}\n")
        if "string" not in types:
            shared: dict[str, Any] = {name: root[name] for name in ("$defs", "definitions") if name in root}
            return join(json_schema({**shared, **schema} if isinstance(schema, dict) else {}), closing)
        known = _STRING if types == {"string"} else _UNION
        if strict and (unknown := _unknown(schema, known)):
            raise _error(tool, repr(unknown), f"/properties/{key}")
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if types == {"string"} and values is not None and all(isinstance(value, str) for value in values):
            return f"({' | '.join(quote(value) for value in values if value)}) {closing}"
        return self._text(schema if types == {"string"} else {}, closing)

    def _text(self, schema: dict[str, Any], closing: str) -> str:
        """Return the item of a text that ends at the first closing tag."""
        number = len(self.rules)
        least, most = counts(schema, "minLength", "maxLength")
        size = f" & /(?s:.){{{least},{'' if most is None else most}}}/" if least or most is not None else ""
        self.rules.append(f"TEXT_{number}: {TEXT}{size} & ~/(?s:.*)<\\/parameter>(?s:.*)/")
        self.rules.append(f"text_{number}[lazy]: TEXT_{number} {closing}")
        return f"text_{number}"


def _unknown(schema: dict[str, Any], known: frozenset[str] | set[str]) -> str | None:
    """Return a keyword that is none of ``known``, of a schema or of the members of its union."""
    members = [one for key in ("anyOf", "oneOf") for one in schema.get(key, ()) if isinstance(one, dict)]
    found = set(schema) - known
    return min(found) if found else next(filter(None, (_unknown(one, known) for one in members)), None)


def _error(tool: str, what: str, place: str) -> InvalidRequest:
    return InvalidRequest(
        f"tools: the parameters of {tool!r} have {what} at {place}, which cannot be enforced in the tags in which this "
        "model writes calls"
    )
