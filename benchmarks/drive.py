"""Drives the portable engine in this process and notes when each token came: no server, no thread, no waiting."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.checkpoints import VOCAB
from inflight.engine.engine import Engine
from inflight.engine.request import Output, Request, RequestMetrics
from inflight.sampling import SamplingParams


@dataclass
class Stream:
    """What was seen of one request. Times are ``time.perf_counter()``."""

    submitted_s: float
    arrivals_s: list[float] = field(default_factory=list)
    """The time of each token."""
    tokens: list[int] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    """The engine's, from its end on."""
    ended: bool = False

    @property
    def ttft_s(self) -> float:
        """Time to its first token."""
        return self.arrivals_s[0] - self.submitted_s

    @property
    def itl_s(self) -> list[float]:
        """Times between its tokens."""
        return np.diff(self.arrivals_s).tolist()


class Driver:
    """Submits requests to an engine and steps it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._streams: dict[int, Stream] = {}

    def submit(self, request: Request) -> Stream:
        """Put a request into the queue."""
        self.engine.validate(request)
        stream = self._streams[request.key] = Stream(time.perf_counter())
        self.engine.submit(request)
        return stream

    def step(self) -> None:
        """Do one step and note what it made.

        Raises:
            InflightError: a request failed.
        """
        outputs = self.engine.step()
        now = time.perf_counter()
        for output in outputs:
            self._note(output, now)

    def _note(self, output: Output, now: float) -> None:
        if output.error is not None:
            raise output.error
        stream = self._streams[output.key]
        stream.arrivals_s += [now] * len(output.tokens)
        stream.tokens += output.tokens
        if output.finished:
            del self._streams[output.key]
            stream.metrics, stream.ended = output.metrics or stream.metrics, True

    def finish(self) -> None:
        """Step until the engine is idle."""
        while self.engine.busy:
            self.step()

    def run(self, requests: Iterable[Request]) -> list[Stream]:
        """Submit all, step until all have ended, and return what was seen of each."""
        streams = [self.submit(request) for request in requests]
        self.finish()
        return streams


def ask(prompt: Sequence[int], max_tokens: int, priority: int = 0) -> Request:
    """Return a greedy request for exactly so many tokens."""
    return Request(list(prompt), SamplingParams(max_tokens, ignore_eos=True), priority=priority)


def prompts(generator: np.random.Generator, count: int, length: int) -> list[list[int]]:
    """Return so many random prompts of so many tokens; no two begin alike, but by chance."""
    return generator.integers(1, VOCAB, (count, length)).tolist()
