"""Calls that are written as tags: ``<function=name><parameter=key>value</parameter></function>``.

A value is text. What it becomes depends on the types that the tool's schema gives the parameter. A value that can only
be a string goes out as it comes; any other once it is complete.
"""

from __future__ import annotations

import json
import re
from typing import Any

from inflight.text.output.incremental_json import JsonText, as_json, to_json
from inflight.text.output.python_calls import python_literal
from inflight.text.output.scanner import SPACE, SPACES, Reading, Scanner
from inflight.text.output.schemas import schema_types
from inflight.text.output.tools import Tool

FUNCTION, END_CALL = "<function=", "</tool_call>"
_PARAMETER, _END_PARAMETER, _END_FUNCTION = "<parameter=", "</parameter>", "</function>"
_OF_PYTHON = ("True", "False", "None")
_NAME = re.compile(r"[^>\n]*")


class XmlCallReader:
    """Reads one call behind ``<function=``.

    Where the output ends before the closing tags, the call stays open. Where other text follows a whole value, the call
    is complete even if its closing tags are missing, and that text is content.
    """

    def __init__(self, scanner: Scanner, tools: dict[str, Tool], *, wrapped: bool) -> None:
        """``wrapped`` says that ``</tool_call>`` belongs to the call."""
        self._scanner = scanner
        self._tools = tools
        self._wrapped = wrapped
        self._keys = 0

    def read(self) -> Reading[None]:
        """Read the call, and accept or reject what has been recorded."""
        scanner = self._scanner
        name = yield from scanner.name(_NAME)
        if name not in self._tools or not (yield from scanner.literal(">")):
            scanner.reject()
            return
        scanner.named(name)
        while True:
            yield from scanner.run(SPACE)
            if (yield from scanner.literal(_END_FUNCTION)):
                yield from self._end(name, closes=True)
                return
            if self._keys and (yield from scanner.cut_off(_PARAMETER, _END_FUNCTION)):
                scanner.accept()
                return
            if not (yield from scanner.literal(_PARAMETER)):
                yield from self._end(name, closes=self._keys > 0)
                return
            if not (yield from self._parameter(name)):
                return

    def _parameter(self, name: str) -> Reading[bool]:
        """Read a parameter behind the beginning of its tag; return whether the call goes on."""
        scanner = self._scanner
        key = yield from scanner.name(_NAME)
        if not (yield from scanner.literal(">")):
            if self._keys and (yield from scanner.peek()) is None:
                scanner.accept()
            else:
                yield from self._end(name, closes=False)
            return False
        scanner.accept()
        if not self._keys:
            scanner.call(name)
        scanner.arguments(f"{', ' if self._keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._keys += 1
        ending = yield from _Value(scanner, parameter_types(self._tools[name], key)).read()
        if ending == END_CALL:
            scanner.arguments("}")
            scanner.end_call()
        scanner.begin()
        return ending == _END_PARAMETER

    def _end(self, name: str, *, closes: bool) -> Reading[None]:
        """End a call that has parameters, or that ``closes``; what is no closing tag is content."""
        scanner = self._scanner
        if self._keys:
            scanner.arguments("}")
            scanner.end_call()
        elif closes:
            scanner.whole_call(name, "{}")
            scanner.begin()
        if closes:
            yield from scanner.run(SPACE)
            if (yield from scanner.closing(END_CALL)) or not self._wrapped:
                scanner.accept()
                return
        scanner.reject()


class _Value:
    """Reads the value of one parameter.

    It ends at ``</parameter>``, or at ``</function>`` and ``</tool_call>`` where a model forgets that. Neither counts
    inside a string of JSON, where JSON is expected, unless it stands on a line of its own: such a string has no lines.
    """

    def __init__(self, scanner: Scanner, types: frozenset[str]) -> None:
        self._scanner = scanner
        self._types = types
        self._is_text = types == {"string"}
        self._json = JsonText()
        self._parts: list[str] = []
        """The value so far; of a text only the line break at its end, which may stand before the closing tag."""
        self._begun = False
        self._last = ""

    def read(self) -> Reading[str | None]:
        """Read the value, and give it out; return what has ended it, or None: the output."""
        scanner = self._scanner
        if self._is_text:
            scanner.arguments('"')
        while (tag := (yield from scanner.until((_END_PARAMETER, _END_FUNCTION), self._add, tail=False))) is not None:
            if not self._in_string():
                if tag == _END_PARAMETER:
                    break
                space = yield from scanner.run(SPACE)
                if (yield from scanner.literal(END_CALL)):
                    tag = END_CALL
                    break
                tag += space
            self._add(tag)
        if self._is_text:
            scanner.arguments("" if tag is None else '"')
        elif tag is not None:
            scanner.arguments(convert("".join(self._parts).removesuffix("\n"), self._types))
        else:
            scanner.arguments(_beginning("".join(self._parts)))
        return tag

    def _in_string(self) -> bool:
        """Return whether what comes next is inside a string of JSON."""
        value = self._json
        return "string" not in self._types and value.in_string and not value.broken and self._last != "\n"

    def _add(self, text: str) -> None:
        if not text:
            return
        self._last = text[-1]
        if not self._begun:
            text = text.removeprefix("\n")
            self._begun = True
        self._parts.append(text)
        if self._is_text:
            text = "".join(self._parts)
            self._parts = ["\n"] if text.endswith("\n") else []
            self._scanner.arguments(json.dumps(text.removesuffix("\n"), ensure_ascii=False)[1:-1])
        else:
            self._json.feed(text, 0)


def _beginning(text: str) -> str:
    """Return the beginning of the JSON that a text becomes which the output has cut off."""
    value = JsonText()
    accepted, place = value.feed(text, 0)
    is_value = not text[place:].strip(SPACES)
    return accepted + value.rest() if is_value else json.dumps(text, ensure_ascii=False)[:-1]


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
    if types - {"string", "null", "boolean"} or (not types and bare not in _OF_PYTHON):
        found = as_json(bare)
        if found is not None and (not types or _is_one_of(value := json.loads(found), types)):
            return str(int(value)) if types and "number" not in types and isinstance(value, float) else found
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
