"""Quality in production: a share of the answers is scored again by a reference, and what differs is counted.

The reference is another deployment of the same model, in full precision or of another engine. It gets a prompt with its
answer and returns the log-probs of its tokens, which are compared with those that they were served with. An answer is
sent there when it has ended; none waits for it, and none fails by it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from array import array
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

import numpy as np

from inflight.errors import EngineFailure
from inflight.gateway.engine_client import EngineDelta, GenerateRequest
from inflight.gateway.metrics import GatewayMetrics
from inflight.gateway.resuming import Engine
from inflight.settings.gateway_quality import GatewayQualitySettings

log = logging.getLogger(__name__)

_LEAST = -100.0
"""In place of log-probs below it, so that one token that is impossible to either side does not outweigh all others."""
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "guide": None}
_EMPTY = "top_k min_p presence_penalty frequency_penalty min_tokens bad_words".split()
"""Fields, with their values or empty, with which tokens are drawn from the model's own distribution."""


def mode_of(request: GenerateRequest) -> str:
    """Return how tokens are chosen, one of ``inflight.metrics.QUALITY_MODES``."""
    if not request.temperature:
        return "greedy"
    if any(getattr(request, name) for name in _EMPTY) or request.bias is not None:
        return "shaped"
    own = all(getattr(request, name) == value for name, value in _NEUTRAL.items())
    return "plain" if own else "shaped"


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """One answer that has ended."""

    prompt: array[int]
    tokens: array[int]
    log_probs: array[float]
    """With which they were served."""
    mode: str


@dataclass(slots=True)
class Sample:
    """A request whose answers are scored again; it sees what the engine sends."""

    request: GenerateRequest
    """As it is to be sent: with log-probs."""
    add: Callable[[ServedAnswer], None]
    """Takes what has ended."""
    _tokens: dict[int, array[int]] = field(default_factory=dict)
    _log_probs: dict[int, array[float]] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)

    def take(self, delta: EngineDelta) -> None:
        """Take what has come of one sequence."""
        tokens = self._tokens.setdefault(delta.index, array("i"))
        log_probs = self._log_probs.setdefault(delta.index, array("d"))
        tokens.extend(delta.tokens)
        log_probs.extend(delta.log_probs)
        if delta.finish_reason is not None:
            self.end(delta.index)

    def end(self, index: int) -> None:
        """Have the answer of a sequence scored, which has ended; what the engine sends of it later is left out."""
        tokens, log_probs = self._tokens.pop(index, None), self._log_probs.pop(index, None)
        if tokens and log_probs and index not in self._ended:
            self.add(ServedAnswer(array("i", self.request.prompt), tokens, log_probs, mode_of(self.request)))
        self._ended.add(index)


class QualityMonitor:
    """Samples requests, and compares their answers with the reference's log-probs in a task of its own."""

    def __init__(
        self,
        settings: GatewayQualitySettings,
        reference: Engine,
        metrics: GatewayMetrics,
        longest: int | None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """
        Args:
            settings: how many answers, and how long they wait.
            reference: the engine that scores them.
            metrics: count what differs.
            longest: tokens that a prompt and its answer have at most; None: that is not known.
            draw: returns a number in [0, 1) for each request.
        """
        self._settings, self._reference, self._metrics = settings, reference, metrics
        self._longest, self._draw = longest, draw
        self._waiting: asyncio.Queue[ServedAnswer] = asyncio.Queue(settings.max_waiting)
        self._task: asyncio.Task[None] | None = None
        self._fails = False
        """Whether the last comparison has failed."""

    def sample(self, request: GenerateRequest) -> Sample | None:
        """Return a request as a sample; None: it is none."""
        if self._draw() >= self._settings.sample_ratio:
            return None
        return Sample(replace(request, log_probs=True), self._add)

    def start(self) -> None:
        """Compare what comes, until ``stop``."""
        self._task = asyncio.create_task(self._keep_comparing(), name="quality")

    async def stop(self) -> None:
        """Forget what waits, and close the connection to the reference."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._reference.close()

    def _add(self, answer: ServedAnswer) -> None:
        try:
            self._waiting.put_nowait(answer)
        except asyncio.QueueFull:
            self._metrics.quality_answer("dropped")

    async def _keep_comparing(self) -> None:
        while True:
            answer = await self._waiting.get()
            try:
                async with asyncio.timeout(self._settings.timeout_s):
                    await self._compare(answer)
                self._fails = False
            except Exception as error:  # whatever it is, no request may know of it
                self._metrics.quality_answer("failed")
                if not self._fails:  # once, and without its message, which may have parts of the prompt
                    log.warning("the reference does not score answers: %s", type(error).__name__)
                self._fails = True

    async def _compare(self, answer: ServedAnswer) -> None:
        """Have the reference score an answer, and count what differs.

        Raises:
            InflightError: the reference's error.
            TimeoutError: it takes too long.
        """
        ids = [*answer.prompt, *answer.tokens][: None if self._longest is None else self._longest - 1]
        count = len(ids) - len(answer.prompt)
        if not count:  # the prompt alone fills the reference's context
            raise EngineFailure("there is no room for the answer")
        request = GenerateRequest(prompt=ids, max_tokens=1, stream=False, prompt_log_probs=1)
        scores, likeliest = None, None
        async with aclosing(self._reference.generate(request)) as deltas:
            async for delta in deltas:
                scores = delta.outputs.get("prompt_log_probs", scores)
                likeliest = delta.outputs.get("prompt_top_log_prob_ids", likeliest)
        if scores is None or likeliest is None or scores.size != len(ids) - 1 or len(answer.log_probs) < count:
            raise EngineFailure("the log-probs of an answer are not whole")
        served = np.maximum(np.array(answer.log_probs[:count]), _LEAST)
        differences = served - np.maximum(scores.reshape(-1)[-count:].astype(np.float64), _LEAST)
        agreeing = np.array(answer.tokens[:count]) == likeliest.reshape(len(ids) - 1, -1)[-count:, 0]
        self._metrics.quality_compared(answer.mode, differences, int(agreeing.sum()))
