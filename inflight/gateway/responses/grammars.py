"""Grammars of custom tools as one regular expression, which is what a JSON schema can hold.

A grammar in Lark whose rules do not refer to themselves is a regular expression: each name stands for its rule. The
patch format of Codex is one. Grammars with recursion, or with what Lark does beside rules, have no such form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from inflight.text.patterns import BadPattern, rust_pattern

MOST_CHARACTERS = 1 << 15
"""Limit of the length of a grammar and of an expression: rules that are used twice each double it with every level."""
_RULE = re.compile(r"^[?!]*(\w+)(?:\.-?\d+)?[ \t]*:", re.MULTILINE)
_COMMENT = re.compile(r"^[ \t]*(?://|#)[^\n]*$|[ \t]//[^\n]*$", re.MULTILINE)
_IMPORT = re.compile(r"^%import[ \t]+common\.(\w+)[ \t]*$", re.MULTILINE)
_TOKEN = re.compile(
    r"""\s*(?:(?P<text>"(?:[^"\\\n]|\\.)*"i?)|(?P<regex>/(?:[^/\\\n]|\\.)+/[a-z]*)|(?P<name>[A-Za-z_]\w*)"""
    r"""|(?P<count>~[ ]*\d+(?:[ ]*\.\.[ ]*\d+)?)|(?P<sign>->|\.\.|[()\[\]|*+?]))"""
)
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "INT": "[0-9]+",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
}
"""The terminals of Lark's library that grammars of tools import."""
_DOT = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|\.", re.DOTALL)
"""A dot, or an escape or a class, in which a dot is itself."""
_ESCAPES = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\\n": "\n", "\\t": "\t", "\\r": "\r"}


def pattern_of_lark(grammar: str) -> str | None:
    """Return the regular expression of a grammar in Lark; None: it has none, or none that is known here."""
    if len(grammar) > MOST_CHARACTERS:
        return None
    try:
        return pattern_of_regex(_Expressions(grammar).of("start"))
    except (_NoExpression, RecursionError):
        return None


def pattern_of_regex(expression: str) -> str | None:
    """Return a regular expression if the engine can hold a text to it; None: it has what cannot be enforced."""
    if len(expression) > MOST_CHARACTERS:
        return None
    try:
        rust_pattern(expression)
    except BadPattern:
        return None
    return expression


class _NoExpression(Exception):
    """A grammar is no regular expression."""


class _Expressions:
    """The rules of one grammar as expressions."""

    def __init__(self, grammar: str) -> None:
        text = _COMMENT.sub("", grammar)
        self._made = {name: _COMMON[name] for name in _IMPORT.findall(text) if name in _COMMON}
        text = _IMPORT.sub("", text)
        if re.search(r"^%", text, re.MULTILINE):
            raise _NoExpression
        heads = list(_RULE.finditer(text))
        if not heads:
            raise _NoExpression
        ends = [head.start() for head in heads[1:]] + [len(text)]
        self._rules = {head[1]: text[head.end() : end] for head, end in zip(heads, ends, strict=True)}
        self._open: set[str] = set()

    def of(self, name: str) -> str:
        """Return the expression of a rule. Raises _NoExpression: it refers to itself, or there is none."""
        if name not in self._made:
            if name in self._open or name not in self._rules:
                raise _NoExpression
            self._open.add(name)
            self._made[name] = _Alternatives(_tokens(self._rules[name]), self).read()
            self._open.remove(name)
        return self._made[name]


class _Alternatives:
    """Reads the tokens of one rule."""

    def __init__(self, tokens: Sequence[tuple[str, str]], rules: _Expressions) -> None:
        self._tokens, self._rules, self._place = tokens, rules, 0

    def read(self) -> str:
        """Return the expression of the whole rule."""
        expression = self._alternatives()
        if self._place < len(self._tokens):
            raise _NoExpression
        return expression

    def _peek(self) -> str:
        """Return the sign that comes next; empty: none does."""
        kind, text = self._tokens[self._place] if self._place < len(self._tokens) else ("end", "")
        return text if kind in ("sign", "count") else ""

    def _alternatives(self) -> str:
        ways = self._sequence()
        several = self._peek() == "|"
        while self._peek() == "|":
            self._place += 1
            ways = _bounded(f"{ways}|{self._sequence()}")
        return f"(?:{ways})" if several else ways

    def _sequence(self) -> str:
        items = ""
        while self._place < len(self._tokens) and self._peek() not in ("|", ")", "]"):
            if self._peek() == "->":
                self._place += 2  # the name of a branch
                continue
            items = _bounded(items + self._item())
        return items

    def _item(self) -> str:
        atom = self._atom()
        sign = self._peek()
        if sign in ("*", "+", "?"):
            self._place += 1
            return f"(?:{atom}){sign}"
        if sign.startswith("~"):
            self._place += 1
            return f"(?:{atom}){{{sign[1:].replace(' ', '').replace('..', ',')}}}"
        if sign == "..":
            raise _NoExpression
        return atom

    def _atom(self) -> str:
        kind, text = self._tokens[self._place]
        self._place += 1
        match kind:
            case "name":
                return self._rules.of(text)
            case "text":
                return _literal(text)
            case "regex":
                return _regex(text)
        if text not in ("(", "["):
            raise _NoExpression
        inner = self._alternatives()
        if self._peek() != (")" if text == "(" else "]"):
            raise _NoExpression
        self._place += 1
        return f"(?:{inner})" if text == "(" else f"(?:{inner})?"


def _bounded(expression: str) -> str:
    """Return an expression that is about to be a part of others. Raises _NoExpression: it is too long."""
    if len(expression) > MOST_CHARACTERS:
        raise _NoExpression
    return expression


def _tokens(rule: str) -> list[tuple[str, str]]:
    """Return the tokens of a rule, each with its kind. Raises _NoExpression: something else is there."""
    tokens, place = [], 0
    while match := _TOKEN.match(rule, place):
        kind = match.lastgroup or ""
        tokens.append((kind, match[kind]))
        place = match.end()
    if rule[place:].strip():
        raise _NoExpression
    return tokens


def _literal(text: str) -> str:
    """Return the expression of a string of Lark."""
    inner = text.removesuffix("i")[1:-1]
    said = re.sub(r"\\(.)", lambda one: _ESCAPES.get(one[0], one[1]), inner)
    return "".join(_either_case(one) if text.endswith("i") else _character(one) for one in said)


def _character(one: str) -> str:
    return _ESCAPES.get(one, f"\\{one}" if one in r"\.+*?()|[]{}^$/" else one)


def _either_case(one: str) -> str:
    """Return the expression of a character in either case: the engine's expressions have no flags."""
    lower, upper = one.lower(), one.upper()
    return f"[{lower}{upper}]" if lower != upper and len(lower) == len(upper) == 1 else _character(one)


def _regex(text: str) -> str:
    """Return an expression between slashes. Raises _NoExpression: it is none by itself, or has flags but ``s``."""
    expression, _, flags = text[1:].rpartition("/")
    if flags not in ("", "s") or pattern_of_regex(expression) is None:
        raise _NoExpression
    if flags:
        expression = _DOT.sub(lambda one: r"[\s\S]" if one[0] == "." else one[0], expression)
    return f"(?:{expression})"
