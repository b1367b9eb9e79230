"""Grammars in llguidance's Lark that enforce calls of tools."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from inflight.errors import InvalidRequest
from inflight.sampling import Guide
from inflight.settings.guided import MOST_GUIDE_BYTES
from inflight.text.output.schemas import NoSchema, NotEnforceable, check_shape
from inflight.text.output.tools import Tool, ToolChoice

TEXT = "/(?s:.*)/"
SPACE_RULE = "SPACE: /[ \\n]{1,4}/"
_LARGEST_COUNT = 2**31 - 1
"""The largest number of repetitions that llguidance takes."""


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
    """Which calls a request's choice of tools allows."""

    tools: tuple[Tool, ...]
    """Those that may be called, with the schemas that hold for their arguments.

    Of the schema of a tool that is not strict a notation other than JSON may leave out what it cannot enforce.
    """
    must: bool
    """Whether there must be a call; otherwise text may stand before the calls, or in their place."""
    several: bool
    thought: tuple[str, ...] = ()
    """The rule ``thought``, of the reasoning with which the output may begin, and what it needs; (): it may not."""
    opening: str = ""
    """The expression of what opens reasoning at the beginning, so that free text must not begin with it."""
    answer: tuple[str, ...] = ()
    """The rule ``answer`` and what it needs: an answer of a form, which may stand in place of calls."""
    max_bytes: int = MOST_GUIDE_BYTES
    """The size in UTF-8 beyond which the grammar is refused."""

    def text(self, *words: str, excluded: str = "") -> str:
        """Return the terminal of free text that has none of these words in it, and does not begin with reasoning.

        ``excluded`` is the expression of what the text must not be besides.
        """
        patterns = [f"{self.opening}(?s:.*)"] if self.opening else []
        patterns += [f"(?s:.*)({'|'.join(map(escape, words))})(?s:.*)"] if words else []
        patterns += [excluded] if excluded else []
        return " & ".join([TEXT, *(f"~/{pattern}/" for pattern in patterns)])


class Rules:
    """The rules of a grammar, which are counted as they come: one that is too large is not made as a whole."""

    def __init__(self, max_bytes: int) -> None:
        self.lines: list[str] = []
        self._left = self._max_bytes = max_bytes
        self._once: set[str] = set()
        self._numbers = itertools.count()

    def number(self) -> int:
        """Return a number for the name of a rule, which no other rule has."""
        return next(self._numbers)

    def add(self, rule: str) -> None:
        """Add a rule. Raises InvalidRequest: the grammar is larger than its limit."""
        self._left -= len(rule.encode())
        if self._left < 0:
            raise InvalidRequest(f"tools need a grammar of more than {self._max_bytes} bytes, which is the limit")
        self.lines.append(rule)

    def add_once(self, rule: str) -> None:
        """Add a rule unless this has added it before."""
        if rule not in self._once:
            self._once.add(rule)
            self.add(rule)


def asked(tools: Sequence[Tool], choice: ToolChoice, parallel: bool, answer: Guide | None = None) -> Asked | None:
    """Return what a choice of tools asks of the grammar; None: nothing.

    Beside an ``answer`` of a form calls follow their schemas, whatever ``strict`` says.

    Raises:
        InvalidRequest: the choice is of a tool that there is not.
    """
    free = choice.kind == "auto" and answer is None
    if choice.kind == "none" or (free and parallel and not any(tool.strict for tool in tools)):
        return None
    if choice.kind == "named":
        tools = [tool for tool in tools if tool.name == choice.name]
        if not tools:
            raise InvalidRequest(f"tool_choice.function.name is {choice.name!r}; it must be one of tools")
    if not tools:
        if choice.kind == "auto":
            return None
        raise InvalidRequest(f"tool_choice is {choice.kind!r} and tools is empty; it must have a tool to choose")
    must = not free
    held = tuple(tool if must or tool.strict else replace(tool, parameters={}) for tool in tools)
    several = parallel and choice.kind != "named"
    beside = answer_rules(answer) if answer is not None and choice.kind == "auto" else ()
    return Asked(held, must, several, answer=beside)


