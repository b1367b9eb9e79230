"""Which modules a configuration of compressed-tensors means: full names, ``re:`` and a pattern that the beginning of a
name matches, or ``Linear`` for any.

A pattern comes with the checkpoint, so that it may be made to take for ever. None is tried that may.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, Generic, TypeVar

from inflight.engine.quant.readers.fields import SOURCE, wrong
from inflight.errors import DeploymentError

_Meaning = TypeVar("_Meaning")
_ANY_LINEAR, _PATTERN = "Linear", "re:"
_SYNTAX = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\??|[)|*+?]|\{\d*,?\d*\}", re.DOTALL)
"""What decides in how many ways a regular expression can match; and, to be passed over, escapes and sets."""
_OTHER_SYNTAX = re.compile(r"\(\?(?:#|[a-zA-Z]*x)")
"""A comment, or the flag x: what follows is not read as ``_SYNTAX`` reads it."""
_LONGEST_NAME, _MOST_WAYS = 128, 3e8
"""Characters of a module's name that patterns are tried on. Four ``.*`` are allowed, and take milliseconds."""
_MOST_WORK = 3e10
"""Ways of all patterns to match all modules: minutes at the most. Kimi K2's have a twentieth of it."""


class ByName(Generic[_Meaning]):
    """What a configuration says of modules; a full name decides before patterns do, and they before ``Linear``."""

    def __init__(self, meanings: Mapping[str, _Meaning], modules: Collection[str]) -> None:
        """``meanings``: by names that ``read_names`` has let pass; ``modules``: all that will be asked for.

        Raises:
            DeploymentError: to try the patterns on the modules may take for ever.
        """
        self._meanings = meanings
        patterns = sorted(name.removeprefix(_PATTERN) for name in meanings if name.startswith(_PATTERN))
        longest = max((len(name) for name in modules if len(name) < _LONGEST_NAME), default=1)
        if len(modules) * sum(_ways(pattern, longest) for pattern in patterns) > _MOST_WORK:
            raise DeploymentError(
                f"{SOURCE}: it may take for ever to find which of {len(modules):,} modules its {len(patterns):,} "
                f"patterns match, as in {_PATTERN + max(patterns, key=lambda one: _ways(one, longest))!r}; make them "
                "simpler"
            )
        self._patterns = [(re.compile(pattern), meanings[_PATTERN + pattern]) for pattern in patterns]

    def of(self, module: str) -> _Meaning | None:
        """Return what is said of a module; None: nothing."""
        if module in self._meanings:
            return self._meanings[module]
        if len(module) < _LONGEST_NAME:
            for pattern, meaning in self._patterns:
                if pattern.match(module):
                    return meaning
        return self._meanings.get(_ANY_LINEAR)


def read_names(value: Any, field: str) -> list[str]:
    """Return a list of names and patterns. Raises DeploymentError: it is none, or a pattern may take for ever."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise wrong(field, value, "a list of names")
    for name in value:
        if name.startswith(_PATTERN):
            pattern = name.removeprefix(_PATTERN)
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise wrong(field, name, f"a regular expression ({error})") from None
            if any(_OTHER_SYNTAX.match(pattern, token.start()) for token in _SYNTAX.finditer(pattern)):
                raise wrong(field, name, "without comments, which begin with (?#, and without the flag x")
            if _ways(pattern, _LONGEST_NAME) > _MOST_WAYS:
                raise wrong(field, name, "simpler: it may take for ever to find that it does not match")
    return value


def _ways(pattern: str, length: int) -> float:
    """Return in how many ways a regular expression can match a name of so many characters at the most, as it tries them
    one after another. It has no comments, and not the flag x."""
    ways, choices, closed = 1.0, [1], -1
    for token in _SYNTAX.finditer(pattern):
        kind = token[0]
        if kind[0] in "*+{":
            ways *= math.inf if token.start() == closed else length
        elif kind == "?":
            ways *= 2
        elif kind == "|":
            choices[-1] += 1
        elif kind[0] == "(":
            choices.append(1)
        elif kind == ")":
            ways, closed = ways * choices.pop(), token.end()
    return ways * choices[0]
