"""What is measured and how it is counted: the one place of every definition; docs/measurements.md is about them.

It computes figures from the records of requests; how these were sent is not known here.
All times are seconds from the begin of the load on the client's clock; figures of latency are milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import numpy as np

from inflight.load.scenario import Slo
from inflight.report.units import with_floats

Outcome = Literal["completed", "cancelled", "refused", "failed", "unfinished"]
"""How a request ended: with its answer; cancelled by the client, as planned; not admitted; with an error; or cut off
by the end of the test. Only completed ones have latencies that count."""


class Arrival(NamedTuple):
    """A response that has text."""

    time_s: float
    tokens: int
    """New since the arrival before it, by the server's own count of output tokens; it may be 0."""


@dataclass(slots=True)
class RequestRecord:
    """What was seen of one request; only its ``Observation`` writes it, while the request runs."""

    session: int
    turn: int
    class_name: str
    sent_s: float
    ended_s: float
    outcome: Outcome
    request_id: str = ""
    """What the server's traces and logs call it."""
    scheduled_s: float | None = None
    """When it should have been sent: open loop only."""
    arrivals: Sequence[Arrival] = ()
    input_tokens: int | None = None
    output_tokens: int = 0
    """The server's counts; output tokens so far, if it did not complete."""
    cached_tokens: int | None = None
    """Prompt tokens that came from the prefix cache."""
    queue_s: float | None = None
    """Time from arrival at the engine to its first step, by the server's clock alone."""
    finish_reason: str | None = None
    error: str = ""
    """Kind and message, of a refused or failed one."""

    @property
    def completed(self) -> bool:
        """Whether the whole answer has come."""
        return self.outcome == "completed"

    @property
    def start_s(self) -> float:
        """From when latencies count: in an open loop the time it should have been sent, lest a client that is held up
        by a slow server sends less and measures nothing of it (coordinated omission)."""
        return self.sent_s if self.scheduled_s is None else self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Start to first text; None: no text came."""
        return self.arrivals[0].time_s - self.start_s if self.arrivals else None

    @property
    def e2e_s(self) -> float:
        """Start to the last response."""
        return self.ended_s - self.start_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between successive responses with text."""
        return np.diff([arrival.time_s for arrival in self.arrivals]).tolist()

    @property
    def itl_s(self) -> list[float]:
        """Time per token after the first response: one of k tokens after a gap g gives k samples of g / k.

        They add up to the time from first to last text. Text without a new token (it had been held back) counts as one.
        """
        counts = [max(arrival.tokens, 1) for arrival in self.arrivals[1:]]
        return [gap / k for gap, k in zip(self.gaps_s, counts, strict=True) for _ in range(k)]

    @property
    def mean_itl_s(self) -> float | None:
        """Mean of ``itl_s``; None: no more than one response had text."""
        samples = self.itl_s
        return sum(samples) / len(samples) if samples else None

    def passes(self, slo: Slo) -> bool:
        """Return whether a limit of ``slo`` was passed by its end, however it ended.

        Without text it has waited for it until its end; ITL is judged by the request's mean, which one text has not.
        """
        waited_s = self.e2e_s if self.ttft_s is None else self.ttft_s
        pairs = ((slo.ttft_ms, waited_s), (slo.itl_ms, self.mean_itl_s), (slo.e2e_ms, self.e2e_s))
        return any(limit is not None and value is not None and 1000 * value > limit for limit, value in pairs)

    def meets(self, slo: Slo) -> bool:
        """Return whether it completed within every limit of ``slo``; an answer without text has kept no TTFT."""
        silent = slo.ttft_ms is not None and self.ttft_s is None
        return self.completed and not silent and not self.passes(slo)

    def is_judged(self, slo: Slo) -> bool:
        """Return whether it is known if it met ``slo``: it is not of one that the client cancelled within all limits.

        One that was cancelled after a limit had passed counts: clients that leave a stuck server would hide it.
        """
        return self.outcome != "cancelled" or self.passes(slo)

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object: times in seconds to the microsecond, arrivals as pairs of time and tokens."""
        row = {field.name: getattr(self, field.name) for field in fields(self)}
        return with_floats(row, lambda seconds: round(seconds, 6))

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> RequestRecord:
        """Return the record that ``as_json`` has written."""
        return cls(**{**row, "arrivals": tuple(Arrival(*pair) for pair in row["arrivals"])})


def _known(value: float | None) -> list[float]:
    return [] if value is None else [value]


LATENCIES: dict[str, Callable[[RequestRecord], list[float]]] = {
    "ttft_ms": lambda one: _known(one.ttft_s),
    "itl_ms": lambda one: one.itl_s,
    "gap_ms": lambda one: one.gaps_s,
    "mean_itl_ms": lambda one: _known(one.mean_itl_s),
    "e2e_ms": lambda one: [one.e2e_s],
    "queue_ms": lambda one: _known(one.queue_s),
}
"""What a request has of each latency, in seconds, by the name of its figure."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Samples of one quantity. Percentiles interpolate linearly between the two nearest ranks (numpy's default)."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float], scale: float = 1.0) -> Distribution | None:
        """Return the distribution of ``samples``, each multiplied by ``scale``; None: there are none."""
        if not len(samples):
            return None
        values = np.asarray(samples, dtype=float) * scale
        p50, p90, p95, p99 = (float(value) for value in np.percentile(values, (50, 90, 95, 99)))
        return cls(len(values), float(values.mean()), p50, p90, p95, p99, float(values.max()))


