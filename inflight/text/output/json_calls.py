"""Calls that are written as JSON objects: ``{"name": …, "arguments": {…}}``."""

from __future__ import annotations

import json

from inflight.text.output.incremental_json import JsonText, as_json
from inflight.text.output.scanner import SPACE, SPACES, Reading, Scanner

NAMES = frozenset({"name", "function"})
ARGUMENTS = frozenset({"arguments", "parameters"})
_OTHERS = frozenset({"type", "id"})


class Arguments:
    """Where the arguments of one call go: the call begins once they are seen to be an object with a key, or empty."""

    def __init__(self, scanner: Scanner, name: str) -> None:
        self._scanner = scanner
        self._name = name
        self._held: list[str] = []
        self.started = self.complete = False

    def __call__(self, text: str) -> None:
        """Take more of the arguments."""
        if self.started:
            self._scanner.arguments(text)
        elif text:
            first = not self._held
            self._held.append(text)
            if text.strip(SPACES) not in (("{", "") if first else ("",)):
                self.started = True
                self._scanner.call(self._name)
                self._scanner.arguments("".join(self._held))

    def end(self, complete: bool) -> None:
        """Say that nothing more of them comes. What follows arguments that have been broken off is content."""
        self.complete = complete
        if complete:
            self._scanner.end_call()
        elif self.started:
            self._scanner.keep_space()


def json_arguments(scanner: Scanner, name: str) -> Reading[Arguments]:
    """Read the object of the arguments of ``name``, if one comes next.

    A call that has begun stays one. If it is broken off, by the end or by a character that JSON has not there, it stays
    open, and what follows is content.
    """
    arguments = Arguments(scanner, name)
    if (yield from scanner.peek()) == "{":
        arguments.end((yield from scanner.value(JsonText(), arguments)))
    return arguments


class CallReader:
    """Reads one call. Its keys may come in any order; arguments that come before the name are held back."""

    def __init__(self, scanner: Scanner, names: frozenset[str]) -> None:
        """``names`` are those of the request's tools."""
        self._scanner = scanner
        self._known = names
        self._name: str | None = None
        self._arguments: str | None = None
        self._complete = False
        """Whether a call has begun, and its arguments have ended."""

    def read(self) -> Reading[bool]:
        """Read the object that comes next; return whether it was a call, or has begun one that is not broken off."""
        scanner = self._scanner
        if not (yield from scanner.literal("{")):
            return False
        while (yield from self._entry()):
            yield from scanner.run(SPACE)
            if (yield from scanner.literal("}")):
                return self._ends()
            if not (yield from scanner.literal(",")):
                break
        return self._complete

    def _entry(self) -> Reading[bool]:
        """Read a key, as it is spelt, and its value; return whether they may be those of a call."""
        scanner = self._scanner
        yield from scanner.run(SPACE)
        key = (yield from _read(scanner)) if (yield from scanner.peek()) == '"' else None
        yield from scanner.run(SPACE)
        if key is None or not (yield from scanner.literal(":")):
            return False
        yield from scanner.run(SPACE)
        return (yield from self._value(key[1:-1]))

    def _value(self, key: str) -> Reading[bool]:
        """Read the value of a key; return whether it may be that of a call."""
        scanner = self._scanner
        if key in NAMES and self._name is None:
            self._name = yield from read_string(scanner)
            if self._name not in self._known:
                return False
            scanner.named(self._name)
            return True
        if key in ARGUMENTS and not self._complete and self._arguments is None:
            if self._name is not None and (yield from scanner.peek()) == "{":
                arguments = yield from json_arguments(scanner, self._name)
                if arguments.started:
                    scanner.begin()
                self._complete = arguments.complete
                return self._complete
            self._arguments = yield from _read(scanner)
            return self._arguments is not None
        return key in _OTHERS and (yield from _read(scanner)) is not None

    def _ends(self) -> bool:
        """Give out the call that is complete and has not begun; return whether there is one."""
        if self._complete:
            self._scanner.accept()
            return True
        text = as_object(self._arguments)
        if self._name is None or text is None:
            return False
        self._scanner.whole_call(self._name, text)
        return True


def read_string(scanner: Scanner) -> Reading[str | None]:
    """Read the JSON string that comes next; None: there is none."""
    if (yield from scanner.peek()) != '"':
        return None
    text = yield from _read(scanner)
    return None if text is None else str(json.loads(text))


def as_object(arguments: str | None) -> str | None:
    """Return arguments as JSON of an object; they may be absent, null, or a string of JSON. None: they are neither."""
    if arguments is None or arguments == "null":
        return "{}"
    if arguments.startswith('"'):
        arguments = str(json.loads(arguments)).strip()
    return as_json(arguments) if arguments.startswith("{") else None


def _read(scanner: Scanner) -> Reading[str | None]:
    parts: list[str] = []
    return "".join(parts).strip(SPACES) if (yield from scanner.value(JsonText(), parts.append)) else None


def read_calls(scanner: Scanner, names: frozenset[str], separator: str, end: str) -> Reading[None]:
    """Read calls with ``separator`` between them up to ``end``; what is none of that comes out as content."""
    while (yield from CallReader(scanner, names).read()):
        scanner.begin()
        yield from scanner.run(SPACE)
        if (yield from scanner.closing(end)):
            scanner.accept()
            return
        if separator and not (yield from scanner.literal(separator)):
            break
        yield from scanner.run(SPACE)
        if (yield from scanner.peek()) is None:
            scanner.accept()
    scanner.reject()
