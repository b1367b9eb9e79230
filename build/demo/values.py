"""The words and numbers that questions, arguments and results of the demo's tool and JSON examples are filled with.

Some are of lists, some are made up, so that the model learns to copy what it has not seen. It does not know tools.
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Value = str | int | float | list[str]
OPEN = ("city", "person", "company", "word", "subject", "item", "song", "task")
"""Kinds of which there are more than a list has."""
SYLLABLES = "ba be bo ca co da de di do fa fi ga go ha ho ka ki la le li lo ma mi mo na ne no pa pe po ra re ri ro sa se si so ta te ti to va ve vo za zo lan mar ton ber gen vik dor sul nor tar win mond fel kar len mil ran ser".split()  # noqa: E501
ENDS = ["", "", "n", "r", "s", "a", "o", "ville", "burg", "ton", "stad"]


@dataclass(frozen=True)
class Values:
    """The lists of values by kind, and how many of their values are made up."""

    lists: Mapping[str, Sequence[str]]
    made_up: float = 0.3

    def pick(self, kind: str | Sequence[str], rng: random.Random) -> Value:
        """Return a value of `kind`: the name of a list, `#` and the largest number, or one of several kinds."""
        if not isinstance(kind, str):
            kind = rng.choice(kind)
        if kind.startswith("#"):
            return number(int(kind[1:]), rng)
        if kind == "people":
            return [str(self.pick("person", rng)) for _ in range(rng.randint(2, 3))]
        if kind == "expression":
            signs = [rng.choice("+-*/") for _ in range(rng.choice([1, 1, 2]))]
            return str(rng.randint(1, 99)) + "".join(f" {sign} {rng.randint(1, 99)}" for sign in signs)
        if kind in OPEN and rng.random() < self.made_up:
            return self._unseen(kind, rng)
        return rng.choice(self.lists[kind])

    def _unseen(self, kind: str, rng: random.Random) -> str:
        if kind in ("city", "person", "company"):
            return " ".join(made_up_name(rng) for _ in range(rng.choice([1, 1, 2])))
        words = [word for name in ("item", "subject", "task") for text in self.lists[name] for word in text.split()]
        count = rng.choice([1, 1, 2, 3])
        return " ".join(rng.choice(words) if rng.random() < 0.7 else made_up_name(rng).lower() for _ in range(count))

    def fill(self, template: str, known: Mapping[str, Any], rng: random.Random) -> str:
        """Fill the {slots} of `template` with what is `known`, else with new values."""
        filled: dict[str, str] = {}
        for _, slot, _, _ in string.Formatter().parse(template):
            if slot is not None:
                filled[slot] = spoken(known[slot] if slot in known else self.pick(slot, rng))
        return template.format_map(filled)


def number(most: int, rng: random.Random) -> int | float:
    """Return a number from 1 to `most`, small ones more often; below 1000 some have a fraction."""
    if most < 1000 and rng.random() < 0.12:
        return round(rng.uniform(0, most), 1)
    return rng.randint(1, rng.choice([most, most, min(most, 20)]))


def made_up_name(rng: random.Random) -> str:
    """Return a word of two or three syllables with a capital letter."""
    syllables = [rng.choice(SYLLABLES) for _ in range(rng.choice([2, 2, 3]))]
    return ("".join(syllables) + rng.choice(ENDS)).capitalize()


def spoken(value: Value) -> str:
    """Return a value as a sentence has it."""
    if isinstance(value, list):
        return listed(value)
    return str(value)


def listed(words: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
