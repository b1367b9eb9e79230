"""How a stage says how far it is: one call per step, whatever shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

Item = TypeVar("Item")
Progress = Callable[[str, int, int], object]
"""Called with what is being done, how many steps are done, and how many there are."""


def silent(_what: str, _done: int, _total: int) -> None:
    """Show nothing."""


def tracked(items: Iterable[Item], what: str, progress: Progress) -> Iterator[Item]:
    """Yield ``items``, saying how many are done; they must have a length."""
    assert isinstance(items, Sized)
    for done, item in enumerate(items):
        progress(what, done, len(items))
        yield item
    progress(what, len(items), len(items))
