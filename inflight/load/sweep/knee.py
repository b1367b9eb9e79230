"""What a sweep has found: the knee of the throughput-latency curve, and the highest load that keeps the limits.

R. Jain (The Art of Computer Systems Performance Analysis, 1991, section 3.3) calls the two the knee capacity and the
usable capacity. Where the knee is depends on the loop:

closed loop   the concurrency with the most power, throughput / mean latency (L. Kleinrock, "Power and Deterministic
              Rules of Thumb", ICC 1979). Below it a request more adds throughput, above it only waiting. Of a server
              with c places that is c, or as N = X * R says (Little's law) the N at which the asymptotes
              X = N / R_min and X = X_max meet.
open loop     the rate at which the asymptotes X = offered and X = X_max meet: below it everything is answered, above
              it the queue grows for as long as the load lasts, and latencies say how long that was and nothing else.
              X_max is the highest throughput of all steps; steps above the knee show it best, as they never idle. A
              session is one request there, so the knee is at X_max sessions per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight.load.sweep.search import Plan, borders, keeping_limits, keeping_up
from inflight.load.sweep.step import Level


@dataclass(frozen=True, slots=True)
class Knee:
    """The knee of the throughput-latency curve."""

    load: float
    """Sessions per second, or at a time."""
    requests_per_second: float
    output_tokens_per_second: float
    below: float | None
    """Open loop: the highest load that the server kept up with, of those that are no more than it ever answered."""
    above: float | None
    """Open loop: the lowest that it did not keep up with."""


@dataclass(frozen=True, slots=True)
class Usable:
    """The highest load that keeps the limits."""

    load: float
    goodput: float
    """Requests per second."""
    attainment: float
    """Share of the requests that kept every limit."""
    broken_at: float | None
    """The lowest load at which the server broke them; None: none that was tried."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What a sweep says."""

    knee: Knee | None
    usable: Usable | None
    notes: tuple[str, ...]
    """Why something was not found, or what holds it back."""


def find(plan: Plan, levels: Sequence[Level]) -> Findings:
    """Return what the measured levels say; a sweep that was interrupted may have found less."""
    notes = []
    bound = [level.load for level in levels if level.client_bound]
    if bound:
        notes.append(
            f"The client was the bottleneck at a load of {min(bound):g}: it is no answer, and what lies above it was "
            f"not measured."
        )
    told = [level for level in levels if not level.client_bound]
    knee = (_open_knee if plan.open else _closed_knee)(told)
    if knee is None:
        notes.append("No knee: the highest load that was measured did not saturate the server.")
    usable, reason = (None, "") if plan.share is None else _usable(plan, told)
    return Findings(knee, usable, tuple([*notes, reason] if reason else notes))


def _open_knee(levels: list[Level]) -> Knee | None:
    _, failing = borders(levels, keeping_up().passes)
    if failing is None:
        return None
    best = max(levels, key=lambda level: level.answered)
    load = min(best.answered, failing.load)
    return Knee(
        load=load,
        requests_per_second=best.answered,
        output_tokens_per_second=best.output_tokens_per_second,
        # What was answered tells more than a queue that has hardly begun to grow.
        below=max((level.load for level in levels if level.load <= load and level.load < failing.load), default=None),
        above=failing.load,
    )


def _closed_knee(levels: list[Level]) -> Knee | None:
    """Return the level with the most power; at the highest load of all it may still be on its way up."""
    best = max(levels, key=lambda level: level.power, default=None)
    if best is None or best is levels[-1] or not best.power:
        return None
    return Knee(best.load, best.answered, best.output_tokens_per_second, below=None, above=None)


def _usable(plan: Plan, levels: Sequence[Level]) -> tuple[Usable | None, str]:
    passing, failing = borders(levels, keeping_limits(plan).passes)
    if passing is None:
        return None, "Even the lowest load that was measured did not keep the limits." if failing else ""
    reason = "" if failing else "The limits held at every load that was measured: the highest may be higher."
    usable = Usable(passing.load, passing.goodput or 0.0, passing.attainment, failing.load if failing else None)
    return usable, reason
