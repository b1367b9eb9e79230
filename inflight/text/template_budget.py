"""What a rendering may take: processor time, and the characters of the texts that it reads and makes."""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2.utils import Namespace

RENDER_S = 1.0
"""Seconds of processor time that one rendering may take."""
AT_ONCE_S = 0.005
"""Seconds of it where others wait for the thread."""
LARGEST = 8 << 20
"""Characters of the largest text, and the most work that one call of C may have: no other thread runs meanwhile."""
_CHARACTERS = 128 << 20
"""Characters that all steps of a rendering may read and make."""
_WORK_UNSEEN = 16
"""Steps, or KiB of text, of some microseconds each, between two looks at the clock."""
_ELEMENTS = 1_000_000
"""The most elements of a new list or object, at any depth; a shared part counts each time."""
_ESCAPED = 3
"""Characters that one beyond ASCII becomes in JSON or in Python's notation, in the middle of nothing and twelve."""
_WRITTEN = 32
"""Characters that are as much work as writing one value more."""
_VIEWS = (KeysView, ValuesView, ItemsView)


class TooMuch(jinja2.TemplateRuntimeError):
    """A template computes or makes more than it may."""


class TakesLonger(BaseException):
    """A rendering has taken the time that it has where others wait for the thread: no error, and not answered."""


class _Budget:
    """The processor time and the characters that are left to one rendering."""

    def __init__(self, *, hurries: bool = False) -> None:
        seconds = AT_ONCE_S if hurries else RENDER_S
        self._hurries, self._seconds, self._unseen = hurries, seconds, 0
        self._until, self._left = time.thread_time() + seconds, int(_CHARACTERS * seconds / RENDER_S)

    def step(self, work: int = 1) -> None:
        """Take a step; the clock is looked at when there has been some work."""
        self._unseen += work
        if self._unseen < _WORK_UNSEEN:
            return
        self._unseen = 0
        if time.thread_time() > self._until:
            self._give_up(f"it takes more than {self._seconds:g} s of processor time")

    def take(self, work: int) -> None:
        """Read or make so many characters."""
        if work > LARGEST:
            self._give_up(f"one step makes or reads more than {LARGEST} characters")
        self.step(1 + work // 1024)
        self._left -= work
        if self._left < 0:
            self._give_up(f"it makes more than {_CHARACTERS} characters")

    def _give_up(self, reason: str) -> None:
        if self._hurries:
            raise TakesLonger
        raise TooMuch(reason)


_HURRIES: ContextVar[bool] = ContextVar("hurries", default=False)
_BUDGET: ContextVar[_Budget | None] = ContextVar("budget", default=None)


@contextmanager
def at_once() -> Iterator[None]:
    """Have what is rendered within take little time, or raise ``TakesLonger``: others wait for the thread."""
    token = _HURRIES.set(True)
    try:
        yield
    finally:
        _HURRIES.reset(token)


@contextmanager
def budget() -> Iterator[None]:
    """Give one rendering, or the compilation of one template, its budget."""
    token = _BUDGET.set(_Budget(hurries=_HURRIES.get()))
    try:
        yield
    finally:
        _BUDGET.reset(token)


def spend() -> _Budget:
    """Return the budget of the rendering."""
    return _BUDGET.get() or _Budget()


class Steps:
    """The values that a loop goes over; each turn is a step."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        budget = spend()
        for value in self._values:
            budget.step()
            yield value


def listed(value: Any) -> Any:
    """Return a value that C code may go over: an iterator's values as a list, each of which has been a step."""
    return list(Steps(value)) if isinstance(value, (Iterator, range, *_VIEWS)) else value


def length(value: Any) -> int:
    """Return the length of a text or of a collection; 0: it is neither."""
    return len(value) if isinstance(value, str | list | tuple | dict) else 0


def elements(value: Any) -> int:
    """Return how many values a new list, tuple or object has, at any depth. Raises TooMuch."""
    return _sum([value], _ELEMENTS, texts=False)


def weight(*values: Any, shown: bool = False) -> int:
    """Return how many characters values have in all, about. Raises TooMuch.

    Args:
        values: any; a value counts as one more.
        shown: whether they are to be written, in JSON or in Python's notation, which escapes texts.
    """
    return _sum(list(values), LARGEST, shown=shown)


def _sum(waiting: list[Any], most: int, *, texts: bool = True, shown: bool = False) -> int:
    budget, size, seen, each = spend(), 0, 0, _WRITTEN if shown else 1
    while waiting:
        one = waiting.pop()
        size, seen = size + each, seen + 1
        if isinstance(one, str):
            if texts:
                size += len(one) * (1 if not shown or one.isascii() else _ESCAPED)
        elif (parts := _parts(one)) is not None:
            waiting += parts
        if size + len(waiting) > most:
            raise TooMuch(f"it makes a value of more than {most} {'characters' if texts else 'elements'}")
        if seen & 255 == 0:
            budget.step()
    return size


def _parts(value: Any) -> Iterable[Any] | None:
    """Return what a value holds; None: it is no collection."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, _VIEWS):
        return list(value)
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, Namespace):
        return value._Namespace__attrs.values()  # type: ignore[attr-defined,no-any-return]
    return None
