"""Structural tags, xgrammar's JSON for free text with tags inside of it, written as Lark for llguidance.

Both forms are read: ``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}``, and ``{"format": {...}}``, a
tree of formats. Formats that speak of tokens, or of one model's parameters in XML, are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

from inflight.engine.guided.ebnf import lark_of_ebnf
from inflight.engine.guided.guide_json import read_json
from inflight.engine.guided.json_schema import schema_grammar
from inflight.engine.guided.tag_parts import ANY, Atom, Lines, Part, literal, schema_atom, wrong
from inflight.errors import InvalidRequest
from inflight.text.patterns import BadPattern, lark_expression

_TEXT = "/(?s:.*)/"
_DEEPEST = 32
_MOST_TRIGGERS = 100
_ErrorOf = Callable[[str], str | None]
_NO_NUMBERS = ("object", "array", "string", "boolean", "null")


@dataclass(frozen=True, slots=True)
class _Where:
    """Where a format stands."""

    place: str
    end: str | None = None
    """The text that ends it, and is written with it."""
    is_last: bool = True
    """Whether nothing comes behind it, and behind its end."""
    depth: int = 0

    @property
    def follows(self) -> str | None:
        """The characters that may come behind it and its end."""
        return None if self.is_last else ANY

    def at(self, place: str) -> _Where:
        """Return this with another place, one deeper."""
        return replace(self, place=place, depth=self.depth + 1)

    def within(self, place: str) -> _Where:
        """Return where a format stands that something follows."""
        return replace(self.at(place), end=None, is_last=False)


def lark_of_tags(text: str, error_of_schema: _ErrorOf, is_empty: Callable[[str], bool]) -> str:
    """Return a structural tag as Lark, whose first rule is ``start``.

    Args:
        text: the tag, as JSON.
        error_of_schema: as ``schema_grammar`` takes it.
        is_empty: whether no text is a sentence of a Lark grammar.

    Raises:
        InvalidRequest: it is none, or it has what is not supported; the message names the place.
    """
    tag = read_json(text)
    if not isinstance(tag, dict):
        raise wrong("it", "must be a JSON object")
    writer = _Writer(error_of_schema, is_empty)
    if "format" in tag:
        _check_keys(tag, "it", {"type", "format"})
        part, place = writer.node(tag["format"], _Where("format")), "format"
    else:
        _check_keys(tag, "it", {"type", "structures", "triggers"})
        part, place = writer.node({"type": "triggered_tags", **_new_form(tag)}, _Where("structures")), "structures"
    start = writer.lines.emit(part, place, None)
    return "\n".join([f"start: {start}", *writer.lines.lines])


def _new_form(tag: dict[str, Any]) -> dict[str, Any]:
    """Return the triggers and tags of the older form as the newer one has them."""
    tags = []
    for index, one in enumerate(_list(tag, "structures", "it")):
        place = f"structures[{index}]"
        if not isinstance(one, dict):
            raise wrong(place, "must be a JSON object")
        _check_keys(one, place, {"begin", "schema", "end"})
        schema = one.get("schema")
        read = read_json(schema, f"{place}.schema") if isinstance(schema, str) else schema
        content = {"type": "json_schema", "json_schema": read}
        tags.append({"type": "tag", "begin": one.get("begin"), "content": content, "end": one.get("end", "")})
    return {"triggers": tag.get("triggers"), "tags": tags}


def _check_keys(node: dict[str, Any], place: str, known: set[str]) -> None:
    if unknown := sorted(node.keys() - known):
        raise wrong(place, f"has {unknown[0]!r}, which is not supported; it may have {', '.join(sorted(known))}")


def _text(node: dict[str, Any], key: str, place: str) -> str:
    value = node.get(key)
    if not isinstance(value, str):
        raise wrong(f"{place}.{key}", "must be a text")
    return value


def _list(node: dict[str, Any], key: str, place: str) -> list[Any]:
    value = node.get(key)
    if not isinstance(value, list) or not value:
        raise wrong(f"{place}.{key}", "must be a list that is not empty")
    return value


def _flag(node: dict[str, Any], key: str, place: str) -> bool:
    value = node.get(key, False)
    if not isinstance(value, bool):
        raise wrong(f"{place}.{key}", "must be true or false")
    return value


class _Writer:
    """Writes formats as parts, with rules of their own where these need some: ``lines``."""

    def __init__(self, error_of_schema: _ErrorOf, is_empty: Callable[[str], bool]) -> None:
        self._error_of = error_of_schema
        self.lines = Lines(is_empty)

    def node(self, node: Any, where: _Where) -> Part:
        """Return a format as a part, with its end."""
        if not isinstance(node, dict):
            raise wrong(where.place, "must be a JSON object")
        if where.depth > _DEEPEST:
            raise wrong(where.place, f"lies below {_DEEPEST} others")
        kind = node.get("type")
        if not isinstance(kind, str) or kind not in _FORMATS:
            raise wrong(where.place, f"has the type {kind!r}; supported are {', '.join(_FORMATS)}")
        keys, write = _FORMATS[kind]
        _check_keys(node, where.place, {"type", *keys})
        return write(self, node, where)

    def _until(self, end: str) -> str:
        """Return a rule for free text up to the first ``end``, which it takes too."""
        [atom] = literal(end)
        return self.lines.rule(f"{_TEXT} {atom.lark}", "[lazy]")

    def const_string(self, node: dict[str, Any], where: _Where) -> Part:
        return literal(_text(node, "value", where.place) + (where.end or ""))

    def json_schema(self, node: dict[str, Any], where: _Where) -> Part:
        place = f"{where.place}.json_schema"
        if "json_schema" not in node:
            raise wrong(place, "must be given")
        schema = node["json_schema"]
        try:
            form = schema_grammar(schema, self._error_of)
        except InvalidRequest as error:
            raise wrong(f"{place}:", str(error).partition(": ")[2]) from None
        may_be_number = not isinstance(schema, dict) or schema.get("type") not in _NO_NUMBERS
        return schema_atom(self.lines.rule(f"%json {form}"), may_be_number), *literal(where.end or "")

    def regex(self, node: dict[str, Any], where: _Where) -> Part:
        try:
            expression = lark_expression(_text(node, "pattern", where.place))
        except BadPattern as error:
            raise wrong(f"{where.place}.pattern", f"is refused: {error}") from None
        return Atom(expression), *literal(where.end or "")

    def grammar(self, node: dict[str, Any], where: _Where) -> Part:
        root, lines = lark_of_ebnf(_text(node, "grammar", where.place), self.lines.number())
        self.lines.lines.append(lines)
        return Atom(root, is_regular=root[0].isupper(), needs=lines), *literal(where.end or "")

    def any_text(self, node: dict[str, Any], where: _Where) -> Part:
        self._check_ended(node, where)
        return (Atom(self._until(where.end), False) if where.end else Atom(_TEXT),)

    def _check_ended(self, node: dict[str, Any], where: _Where) -> None:
        if not where.end and not where.is_last:
            raise wrong(where.place, f"is {node['type']}, which must be the last of a sequence, or inside of a tag")

    def tag(self, node: dict[str, Any], where: _Where) -> Part:
        begin = _text(node, "begin", where.place)
        return *literal(begin), *self._inside(node, where), *literal(where.end or "")

    def _inside(self, node: dict[str, Any], where: _Where) -> Part:
        """Return the content of a tag with the text that ends it."""
        ends = node.get("end")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or len(ends) != 1 or not isinstance(ends[0], str):
            raise wrong(f"{where.place}.end", "must be one text")
        inner = replace(where.at(f"{where.place}.content"), end=ends[0] or None)
        return self.node(node.get("content"), inner if not where.end else replace(inner, is_last=False))

    def sequence(self, node: dict[str, Any], where: _Where) -> Part:
        elements = _list(node, "elements", where.place)
        part: Part = ()
        for index, element in enumerate(elements):
            place = f"{where.place}.elements[{index}]"
            is_end = index == len(elements) - 1
            part += self.node(element, where.at(place) if is_end else where.within(place))
        return part

    def choice(self, node: dict[str, Any], where: _Where) -> Part:
        places = [
            (element, f"{where.place}.elements[{index}]")
            for index, element in enumerate(_list(node, "elements", where.place))
        ]
        return self.lines.either([(self.node(one, where.at(place)), place) for one, place in places], where.follows)

    def repeated(self, node: dict[str, Any], where: _Where) -> Part:
        suffix = {"optional": "?", "plus": "+", "star": "*"}[node["type"]]
        content = self.node(node.get("content"), where.within(f"{where.place}.content"))
        follows = ANY if where.end else where.follows
        return *self.lines.repeated(content, suffix, where.place, follows), *literal(where.end or "")

    def triggered_tags(self, node: dict[str, Any], where: _Where) -> Part:
        """Write free text in which a trigger must begin one of the tags."""
        self._check_ended(node, where)
        place, tags = where.place, _list(node, "tags", where.place)
        once, stops = _flag(node, "at_least_one", place), _flag(node, "stop_after_first", place)
        heads = {trigger: self._until(trigger) for trigger in _triggers(node, where)}
        inside = where.at(place) if stops and not where.end else where.within(place)
        made = [self._triggered(tag, inside.at(f"{place}.tags[{index}]"), heads) for index, tag in enumerate(tags)]
        if unused := heads.keys() - {trigger for trigger, _ in made}:
            raise wrong(f"{place}.triggers", f"has {min(unused)!r}, with which no tag begins")
        any_tag = self.lines.rule(" | ".join(tag for _, tag in made))
        free = self._until(where.end) if where.end else _TEXT
        if not stops:
            return (Atom(f"({any_tag}{'+' if once else '*'} {free})", False),)
        # After the tag nothing comes; where there may be none, there may be free text.
        alone = " ".join([any_tag, *(atom.lark for atom in literal(where.end or ""))])
        return (Atom(alone if once else f"({alone} | {free})", False),)

    def _triggered(self, tag: Any, where: _Where, heads: dict[str, str]) -> tuple[str, str]:
        if not isinstance(tag, dict):
            raise wrong(where.place, "must be a JSON object")
        _check_keys(tag, where.place, {"type", "begin", "content", "end"})
        begin = _text(tag, "begin", where.place)
        trigger = next((one for one in heads if begin.startswith(one)), None)
        if trigger is None:
            raise wrong(f"{where.place}.begin", "must begin with one of the triggers")
        part = *literal(begin[len(trigger) :]), *self._inside(tag, where)
        return trigger, self.lines.rule(f"{heads[trigger]} {self.lines.emit(part, where.place, where.follows)}")

    def tags_with_separator(self, node: dict[str, Any], where: _Where) -> Part:
        place, tags = where.place, enumerate(_list(node, "tags", where.place))
        places = [(tag, f"{place}.tags[{index}]") for index, tag in tags]
        made = self.lines.either([(self.node(tag, where.within(inner)), inner) for tag, inner in places], ANY)
        if not _flag(node, "stop_after_first", place):
            made += self.lines.repeated((*literal(_text(node, "separator", place)), *made), "*", place, ANY)
        if not _flag(node, "at_least_one", place):
            made = self.lines.repeated(made, "?", place, ANY if where.end else where.follows)
        return *made, *literal(where.end or "")


def _triggers(node: dict[str, Any], where: _Where) -> list[str]:
    """Return the triggers that free text may come to: one that begins with another is never reached."""
    place = f"{where.place}.triggers"
    triggers = _list(node, "triggers", where.place)
    if not all(isinstance(one, str) and one for one in triggers) or len(set(triggers)) < len(triggers):
        raise wrong(place, "must be texts that are not empty and differ")
    if len(triggers) > _MOST_TRIGGERS:
        raise wrong(place, f"has {len(triggers)} texts; the limit is {_MOST_TRIGGERS}")
    shortest = [one for one in triggers if not any(one != other and one.startswith(other) for other in triggers)]
    stops = [*shortest, *([where.end] if where.end else [])]
    for one, other in permutations(stops, 2):
        if one in other:
            raise wrong(place, f"or the end has {other!r}, of which {one!r} is a part; it could not be reached")
    return shortest


_FORMATS: dict[str, tuple[tuple[str, ...], Callable[[_Writer, dict[str, Any], _Where], Part]]] = {
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
