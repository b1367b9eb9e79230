"""The format that a checkpoint describes itself, in the ``response_template`` of its tokenizer's settings.

The description is that of transformers. Text fields go out as they come; calls once their closing delimiter has come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import regex

from inflight.sampling import Guide
from inflight.settings.guided import MOST_GUIDE_BYTES
from inflight.text.output.events import OutputEvent
from inflight.text.output.format import ChatFormat, OutputParser
from inflight.text.output.incremental_json import as_json, to_json
from inflight.text.output.markers import Marker, Piece
from inflight.text.output.scanner import Scanner
from inflight.text.output.template_fields import (
    CALLS,
    REASONING,
    Delimiter,
    Field,
    ResponseTemplate,
    read_template,
)
from inflight.text.output.template_values import SECONDS, fill, parse_value
from inflight.text.output.tools import Tool, ToolChoice
from inflight.text.output.xml_calls import convert, parameter_types
from inflight.text.tokenizer import Tokenizer

_UNKNOWN: Any = object()


class TemplateFormat(ChatFormat):
    """Reads output by the description; a choice of tools is enforced as the family that was ``found`` writes calls."""

    name: ClassVar[str] = "response_template"

    def __init__(self, tokenizer: Tokenizer, spec: Mapping[str, Any], found: ChatFormat) -> None:
        """
        Raises:
            DeploymentError: the description is not what it should be.
        """
        super().__init__(tokenizer)
        self._template = read_template(spec)
        self._found = found
        names = {one.name for one in self._template.fields}
        self.has_tools, self.has_reasoning = CALLS in names, self._template.reasoning is not None
        texts = self._template.texts
        self._markers = frozenset(
            token
            for name, token in tokenizer.special_tokens.items()
            if any(name in text or re.escape(name) in text or regex.escape(name) in text for text in texts)
        )

    @property
    def markers(self) -> frozenset[int]:
        """The special tokens that the description names."""
        return self._markers

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The end ids of the family."""
        return self._found.stop_token_ids

    def parser(self, tools: Sequence[Tool], *, reasoning_open: bool, has_form: bool = False) -> OutputParser:
        """Return the parser of one output."""
        return _TemplateParser(self._read_by, {tool.name: tool for tool in tools}, reasoning_open, has_form)

    @property
    def _read_by(self) -> ResponseTemplate:
        """The description; where reasoning is switched off, without the field of it."""
        if self.has_reasoning:
            return self._template
        fields = tuple(one for one in self._template.fields if one.name not in REASONING)
        return replace(self._template, fields=fields)

    def opens_reasoning(self, prompt: str) -> bool:
        """Return whether a rendered prompt ends inside a part of reasoning."""
        anchors = list(self._template.anchor.finditer(prompt, timeout=SECONDS))
        parser = _TemplateParser(self._read_by, {}, False)
        parser.push([prompt[anchors[-1].end() :] if anchors else prompt])
        return parser.in_reasoning

    def may_reason(self, prompt: str) -> bool:
        """Return whether an output may begin with reasoning, as the family writes it."""
        return self.has_reasoning and not self.opens_reasoning(prompt) and self._found.may_reason(prompt)

    def takes(self, answer: Guide, *, beside_calls: bool) -> bool:
        """Return whether the family's guides take an answer's form."""
        return self._found.takes(answer, beside_calls=beside_calls)

    def guide(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        parallel: bool,
        *,
        answer: Guide | None = None,
        reasoning: bool = False,
        max_bytes: int = MOST_GUIDE_BYTES,
    ) -> Guide | None:
        """Return what an output must be, as the family writes it."""
        return self._found.guide(tools, choice, parallel, answer=answer, reasoning=reasoning, max_bytes=max_bytes)

    def guide_start(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the tokens that end the reasoning: the description's own where it has one spelling of them."""
        field = self._template.reasoning
        words = field.closing.words if field is not None and field.closing is not None else ()
        return tuple(tokenizer.spelling(words[0])) if len(words) == 1 else self._found.guide_start(tokenizer)

    def answer_start(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the tokens behind which the answer's own text stands."""
        return self._found.answer_start(tokenizer)


class _TemplateParser:
    """Reads one output: text of the field at hand, up to the next delimiter."""

    has_open_call = False

    def __init__(
        self, template: ResponseTemplate, tools: dict[str, Tool], reasoning_open: bool, has_form: bool = False
    ) -> None:
        self._template = template
        self._tools = tools
        self._has_form, self._in_answer = has_form, False
        self._field = template.reasoning if reasoning_open else template.implicit
        self._scanner = Scanner(frozenset())
        self._buffer, self._enough = "", 0
        self._found: dict[Delimiter, regex.Match | None] = {}
        """Where each delimiter comes first in the buffer, from the last place where it was looked for."""
        self._raw: list[str] = []
        """A call so far, with its delimiters; a text field keeps nothing."""
        self._body: list[str] = []
        self._captures: dict[str, str] = {}
        if reasoning_open:
            self._scanner.switch()

    @property
    def in_reasoning(self) -> bool:
        """Whether the text at hand is reasoning."""
        return self._field is not None and self._field.name in REASONING

    def push(self, pieces: list[Piece]) -> list[OutputEvent]:
        """Take the next pieces; return what is settled by them."""
        self._buffer += "".join(piece.text if isinstance(piece, Marker) else piece for piece in pieces)
        if len(self._buffer) >= self._enough:
            self._process(ended=False)
        return self._scanner.events()

    def finish(self, cut: bool = False) -> list[OutputEvent]:
        """End the output; return what was still held back."""
        self._process(ended=True)
        self._add(self._buffer)
        self._buffer = ""
        if self._field is not None and self._field.name == CALLS and not cut:
            self._scanner.content("".join(self._raw))
        if not self.in_reasoning:
            self._scanner.end_content()
        return self._scanner.events()

    def _process(self, ended: bool) -> None:
        """Read up to the last delimiter that is certain; leave what may still become one."""
        place = 0
        self._found.clear()
        while True:
            found, hold = self._search(place, ended)
            if found is None:
                break
            field, match = found
            self._add(self._buffer[place : match.start()])
            if self._in_answer and field is not self._template.implicit:
                self._add(match[0])
            else:
                self._cross(field, match)
            if match.end() == match.start():
                place, hold = match.end(), match.end()
                break
            place = match.end()
        self._add(self._buffer[place:hold])
        self._buffer = self._buffer[hold:]
        # A delimiter that is long in coming is looked for less often: the whole costs no more than its length does.
        self._enough = len(self._buffer) + len(self._buffer) // 8

    def _search(self, place: int, ended: bool) -> tuple[tuple[Field | None, regex.Match] | None, int]:
        """Return the first delimiter with the field that begins there, and where what may become one begins."""
        best: tuple[Field | None, regex.Match] | None = None
        hold = len(self._buffer)
        for field, delimiter in self._watched():
            match = self._next(delimiter, place, ended)
            if match is None:
                continue
            at_end = match.end() == len(self._buffer) and (delimiter.grows or match.end() == match.start())
            if not ended and (match.partial or at_end):
                hold = min(hold, match.start())
            elif best is None or _order(match) < _order(best[1]):
                best = field, match
        if best is not None and best[1].start() >= hold:
            best = None
        return best, hold

    def _next(self, delimiter: Delimiter, place: int, ended: bool) -> regex.Match | None:
        """Return where a delimiter comes next. Each part of the buffer is searched once for each delimiter."""
        match = self._found.get(delimiter, _UNKNOWN)
        if match is _UNKNOWN or (match is not None and match.start() < place):
            match = delimiter.pattern.search(self._buffer, place, partial=not ended, timeout=SECONDS)
            self._found[delimiter] = match
        return match

    def _watched(self) -> list[tuple[Field | None, Delimiter]]:
        """Return the delimiters that count now, each with the field that begins behind it."""
        template = self._template
        current, implicit = self._field, template.implicit
        if current is not None and current is not implicit:
            return [(implicit, current.closing)] if current.closing is not None else []
        watched: list[tuple[Field | None, Delimiter]] = [(one, one.opening) for one in template.fields if one.opening]
        return [*watched, (implicit, implicit.closing)] if implicit is not None and implicit.closing else watched

    def _cross(self, field: Field | None, match: regex.Match) -> None:
        """Go into another field, behind its delimiter."""
        if self._field is not None and self._field.name == CALLS:
            self._raw.append(match[0])
            self._close_calls(self._field)
        elif self.in_reasoning or (field is not None and field.name in REASONING):
            self._scanner.switch()
        self._field = field
        if field is not None and field.name == CALLS:
            self._raw, self._body = [match[0]], []
            self._captures = {key: value for key, value in match.groupdict().items() if value is not None}

    def _add(self, text: str) -> None:
        """Add text to the field at hand; text of no field is content, so that nothing is lost."""
        if not text:
            return
        if self._field is not None and self._field.name == CALLS:
            self._raw.append(text)
            self._body.append(text)
        elif self.in_reasoning:
            self._scanner.reasoning(text)
        else:
            self._scanner.content(text)
            self._in_answer |= self._has_form and bool(text.strip())

    def _close_calls(self, field: Field) -> None:
        """Give out the calls of a field that is complete, or its text where it has none."""
        try:
            calls = [self._call(value) for value in self._values(field)]
        except (ValueError, KeyError, TypeError, RecursionError, TimeoutError):
            calls = []
        if not calls:
            self._scanner.content("".join(self._raw))
        for name, arguments in calls:
            self._scanner.whole_call(name, arguments)
        self._raw, self._body = [], []

    def _values(self, field: Field) -> list[Any]:
        value = parse_value("".join(self._body), field.kind, field.options)
        if field.transform is not None:
            if field.each:
                return [fill(field.transform, {**self._captures, **one}) for one in value]
            value = fill(field.transform, {**self._captures, "content": value})
        return value if isinstance(value, list) else [value]

    def _call(self, value: Any) -> tuple[str, str]:
        """Return the name and the arguments of a call. Raises ValueError, KeyError or TypeError: it is none."""
        function = value["function"]
        name, arguments = function["name"], function.get("arguments") or {}
        tool = self._tools[name]
        if isinstance(arguments, str):
            arguments = json.loads(as_json(arguments) or "null")
        if not isinstance(arguments, dict):
            raise TypeError("arguments are an object")
        for key, one in arguments.items():
            types = parameter_types(tool, key)
            if isinstance(one, str) and types:
                arguments[key] = json.loads(convert(one, types))
        return name, to_json(arguments)


def _order(match: regex.Match) -> tuple[int, int]:
    return match.start(), match.start() - match.end()
