"""What a load does to a group of GPUs: batch, latency and throughput in the steady state."""

from __future__ import annotations

import math
from dataclasses import dataclass

from inflight.export.plan.request import PlanRequest
from inflight.export.plan.roofline import Roofline, Step, StepTime

P95_SIGMAS = 1.645
"""The running sequences are close to Poisson distributed (M/G/infinity): 95 % of the time no more than the mean and so
many of its square roots."""


@dataclass(frozen=True)
class Point:
    """A steady state of one copy of the model."""

    batch: float
    """Mean sequences that decode."""
    requests_per_second: float
    tokens_per_second: float
    """Generated."""
    ttft_ms: float
    """Of a prompt of P95 length."""
    itl_ms: float
    """Mean time between two tokens of a stream."""
    binds: str
    """What most of a step's time goes to: bandwidth, compute, overhead or communication."""


class Serving:
    """A load on one copy of the model.

    In the steady state, per step, each decoding sequence gets a token and its share of new prompts is computed: for
    every ``output_tokens`` decoded, ``uncached_input`` prompt tokens. So a batch of B decoding sequences implies the
    whole step, its time t, and by Little's law (B = rate x output_tokens x t) the rate that it sustains.
    """

    def __init__(self, roofline: Roofline, request: PlanRequest, max_tokens_per_step: int) -> None:
        self._roofline, self._request, self._budget = roofline, request, max_tokens_per_step

    @property
    def budget_batch(self) -> int:
        """The largest batch whose share of prompt tokens is within the token budget of a step."""
        request = self._request
        return max(1, int(self._budget * request.output_tokens / (request.output_tokens + request.uncached_input)))

    def step_time(self, batch: float) -> StepTime:
        """Return the mean step while ``batch`` sequences decode and their successors' prompts are computed."""
        request = self._request
        ends = batch / request.output_tokens
        return self._roofline.time(
            Step(
                decodes=batch,
                context=request.input_tokens + request.output_tokens / 2,
                prefill_tokens=ends * request.uncached_input,
                prefill_context=_prefill_context(request.input_tokens, request.cache_hit_rate),
                prefill_ends=ends,
            )
        )

    def tokens_per_second(self, batch: float) -> float:
        """Return what the steady state generates in which ``batch`` sequences decode."""
        return batch / self.step_time(batch).total

    def point(self, batch: float) -> Point:
        """Return the steady state in which ``batch`` sequences decode."""
        time = self.step_time(batch)
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
        request = self._request
        ttft = self._prefill(request.longest_input, batch=0)
        step = self._roofline.time(Step(decodes=1, context=request.input_tokens + request.output_tokens / 2))
        seconds = self._prefill(request.input_tokens, batch=0) + request.output_tokens * step.total
        return Point(
            batch=1,
            requests_per_second=1 / seconds,
            tokens_per_second=request.output_tokens / seconds,
            ttft_ms=1000 * ttft,
            itl_ms=1000 * step.total,
            binds=step.binds,
        )

    def at_rate(self, rate: float, max_batch: float) -> Point | None:
        """Return the steady state at ``rate`` requests per second; None: saturated."""
        if self._requests_per_second(max_batch) < rate:
            return None
        low, high = 0.0, float(max_batch)
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self._requests_per_second(middle) < rate else (low, middle)
        return self.point(high)

    def holds(self, point: Point) -> bool:
        """Whether the objectives are met."""
        request = self._request
        return (request.slo_ttft_ms is None or point.ttft_ms <= request.slo_ttft_ms) and (
            request.slo_itl_ms is None or point.itl_ms <= request.slo_itl_ms
        )

    def largest(self, max_batch: int) -> int:
        """Return the largest batch, at most ``max_batch``, that meets the objectives; 0 where not even one does."""
        low, high = 0, max_batch
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.holds(self.point(middle)) else (low, middle - 1)
        return low

    def _requests_per_second(self, batch: float) -> float:
        return batch / (self._request.output_tokens * self.step_time(batch).total)

    def _ttft(self, batch: float, rate: float, step_s: float) -> float:
        """Return the time to the first token of a P95 prompt: the rest of the running step, the prompts before it, its
        own chunks.

        The wait for prompts before it is that of an M/M/1 queue whose service is the time that a mean prompt adds.
        """
        request = self._request
        added = self._prefill(request.input_tokens, batch) - self._prefill_steps(request.input_tokens, batch) * step_s
        share = min(rate * max(added, 0.0), 0.999)
        return step_s / 2 + share / (1 - share) * max(added, 0.0) + self._prefill(request.longest_input, batch)

    def _prefill_steps(self, prompt: int, batch: float) -> int:
        return math.ceil(prompt * (1 - self._request.cache_hit_rate) / self._chunk(batch))

    def _chunk(self, batch: float) -> float:
        return max(1.0, self._budget - batch)

    def _prefill(self, prompt: int, batch: float) -> float:
        """Return the seconds of the steps that compute a prompt, with ``batch`` sequences decoding in them."""
        request, steps = self._request, self._prefill_steps(prompt, batch)
        chunk = prompt * (1 - request.cache_hit_rate) / steps
        step = Step(
            decodes=batch,
            context=request.input_tokens + request.output_tokens / 2,
            prefill_tokens=chunk,
            prefill_context=_prefill_context(prompt, request.cache_hit_rate),
            prefill_ends=1 / steps,
        )
        return steps * self._roofline.time(step).total


def _prefill_context(prompt: float, cache_hit_rate: float) -> float:
    """Return the mean tokens that a prompt's uncached tokens attend to: all that is cached, and half of the rest."""
    return prompt * (1 + cache_hit_rate) / 2


def steady_batch(most: int) -> float:
    """Return the mean of running sequences that are at most ``most`` 95 % of the time: m + 1.645 sqrt(m) = most."""
    root = ((P95_SIGMAS**2 + 4 * most) ** 0.5 - P95_SIGMAS) / 2
    return root * root