@dataclass(frozen=True, slots=True)
class Figures:
    """All figures of one window of time. What has no sample is None."""

    window_s: tuple[float, float]
    requests: int
    """That started in the window."""
    outcomes: dict[str, int]
    """How many of these requests ended in each way."""
    errors: dict[str, int]
    """Kinds of error of the refused and failed ones."""
    requests_per_second: float
    """Completed in the window, whenever they started."""
    goodput: float | None
    """Requests per second that started in the window and met every limit; None: there are no limits."""
    slo_attainment: float | None
    """Their share of ``judged``."""
    judged: int
    """Requests that started in the window, failed ones included, but those that the client cancelled within limits."""
    output_tokens_per_second: float
    input_tokens_per_second: float
    total_tokens_per_second: float
    """Tokens that arrived in the window, whenever their request started: output tokens with the response that brought
    them, a prompt's tokens with its first text."""
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    """Time per token, pooled over requests."""
    gap_ms: Distribution | None
    """Time between responses, pooled over requests."""
    mean_itl_ms: Distribution | None
    """Each request's mean time per token."""
    e2e_ms: Distribution | None
    queue_ms: Distribution | None
    """Time in the server's queue."""
    send_delay_ms: Distribution | None
    """Time from the scheduled to the real sending; open loop only."""
    input_tokens: Distribution | None
    output_tokens: Distribution | None
    """Tokens of each completed request."""
    cached_share: float | None
    """Share of the completed requests' prompt tokens that came from the prefix cache."""


def measure(records: Iterable[RequestRecord], window: tuple[float, float], slo_of: Mapping[str, Slo]) -> Figures:
    """Return the figures of a window.

    Latencies are those of completed requests that started in the window, also where they ended after it: leaving those
    out would leave the slow ones out. Rates count what happened in the window.

    Args:
        records: all requests of the test.
        window: its begin (included) and end (not included), in seconds; the end is after the begin.
        slo_of: limits by class name; a class without any has none.
    """
    everything = list(records)
    (begin, end), length = window, window[1] - window[0]
    started = [one for one in everything if begin <= one.start_s < end]
    done = [one for one in started if one.completed]
    outputs = sum(tokens for time_s, tokens in output_events(everything) if begin <= time_s < end)
    inputs = sum(one.input_tokens or 0 for one in everything if one.arrivals and begin <= one.arrivals[0].time_s < end)
    of_class = [(one, slo_of.get(one.class_name, Slo())) for one in started]
    judged = [(one, slo) for one, slo in of_class if one.is_judged(slo)]
    good = sum(one.meets(slo) for one, slo in judged)
    limited = any(slo != Slo() for slo in slo_of.values())
    cached = [(one.cached_tokens, one.input_tokens or 0) for one in done if one.cached_tokens is not None]
    prompts = sum(tokens for _, tokens in cached)
    return Figures(
        window_s=window,
        requests=len(started),
        outcomes=dict(Counter(one.outcome for one in started)),
        errors=dict(Counter(one.error.partition(":")[0] for one in started if one.error)),
        requests_per_second=sum(one.completed and begin <= one.ended_s < end for one in everything) / length,
        goodput=good / length if limited else None,
        slo_attainment=good / len(judged) if limited and judged else None,
        judged=len(judged),
        output_tokens_per_second=outputs / length,
        input_tokens_per_second=inputs / length,
        total_tokens_per_second=(outputs + inputs) / length,
        send_delay_ms=send_delay_ms(everything, window),
        cached_share=sum(tokens for tokens, _ in cached) / prompts if prompts else None,
        input_tokens=Distribution.of([one.input_tokens for one in done if one.input_tokens is not None]),
        output_tokens=Distribution.of([one.output_tokens for one in done]),
        **{name: Distribution.of([s for one in done for s in of(one)], 1000) for name, of in LATENCIES.items()},
    )


def send_delay_ms(records: Iterable[RequestRecord], window: tuple[float, float]) -> Distribution | None:
    """Return how late the requests of a window were sent; None: a closed loop has no schedule."""
    started = (one for one in records if window[0] <= one.start_s < window[1])
    return Distribution.of([one.sent_s - one.scheduled_s for one in started if one.scheduled_s is not None], 1000)


def output_events(records: Iterable[RequestRecord]) -> Iterable[tuple[float, int]]:
    """Yield when how many output tokens arrived; tokens without text at the end, such as an end id, with the end."""
    for one in records:
        seen = sum(arrival.tokens for arrival in one.arrivals)
        yield from ((arrival.time_s, arrival.tokens) for arrival in one.arrivals)
        yield one.ended_s, one.output_tokens - seen
