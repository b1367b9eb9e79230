"""Calls that are written in Python: ``name(key=value, …)``. A call comes out once it is complete."""

from __future__ import annotations

import ast
import io
import keyword
import re
import tokenize
from typing import Any

from inflight.text.output.incremental_json import finite, to_json
from inflight.text.output.scanner import SPACE, Reading, Scanner

NAME = re.compile(r"[\w.:/\-]*")
_MAX_DEPTH = 190
"""Most brackets inside each other: the parser of Python gives up at 200."""
_PLAIN = re.compile(r"[^()\[\]{}'\"]+")
_QUOTED = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_RESERVED = re.compile(rf"[(,]\s*(?:{'|'.join(keyword.kwlist)})\s*=")
_MARK = "__keyword__"
"""What makes a name of a keyword of Python."""


class PythonArguments:
    """Follows the text from ``(`` to the ``)`` that closes it."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._stack: list[str] = []
        self._quote = ""
        self._escape = False

    def feed(self, text: str, place: int) -> tuple[str, int]:
        """Read ``text`` from ``place`` on; return what was accepted and the place of what was not read."""
        start = place
        while place < len(text) and not self.done and not self.broken:
            pattern = _QUOTED[self._quote] if self._quote else _PLAIN
            if not self._escape and (match := pattern.match(text, place)):
                place = match.end()
                continue
            self._take(text[place])
            place += not self.broken
        return text[start:place], place

    def rest(self) -> str:
        """Return nothing: all that has been read is accepted."""
        return ""

    def _take(self, character: str) -> None:
        if self._quote:
            ends = character == self._quote and not self._escape
            self._escape = character == "\\" and not self._escape
            self._quote = "" if ends else self._quote
        elif character in "'\"":
            self._quote = character
        elif character in _CLOSING:
            self._stack.append(_CLOSING[character])
            self.broken = len(self._stack) > _MAX_DEPTH
        else:
            self.broken = not self._stack or self._stack.pop() != character
            self.done = not self._stack and not self.broken


def read_python_call(scanner: Scanner, names: frozenset[str]) -> Reading[bool]:
    """Read the call that comes next, and give it out; return whether there was one."""
    name = yield from scanner.name(NAME)
    if name not in names or (yield from scanner.peek()) != "(":
        return False
    scanner.named(name)
    parts: list[str] = []
    if not (yield from scanner.value(PythonArguments(), parts.append)):
        return False
    arguments = _arguments("".join(parts))
    if arguments is None:
        return False
    scanner.whole_call(name, arguments)
    return True


def read_python_list(scanner: Scanner, names: frozenset[str]) -> Reading[None]:
    """Read ``[name(…), name(…)]``; what is none of that comes out as content."""
    if (yield from scanner.literal("[")):
        yield from scanner.run(SPACE)
        while (yield from read_python_call(scanner, names)):
            scanner.begin()
            yield from scanner.run(SPACE)
            if (yield from scanner.closing("]")):
                scanner.accept()
                return
            if not (yield from scanner.literal(",")):
                break
            yield from scanner.run(SPACE)
            if (yield from scanner.peek()) is None:
                scanner.accept()
    scanner.reject()


def _arguments(text: str) -> str | None:
    """Return arguments in Python as JSON; None: they are no keywords with values that JSON has."""
    try:
        if _RESERVED.search(text):
            text = _with_marks(text)
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        return to_json({_key(word.arg): _value(word.value) for word in call.keywords})
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError):
        return None


def _with_marks(text: str) -> str:
    """Return arguments with a mark behind each name that is a keyword of Python, which has no such arguments."""
    lines = io.StringIO(text).readlines()
    tokens = tokenize.generate_tokens(iter(lines).__next__)
    found = [token for token in tokens if token.type not in (tokenize.NL, tokenize.COMMENT)]
    for before, word, after in reversed(list(zip(found, found[1:], found[2:], strict=False))):
        if before.string in ("(", ",") and keyword.iskeyword(word.string) and after.string == "=":
            row, column = word.end
            lines[row - 1] = f"{lines[row - 1][:column]}{_MARK}{lines[row - 1][column:]}"
    return "".join(lines)


def python_literal(text: str) -> Any:
    """Return the list or the dictionary that a text spells in Python; None: it does not."""
    try:
        return _value(ast.parse(text, mode="eval").body) if text[:1] in ("[", "{") else None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _key(name: str | None) -> str:
    if name is None:
        raise ValueError("** is no keyword")
    return name.removesuffix(_MARK)


def _value(node: ast.expr) -> Any:
    """Return a literal; JSON's own spellings of it are understood too."""
    if isinstance(node, ast.Name):
        return {"true": True, "false": False, "null": None}[node.id] if node.id in ("true", "false", "null") else _bad()
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(key) if key is not None else _bad() for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            _bad()
        return dict(zip(keys, map(_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if isinstance(value, float):
        return float(finite(repr(value)))
    return value if isinstance(value, str | int | float | bool | None) else _bad()


def _bad() -> Any:
    raise ValueError("JSON has no such value")
