"""Formats whose output is text, with reasoning and calls between delimiters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from inflight.sampling import Guide
from inflight.settings.guided import MOST_GUIDE_BYTES
from inflight.text.output.call_grammar import (
    SPACE_RULE,
    TEXT,
    Asked,
    answer_rules,
    asked,
    escape,
    lark,
    quote,
)
from inflight.text.output.events import OutputEvent
from inflight.text.output.format import ChatFormat, OutputParser, no_tools
from inflight.text.output.markers import Piece
from inflight.text.output.scanner import SPACE, Reading, Scanner
from inflight.text.output.tools import Tool, ToolChoice
from inflight.text.tokenizer import Tokenizer

ToolsByName = dict[str, Tool]


class ReadingParser:
    """Drives a reading over pieces as they come."""

    def __init__(self, scanner: Scanner, reading: Reading[None]) -> None:
        self._scanner = scanner
        self._reading: Reading[None] | None = reading

    def push(self, pieces: list[Piece]) -> list[OutputEvent]:
        """Take the next pieces; return what is settled by them."""
        self._scanner.feed(pieces)
        return self._go_on()

    def finish(self, cut: bool = False) -> list[OutputEvent]:
        """End the output; return what was still held back."""
        self._scanner.end(cut)
        return self._go_on()

    @property
    def has_open_call(self) -> bool:
        """Whether the arguments of a call that has begun are not complete."""
        return self._scanner.has_open_call

    def _go_on(self) -> list[OutputEvent]:
        if self._reading is not None and next(self._reading, self) is self:
            self._reading = None
        return self._scanner.events()


class SectionFormat(ChatFormat):
    """Reasoning first, between delimiters; then content, and calls behind one of ``starts``."""

    has_tools = True
    starts: tuple[str, ...] = ()
    """Delimiters behind which calls stand."""
    inner: tuple[str, ...] = ()
    """Delimiters inside calls."""
    ends: tuple[str, ...] = ()
    """Special tokens that end an output, besides the checkpoint's own."""
    thinking: tuple[str, str] = ("<think>", "</think>")

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        close = self.thinking[1]
        self.has_reasoning = tokenizer.token_id(close) is not None or close in tokenizer.config.templates
        words = (*self.starts, *self.inner, *self.thinking)
        self._special = {word: token for word, token in tokenizer.special_tokens.items() if word in words}

    @property
    def markers(self) -> frozenset[int]:
        """The special tokens that the parser needs to see."""
        return frozenset(self._special.values())

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The end ids that the format adds to the checkpoint's own."""
        found = (self._tokenizer.special_tokens.get(word) for word in self.ends)
        return frozenset(token for token in found if token is not None)

    def parser(self, tools: Sequence[Tool], *, reasoning_open: bool, has_form: bool = False) -> OutputParser:
        """Return the parser of one output."""
        scanner, named = Scanner(frozenset(self._special)), {tool.name: tool for tool in tools}
        return ReadingParser(scanner, self._read(scanner, named, reasoning_open, has_form))

    def opens_reasoning(self, prompt: str) -> bool:
        """Return whether a rendered prompt ends inside a part of reasoning."""
        opening, closing = self.thinking
        return self.has_reasoning and prompt.rfind(opening) > prompt.rfind(closing) and self._is_last(prompt, opening)

    @staticmethod
    def _is_last(prompt: str, opening: str) -> bool:
        """Return whether nothing but white space follows the delimiter: one in a user's message opens nothing."""
        return prompt.rstrip().endswith(opening.rstrip())

    def guide_start(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the tokens that end the reasoning."""
        return tuple(tokenizer.spelling(self.thinking[1])) if self.has_reasoning else ()

    def may_reason(self, prompt: str) -> bool:
        """Return whether an output may begin with reasoning: its prompt has neither opened nor closed it."""
        if not self.has_reasoning or self.opens_reasoning(prompt):
            return False
        return not prompt.rstrip().endswith(self.thinking[1].rstrip())

    def takes(self, answer: Guide, *, beside_calls: bool) -> bool:
        """Return whether an answer's form is JSON by a schema or a choice, which can stand beside calls."""
        return not beside_calls or bool(answer_rules(answer))

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
        """Return what an output must be; a form that is no rule of a grammar leaves no room for reasoning."""
        calls = asked(tools, choice, parallel, answer)
        thought = self._thought() if reasoning and self.has_reasoning else ()
        if calls is None:
            rules = answer_rules(answer) if answer is not None and thought else ()
            return lark("start: thought? answer", *rules, *thought, SPACE_RULE) if rules else answer
        return self.grammar(replace(calls, thought=thought, opening=self._opening, max_bytes=max_bytes))

    @property
    def _opening(self) -> str:
        """The expression of what opens the reasoning, where that is text."""
        opening = self.thinking[0]
        return "" if not self.has_reasoning or opening in self._special else rf"[ \t\r\n]*{escape(opening)}"

    def _thought(self) -> tuple[str, ...]:
        """Return the rule of reasoning at the beginning, and what it needs."""
        opening, closing = map(self.word, self.thinking)
        first, rules = opening, [f"THOUGHT: {TEXT}"]
        if self._opening:
            first = "OPENING"  # with little space before it, of which some models would write more and more
            rules.append(rf"OPENING: /[ \t\r\n]{{0,4}}{escape(self.thinking[0])}/")
        rest = f"THOUGHT {closing}"
        if self.thinking[1] not in self._special:
            rules.append(f"thinking[lazy]: {rest}")
            rest = "thinking"
        return f"thought: {first} {rest} SPACE?", *rules

    def grammar(self, calls: Asked) -> Guide:
        """Return the grammar of calls as the format writes them. Raises UnsupportedFeature: it writes none."""
        raise no_tools()

    def word(self, delimiter: str) -> str:
        """Return a delimiter as an item of Lark."""
        return f"<[{self._special[delimiter]}]>" if delimiter in self._special else quote(delimiter)

    def _read(self, scanner: Scanner, tools: ToolsByName, reasoning_open: bool, has_form: bool) -> Reading[None]:
        if self.has_reasoning:
            scanner.begin()
            yield from scanner.run(SPACE)
            opened = yield from scanner.literal(self.thinking[0])
            if opened or reasoning_open:
                scanner.accept()
                scanner.switch()
                yield from self.open_reasoning(scanner)
                yield from scanner.until((self.thinking[1],), scanner.reasoning)
                scanner.switch()
            else:
                scanner.reject()
        if tools:
            yield from self.begin(scanner, tools)
        is_answer = has_form and not (yield from self._first_call(scanner, tools))
        starts = self.starts if tools and not is_answer else ()
        while (start := (yield from scanner.until(starts, scanner.content))) is not None:
            scanner.begin("" if start in self._special else start)
            yield from self._calls(scanner, start, tools)
        scanner.end_content()

    def _first_call(self, scanner: Scanner, tools: ToolsByName) -> Reading[bool]:
        """Read the delimiter and the call that come next; return whether there is such a delimiter."""
        scanner.begin()
        yield from scanner.run(SPACE)
        for start in self.starts if tools else ():
            if (yield from scanner.literal(start)):
                yield from self._calls(scanner, start, tools)
                return True
        scanner.reject()
        return False

    def _calls(self, scanner: Scanner, start: str, tools: ToolsByName) -> Reading[None]:
        scanner.in_calls = True
        yield from self.calls(scanner, start, tools)
        scanner.in_calls = False

    def open_reasoning(self, scanner: Scanner) -> Reading[None]:
        """Read what else belongs to the delimiter that opens the reasoning."""
        yield from ()

    def begin(self, scanner: Scanner, tools: ToolsByName) -> Reading[None]:
        """Read calls that may begin the content without a delimiter."""
        yield from ()

    def calls(self, scanner: Scanner, start: str, tools: ToolsByName) -> Reading[None]:
        """Read calls behind the delimiter ``start``; then accept or reject what has been recorded."""
        raise NotImplementedError
