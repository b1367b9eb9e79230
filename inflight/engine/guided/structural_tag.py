"""Structural tags, xgrammar's JSON for free text with tags inside of it, written as Lark for llguidance.

Both forms are read: ``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}``, and ``{"format": {...}}``, a
tree of formats. Formats that speak of tokens, or of one model's parameters in XML, are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llguidance import regex_to_lark

from inflight.engine.guided.ebnf import lark_of_ebnf
from inflight.engine.guided.json_schema import schema_grammar
from inflight.errors import InvalidRequest

_TEXT = "/(?s:.*)/"
_DEEPEST = 32
_ErrorOf = Callable[[str], str | None]


def lark_of_tags(text: str, error_of_schema: _ErrorOf) -> str:
    """Return a structural tag as Lark, whose first rule is ``start``.

    Raises:
        InvalidRequest: it is none, or it has what is not supported; the message names the place.
    """
    tag = json.loads(text)
    if not isinstance(tag, dict):
        raise _wrong("it", "must be a JSON object")
    writer = _Writer(error_of_schema)
    if "format" in tag:
        _check_keys(tag, "it", {"type", "format"})
        start = writer.node(tag["format"], "format", None, 0)
    else:
        _check_keys(tag, "it", {"type", "structures", "triggers"})
        start = writer.node({"type": "triggered_tags", **_new_form(tag)}, "structures", None, 0)
    return "\n".join([f"start: {start}", *writer.lines])


def _new_form(tag: dict[str, Any]) -> dict[str, Any]:
    """Return the triggers and tags of the older form as the newer one has them."""
    tags = []
    for index, one in enumerate(_list(tag, "structures", "it")):
        place = f"structures[{index}]"
        if not isinstance(one, dict):
            raise _wrong(place, "must be a JSON object")
        _check_keys(one, place, {"begin", "schema", "end"})
        schema = one.get("schema")
        read = json.loads(schema) if isinstance(schema, str) else schema
        content = {"type": "json_schema", "json_schema": read}
        tags.append({"type": "tag", "begin": one.get("begin"), "content": content, "end": one.get("end", "")})
    return {"triggers": tag.get("triggers"), "tags": tags}


def _wrong(place: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"guided_decoding_guide: {place} {problem}")


def _check_keys(node: dict[str, Any], place: str, known: set[str]) -> None:
    if unknown := sorted(node.keys() - known):
        raise _wrong(place, f"has {unknown[0]!r}, which is not supported; it may have {', '.join(sorted(known))}")


def _text(node: dict[str, Any], key: str, place: str) -> str:
    value = node.get(key)
    if not isinstance(value, str):
        raise _wrong(f"{place}.{key}", "must be a text")
    return value


def _list(node: dict[str, Any], key: str, place: str) -> list[Any]:
    value = node.get(key)
    if not isinstance(value, list) or not value:
        raise _wrong(f"{place}.{key}", "must be a list that is not empty")
    return value


def _flag(node: dict[str, Any], key: str, place: str) -> bool:
    value = node.get(key, False)
    if not isinstance(value, bool):
        raise _wrong(f"{place}.{key}", "must be true or false")
    return value


def _literal(text: str) -> str:
    return json.dumps(text)


class _Writer:
    """Writes formats as expressions of Lark, with rules of their own where these need some: ``lines``."""

    def __init__(self, error_of_schema: _ErrorOf) -> None:
        self._error_of = error_of_schema
        self.lines: list[str] = []
        self._rules = 0

    def node(self, node: Any, place: str, end: str | None, depth: int) -> str:
        """Return a format as an expression; ``end``: the text that ends it where it is free text."""
        if not isinstance(node, dict):
            raise _wrong(place, "must be a JSON object")
        if depth > _DEEPEST:
            raise _wrong(place, f"lies below {_DEEPEST} others")
        kind = node.get("type")
        if kind not in _FORMATS:
            raise _wrong(place, f"has the type {kind!r}; supported are {', '.join(_FORMATS)}")
        keys, write = _FORMATS[kind]
        _check_keys(node, place, {"type", *keys})
        return write(self, node, place, end, depth + 1)

    def _rule(self, body: str, options: str = "") -> str:
        self._rules += 1
        self.lines.append(f"s_{self._rules}{options}: {body}")
        return f"s_{self._rules}"

    def _until(self, end: str) -> str:
        """Return a rule for free text up to the first ``end``, which it takes too."""
        return self._rule(f"{_TEXT} {_literal(end)}", "[lazy]")

    def const_string(self, node: dict[str, Any], place: str, end: str | None, depth: int) -> str:
        value = _literal(_text(node, "value", place))
        return value if end is None else f"{value} {_literal(end)}"

    def json_schema(self, node: dict[str, Any], place: str, end: str | None, depth: int) -> str:
        if "json_schema" not in node:
            raise _wrong(f"{place}.json_schema", "must be given")
        try:
            form = schema_grammar(node["json_schema"], self._error_of)
        except InvalidRequest as error:
            raise _wrong(f"{place}.json_schema:", str(error).partition(": ")[2]) from None
        return self._ended(self._rule(f"%json {form}"), end)

    def regex(self, node: dict[str, Any], place: str, end: str | None, depth: int) -> str:
        return self._ended(f"/{regex_to_lark(_text(node, 'pattern', place), use_ascii='')}/", end)

    def grammar(self, node: dict[str, Any], place: str, end: str | None, depth: int) -> str:
        self._rules += 1
        root, lines = lark_of_ebnf(_text(node, "grammar", place), self._rules)
        self.lines.append(lines)
        return self._ended(root, end)

    def any_text(self, node: dict[str, Any], place: str, end: str | None, depth: int) -> str:
        return _TEXT if end is None else self._until(end)

    def tag(self, node: dict[str, Any], place: str, end: str | None, depth: int) -> str:
        begin = _text(node, "begin", place)
        inside = self._inside(node, place, depth)
        return self._ended(f"({_literal(begin)} {inside})" if begin else inside, end)

    def _inside(self, node: dict[str, Any], place: str, depth: int) -> str:
        """Return the content of a tag with the text that ends it."""
        ends = node.get("end")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or len(ends) != 1 or not isinstance(ends[0], str):
            raise _wrong(f"{place}.end", "must be one text")
        return self.node(node.get("content"), f"{place}.content", ends[0] or None, depth)

    def sequence(self, node: dict[str, Any], place: str, end: str | None, depth: int) -> str:
        elements = _list(node, "elements", place)
        made = []
        for index, element in enumerate(elements):
            inside, last = f"{place}.elements[{index}]", index == len(elements) - 1
            if not last and isinstance(element, dict) and element.get("type") in ("any_text", "triggered_tags"):
                raise _wrong(inside, f"is {element['type']}, which must be the last of a sequence, or inside of a tag")
            made.append(self.node(element, inside, end if last else None, depth))
        return f"({' '.join(made)})"

    def choice(self, node: dict[str, Any], place: str, end: str | None, depth: int) -> str:
        elements = enumerate(_list(node, "elements", place))
        made = [self.node(element, f"{place}.elements[{index}]", end, depth) for index, element in elements]
        return f"({' | '.join(made)})"

    def repeated(self, node: dict[str, Any], place: str, end: str | None, depth: int) -> str:
        suffix = {"optional": "?", "plus": "+", "star": "*"}[node["type"]]
        content = node.get("content")
        if isinstance(content, dict) and content.get("type") in ("any_text", "triggered_tags"):
            raise _wrong(f"{place}.content", f"is {content['type']}, which cannot be repeated")
        return self._ended(f"({self.node(content, f'{place}.content', None, depth)}){suffix}", end)

    def triggered_tags(self, node: dict[str, Any], place: str, end: str | None, depth: int) -> str:
        """Write free text in which a trigger must begin one of the tags."""
        triggers, tags = _list(node, "triggers", place), _list(node, "tags", place)
        heads = {trigger: self._until(trigger) for trigger in triggers if isinstance(trigger, str) and trigger}
        if len(heads) < len(triggers):
            raise _wrong(f"{place}.triggers", "must be texts that are not empty and differ")
        made = [self._triggered(tag, f"{place}.tags[{index}]", heads, depth) for index, tag in enumerate(tags)]
        if unused := heads.keys() - {trigger for trigger, _ in made}:
            raise _wrong(f"{place}.triggers", f"has {min(unused)!r}, with which no tag begins")
        any_tag = self._rule(" | ".join(tag for _, tag in made))
        once, first = _flag(node, "at_least_one", place), _flag(node, "stop_after_first", place)
        free = _TEXT if end is None else self._until(end)
        if first:  # after the tag nothing comes; where there may be none, there may be free text
            tag = self._ended(any_tag, end)
            return tag if once else f"({tag} | {free})"
        return f"({any_tag}{'+' if once else '*'} {free})"

    def _triggered(self, tag: Any, place: str, heads: dict[str, str], depth: int) -> tuple[str, str]:
        if not isinstance(tag, dict):
            raise _wrong(place, "must be a JSON object")
        _check_keys(tag, place, {"type", "begin", "content", "end"})
        begin = _text(tag, "begin", place)
        trigger = max((one for one in heads if begin.startswith(one)), key=len, default=None)
        if trigger is None:
            raise _wrong(f"{place}.begin", "must begin with one of the triggers")
        rest = begin[len(trigger) :]
        literal = f"{_literal(rest)} " if rest else ""
        return trigger, self._rule(f"{heads[trigger]} {literal}{self._inside(tag, place, depth)}")

    def tags_with_separator(self, node: dict[str, Any], place: str, end: str | None, depth: int) -> str:
        tags = enumerate(_list(node, "tags", place))
        any_tag = self._rule(" | ".join(self.node(tag, f"{place}.tags[{index}]", None, depth) for index, tag in tags))
        made = any_tag
        if not _flag(node, "stop_after_first", place):
            made = f"{any_tag} ({_literal(_text(node, 'separator', place))} {any_tag})*"
        return self._ended(made if _flag(node, "at_least_one", place) else f"({made})?", end)

    def _ended(self, expression: str, end: str | None) -> str:
        return expression if end is None else f"{expression} {_literal(end)}"


_FORMATS: dict[str, tuple[tuple[str, ...], Callable[[_Writer, dict[str, Any], str, str | None, int], str]]] = {
    "const_string": (("value",), _Writer.const_string),
    "json_schema": (("json_schema",), _Writer.json_schema),
    "regex": (("pattern",), _Writer.regex),
    "grammar": (("grammar",), _Writer.grammar),
    "any_text": ((), _Writer.any_text),
    "tag": (("begin", "content", "end"), _Writer.tag),
    "sequence": (("elements",), _Writer.sequence),
    "or": (("elements",), _Writer.choice),
    "optional": (("content",), _Writer.repeated),
    "plus": (("content",), _Writer.repeated),
    "star": (("content",), _Writer.repeated),
    "triggered_tags": (("triggers", "tags", "at_least_one", "stop_after_first"), _Writer.triggered_tags),
    "tags_with_separator": (
        ("tags", "separator", "at_least_one", "stop_after_first"),
        _Writer.tags_with_separator,
    ),
}
"""The types of formats, with the keys that each has, and what writes it."""
