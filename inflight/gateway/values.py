"""Kinds of values that fields of a request's body have, with their limits: each check names the field by its path."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.gateway.errors import ApiError, invalid
from inflight.json_text import SHOWN_CHARACTERS, shown

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character: JSON can spell it alone, and no text has it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of values with its limits."""

    wanted: str
    """What a value must be, such as ``a number from 0 to 2``."""
    read: Callable[[Any, str], Any]
    """Returns a value, given it and its path. Raises ApiError: naming the path."""


def wrong(path: str, value: Any, wanted: str) -> ApiError:
    """Return the error of a value that is not what it must be."""
    return invalid(f"{path} is {shown(value)}; it must be {wanted}", path)


def same(one: Any, other: Any) -> bool:
    """Return whether two values are the same in JSON: true is no number there, and 1 and 1.0 are one number."""
    return _marked(one) == _marked(other)


def _marked(value: Any) -> Any:
    """Return a value of which Python's ``==`` judges as JSON does: bools are marked, at any depth."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, list):
        return [_marked(one) for one in value]
    if isinstance(value, dict):
        return {name: _marked(one) for name, one in value.items()}
    return value


def _kind(wanted: str, accept: Callable[[Any], tuple[bool, Any]]) -> Kind:
    """Return the kind of which ``accept`` tells the values: whether one is good, and as what it is read."""

    def read(value: Any, path: str) -> Any:
        good, result = accept(value)
        if not good:
            raise wrong(path, value, wanted)
        return result

    return Kind(wanted, read)


def boolean() -> Kind:
    """Return the kind of true and false."""
    return _kind("true or false", lambda value: (isinstance(value, bool), value))


def integer(low: int, high: int) -> Kind:
    """Return the kind of whole numbers from ``low`` to ``high``; 64.0 is one too."""

    def accept(value: Any) -> tuple[bool, Any]:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high, value

    return _kind(f"a whole number from {low} to {high}", accept)


def number(low: float, high: float, *, above: bool = False) -> Kind:
    """Return the kind of finite numbers from ``low`` to ``high``; ``above``: ``low`` itself is none."""

    def accept(value: Any) -> tuple[bool, Any]:
        good = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        return good and not (above and value == low), float(value) if good else value

    limits = f"above {low:g}" if above else f"from {low:g}"
    limits += f" to {high:g}" if high < math.inf else ""
    return _kind(f"a number {limits}", accept)


def string(most: int | None = None, *, empty: bool = True) -> Kind:
    """Return the kind of texts, of ``most`` characters."""

    def accept(value: Any) -> tuple[bool, Any]:
        good = isinstance(value, str) and not _SURROGATE.search(value) and (empty or value)
        return bool(good and (most is None or len(value) <= most)), value

    limits = f" of at most {most} characters" if most is not None else ""
    return _kind(f"a{'' if empty else ' not empty'} string{limits}", accept)


def one_of(*values: str) -> Kind:
    """Return the kind of these words."""
    return _kind(" or ".join(f'"{value}"' for value in values), lambda value: (value in values, value))


def list_of(kind: Kind, most: int, *, least: int = 0) -> Kind:
    """Return the kind of lists of ``least`` to ``most`` values of a kind."""
    wanted = f"a list of at most {most} values, each {kind.wanted}"

    def read(value: Any, path: str) -> Any:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise invalid(f"{path} is {_size(value)}; it must be {wanted}", path)
        return [kind.read(one, f"{path}[{index}]") for index, one in enumerate(value)]

    return Kind(wanted, read)


def one_or_list_of(kind: Kind, most: int) -> Kind:
    """Return the kind of one value or a list of at most ``most``, read as a list."""
    several = list_of(kind, most)

    def read(value: Any, path: str) -> Any:
        return several.read(value, path) if isinstance(value, list) else [kind.read(value, path)]

    return Kind(f"{kind.wanted}, or {several.wanted}", read)


def mapping() -> Kind:
    """Return the kind of objects."""
    return _kind("an object", lambda value: (isinstance(value, dict), value))


def mapping_of(kind: Kind, most: int) -> Kind:
    """Return the kind of objects with at most ``most`` values of a kind."""
    wanted = f"an object of at most {most} values, each {kind.wanted}"

    def read(value: Any, path: str) -> Any:
        if not isinstance(value, dict) or len(value) > most:
            raise invalid(f"{path} is {_size(value)}; it must be {wanted}", path)
        return {name: kind.read(one, f"{path}.{name[:SHOWN_CHARACTERS]}") for name, one in value.items()}

    return Kind(wanted, read)


def object_with(parts: Mapping[str, Kind], required: Sequence[str] = ()) -> Kind:
    """Return the kind of objects with these keys; null is absent, and another key is refused by name."""
    names = ", ".join(parts)

    def read(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise wrong(path, value, f"an object with {names}")
        given = {name: one for name, one in value.items() if one is not None}
        for name in given:
            if name not in parts:
                raise invalid(f"{path}.{name} is not known; {path} may have {names}", f"{path}.{name}")
        for name in required:
            if name not in given:
                raise invalid(f"{path}.{name} is missing", f"{path}.{name}")
        return {name: parts[name].read(one, f"{path}.{name}") for name, one in given.items()}

    return Kind(f"an object with {names}", read)


def anything() -> Kind:
    """Return the kind of all values, which the endpoint itself reads."""
    return Kind("any value", lambda value, path: value)


def _size(value: Any) -> str:
    return f"of {len(value)} values" if isinstance(value, list | dict) else shown(value)
