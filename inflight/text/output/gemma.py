"""The formats of Gemma: 4 has tokens and a notation of its own, 3 writes Python into a fence."""

from __future__ import annotations

import json
import re
from typing import ClassVar

from inflight.sampling import Guide
from inflight.text.output.call_grammar import Asked, Shape, calls_behind, join, quote
from inflight.text.output.incremental_json import JsonText
from inflight.text.output.json_calls import Arguments
from inflight.text.output.markers import Marker
from inflight.text.output.python_calls import NAME, read_python_call, read_python_list
from inflight.text.output.scanner import SPACE, SPACES, Reading, Scanner
from inflight.text.output.sections import SectionFormat, ToolsByName
from inflight.text.output.spelling import GEMMA, PYTHON, Spelled

_QUOTE = '<|"|>'
_KEY = re.compile(r'[^:,{}\[\]"<>\r\n]*')


class Gemma4Format(SectionFormat):
    """``<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>``."""

    name: ClassVar[str] = "gemma4"
    starts = ("<|tool_call>",)
    inner = ("<tool_call|>", _QUOTE)
    thinking = ("<|channel>", "<channel|>")

    def opens_reasoning(self, prompt: str) -> bool:
        """Return whether a rendered prompt ends inside a part of reasoning."""
        return self.has_reasoning and re.search(r"<\|channel>(thought)?\s*$", prompt) is not None

    def open_reasoning(self, scanner: Scanner) -> Reading[None]:
        """Read the name of the channel."""
        yield from scanner.run(SPACE)
        yield from scanner.literal("thought")

    def calls(self, scanner: Scanner, start: str, tools: ToolsByName) -> Reading[None]:
        """Read one call."""
        yield from scanner.run(SPACE)
        if not (yield from scanner.literal("call:")):
            scanner.reject()
            return
        name = yield from scanner.name(NAME)
        if name not in tools or (yield from scanner.peek()) != "{":
            scanner.reject()
            return
        scanner.named(name)
        arguments = Arguments(scanner, name)
        arguments.end((yield from _Notation(scanner, arguments, _QUOTE in self._special).read()))
        if not arguments.complete:
            scanner.reject()
            return
        scanner.begin()
        yield from scanner.run(SPACE)
        if (yield from scanner.closing("<tool_call|>")):
            scanner.accept()
        else:
            scanner.reject()

    def grammar(self, calls: Asked) -> Guide:
        """Return the grammar of calls."""
        spelled = Spelled(GEMMA, self.word, calls.max_bytes)
        bodies = [
            join(quote(f"call:{tool.name}"), spelled.arguments(tool), self.word("<tool_call|>")) for tool in calls.tools
        ]
        return calls_behind(
            calls,
            Shape("<|tool_call>", separator=self.word("<|tool_call>")),
            bodies,
            self._special,
            (),
            spelled.rules.lines,
        )


class _Notation:
    """Reads Gemma 4's notation as JSON: keys without quotes, and strings between tokens of their own."""

    def __init__(self, scanner: Scanner, sink: Arguments, special: bool) -> None:
        self._scanner = scanner
        self._sink = sink
        self._json = JsonText()
        self._quote = "" if special else _QUOTE

    def read(self) -> Reading[bool]:
        """Read one value; return whether it is complete."""
        scanner, value = self._scanner, self._json
        while not value.done and not value.broken:
            if not value.in_string and (yield from scanner.literal(_QUOTE)):
                yield from self._string()
            elif not isinstance((yield from scanner.peek()), str):
                self._sink(value.rest())
                break
            elif value.expects_key and self._begins_key((yield from scanner.peek())):
                key = yield from scanner.name(_KEY)
                if (yield from scanner.peek()) is None:
                    self._give(json.dumps(key, ensure_ascii=False)[:-1], key)
                    break
                self._give(json.dumps(key.rstrip(), ensure_ascii=False), key)
            else:
                character = yield from scanner.one()
                self._give(character, character)
        return value.done

    @staticmethod
    def _begins_key(character: str | Marker | None) -> bool:
        return isinstance(character, str) and character not in SPACES and _KEY.fullmatch(character) is not None

    def _string(self) -> Reading[None]:
        """Read a string behind its first quote; the output may end inside of it."""
        self._give('"', self._quote)
        if not self._json.broken and (yield from self._scanner.until((_QUOTE,), self._text, record=True)) is not None:
            self._give('"', self._quote)

    def _text(self, text: str) -> None:
        self._give(json.dumps(text, ensure_ascii=False)[1:-1], text)

    def _give(self, text: str, spelt: str) -> None:
        """Take JSON that was ``spelt`` in some other way; what cannot follow belongs to the content."""
        accepted, _ = self._json.feed(text, 0)
        self._sink(accepted)
        if self._json.broken and self._sink.started:
            self._scanner.begin(spelt)


class Gemma3Format(SectionFormat):
    """Calls in Python inside a fence: ``tool_code``."""

    name: ClassVar[str] = "gemma3"
    starts = ("```tool_code",)

    def calls(self, scanner: Scanner, start: str, tools: ToolsByName) -> Reading[None]:
        """Read calls, one a line, up to the end of the fence."""
        names = frozenset(tools)
        yield from scanner.run(SPACE)
        if (yield from scanner.peek()) == "[":
            yield from read_python_list(scanner, names)
            scanner.begin()
            yield from scanner.run(SPACE)
            called = True
        else:
            called = yield from self._line(scanner, names)
            yield from scanner.run(SPACE)
            while called and (yield from scanner.peek()) not in ("`", None):
                called = yield from self._line(scanner, names)
                yield from scanner.run(SPACE)
        if called and (yield from scanner.closing("```")):
            scanner.accept()
        else:
            scanner.reject()

    @staticmethod
    def _line(scanner: Scanner, names: frozenset[str]) -> Reading[bool]:
        printed = yield from scanner.literal("print(")
        if not (yield from read_python_call(scanner, names)):
            return False
        scanner.begin()
        return not printed or (yield from scanner.literal(")"))

    def grammar(self, calls: Asked) -> Guide:
        """Return the grammar of calls in Python."""
        spelled = Spelled(PYTHON, quote, calls.max_bytes)
        bodies = [join(quote(tool.name), spelled.arguments(tool)) for tool in calls.tools]
        shape = Shape("```tool_code", quote("\n"), quote("\n"), quote("\n```"))
        return calls_behind(calls, shape, bodies, self._special, (), spelled.rules.lines)
