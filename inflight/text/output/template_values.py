"""The values of a ``response_template``: how the text of a field is read, and what is made of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import regex

from inflight.text.output.incremental_json import as_json

SECONDS = 1.0
"""How long one search may take: the patterns are the checkpoint's."""
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
Options = Mapping[str, Any]


def parse_value(text: str, kind: str, options: Options) -> Any:
    """Return the value of a field's text. Raises ValueError, KeyError, TypeError or TimeoutError: it is none."""
    return _PARSERS[kind](text, options)


def is_kind(kind: str) -> bool:
    """Return whether there is such a kind of content."""
    return kind in _PARSERS


def _text(text: str, options: Options) -> str:
    return text.strip() if options.get("strip", True) else text


def _json(text: str, options: Options) -> Any:
    """Read JSON, whose strings may have other delimiters and whose keys may have none."""
    parts: list[str] = []
    place = 0
    closing = dict(options.get("string_delims", ()))
    opening = re.compile("|".join(map(re.escape, closing))) if closing else None
    while opening and (match := opening.search(text, place)):
        end = text.index(closing[match[0]], match.end())
        parts += [_with_keys(text[place : match.start()], options), json.dumps(text[match.end() : end])]
        place = end + len(closing[match[0]])
    parts.append(_with_keys(text[place:], options))
    found = as_json("".join(parts))
    if found is not None:
        return json.loads(found)
    if options.get("allow_non_json"):
        return text.strip()
    raise ValueError("no JSON")


def _with_keys(text: str, options: Options) -> str:
    return re.sub(r"(?<=[{,])(\w+):", r'"\1":', text) if options.get("unquoted_keys") else text


def _tags(text: str, options: Options) -> dict[str, Any]:
    values: dict[str, Any] = {}
    lists: set[str] = set()
    for match in regex.finditer(options["tag_pattern"], text, flags=regex.DOTALL, timeout=SECONDS):
        key, value = match["key"], _inner(match["value"] or "", options)
        if key in values and options.get("merge_duplicates"):
            values[key] = [*(values[key] if key in lists else [values[key]]), value]
            lists.add(key)
        else:
            values[key] = value
    return values


def _lines(text: str, options: Options) -> dict[str, Any]:
    values = {}
    for line in text.split(options.get("line_sep", "\n")):
        key, separator, value = _text(line, options).partition(options.get("kv_sep", ":"))
        if separator:
            values[_text(key, options)] = _inner(_text(value, options), options)
    return values


def _inner(text: str, options: Options) -> Any:
    parser = options.get("value_parser")
    return text if parser is None else parse_value(text, parser.get("name", "text"), parser.get("args", {}))


_PARSERS: dict[str, Callable[[str, Options], Any]] = {
    "text": _text,
    "int": lambda text, options: int(_text(text, options)),
    "float": lambda text, options: float(_text(text, options)),
    "bool": lambda text, options: _text(text, options).lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _tags,
    "kv-lines": _lines,
}


def fill(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Return a transform with its placeholders replaced. Raises KeyError or TypeError: there is no such value."""
    if isinstance(transform, dict):
        return {key: fill(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [fill(value, scope) for value in transform]
    match = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if match is None:
        return transform
    value: Any = scope
    for key in match[1].split("."):
        value = value[key]
    return value


def mixes(transform: Any) -> bool:
    """Return whether a string of a transform has a placeholder beside other text, which means nothing."""
    if isinstance(transform, dict | list):
        return any(map(mixes, transform.values() if isinstance(transform, dict) else transform))
    found = isinstance(transform, str) and _PLACEHOLDER.search(transform)
    return bool(found) and not _PLACEHOLDER.fullmatch(transform)
