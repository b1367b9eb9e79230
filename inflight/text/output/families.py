"""The formats of Qwen, Llama, Mistral and DeepSeek."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import ClassVar

from inflight.sampling import Guide
from inflight.text.output.call_grammar import (
    Asked,
    Shape,
    call_rules,
    calls_behind,
    escape,
    join,
    json_schema,
    lark,
    quote,
    start,
)
from inflight.text.output.incremental_json import to_json
from inflight.text.output.json_calls import json_arguments, read_calls
from inflight.text.output.python_calls import NAME, read_python_list
from inflight.text.output.scanner import SPACE, Reading, Scanner
from inflight.text.output.sections import SectionFormat, ToolsByName
from inflight.text.output.xml_calls import END_CALL, FUNCTION, XmlCallReader
from inflight.text.output.xml_grammar import XmlArguments


class ThinkFormat(SectionFormat):
    """Reasoning between ``<think>`` and ``</think>``, and no tools."""

    name: ClassVar[str] = "think"
    has_tools = False


class HermesFormat(SectionFormat):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen 2.5, Qwen 3 and many others."""

    name: ClassVar[str] = "hermes"
    starts: tuple[str, ...] = ("<tool_call>",)
    inner = (END_CALL,)

    def calls(self, scanner: Scanner, start: str, tools: ToolsByName) -> Reading[None]:
        """Read one call, in JSON or as tags."""
        if start != FUNCTION:
            yield from scanner.run(SPACE)
            if (yield from scanner.peek()) == "{":
                yield from read_calls(scanner, frozenset(tools), "", END_CALL)
                return
            if not (yield from scanner.literal(FUNCTION)):
                scanner.reject()
                return
        yield from XmlCallReader(scanner, tools, wrapped=start != FUNCTION).read()

    def grammar(self, calls: Asked) -> Guide:
        """Return the grammar of calls in JSON."""
        end = self.word(END_CALL)
        bodies = [
            join(
                quote(f'\n{{"name": {to_json(tool.name)}, "arguments": '),
                json_schema(tool.schema),
                quote("}\n"),
                end,
            )
            for tool in calls.tools
        ]
        separator = join(quote("\n"), self.word("<tool_call>"))
        return calls_behind(calls, Shape("<tool_call>", separator=separator), bodies, self._special, ())


class GenericFormat(HermesFormat):
    """Hermes' notation for a model that does not know it: ``generic_tools`` tells it, and a guide holds it."""

    name: ClassVar[str] = "generic"

    def grammar(self, calls: Asked) -> Guide:
        """Return the grammar of one call: such a model would write the same again and again."""
        return super().grammar(replace(calls, several=False))


class XmlFormat(HermesFormat):
    """``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``: Qwen3-Coder, Qwen 3.5."""

    name: ClassVar[str] = "qwen_xml"
    starts = ("<tool_call>", FUNCTION)

    def grammar(self, calls: Asked) -> Guide:
        """Return the grammar of calls as tags."""
        parameters = XmlArguments(calls.max_bytes)
        end = join(quote("</function>\n"), self.word(END_CALL))
        bodies = [
            join(
                quote(f"\n<function={tool.name}>\n"),
                parameters.arguments(tool),
                end,
            )
            for tool in calls.tools
        ]
        shape = Shape("<tool_call>", separator=join(quote("\n"), self.word("<tool_call>")))
        return calls_behind(calls, shape, bodies, self._special, (FUNCTION,), parameters.rules.lines)


class LlamaFormat(SectionFormat):
    """``{"name": …, "parameters": {…}}`` or ``[name(key=value)]`` at the beginning, or behind ``<|python_tag|>``."""

    name: ClassVar[str] = "llama"
    starts = ("<|python_tag|>", "<|python_start|>")
    inner = ("<|python_end|>",)
    ends = ("<|eom_id|>", "<|eom|>")

    def takes(self, answer: Guide, *, beside_calls: bool) -> bool:
        """Return whether there are no calls beside an answer's form: both are plain JSON, and one may be the other."""
        return not beside_calls

    def begin(self, scanner: Scanner, tools: ToolsByName) -> Reading[None]:
        """Read calls that begin the content."""
        scanner.begin()
        yield from scanner.run(SPACE)
        yield from self._read_calls(scanner, tools)

    def calls(self, scanner: Scanner, start: str, tools: ToolsByName) -> Reading[None]:
        """Read calls behind a tag."""
        yield from scanner.run(SPACE)
        yield from self._read_calls(scanner, tools)

    def _read_calls(self, scanner: Scanner, tools: ToolsByName) -> Reading[None]:
        match (yield from scanner.peek()):
            case "{":
                yield from read_calls(scanner, frozenset(tools), ";", "<|python_end|>")
            case "[":
                yield from read_python_list(scanner, frozenset(tools))
            case _:
                scanner.reject()

    def grammar(self, calls: Asked) -> Guide:
        """Return the grammar of calls in JSON, which every model of the family reads and writes."""
        bodies = [
            join(
                quote(f'{{"name": {to_json(tool.name)}, "parameters": '),
                json_schema(tool.schema),
                quote("}"),
            )
            for tool in calls.tools
        ]
        rules = call_rules(calls, Shape("", separator=quote("; ")), bodies)
        if calls.must:
            return lark(*start(calls, "calls"), *rules)
        names = "|".join(escape(tool.name) for tool in calls.tools)
        keys = "name|function|type|id|arguments|parameters"
        like = rf'[ \t\r\n]*(\{{[ \t\r\n]*"({keys})"|\[[ \t\r\n]*({names})\()(?s:.*)'
        free = calls.text(*(word for word in self.starts if word not in self._special), excluded=like)
        tags = [self.word(word) for word in self.starts if word in self._special]
        if not tags:
            return lark(*start(calls, "calls", "FREE"), f"FREE: {free}", *rules)
        tagged = f"BEFORE ({' | '.join(tags)}) calls"
        return lark(*start(calls, "calls", "FREE", tagged), f"FREE: {free}", f"BEFORE: {free}", *rules)


