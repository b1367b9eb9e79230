"""Calls that are written as tags: ``<function=name><parameter=key>value</parameter></function>``.

A value is text. What it becomes depends on the types that the tool's schema gives the parameter. A value that can only
be a string goes out as it comes; any other once it is complete.
"""

from __future__ import annotations

import json
import re
from typing import Any

from inflight.text.output.json_calls import schema_types
from inflight.text.output.json_text import to_json
from inflight.text.output.python_calls import python_literal
from inflight.text.output.scanner import SPACE, SPACES, Reading, Scanner
from inflight.text.output.tools import Tool

FUNCTION = "<function="
_PARAMETER, _END_PARAMETER, _END_FUNCTION = "<parameter=", "</parameter>", "</function>"
_NAME = re.compile(r"[^>\n]*")


class _StringValue:
    """A value that is a string: escaped for JSON as it comes, without the line breaks next to the tags."""

    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner
        self._first = True
        self._held = ""

    def __call__(self, text: str) -> None:
        if not text:
            return
        if self._first:
            text = text.removeprefix("\n")
            self._first = False
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._scanner.arguments(json.dumps(text.removesuffix("\n"), ensure_ascii=False)[1:-1])


def read_xml_call(scanner: Scanner, tools: dict[str, Tool]) -> Reading[bool]:
    """Read a call behind ``<function=``; return whether there was one, which may be broken off."""
    name = yield from scanner.name(_NAME)
    if name not in tools or not (yield from scanner.literal(">")):
        return False
    opening = "{"
    while True:
        yield from scanner.run(SPACE)
        if (yield from scanner.literal(_END_FUNCTION)):
            if opening == "{":
                scanner.call(name)
                scanner.arguments("{")
            scanner.arguments("}")
            scanner.begin()
            return True
        if opening != "{" and (yield from scanner.cut_off(_PARAMETER, _END_FUNCTION)):
            scanner.accept()
            return True
        key = yield from _read_key(scanner)
        if key is None:
            if opening != "{":
                scanner.keep_space()
            return opening != "{"
        if opening == "{":
            scanner.call(name)
        scanner.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        opening = ", "
        if not (yield from _read_value(scanner, tools[name], key)):
            return True
        scanner.begin()


def _read_key(scanner: Scanner) -> Reading[str | None]:
    if not (yield from scanner.literal(_PARAMETER)):
        return None
    key = yield from scanner.name(_NAME)
    return key if (yield from scanner.literal(">")) else None


def _read_value(scanner: Scanner, tool: Tool, key: str) -> Reading[bool]:
    """Read a value up to its closing tag, and give it out; return whether it is complete."""
    types = parameter_types(tool, key)
    if types == {"string"}:
        scanner.arguments('"')
        if (yield from scanner.until((_END_PARAMETER,), _StringValue(scanner), tail=False)) is None:
            return False
        scanner.arguments('"')
        return True
    parts: list[str] = []
    if (yield from scanner.until((_END_PARAMETER,), parts.append, tail=False)) is None:
        return False
    text = "".join(parts).removeprefix("\n").removesuffix("\n")
    scanner.arguments(convert(text, types))
    return True


def parameter_types(tool: Tool, key: str) -> frozenset[str]:
    """Return the JSON types of a tool's parameter; none where the schema does not say."""
    properties = tool.parameters.get("properties")
    try:
        return schema_types(properties.get(key), tool.parameters) if isinstance(properties, dict) else frozenset()
    except RecursionError:
        return frozenset()


def convert(text: str, types: frozenset[str]) -> str:
    """Return the JSON that a text stands for: of the types that it can have the one other than a string, if any."""
    bare = text.strip(SPACES)
    if "null" in types and bare in ("null", "None"):
        return "null"
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    if types - {"string", "null", "boolean"} or not types:
        try:
            value = json.loads(bare, parse_constant=_no_number)
            if not types or _is_one_of(value, types):
                return to_json(int(value) if isinstance(value, float) and "number" not in types and types else value)
        except (ValueError, RecursionError):
            if types & {"array", "object"} and (value := python_literal(bare)) is not None and _is_one_of(value, types):
                return to_json(value)
    return to_json(text)


def _is_one_of(value: Any, types: frozenset[str]) -> bool:
    if isinstance(value, bool) or value is None:
        return False
    if isinstance(value, int):
        return bool(types & {"integer", "number"})
    if isinstance(value, float):
        return "number" in types or ("integer" in types and value.is_integer())
    return ("array" in types and isinstance(value, list)) or ("object" in types and isinstance(value, dict))


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
