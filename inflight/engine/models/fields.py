"""Checked reading of ``config.json``: each value must be of its kind, and the error names field, value and kind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from inflight.errors import DeploymentError

Kind = tuple[Callable[[Any], bool], str]
"""What a value of ``config.json`` must be, as a test and in words."""
MOST = 2**31 - 1


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


FLAG: Kind = (lambda value: isinstance(value, bool)), "true or false"
COUNT: Kind = (lambda value: type(value) is int and 1 <= value <= MOST), "a positive integer below 2^31"
LENGTH: Kind = (lambda value: type(value) is int and value >= 1), "a positive integer"
INDEX: Kind = (lambda value: type(value) is int and 0 <= value <= MOST), "0 or a positive integer below 2^31"
NUMBER: Kind = (lambda value: _is_number(value) and value > 0), "a number above 0"
AMOUNT: Kind = (lambda value: _is_number(value) and value >= 0), "0 or a number above 0"
FACTORS: Kind = (lambda value: isinstance(value, list) and all(map(NUMBER[0], value))), "a list of numbers above 0"
INDICES: Kind = (lambda value: isinstance(value, list) and all(map(INDEX[0], value))), "a list of layers"


class Fields:
    """The fields of one ``config.json``, or of the text part of one."""

    def __init__(self, data: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        """``defaults``: what the architecture has where ``data`` has nothing, or null."""
        given = {name: value for name, value in data.items() if value is not None}
        self.data: Mapping[str, Any] = {**(defaults or {}), **given}
        """What is given or has a default."""

    def required(self, name: str) -> int:
        """Return a count that must be there."""
        return int(checked(name, self.data.get(name), COUNT))

    def given(self, name: str, default: Any, kind: Kind) -> Any:
        """Return a value that may be left out, or null."""
        return given(self.data, name, default, kind)


def given(data: Mapping[str, Any], name: str, default: Any, kind: Kind) -> Any:
    """Return a value that may be left out, or null."""
    return default if data.get(name) is None else checked(name, data[name], kind)


def checked(name: str, value: Any, kind: Kind) -> Any:
    """Return ``value``. Raises DeploymentError: it is not of its kind."""
    if not kind[0](value):
        raise DeploymentError(f"config.json: {name} is {value!r}; it must be {kind[1]}")
    return value
