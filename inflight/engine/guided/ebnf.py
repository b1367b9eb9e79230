"""EBNF grammars as xgrammar and llama.cpp have them (GBNF), written as Lark for llguidance.

llguidance splits a text into lexemes, each as long as can be, before it parses. So what no recursion goes through
becomes one lexeme as a whole: its parts could take characters from each other otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from inflight.errors import InvalidRequest

ROOT = "root"
_DEEPEST = 64
_MOST_REPETITIONS = 4096
_NEVER = ("{0}", "{0,0}")
_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)|(?P<rule>(?P<name>[A-Za-z_][\w.-]*)(?:\s|\#[^\n]*)*::=)|(?P<ref>[A-Za-z_][\w.-]*)"""
    r"""|(?P<text>"(?:\\.|[^"\\\n])*")|(?P<class>\[\^?(?:\\.|[^\]\\])*\])"""
    r"""|(?P<count>\{\s*[0-9]+\s*(?:,\s*[0-9]*\s*)?\}|[*+?])|(?P<mark>\(=|[|().])""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL)
_NAMED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "e": "\x1b"}
_IN_CLASS = re.compile(r"[\[\]\\^&~/-]")


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A text or a class of characters, as Lark has it."""

    lark: str


@dataclass(frozen=True, slots=True)
class _Ref:
    """Another rule."""

    name: str


@dataclass(frozen=True, slots=True)
class _Many:
    """A sequence of nodes, or the choices among them."""

    nodes: tuple[_Node, ...]
    between: str


@dataclass(frozen=True, slots=True)
class _Repeated:
    """A node, again and again."""

    node: _Node
    suffix: str


_Node = _Leaf | _Ref | _Many | _Repeated


