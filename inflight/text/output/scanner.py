"""The input and the events of a parser, which reads its input as if all of it were there.

A parser is a generator. The scanner's reading methods are generators too: they yield where they need input that has
not come yet. So what a parser does cannot depend on how the output was cut into pieces. What has been read in search of
a call is recorded, and comes out as content if it is none.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import Protocol, TypeVar

from inflight.text.output.events import ArgumentsDelta, CallStart, ContentDelta, OutputEvent, ReasoningDelta
from inflight.text.output.markers import Marker, Piece

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A reading that may wait for more input, and its result."""
SPACES = " \t\r\n"
SPACE = re.compile(r"[ \t\r\n]*")
_MAX_NAME = 256


class ValueText(Protocol):
    """Follows one value in the text: JSON or Python's."""

    done: bool
    broken: bool

    def feed(self, text: str, place: int) -> tuple[str, int]:
        """Read ``text`` from ``place`` on; return what was accepted and the place of what was not read."""

    def rest(self) -> str:
        """Return what has been read and is still held, where nothing more is to be read."""


class Scanner:
    """Reads one output for a parser, and keeps the events that the parser makes of it."""

    def __init__(self, special: frozenset[str]) -> None:
        """``special``: the delimiters that are special tokens: they come as markers, and their text is just text."""
        self._special = special
        self._pieces: deque[Piece] = deque()
        self._text, self._place = "", 0
        self._ended = False
        self._record: list[str] | None = None
        self._events: list[OutputEvent] = []
        self._space: list[str] = []
        """White space at the end of the content so far, which is dropped if a call follows."""
        self._trims = False
        """Whether white space at this place belongs to the format."""
        self._calls = self._complete_calls = 0
        self._cut = False
        self._ran_out: int | None = None
        """The place where the output ended inside of a word that was looked for."""
        self._named: str | None = None
        self.in_calls = False
        """Whether a delimiter of calls has come, and not what ends them."""

    @property
    def has_open_call(self) -> bool:
        """Whether the arguments of a call that has begun are not complete."""
        return self._complete_calls < self._calls

    def feed(self, pieces: Iterable[Piece]) -> None:
        """Add what has come."""
        self._pieces.extend(piece for piece in pieces if piece)

    def end(self, cut: bool) -> None:
        """Say that no more comes; ``cut``: though there would have been more."""
        self._ended, self._cut = True, cut

    def events(self) -> list[OutputEvent]:
        """Return the events since the last time, with neighbours of one kind joined."""
        events, self._events = self._events, []
        return join_events(events)

    # What is read.

    def peek(self) -> Reading[str | Marker | None]:
        """Return the next character or marker without reading it; None: the output has ended."""
        while self._place == len(self._text) and not self._refill():
            if self._pieces:
                return self._pieces[0]
            if self._ended:
                return None
            yield
        return self._text[self._place]

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read the longest run of characters; ``pattern`` matches a run of any length of a class of characters."""
        parts: list[str] = []
        while isinstance((yield from self.peek()), str):
            match = pattern.match(self._text, self._place)
            end = match.end() if match else self._place
            parts.append(self._take(end))
            if end < len(self._text):
                break
        return "".join(parts)

    def one(self) -> Reading[str]:
        """Read the next character, which is there."""
        yield from self.peek()
        return self._take(self._place + 1)

    def literal(self, word: str) -> Reading[bool]:
        """Read ``word`` if it comes next; return whether it did."""
        if word in self._special:
            following = yield from self.peek()
            if isinstance(following, Marker) and following.text == word:
                self._pieces.popleft()
                return True
            return False
        while True:
            there = self._text[self._place : self._place + len(word)]
            if there == word:
                self._take(self._place + len(word))
                return True
            if not word.startswith(there):
                return False
            if not self._refill():
                if self._pieces or self._ended:
                    self._ran_out = None if self._pieces else self._place
                    return False
                yield

    def closing(self, word: str) -> Reading[bool]:
        """Read ``word`` if it comes next, or as much of it as there is where the output ends."""
        return (yield from self.literal(word)) or (yield from self.cut_off(word))

    def cut_off(self, *words: str) -> Reading[bool]:
        """Read the rest of the output if it is the beginning of one of ``words``, or empty; return whether it was."""
        while isinstance((yield from self.peek()), str):
            rest = self._text[self._place :]
            if not any(word.startswith(rest) for word in words):
                return False
            if self._refill():
                continue
            if self._pieces:
                return False
            if self._ended:
                self._take(len(self._text))
                break
            yield
        return not self._pieces

    def until(
        self, words: tuple[str, ...], sink: Callable[[str], None], record: bool = False, tail: bool = True
    ) -> Reading[str | None]:
        """Give text to ``sink`` until one of ``words`` comes; read it and return it; None: the output has ended.

        No word begins another one. Markers that are none of the words are skipped. Unless ``tail``, the beginning of a
        word that the output ends with is left out.
        """
        texts = tuple(word for word in words if word not in self._special)
        while True:
            if texts and (match := _alternatives(texts).search(self._text, self._place)):
                sink(self._pass(match.start(), record))
                self._pass(match.end(), record)
                return match[0]
            sink(self._pass(self._settled(texts), record))
            if self._refill():
                continue
            if not self._pieces and not self._ended:
                yield
                continue
            rest = self._pass(len(self._text), record)
            if self._pieces or tail:
                sink(rest)
            if not self._pieces:
                return None
            marker = self._pieces.popleft()
            if isinstance(marker, Marker) and marker.text in words:
                return marker.text

    def value(self, value: ValueText, sink: Callable[[str], None]) -> Reading[bool]:
        """Give the value that comes next to ``sink``; return whether it is complete."""
        while not value.done and not value.broken and isinstance((yield from self.peek()), str):
            accepted, place = value.feed(self._text, self._place)
            self._take(place)
            sink(accepted)
        sink(value.rest())
        return value.done

    def name(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read a run of characters that may be a name; one that is too long is cut, and so is nobody's."""
        parts: list[str] = []
        size = 0
        while size <= _MAX_NAME and isinstance((yield from self.peek()), str):
            match = pattern.match(self._text, self._place, self._place + _MAX_NAME + 1 - size)
            end = match.end() if match else self._place
            parts.append(self._take(end))
            size += len(parts[-1])
            if end < len(self._text):
                break
        return "".join(parts)

    def _refill(self) -> bool:
        """Join the texts that have come to what is not read; return whether there were any."""
        if not self._pieces or not isinstance(self._pieces[0], str):
            return False
        parts = [self._text[self._place :]]
        while self._pieces and isinstance(piece := self._pieces[0], str):
            parts.append(piece)
            self._pieces.popleft()
        self._text, self._place = "".join(parts), 0
        return True

    def _take(self, end: int) -> str:
        return self._pass(end, record=True)

    def _pass(self, end: int, record: bool) -> str:
        text, self._place = self._text[self._place : end], end
        if record and self._record is not None and text:
            self._record.append(text)
        return text

    def _settled(self, words: tuple[str, ...]) -> int:
        """Return the place where the longest end of the text begins that begins one of the words."""
        if not words:
            return len(self._text)
        longest = max(map(len, words)) - 1
        match = _beginnings(words).search(self._text, max(self._place, len(self._text) - longest))
        return match.start() if match else len(self._text)

    # What is made of it.

    def begin(self, text: str = "") -> None:
        """Record what is read from here on, after ``text``, which has been read: it may be a call.

        A record that has begun goes on.
        """
        self._record = [*(self._record or ()), text] if text or self._record is None else self._record

    def reject(self) -> None:
        """Turn what has been recorded into content: it is no call. What was cut inside of a call is none either."""
        text, self._record = "".join(self._record or ()), None
        if self._cut_in_call:
            self._place = len(self._text)
            if self._named is not None:
                self.call(self._named)
        else:
            self.content(text)
        self._named = None

    @property
    def _cut_in_call(self) -> bool:
        """Whether the output was cut where a call may have gone on."""
        is_over = not self._pieces and self._place in (len(self._text), self._ran_out)
        return self._cut and is_over and (self.in_calls or self._named is not None)

    def named(self, name: str) -> None:
        """Say that what is recorded calls this tool; where the output is cut, that much is known of the call."""
        self._named = name

    def accept(self) -> None:
        """Forget what has been recorded: it belongs to a call."""
        self._record, self._space, self._trims, self._named = None, [], True, None

    def content(self, text: str) -> None:
        """Add text to the answer, but for white space at its end, which may precede a call."""
        if shown := self._without_space(text):
            self._events.append(ContentDelta(shown))

    def reasoning(self, text: str) -> None:
        """Add text to the reasoning, but for white space at its end."""
        if shown := self._without_space(text):
            self._events.append(ReasoningDelta(shown))

    def _without_space(self, text: str) -> str:
        """Return what may be shown: white space waits for what follows it."""
        if self._trims:
            text = text.lstrip(SPACES)
            self._trims = not text
        kept = text.rstrip(SPACES)
        if not kept:
            self._space.append(text)
            return ""
        shown = "".join(self._space) + kept
        self._space = [text[len(kept) :]]
        return shown

    def end_content(self) -> None:
        """Show the white space that ends the answer."""
        if space := "".join(self._space):
            self._events.append(ContentDelta(space))
        self._space = []

    def switch(self) -> None:
        """Go from reasoning to content or back: white space around the border belongs to the format."""
        self._space, self._trims = [], True

    def keep_space(self) -> None:
        """Say that white space at this place is part of the content."""
        self._trims = False

    def call(self, name: str) -> None:
        """Begin a call; what has been recorded belongs to it."""
        self.accept()
        self._events.append(CallStart(self._calls, name))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call at hand."""
        if text:
            self._events.append(ArgumentsDelta(self._calls - 1, text))

    def end_call(self) -> None:
        """Say that the arguments of the call at hand are complete."""
        self._complete_calls += 1

    def whole_call(self, name: str, arguments: str) -> None:
        """Give out a call with all of its arguments."""
        self.call(name)
        self.arguments(arguments)
        self.end_call()


def join_events(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """Join neighbouring deltas of one kind."""
    joined: list[OutputEvent] = []
    texts: list[str] = []

    def close() -> None:
        if len(texts) > 1:
            last = joined.pop()
            text = "".join(texts)
            joined.append(ArgumentsDelta(last.index, text) if isinstance(last, ArgumentsDelta) else type(last)(text))  # type: ignore[arg-type,call-arg]
        texts.clear()

    for event in events:
        if isinstance(event, CallStart):
            close()
            joined.append(event)
            continue
        last = joined[-1] if joined else None
        if type(last) is not type(event) or (isinstance(event, ArgumentsDelta) and last.index != event.index):  # type: ignore[union-attr]
            close()
            joined.append(event)
        texts.append(event.text)
    close()
    return joined


@lru_cache(maxsize=256)
def _alternatives(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, words)))


@lru_cache(maxsize=256)
def _beginnings(words: tuple[str, ...]) -> re.Pattern[str]:
    """Return what matches the end of a text where it is the beginning of one of the words."""
    nested = ("".join(f"(?:{re.escape(character)}" for character in word) + ")?" * len(word) for word in words)
    return re.compile("|".join(f"(?!\\Z){one.removesuffix('?')}\\Z" for one in nested))
