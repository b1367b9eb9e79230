"""The words and numbers that questions, arguments and results of the demo's tool and JSON examples are filled with.

All are of short lists, and numbers have two digits at most: a model of this size learns to recognise them in a question
and to write them into JSON, where they are other tokens, as no space is before them. It does not know tools.
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Value = str | int | list[str]


@dataclass(frozen=True)
class Values:
    """The lists of values by kind."""

    lists: Mapping[str, Sequence[str]]

    def pick(self, kind: str, rng: random.Random) -> Value:
        """Return a value of `kind`: the name of a list, or `#` and the largest number."""
        if kind.startswith("#"):
            return rng.randint(1, int(kind[1:]))
        if kind == "people":
            return rng.sample(self.lists["person"], rng.randint(2, 3))
        return rng.choice(self.lists[kind])

    def words(self) -> list[str]:
        """Return the first word of each value and the numbers of two digits, with and without a space before them."""
        first = [value.split()[0] for values in self.lists.values() for value in values]
        return [space + word for word in dict.fromkeys([*first, *map(str, range(100))]) for space in ("", " ")]

    def fill(self, template: str, known: Mapping[str, Any], rng: random.Random) -> str:
        """Fill the {slots} of `template` with what is `known`, else with new values."""
        filled: dict[str, str] = {}
        for _, slot, _, _ in string.Formatter().parse(template):
            if slot is not None:
                filled[slot] = spoken(known[slot] if slot in known else self.pick(slot, rng))
        return template.format_map(filled)


def spoken(value: Value) -> str:
    """Return a value as a sentence has it."""
    if isinstance(value, list):
        return listed(value)
    return str(value)


def listed(words: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
