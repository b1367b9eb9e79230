"""Simulates a full batch on the portable engine: its scheduler, step by step, with the times that a plan predicts.

The traffic is a closed loop: as many clients as a batch has sequences, each of which asks again once its answer has
ended. Lengths are spread evenly between half of the mean and one and a half times it, see ``SPREAD``. The scheduler is
``engine.scheduler`` in its mode ``inflight``: who decodes has a token in each step; what is left of the step's budget,
and no more than a chunk, goes to the prompts in the order in which they came.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from inflight.export.plan.plan import PlanRequest, Point
from inflight.export.plan.roofline import Roofline, Step, StepTime

SPREAD = (0.5, 1.5)
"""The shortest and the longest prompt, and answer, by the mean's length."""
_TURNAROUND_S = 0.01
"""From an answer's last token until the next prompt of its client is in the queue: over HTTP, and the tokenizer. So it
misses the step that begins with the last token's end."""
_MEASURED, _LEAST = 4, 128
"""Answers of each client, on average, of which the figures are; and answers of all, at least."""
_MOST_STEPS = 20_000
"""Steps of which the figures are, unless none has ended an answer; they take a second."""


@dataclass(eq=False)
class _Stream:
    """A client's request."""

    asked_s: float
    prompt: int
    """Tokens to compute before its first token."""
    cached: int
    """Tokens of the prompt that the prefix cache has."""
    answer: int
    is_first: bool = False
    """Whether it ran when the loop began."""
    computed: int = 0
    """Tokens of the prompt that are computed."""
    times_s: list[float] = field(default_factory=list)
    """When its tokens came."""

    @property
    def left(self) -> int:
        """Tokens of the prompt that are left to compute."""
        return self.prompt - self.computed

    @property
    def context(self) -> int:
        """Tokens that have keys and values."""
        return self.cached + self.computed + len(self.times_s)

    @property
    def mean_gap_s(self) -> float | None:
        """The mean time between its tokens; None: it has one."""
        gaps = len(self.times_s) - 1
        return (self.times_s[-1] - self.times_s[0]) / gaps if gaps else None


class _Clients:
    """Draws requests."""

    def __init__(self, request: PlanRequest) -> None:
        self._request, self._drawn = request, Random(0)

    def ask(self, now_s: float) -> _Stream:
        """Return a new request."""
        prompt = self._length(self._request.input_tokens)
        cached = min(int(prompt * self._request.cache_hit_rate), prompt - 1)
        return _Stream(now_s, prompt - cached, cached, self._length(self._request.output_tokens))

    def _length(self, mean: int) -> int:
        shortest, longest = SPREAD
        return max(1, round(mean * self._drawn.uniform(shortest, longest)))


@dataclass
class _Figures:
    """The measured steps and answers so far."""

    steps: list[tuple[int, StepTime]] = field(default_factory=list)
    """Sequences that decode in each step, and its time."""
    answers: list[_Stream] = field(default_factory=list)
    seconds: float = 0.0
    """The time of the steps, and that between them in which nobody had a request."""

    def point(self) -> Point:
        """Return their means."""
        spent = Counter[str]()
        for _, time in self.steps:
            spent.update(vars(time))
        waits = [stream.times_s[0] - stream.asked_s for stream in self.answers]
        gaps = [gap for stream in self.answers if (gap := stream.mean_gap_s) is not None] or waits
        return Point(
            batch=sum(decoding * time.total for decoding, time in self.steps) / self.seconds,
            requests_per_second=len(self.answers) / self.seconds,
            tokens_per_second=sum(stream.answer for stream in self.answers) / self.seconds,
            ttft_ms=1000 * sum(waits) / len(waits),
            itl_ms=1000 * sum(gaps) / len(gaps),
            binds=max(spent, key=lambda name: spent[name]),
        )


class FullBatch:
    """Clients in a closed loop, all of whose requests may run at once, and the engine that serves them."""

    def __init__(
        self, roofline: Roofline, request: PlanRequest, streams: int, step_tokens: int, chunk: int | None
    ) -> None:
        """``step_tokens`` and ``chunk`` are the engine's ``max_tokens_per_step`` and ``prefill_chunk_tokens``."""
        self._roofline, self._streams = roofline, streams
        self._step_tokens, self._chunk = step_tokens, chunk or step_tokens
        self._clients, self._now = _Clients(request), 0.0
        self._running = [self._begun(number) for number in range(streams)]
        self._coming = deque[_Stream]()

    def measure(self) -> Point:
        """Return what each client meets in the mean, once those that it began with have ended."""
        while any(stream.is_first for stream in self._running):
            self._step(_Figures())
        figures, began = _Figures(), self._now
        most = max(_MEASURED * self._streams, _LEAST)
        while len(figures.answers) < most and (len(figures.steps) < _MOST_STEPS or not figures.answers):
            self._step(figures)
        figures.seconds = self._now - began
        return figures.point()

    def _begun(self, number: int) -> _Stream:
        """Return a request that decodes already: they are at different places, as they are later on."""
        stream = self._clients.ask(0.0)
        stream.is_first, stream.computed = True, stream.prompt
        stream.times_s = [0.0] * (1 + (stream.answer - 1) * number // self._streams)
        return stream

    def _step(self, figures: _Figures) -> None:
        """Make a step, and note it."""
        self._join()
        decoding = [stream for stream in self._running if not stream.left]
        parts = self._prefills(len(decoding))
        time = self._roofline.time(_work(decoding, parts))
        self._now += time.total
        figures.steps.append((len(decoding), time))
        figures.answers += self._advance(decoding, parts)

    def _join(self) -> None:
        """Have those run whose prompts are in the queue now; where nobody runs, the clock goes on to the first."""
        if not self._running:
            self._now = max(self._now, self._coming[0].asked_s + _TURNAROUND_S)
        while self._coming and self._coming[0].asked_s + _TURNAROUND_S <= self._now:
            self._running.append(self._coming.popleft())

    def _prefills(self, decoding: int) -> dict[_Stream, int]:
        """Return how many tokens of their prompts a step computes, beside so many sequences that decode."""
        room = max(0, self._step_tokens - decoding)
        if decoding:
            room = min(room, self._chunk)
        parts = dict[_Stream, int]()
        for stream in self._running:
            if stream.left and room:
                parts[stream] = min(stream.left, room)
                room -= parts[stream]
        return parts

    def _advance(self, decoding: Sequence[_Stream], parts: dict[_Stream, int]) -> list[_Stream]:
        """End a step: tokens come, and those whose answers end ask again. Return these answers."""
        for stream, count in parts.items():
            stream.computed += count
        for stream in (*decoding, *(stream for stream in parts if not stream.left)):
            stream.times_s.append(self._now)
        ended = [stream for stream in self._running if len(stream.times_s) >= stream.answer]
        self._running = [stream for stream in self._running if stream not in ended]
        self._coming.extend(self._clients.ask(self._now) for _ in ended)
        return ended


def _work(decoding: Sequence[_Stream], parts: dict[_Stream, int]) -> Step:
    """Return the work of a step; a prompt's token attends in the mean to what is there, and half of the rest."""
    tokens = sum(parts.values())
    attended = sum(count * (stream.context + count / 2) for stream, count in parts.items())
    return Step(
        decodes=len(decoding),
        context=sum(stream.context for stream in decoding) / max(1, len(decoding)),
        prefill_tokens=tokens,
        prefill_context=attended / max(1, tokens),
        prefill_ends=sum(stream.left == count for stream, count in parts.items()),
    )
