"""Figures from several polls of a server: rates, latencies and shares over the last seconds."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from inflight.metrics import FAMILIES
from inflight.top.poller import Buckets, Page, Poll

WINDOW_S = 10.0
"""Over which rates, shares and quantiles are taken."""
SERIES_S = 60.0

GENERATED, PROMPT, CACHED, REQUESTS, STEPS, STEP_SEQUENCES = (
    FAMILIES[f"inflight_{name}_total"].name
    for name in ("generated_tokens", "prompt_tokens", "cached_tokens", "requests", "steps", "step_sequences")
)
STEP = FAMILIES["inflight_step_seconds"].name
START = FAMILIES["inflight_start_time_seconds"].name
LATENCIES = {
    "TTFT": FAMILIES["inflight_time_to_first_token_seconds"].name,
    "queue": FAMILIES["inflight_request_queue_seconds"].name,
    "prefill": FAMILIES["inflight_request_prefill_seconds"].name,
    "ITL": FAMILIES["inflight_inter_token_seconds"].name,
    "whole request": FAMILIES["inflight_request_duration_seconds"].name,
}
"""What is shown, by the name it is shown under."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What happened over the last seconds. None: not known, or nothing happened that could be measured."""

    window_s: float = 0.0
    output_tokens_per_s: float | None = None
    input_tokens_per_s: float | None = None
    requests_per_s: float | None = None
    """Finished and refused requests."""
    steps_per_s: float | None = None
    step_s: float | None = None
    """The mean time of a step."""
    batch: float | None = None
    """Sequences per step, mean."""
    hit_rate: float | None = None
    """Share of the prompts' tokens that came from the prefix cache."""
    latencies: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    """The median and the 99th percentile of each of ``LATENCIES``, in seconds."""
    series: tuple[float, ...] = ()
    """Output tokens per second, poll by poll, over the last minute."""


class History:
    """The polls of the last minute that have a page of metrics."""

    def __init__(self) -> None:
        self._pages: deque[tuple[float, Page]] = deque()

    def add(self, poll: Poll) -> None:
        """Take a poll. Where a stage has started anew its counters have too, and the older polls are of no use."""
        if not isinstance(poll.page, Page):
            return
        if self._pages and _value(poll.page, START) != _value(self._pages[-1][1], START):
            self._pages.clear()
        self._pages.append((poll.at_s, poll.page))
        # A rate needs two, however far apart the polls are.
        while len(self._pages) > 2 and poll.at_s - self._pages[0][0] > SERIES_S:
            self._pages.popleft()

    def figures(self, shown: Poll) -> Figures:
        """Return the figures up to the newest poll with metrics; none if ``shown``, the poll beside them, has none."""
        if len(self._pages) < 2 or not isinstance(shown.page, Page):
            return Figures()
        now, new = self._pages[-1]
        then, old = next(one for one in self._pages if now - one[0] <= WINDOW_S or one is self._pages[-2])
        seconds = now - then

        def gained(name: str) -> float:
            return _value(new, name) - _value(old, name)

        def quantiles(name: str) -> tuple[float | None, float | None]:
            before = old.buckets(name)
            buckets = {bound: count - before.get(bound, 0.0) for bound, count in new.buckets(name).items()}
            return quantile(buckets, 0.5), quantile(buckets, 0.99)

        steps, prompt = gained(STEPS), gained(PROMPT)
        return Figures(
            window_s=seconds,
            output_tokens_per_s=gained(GENERATED) / seconds,
            input_tokens_per_s=prompt / seconds,
            requests_per_s=gained(REQUESTS) / seconds,
            steps_per_s=steps / seconds,
            step_s=gained(f"{STEP}_sum") / steps if steps else None,
            batch=gained(STEP_SEQUENCES) / steps if steps else None,
            hit_rate=gained(CACHED) / prompt if prompt else None,
            latencies={shown: quantiles(name) for shown, name in LATENCIES.items()},
            series=tuple(
                (_value(late, GENERATED) - _value(early, GENERATED)) / (at - before)
                for (before, early), (at, late) in pairwise(self._pages)
            ),
        )


def _value(page: Page, name: str) -> float:
    return page.value(name) or 0.0


def quantile(buckets: Buckets, share: float) -> float | None:
    """Return the value below which ``share`` of the observations lie; None where there are none.

    As Prometheus' ``histogram_quantile``: linear within a bucket, the first of which begins at 0. What lies above the
    last finite bound counts as that bound.
    """
    bounds = [(0.0, 0.0), *buckets.items()]
    rank = share * bounds[-1][1]
    if not rank:
        return None
    for (low, below), (high, upto) in pairwise(bounds):
        if upto >= rank:
            return low if math.isinf(high) else low + (high - low) * (rank - below) / (upto - below)
    return None