def lark_of_ebnf(text: str, number: int = 0) -> tuple[str, str]:
    """Return the name of the root in Lark, and the grammar's lines; ``number`` tells its names from other grammars'.

    Raises:
        InvalidRequest: it is no such grammar, or it uses what is not supported; the message names the line.
    """
    rules = _Parser(text).rules()
    if ROOT not in rules:
        raise InvalidRequest(f"guided_decoding_guide: the grammar has no rule {ROOT!r}")
    references = {name: set(_references(node)) for name, node in rules.items()}
    for name, others in references.items():
        if missing := others - rules.keys():
            raise InvalidRequest(f"guided_decoding_guide: rule {name!r} refers to {min(missing)!r}, which is no rule")
    return _Writer(rules, references, number).lark()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._lex())
        self._place = 0

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        while self._place < len(self._tokens):
            kind, value = self._next()
            if kind != "rule":
                self._fail(f"{value!r} where a rule such as `root ::= ...` is expected")
            if value in rules:
                self._fail(f"a second rule {value!r}")
            rules[value] = self._choices(0)
        return rules

    def _lex(self) -> Iterable[tuple[str, str, int]]:
        place = 0
        while place < len(self._text):
            match = _TOKEN.match(self._text, place)
            line = self._text.count("\n", 0, place) + 1
            if match is None:
                problem = f"line {line} has {self._text[place : place + 20]!r}, which is not understood"
                raise InvalidRequest(f"guided_decoding_guide: {problem}")
            kind = "rule" if match["rule"] else str(match.lastgroup)
            if kind != "space":
                yield kind, match["name"] if kind == "rule" else match[0], line
            place = match.end()

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._place][:2] if self._place < len(self._tokens) else ("end", "")

    def _next(self) -> tuple[str, str]:
        found = self._peek()
        self._place += 1
        return found

    def _fail(self, problem: str) -> NoReturn:
        line = self._tokens[min(self._place, len(self._tokens)) - 1][2] if self._tokens else 1
        raise InvalidRequest(f"guided_decoding_guide: line {line} has {problem}")

    def _choices(self, depth: int) -> _Node:
        if depth > _DEEPEST:
            self._fail(f"more than {_DEEPEST} parentheses inside of each other")
        choices = [self._sequence(depth)]
        while self._peek() == ("mark", "|"):
            self._next()
            choices.append(self._sequence(depth))
        return choices[0] if len(choices) == 1 else _Many(tuple(choices), " | ")

    def _sequence(self, depth: int) -> _Node:
        nodes: list[_Node] = []
        while self._peek()[0] in ("ref", "text", "class") or self._peek() in (("mark", "("), ("mark", ".")):
            node = self._item(depth)
            while self._peek()[0] == "count":
                suffix = self._suffix(self._next()[1])
                node = _Repeated(node, suffix) if suffix not in _NEVER else _Leaf('""')
            nodes.append(node)
        if self._peek() == ("mark", "(="):
            self._next()
            self._fail("a look-ahead, which is not supported")
        if self._peek()[0] == "count":
            self._fail(f"{self._next()[1]!r} with nothing before it")
        if not nodes:
            return _Leaf('""')
        return nodes[0] if len(nodes) == 1 else _Many(tuple(nodes), " ")

    def _item(self, depth: int) -> _Node:
        kind, value = self._next()
        if kind == "ref":
            return _Ref(value)
        if kind == "text":
            return _Leaf(json.dumps(self._unescaped(value[1:-1]), ensure_ascii=False).replace("\x7f", r"\u007f"))
        if kind == "class":
            return _Leaf(self._class(value))
        if value == ".":
            return _Leaf(r"/(?s:.)/")
        inside = self._choices(depth + 1)
        if self._next() != ("mark", ")"):
            self._fail("a parenthesis that is not closed")
        return inside

    def _suffix(self, count: str) -> str:
        if count in "*+?":
            return count
        numbers = [
            int(number.lstrip("0")[:9] or "0") for number in re.findall(r"\d+", count)
        ]  # more digits are too many
        if max(numbers) > _MOST_REPETITIONS or numbers != sorted(numbers):
            self._fail(f"{count!r}; the numbers must rise, and be at most {_MOST_REPETITIONS}")
        return f"{{{','.join(map(str, numbers))}{',' if count.rstrip(' }').endswith(',') else ''}}}"

    def _unescaped(self, text: str) -> str:
        return _ESCAPE.sub(lambda found: self._character(found[1]), text)

    def _character(self, escape: str) -> str:
        if escape[0] in "xuU" and len(escape) > 1:
            code = int(escape[1:], 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                self._fail(f"\\{escape}, which is no character")
            return chr(code)
        if escape.isalnum() and escape not in _NAMED:
            self._fail(f"the escape \\{escape}, which is not supported")
        return _NAMED.get(escape, escape)

    def _class(self, text: str) -> str:
        """Return the class as a regular expression: characters and ranges of them, after ``^`` all others."""
        negated = text.startswith("[^")
        parts = [
            (found[0], self._unescaped(found[0]))
            for found in re.finditer(r"\\(?:x..|u....|U.{8}|.)|.", text[1 + negated : -1], re.DOTALL)
        ]
        if not parts:
            self._fail("an empty class of characters")
        last = len(parts) - 1
        inside = "".join(
            "-" if raw == "-" and 0 < index < last else _in_class(one) for index, (raw, one) in enumerate(parts)
        )
        return f"/[{'^' * negated}{inside}]/"


def _in_class(character: str) -> str:
    if _IN_CLASS.match(character):
        return f"\\{character}"
    return character if character.isprintable() and character != " " else f"\\x{{{ord(character):X}}}"


def _references(node: _Node) -> Iterable[str]:
    match node:
        case _Ref(name):
            yield name
        case _Many(nodes):
            for inner in nodes:
                yield from _references(inner)
        case _Repeated(inner):
            yield from _references(inner)


class _Writer:
    """Writes rules: as lexemes, whose names are in capitals, where no recursion goes through them."""

    def __init__(self, rules: Mapping[str, _Node], references: Mapping[str, set[str]], number: int) -> None:
        self._rules, self._number = rules, number
        self._recursive = _reaching_a_circle(references)
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._lines: list[str] = []
        self._lexemes = 0

    def lark(self) -> tuple[str, str]:
        for name, node in self._rules.items():
            recursive = name in self._recursive
            body = self._rule(node) if recursive else self._lexeme(node)
            self._lines.append(f"{self._name(name)}: {body}")
        return self._name(ROOT), "\n".join(self._lines)

    def _name(self, rule: str) -> str:
        return f"{'r' if rule in self._recursive else 'R'}{self._number}_{self._numbers[rule]}"

    def _is_lexeme(self, node: _Node) -> bool:
        return self._recursive.isdisjoint(_references(node))

    def _lexeme(self, node: _Node) -> str:
        match node:
            case _Leaf(lark):
                return lark
            case _Ref(name):
                return self._name(name)
            case _Many(nodes, between):
                return f"({between.join(map(self._lexeme, nodes))})"
            case _Repeated(inner, suffix):
                return f"({self._lexeme(inner)}){suffix}"

    def _rule(self, node: _Node) -> str:
        """Return the body of a rule; neighbours that are lexemes become one lexeme of their own."""
        if self._is_lexeme(node):
            self._lexemes += 1
            name = f"L{self._number}_{self._lexemes}"
            self._lines.append(f"{name}: {self._lexeme(node)}")
            return name
        match node:
            case _Many(nodes, between):
                joined = self._joined(nodes) if between == " " else nodes
                return f"({between.join(map(self._rule, joined))})"
            case _Repeated(inner, suffix):
                return f"({self._rule(inner)}){suffix}"
            case _:
                return self._lexeme(node)

    def _joined(self, nodes: Iterable[_Node]) -> list[_Node]:
        made: list[_Node] = []
        for node in nodes:
            if made and self._is_lexeme(node) and self._is_lexeme(made[-1]):
                made[-1] = _Many((made[-1], node), " ")
            else:
                made.append(node)
        return made


def _reaching_a_circle(references: Mapping[str, set[str]]) -> set[str]:
    """Return the rules from which references lead into a circle: all but those that can be resolved in some order."""
    left = {name: set(others) for name, others in references.items()}
    users: dict[str, list[str]] = {name: [] for name in left}
    for name, others in left.items():
        for other in others:
            users[other].append(name)
    free = [name for name, others in left.items() if not others]
    while free:
        name = free.pop()
        del left[name]
        for user in users[name]:
            left[user].discard(name)
            if not left[user]:
                free.append(user)
    return set(left)
