"""When things start: the phases of a load, and the arrival times that follow from them.

An open loop sends at times that do not depend on answers; a closed loop keeps a number of requests running. Knows
nothing of requests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from inflight.load.section import Section


class Phase(Section):
    """A stretch of time with a rate (open loop) or a concurrency (closed loop), constant or going evenly to another."""

    name: str = Field("", description="for the report")
    duration_s: float = Field(gt=0, description="seconds")
    rate: float | None = Field(None, ge=0, description="sessions that arrive per second")
    to_rate: float | None = Field(None, ge=0, description="the rate at the phase's end")
    arrivals: Literal["poisson", "gamma", "constant"] = Field("poisson", description="how arrivals are spread")
    burstiness: float = Field(
        1.0,
        gt=0,
        description="of gamma arrivals, the shape of the gaps' distribution: 1 is Poisson, less is burstier; the "
        "coefficient of variation of the gaps is its inverse square root",
    )
    concurrency: int | None = Field(None, ge=0, description="sessions that run at any time")
    to_concurrency: int | None = Field(None, ge=0, description="the concurrency at the phase's end")
    steady: bool = Field(True, description="whether it belongs to the measured window")

    @model_validator(mode="after")
    def _one_kind(self) -> Phase:
        if (self.rate is None) == (self.concurrency is None):
            raise ValueError("a phase needs `rate` or `concurrency`, and not both")
        foreign = {"to_concurrency"} if self.open else {"to_rate", "arrivals"}
        foreign |= set() if self.arrivals == "gamma" else {"burstiness"}
        for name in sorted(foreign & self.model_fields_set):
            needs = "`arrivals`: gamma" if name == "burstiness" else "`concurrency`" if self.open else "`rate`"
            raise ValueError(f"`{name}` needs {needs}")
        return self

    @property
    def open(self) -> bool:
        """Whether the phase has a rate (open loop) in place of a concurrency."""
        return self.rate is not None

    @property
    def ends(self) -> tuple[float, float]:
        """Rate or concurrency at its begin and at its end."""
        pair = (self.rate, self.to_rate) if self.open else (self.concurrency, self.to_concurrency)
        first = pair[0] or 0
        return float(first), float(first if pair[1] is None else pair[1])


def starts(phases: Sequence[Phase]) -> list[float]:
    """Return when each phase begins, and when the last one ends, in seconds from the begin of the load."""
    return [0.0, *itertools.accumulate(phase.duration_s for phase in phases)]


def arrival_times(phases: Sequence[Phase], generator: np.random.Generator) -> list[float]:
    """Return the arrival times of an open loop, in seconds from its begin, in order."""
    times: list[float] = []
    for begin, phase in zip(starts(phases), phases, strict=False):
        times += (begin + _times_of(phase, generator)).tolist()
    return times


def _times_of(phase: Phase, generator: np.random.Generator) -> np.ndarray:
    """Return the arrivals of one phase, in seconds from its begin.

    A process of rate 1 is stretched by the inverse of the expected number of arrivals up to t,
    ``N(t) = r0 * t + (r1 - r0) * t**2 / (2 * d)`` (time rescaling), which gives any rate over time exactly.
    """
    (first, last), length = phase.ends, phase.duration_s
    expected = (first + last) / 2 * length
    counts = _unit_process(phase, expected, generator)
    bend = (last - first) / (2 * length)
    root = np.sqrt(np.maximum(first**2 + 4 * bend * counts, 0.0))
    return np.minimum(2 * counts / (first + root), length)


def _unit_process(phase: Phase, until: float, generator: np.random.Generator) -> np.ndarray:
    """Return the arrivals before ``until`` of a process with a mean gap of 1."""
    if phase.arrivals == "constant":
        return np.arange(0.5, until, 1.0)  # half a gap at either end: phases join without a jump
    shape = phase.burstiness if phase.arrivals == "gamma" else 1.0
    drawn = np.empty(0)
    while not drawn.size or drawn[-1] < until:
        gaps = generator.gamma(shape, 1 / shape, size=max(64, int(until)))
        drawn = np.concatenate([drawn, (drawn[-1] if drawn.size else 0.0) + np.cumsum(gaps)])
    return drawn[drawn < until]


def next_active(phases: Sequence[Phase], slot: int, now: float) -> float | None:
    """Return when slot number ``slot`` (from 0) of a closed loop may start a session, ``now`` or later; None: never.

    A slot is active while its number is below the concurrency.
    """
    for begin, phase in zip(starts(phases), phases, strict=False):
        end = begin + phase.duration_s
        if now >= end:
            continue
        first, last = phase.ends
        at = max(now, begin)
        level = first + (last - first) * (at - begin) / phase.duration_s
        if slot < level:
            return at
        if slot < last:  # a rising ramp reaches it; at the very moment it is level, hence the next float up
            reached = math.nextafter(begin + (slot - first) / (last - first) * phase.duration_s, math.inf)
            return max(reached, at)
    return None