def answer_rules(answer: Guide) -> tuple[str, ...]:
    """Return the rule ``answer`` of a form that an answer must have, and what it needs; (): the form is no rule.

    Raises:
        InvalidRequest: the form is not what its kind says.
    """
    if answer.kind not in ("json_schema", "choice"):
        return ()
    try:
        value = json.loads(answer.text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"guided_decoding_guide is not valid JSON: {error}") from None
    if answer.kind == "json_schema":
        return (f"answer: {json_schema(value)}",)
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise InvalidRequest("guided_decoding_guide: the choices must be a JSON list of texts that are not empty")
    return "answer: ANSWER", f"ANSWER: {' | '.join(map(quote, value))}"  # one lexeme: one may begin with another


def quote(text: str) -> str:
    """Return a string of Lark."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def json_schema(schema: Any) -> str:
    """Return the item of Lark for JSON that follows a schema."""
    return f"%json {json.dumps(schema)}"


def escape(text: str) -> str:
    """Return the regular expression of a text, between slashes of Lark."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


def counts(schema: dict[str, Any], least: str, most: str) -> tuple[int, int | None]:
    """Return two bounds of a schema. Raises NotEnforceable: nothing is between them, or one is no count."""
    bounds = schema.get(least) or 0, schema.get(most)
    for key, bound in zip((least, most), bounds, strict=True):
        if bound is not None and not (type(bound) is int and 0 <= bound <= _LARGEST_COUNT):
            raise NotEnforceable(f"{key!r} that is no count up to {_LARGEST_COUNT}")
    if bounds[1] is not None and bounds[0] > bounds[1]:
        raise NotEnforceable(f"{least!r} above {most!r}")
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
        *(
            rule_of_schema(f"call_{index}: {body}", tool.path)
            for index, (tool, body) in enumerate(zip(calls.tools, bodies, strict=True))
        ),
    ]


def rule_of_schema(rule: str, field: str) -> str:
    """Return a rule that a schema has been made into; a comment in the line above says which field has the schema."""
    return f"// {field}\n{rule}"


def field_of_schema(grammar: str, line: int) -> str | None:
    """Return the field that has the schema in a line of a grammar, counted from 1; None: the grammar does not say."""
    above = grammar.split("\n")[line - 2 : line - 1]
    return above[0].removeprefix("// ") if above and above[0].startswith("// tools") else None


@contextmanager
def errors_of(tool: Tool) -> Iterator[None]:
    """Turn errors of a tool's schema, as it becomes a grammar, into InvalidRequest, which names the schema's field."""
    try:
        check_shape(tool.schema)
        yield
    except NoSchema as error:
        raise InvalidRequest(f"{tool.path} is no JSON schema: {error}") from None
    except NotEnforceable as error:
        raise InvalidRequest(
            f"{tool.path} has {error}, which cannot be enforced in the notation in which this model writes calls"
        ) from None
    except RecursionError:
        raise InvalidRequest(f"{tool.path} is a schema that nests too deep") from None
    except (TypeError, ValueError, AttributeError, LookupError):
        raise InvalidRequest(f"{tool.path} is no JSON schema: a keyword has a value of a wrong type") from None


def start(calls: Asked, called: str, *free: str) -> list[str]:
    """Return the rule ``start`` of an output that is ``called``, an answer of a form or ``free`` text."""
    ways = [f"SPACE? {called}", *(["answer"] if calls.answer else [])] if calls.must else [*free, called]
    thought = "thought? " if calls.thought else ""
    return [f"start: {thought}({' | '.join(ways)})", *calls.answer, *calls.thought, SPACE_RULE]


def calls_behind(
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
    if shape.trigger in special:
        trigger = f"<[{special[shape.trigger]}]>"
        if calls.must:
            return lark(*start(calls, f"{trigger} calls"), *rules)
        return lark(*start(calls, f"FREE ({trigger} calls)?"), f"FREE: {calls.text(*texts)}", *rules)
    trigger = quote(shape.trigger)
    if calls.must:
        return lark(*start(calls, f"{trigger} calls"), *rules)
    head = [f"head[lazy]: BEFORE {trigger}", f"BEFORE: {calls.text(*texts)}"]
    return lark(*start(calls, "head calls", "FREE"), f"FREE: {calls.text(shape.trigger, *texts)}", *head, *rules)
