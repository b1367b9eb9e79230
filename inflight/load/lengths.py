"""Distributions of lengths in tokens, and of other whole numbers: drawn with a given generator, so repeatable.

Numbers that fall outside ``min`` and ``max`` are set to the nearer of the two (clipped, not drawn again).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, PrivateAttr, model_validator

from inflight.load.section import FileSection, Section


class Fixed(Section):
    """Always the same."""

    distribution: Literal["fixed"]
    value: int = Field(ge=0)

    def draw(self, _generator: np.random.Generator) -> int:
        return self.value


class _Between(Section):
    """The range of a distribution."""

    min: int = Field(1, ge=0)
    max: int = Field(2**20, ge=0)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"`min` is {self.min}: it must not be above `max` ({self.max})")
        return self

    def _clip(self, value: float) -> int:
        return int(min(max(round(value), self.min), self.max))


class Uniform(_Between):
    """Every whole number from ``min`` to ``max``, both included, equally often."""

    distribution: Literal["uniform"]
    min: int = Field(ge=0)
    max: int = Field(ge=0)

    def draw(self, generator: np.random.Generator) -> int:
        return int(generator.integers(self.min, self.max, endpoint=True))


class Normal(_Between):
    """The normal distribution, rounded."""

    distribution: Literal["normal"]
    mean: float = Field(gt=0)
    std: float = Field(ge=0)

    def draw(self, generator: np.random.Generator) -> int:
        return self._clip(generator.normal(self.mean, self.std))


class Lognormal(_Between):
    """The lognormal distribution, rounded: many short ones and a long tail, as prompts of people are."""

    distribution: Literal["lognormal"]
    median: float = Field(gt=0)
    sigma: float = Field(ge=0, description="standard deviation of the logarithm; the mean is median * exp(sigma**2/2)")

    def draw(self, generator: np.random.Generator) -> int:
        return self._clip(generator.lognormal(np.log(self.median), self.sigma))


class Zipf(_Between):
    """From ``min`` to ``max``; the k-th of them with a probability in proportion to ``k ** -skew``."""

    distribution: Literal["zipf"]
    skew: float = Field(gt=0)
    max: int = Field(ge=0)

    def draw(self, generator: np.random.Generator) -> int:
        weights = rank_weights(self.max - self.min + 1, self.skew)
        return self.min + int(generator.choice(len(weights), p=weights))


class FromFile(FileSection):
    """One of the whole numbers of a text file, one per line, each equally often."""

    distribution: Literal["file"]
    _lengths: list[int] = PrivateAttr()

    @model_validator(mode="after")
    def _read(self) -> FromFile:
        try:
            lines = [line for line in self.path.read_text(encoding="utf-8").split("\n") if line.strip()]
        except UnicodeDecodeError:
            raise ValueError(f"{self.file}: not UTF-8 text") from None
        bad = next((line for line in lines if not line.strip().isdecimal()), None)
        if bad is not None or not lines:
            raise ValueError(f"{self.file}: one whole number per line is expected; found {(bad or '')[:40]!r}")
        self._lengths = [int(line) for line in lines]
        return self

    def draw(self, generator: np.random.Generator) -> int:
        return self._lengths[int(generator.integers(len(self._lengths)))]


Lengths = Annotated[Fixed | Uniform | Normal | Lognormal | Zipf | FromFile, Field(discriminator="distribution")]
"""Any of the distributions, told apart by ``distribution``; ``draw`` returns one length."""


def rank_weights(count: int, skew: float) -> np.ndarray:
    """Return the probabilities of ``count`` ranks, the k-th from 1 in proportion to ``k ** -skew``."""
    weights = np.arange(1, count + 1, dtype=float) ** -skew
    return weights / weights.sum()
