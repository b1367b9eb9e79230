"""Grammars in llguidance's Lark that enforce calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inflight.errors import InvalidRequest
from inflight.sampling import Guide
from inflight.text.output.tools import Tool, ToolChoice

ANY_OBJECT: dict[str, Any] = {"type": "object"}
TEXT = "/(?s:.*)/"
SPACE_RULE = "SPACE: /[ \\n]{1,4}/"


@dataclass(frozen=True)
class Shape:
    """How calls stand in the text, in items of Lark: ``trigger opening call (separator call)* closing``."""

    trigger: str
    """The delimiter that says that calls follow."""
    opening: str = ""
    separator: str = ""
    closing: str = ""


@dataclass(frozen=True)
class Asked:
    """Which calls a request's choice of tools allows; ``tools`` has the schema of the arguments of each tool."""

    tools: dict[str, dict[str, Any]]
    must: bool
    """Whether there must be a call; otherwise text may stand before the calls, or in their place."""
    several: bool
    strict: frozenset[str]
    """The tools whose schema must hold. Of others' schemas a notation other than JSON may leave out what it cannot."""

    reasoning: tuple[str, ...] = ()
    """Rules of ``reasoning``, which may stand before calls that must come; none: it may not."""

    @property
    def before(self) -> str:
        """Items that may stand before calls that must come."""
        return "reasoning? SPACE?" if self.reasoning else "SPACE?"

    def json(self, name: str) -> str:
        """Return the item of Lark for the arguments of a tool, as JSON."""
        return json_schema(self.tools[name])


def asked(tools: Sequence[Tool], choice: ToolChoice, parallel: bool) -> Asked | None:
    """Return what a choice of tools asks of the grammar; None: nothing.

    Raises:
        InvalidRequest: the choice is of a tool that there is not.
    """
    if choice.kind == "none" or (choice.kind == "auto" and parallel and not any(tool.strict for tool in tools)):
        return None
    if choice.kind == "named":
        tools = [tool for tool in tools if tool.name == choice.name]
        if not tools:
            raise InvalidRequest(f"tool_choice.function.name is {choice.name!r}; it must be one of tools")
    if not tools:
        if choice.kind == "auto":
            return None
        raise InvalidRequest(f"tool_choice is {choice.kind!r} and tools is empty; it must have a tool to choose")
    must = choice.kind != "auto"
    schemas = {tool.name: tool.schema if must or tool.strict else ANY_OBJECT for tool in tools}
    strict = frozenset(tool.name for tool in tools if tool.strict)
    return Asked(schemas, must, parallel and choice.kind != "named", strict)


def quote(text: str) -> str:
    """Return a string of Lark."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def json_schema(schema: dict[str, Any]) -> str:
    """Return the item of Lark for JSON that follows a schema."""
    return f"%json {json.dumps(schema)}"


def without(words: Sequence[str]) -> str:
    """Return the terminal of text that has none of these words in it."""
    if not words:
        return TEXT
    pattern = "|".join(regex(word) for word in words)
    return f"{TEXT} & ~/(?s:.*)({pattern})(?s:.*)/"


def regex(text: str) -> str:
    """Return the regular expression of a text, between slashes of Lark."""
    return re.escape(text).replace("/", "\\/").replace("\n", "\\n")


def counts(schema: dict[str, Any], least: str, most: str) -> tuple[int, int | None]:
    """Return two bounds of a schema. Raises ValueError: they are no counts."""
    bounds = schema.get(least, 0), schema.get(most)
    for bound in bounds:
        if bound is not None and (type(bound) is not int or bound < 0):
            raise ValueError(f"{least} and {most} are counts, not {bound!r}")
    return bounds


def join(*items: str) -> str:
    """Return items of Lark, one after the other."""
    return " ".join(item for item in items if item)


def lark(*lines: str) -> Guide:
    """Return the guide of these rules."""
    return Guide("lark_grammar", "\n".join(lines) + "\n")


def call_rules(calls: Asked, shape: Shape, bodies: Sequence[str]) -> list[str]:
    """Return the rules of ``calls``; ``bodies`` are the items of one call of each tool."""
    more = f"({join(shape.separator, 'call')})*" if calls.several else ""
    return [
        f"calls: {join(shape.opening, 'call', more, shape.closing)}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(bodies))),
        *(f"call_{index}: {body}" for index, body in enumerate(bodies)),
    ]


def guide(
    calls: Asked,
    shape: Shape,
    bodies: Sequence[str],
    special: dict[str, int],
    texts: Sequence[str],
    rules: Sequence[str] = (),
) -> Guide:
    """Return the guide of calls behind a trigger; ``bodies`` are the items of one call of each tool.

    ``special`` has the special tokens; ``texts`` are other delimiters of calls, which free text must not have.
    ``rules`` are those that the bodies need.
    """
    rules = [*call_rules(calls, shape, bodies), *rules]
    trigger = f"<[{special[shape.trigger]}]>" if shape.trigger in special else quote(shape.trigger)
    if calls.must:
        return lark(f"start: {calls.before} {trigger} calls", SPACE_RULE, *calls.reasoning, *rules)
    if shape.trigger in special:
        return lark(f"start: FREE ({trigger} calls)?", f"FREE: {without(texts)}", *rules)
    first = ["start: FREE | head calls", f"FREE: {without([shape.trigger, *texts])}"]
    return lark(*first, f"head[lazy]: BEFORE {trigger}", f"BEFORE: {without(texts)}", *rules)