class MistralFormat(SectionFormat):
    """``[TOOL_CALLS][{"name": …, "arguments": {…}}]``, and the newer ``[TOOL_CALLS]name[ARGS]{…}``."""

    name: ClassVar[str] = "mistral"
    starts = ("[TOOL_CALLS]",)
    inner = ("[ARGS]", "[CALL_ID]")
    thinking = ("[THINK]", "[/THINK]")

    def calls(self, scanner: Scanner, start: str, tools: ToolsByName) -> Reading[None]:
        """Read a list of calls, or one call."""
        yield from scanner.run(SPACE)
        if (yield from scanner.literal("[")):
            yield from scanner.run(SPACE)
            yield from read_calls(scanner, frozenset(tools), ",", "]")
            return
        name = yield from scanner.name(NAME)
        if (yield from scanner.literal("[CALL_ID]")):
            yield from scanner.name(NAME)
        if (yield from scanner.literal("[ARGS]")) and name in tools:
            scanner.named(name)
        yield from scanner.run(SPACE)
        if name not in tools or not (yield from json_arguments(scanner, name)).started:
            scanner.reject()

    def grammar(self, calls: Asked) -> Guide:
        """Return the grammar of the newer form where the vocabulary has its token, and of the older one elsewhere."""
        if self._tokenizer.token_id("[ARGS]") is not None:
            bodies = [join(quote(tool.name), self.word("[ARGS]"), json_schema(tool.schema)) for tool in calls.tools]
            shape = Shape("[TOOL_CALLS]", separator=self.word("[TOOL_CALLS]"))
            return calls_behind(calls, shape, bodies, self._special, ())
        bodies = [
            join(
                quote(f'{{"name": {to_json(tool.name)}, "arguments": '),
                json_schema(tool.schema),
                quote("}"),
            )
            for tool in calls.tools
        ]
        shape = Shape("[TOOL_CALLS]", quote("["), quote(", "), quote("]"))
        return calls_behind(calls, shape, bodies, self._special, ())


class DeepSeekFormat(SectionFormat):
    """``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`` (V3.1); in V3 and R1 the JSON is in a fence."""

    name: ClassVar[str] = "deepseek"
    _all, _all_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    _one, _separator, _end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    starts = (_all, _one)
    inner = (_all_end, _separator, _end)

    def calls(self, scanner: Scanner, start: str, tools: ToolsByName) -> Reading[None]:
        """Read calls until one is none."""
        if start == self._all:
            yield from scanner.run(SPACE)
            if not (yield from scanner.literal(self._one)):
                scanner.reject()
                return
        while (yield from self._call(scanner, tools)):
            scanner.begin()
            yield from scanner.run(SPACE)
            if (yield from scanner.closing(self._all_end)):
                scanner.accept()
                return
            if not (yield from scanner.literal(self._one)):
                break
        scanner.reject()

    def _call(self, scanner: Scanner, tools: ToolsByName) -> Reading[bool]:
        """Read one call; return whether there was one, and it is complete."""
        name = yield from scanner.name(_DEEPSEEK_NAME)
        if not (yield from scanner.literal(self._separator)):
            return False
        fenced = name == "function" and (yield from scanner.peek()) != "{"
        if fenced:
            name = yield from scanner.name(_LINE)
            yield from scanner.run(SPACE)
            if not (yield from scanner.literal("```json")):
                return False
        if name in tools:
            scanner.named(name)
        yield from scanner.run(SPACE)
        if name not in tools or not (yield from json_arguments(scanner, name)).started:
            return False
        scanner.begin()
        yield from scanner.run(SPACE)
        if fenced:
            yield from scanner.closing("```")
            yield from scanner.run(SPACE)
        if (yield from scanner.closing(self._end)):
            scanner.accept()
            return True
        return False

    def grammar(self, calls: Asked) -> Guide:
        """Return the grammar of the form that the chat template writes."""
        fenced = "```json" in self._tokenizer.config.templates
        separator, end = self.word(self._separator), self.word(self._end)
        if fenced:
            bodies = [
                join(
                    quote("function"),
                    separator,
                    quote(f"{tool.name}\n```json\n"),
                    json_schema(tool.schema),
                    quote("\n```"),
                    end,
                )
                for tool in calls.tools
            ]
        else:
            bodies = [join(quote(tool.name), separator, json_schema(tool.schema), end) for tool in calls.tools]
        one = self.word(self._one)
        shape = Shape(self._all, one, join(quote("\n") if fenced else "", one), self.word(self._all_end))
        return calls_behind(calls, shape, bodies, self._special, () if self._one in self._special else (self._one,))


_DEEPSEEK_NAME = re.compile(r"[\w.:/\-]*")
_LINE = re.compile(r"[^\n]*")
