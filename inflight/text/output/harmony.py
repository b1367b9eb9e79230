"""The format of gpt-oss: messages in channels, ``<|channel|>final<|message|>…<|return|>``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from inflight.sampling import Guide
from inflight.settings.guided import MOST_GUIDE_BYTES
from inflight.text.output.call_grammar import (
    SPACE_RULE,
    TEXT,
    Asked,
    Shape,
    answer_rules,
    asked,
    call_rules,
    join,
    json_schema,
    lark,
    quote,
)
from inflight.text.output.json_calls import json_arguments
from inflight.text.output.markers import Marker
from inflight.text.output.scanner import SPACE, Reading, Scanner
from inflight.text.output.sections import SectionFormat, ToolsByName
from inflight.text.output.tools import Tool, ToolChoice
from inflight.text.tokenizer import Tokenizer

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START, _CHANNEL)
_HEADER = re.compile(r"[\w .=:/\-]*")
_FIRST = re.compile(r" *(assistant)? *(to=.*)?")
"""What may stand before the channel of the first message, whose beginning is the end of the prompt."""
_RECIPIENT = re.compile(r"to=functions\.([\w.:/\-]+)")


class HarmonyFormat(SectionFormat):
    """Reasoning is the channel ``analysis``; a call is a message to ``functions.name``."""

    name: ClassVar[str] = "harmony"
    starts = (_START, _CHANNEL)
    inner = (_CONSTRAIN, _MESSAGE, "<|end|>", "<|call|>", "<|return|>")
    ends = ("<|return|>", "<|call|>")
    thinking = ("<|channel|>analysis<|message|>", "<|end|>")

    def guide_start(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return nothing: the grammar of messages has the reasoning in it."""
        return ()

    def answer_start(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the tokens behind which the answer's own text stands."""
        return tuple(tokenizer.spelling(f"{_CHANNEL}final{_MESSAGE}"))

    def may_reason(self, prompt: str) -> bool:
        """Return False: the grammar of messages has the reasoning in it."""
        return False

    def has_thought(self, prompt: str) -> bool:
        """Return whether reasoning is told apart: the model decides about it message by message."""
        return self.has_reasoning

    def takes(self, answer: Guide, *, beside_calls: bool) -> bool:
        """Return whether an answer's form is JSON by a schema or a choice, which can stand behind a header."""
        return bool(answer_rules(answer))

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
        """Return what an output must be: messages, of which the last one is a call or the answer."""
        if answer is None or asked(tools, choice, parallel, answer) is not None:
            return super().guide(tools, choice, parallel, answer=answer, max_bytes=max_bytes)
        return self.grammar(Asked((), True, False, answer=answer_rules(answer)))

    def _read(self, scanner: Scanner, tools: ToolsByName, reasoning_open: bool, has_form: bool) -> Reading[None]:
        """Read messages: the header of each says whether it is a call, whether the answer has a form or not."""
        messages = _Messages(scanner, tools)
        if reasoning_open:
            word = yield from messages.body("analysis", None)
        else:
            word = yield from messages.next(_START, _FIRST)
        while word is not None:
            word = yield from messages.next(word)
        scanner.end_content()

    def grammar(self, calls: Asked) -> Guide:
        """Return the grammar of messages; a generation has one call at most, which ends it.

        All text to the user is the answer: where that has a form, no other message to the user stands before it.
        """
        channel, message, constrain = self.word(_CHANNEL), self.word(_MESSAGE), self.word(_CONSTRAIN)
        again = join(self.word("<|end|>"), self.word(_START), quote("assistant"))
        header = join(constrain, quote("json"), message)
        bodies = [
            join(channel, quote(f"commentary to=functions.{tool.name} "), header, json_schema(tool.schema))
            for tool in calls.tools
        ]
        rules = call_rules(replace(calls, several=False), Shape(""), bodies) if bodies else []
        last, before = ["calls"] if bodies else [], quote("analysis")
        if calls.answer:
            last.append(join(channel, f'("final" | "final" " "? {constrain} "json")', message, "answer"))
        elif not calls.must:
            last.append(join(channel, quote("final"), message, "TEXT"))
        if not calls.answer:
            before = f"({before} | {quote('commentary')})"
        return lark(
            f"start: SPACE? before* ({' | '.join(last)})",
            f"before: {channel} {before} {message} TEXT {again}",
            f"TEXT: {TEXT}",
            SPACE_RULE,
            *calls.answer,
            *rules,
        )


class _Messages:
    """Reads messages one by one."""

    def __init__(self, scanner: Scanner, tools: ToolsByName) -> None:
        self._scanner = scanner
        self._tools = tools
        self._before: Callable[[str], None] | None = None
        """Where the text of the message before went."""

    def next(self, word: str, role: re.Pattern[str] = _HEADER) -> Reading[str | None]:
        """Read the message behind the delimiter ``word``; return the delimiter that ends it, or None at the end.

        ``role`` matches what may stand before its channel.
        """
        scanner = self._scanner
        scanner.begin()
        if word not in (_START, _CHANNEL):
            yield from scanner.run(SPACE)
            if not (yield from scanner.literal(_START)):
                return (yield from self._no_message())
            word = _START
        header, channel = "", ""
        scanner.in_calls = bool(self._tools)  # a header is no content, whatever it would have come to
        while word != _MESSAGE:
            part = yield from scanner.name(_HEADER)
            if word == _START and not role.fullmatch(part):
                return (yield from self._no_message())
            header += f" {part}"
            channel = part.split(" ")[0] if word == _CHANNEL else channel
            for following in (_CHANNEL, _CONSTRAIN, _MESSAGE):
                if (yield from scanner.literal(following)):
                    word = following
                    break
            else:
                return (yield from self._no_message())
        scanner.in_calls = False
        return (yield from self.body(channel, _RECIPIENT.search(header) if "to=" in header else None, "to=" in header))

    def body(self, channel: str, recipient: re.Match[str] | None, is_call: bool = False) -> Reading[str | None]:
        """Read the text of a message; return the delimiter that ends it."""
        scanner = self._scanner
        if is_call:
            name = recipient[1] if recipient else ""
            if name in self._tools:
                scanner.named(name)
            yield from scanner.run(SPACE)
            if name not in self._tools or not (yield from json_arguments(scanner, name)).started:
                return (yield from self._no_message())
            scanner.begin()
            yield from scanner.run(SPACE)
            following = yield from scanner.peek()
            if following is None or (isinstance(following, Marker) and following.text in _ENDS):
                scanner.accept()
            else:
                scanner.reject()
            return (yield from scanner.until(_ENDS, scanner.content))
        scanner.accept()
        sink = scanner.reasoning if channel == "analysis" else scanner.content
        if self._before == sink:
            scanner.keep_space()
            sink("\n")
        else:
            scanner.switch()
        self._before = sink
        return (yield from scanner.until(_ENDS, sink))

    def _no_message(self) -> Reading[str | None]:
        """Turn what has been read into content, and what follows up to the next message."""
        self._scanner.reject()
        self._scanner.in_calls = False
        return (yield from self._scanner.until(_ENDS, self._scanner.content))
