"""What a load does to a group of GPUs: batch, latency and throughput in the steady state."""

from __future__ import annotations

import math
from bisect import bisect_left

from inflight.export.plan.plan import PlanRequest, Point
from inflight.export.plan.roofline import Roofline, Step, StepTime

P95_SIGMAS = 1.645
"""The running sequences are close to Poisson distributed (M/G/infinity): 95 % of the time no more than the mean and so
many of its square roots."""
_FULL = 0.98
"""The share of the steps' room for prompts beyond which they count as full: the wait has no bound any more."""


class Serving:
    """A load on one copy of the model.

    In the steady state, per step, each decoding sequence gets a token and its share of new prompts is computed: for
    every ``output_tokens`` decoded, ``uncached_input`` prompt tokens. So a batch of B decoding sequences implies the
    whole step, its time t, and by Little's law (B = rate x output_tokens x t) the rate that it sustains.
    """

    def __init__(
        self, roofline: Roofline, request: PlanRequest, max_tokens_per_step: int, chunk: int | None = None
    ) -> None:
        """``chunk``: prompt tokens of a step in which others decode, at most; None: as many as it has room for."""
        self._roofline, self._request, self._budget = roofline, request, max_tokens_per_step
        self._chunk = chunk or max_tokens_per_step

    @property
    def budget_batch(self) -> int:
        """The largest batch whose share of prompt tokens a step has room for."""
        answer, prompt = self._request.output_tokens, self._request.uncached_input
        return max(1, int(min(self._budget * answer / (answer + prompt), self._chunk * answer / prompt)))

    def requests_per_second(self, batch: float) -> float:
        """Return the rate that the steady state sustains in which ``batch`` sequences decode."""
        return batch / (self._request.output_tokens * self._mean_step(batch).total)

    def point(self, batch: float) -> Point:
        """Return the steady state in which ``batch`` sequences decode."""
        time = self._mean_step(batch)
        rate = batch / (self._request.output_tokens * time.total)
        return Point(
            batch=batch,
            requests_per_second=rate,
            tokens_per_second=batch / time.total,
            ttft_ms=1000 * self._ttft(batch, rate, time.total),
            itl_ms=1000 * time.total,
            binds=time.binds,
        )

    def alone(self) -> Point:
        """Return what a request meets that has the GPUs to itself, one after the other: no wait, no other prompts."""
        request, step = self._request, self._time(1)
        seconds = self._prefill(request.input_tokens, batch=0) + request.output_tokens * step.total
        return Point(
            batch=1,
            requests_per_second=1 / seconds,
            tokens_per_second=request.output_tokens / seconds,
            ttft_ms=1000 * self._prefill(request.longest_input, batch=0),
            itl_ms=1000 * step.total,
            binds=step.binds,
        )

    def at_rate(self, rate: float, max_batch: float) -> Point | None:
        """Return the steady state at ``rate`` requests per second; None: saturated."""
        if self.requests_per_second(max_batch) < rate:
            return None
        low, high = 0.0, float(max_batch)
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self.requests_per_second(middle) < rate else (low, middle)
        return self.point(high)

    def largest(self, max_batch: int) -> int:
        """Return the largest batch, at most ``max_batch``, that meets the objectives; 0 where not even one does."""
        ttft, itl = self._request.slo_ttft_ms, self._request.slo_itl_ms

        def misses(batch: int) -> bool:
            point = self.point(batch)
            return (ttft is not None and point.ttft_ms > ttft) or (itl is not None and point.itl_ms > itl)

        return bisect_left(range(1, max_batch + 1), True, key=misses)

    def _mean_step(self, batch: float) -> StepTime:
        """Return the mean step while ``batch`` sequences decode and their successors' prompts are computed."""
        request, ends = self._request, batch / self._request.output_tokens
        return self._time(batch, ends * request.uncached_input, request.input_tokens, ends)

    def _ttft(self, batch: float, rate: float, step_s: float) -> float:
        """Return the time to the first token of a long prompt: the rest of the running step, the prompts before it, its
        own chunks.

        The wait for prompts before it is that of an M/D/1 queue: prompts pass through the steps' token budget one after
        another, and each takes its share of steps that are full of them.
        """
        request, room = self._request, self._room(batch)
        full = self._time(batch, room, request.input_tokens, room / max(1.0, request.uncached_input)).total
        served = full * request.uncached_input / room
        share = min(rate * served, _FULL)
        return step_s / 2 + share / (2 * (1 - share)) * served + self._prefill(request.longest_input, batch)

    def _room(self, batch: float) -> float:
        """Return the prompt tokens that a step has room for in which ``batch`` sequences decode."""
        return max(1.0, min(self._budget - batch, self._chunk if batch else self._budget))

    def _prefill_steps(self, prompt: int, batch: float) -> int:
        return math.ceil(prompt * (1 - self._request.cache_hit_rate) / self._room(batch))

    def _prefill(self, prompt: int, batch: float) -> float:
        """Return the seconds of the steps that compute a prompt, with ``batch`` sequences decoding in them."""
        steps = self._prefill_steps(prompt, batch)
        return steps * self._time(batch, prompt * (1 - self._request.cache_hit_rate) / steps, prompt, 1 / steps).total

    def _time(self, decodes: float, tokens: float = 0, prompt: float = 0, ends: float = 0) -> StepTime:
        """Return the time of a step with ``tokens`` of prompts of this length, of which ``ends`` end.

        A prompt's uncached tokens attend in the mean to all that is cached, and half of the rest.
        """
        request = self._request
        attended = prompt * (1 + request.cache_hit_rate) / 2
        return self._roofline.time(
            Step(decodes, request.input_tokens + request.output_tokens / 2, tokens, attended, ends)
        )


def steady_batch(most: int) -> float:
    """Return the mean of running sequences that are at most ``most`` 95 % of the time: m + 1.645 sqrt(m) = most."""
    root = ((P95_SIGMAS**2 + 4 * most) ** 0.5 - P95_SIGMAS) / 2
    return root * root
