"""An engine that may break away: its restart is waited for, and what it was generating goes on with the same tokens.

The gateway knows the prompt, the tokens and log-probs that have come, and the seed. So a sequence whose engine has gone
is asked for again behind its tokens (``resumed_ids``), and who reads the deltas sees one stream.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from inflight.client.errors import ServerUnreachable
from inflight.errors import DeadlineExceeded, EngineFailure, InflightError, NotFound, QueueFull
from inflight.gateway.engine_client import EngineDelta, GenerateRequest
from inflight.gateway.errors import crashed
from inflight.gateway.merging import AT_ONCE, merged
from inflight.gateway.metrics import GatewayMetrics
from inflight.gateway.readiness import Readiness
from inflight.sampling import MAX_SEED

log = logging.getLogger(__name__)

MOST_CRASHES = 2
"""Crashes that one request survives, so that one that kills the engine does not do so again and again. A request that
has produced a token survives one crash more: it was probably a bystander, since the one that kills usually has none."""
_PAUSE_S, _MOST_PAUSE_S = 0.1, 0.5
"""Seconds before the first new try after a break, of which each further one waits twice as many; and the most."""
_CRASHED = "crashed_again"
"""Why a request that has met one crash more does not go on."""


class Engine(Protocol):
    """What generates; ``EngineClient`` describes both methods."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineDelta, None]:
        """Generate."""

    async def close(self) -> None:
        """Close the connection."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """What happens to a request whose engine breaks away."""

    enabled: bool
    """Whether it goes on; else it ends with the error."""
    behind_tokens: bool
    """Whether the engine goes on behind tokens; else a request of which any have come ends with the error."""
    wait_s: float
    """Seconds that it waits for an engine that takes nothing; and, unless ``kept``, for one that is away."""
    kept: bool
    """Whether this process ends when the engine is given up: an engine that is away is waited for until then."""


class ResumingEngine:
    """The engine as endpoints use it."""

    def __init__(self, engine: Engine, readiness: Readiness, metrics: GatewayMetrics, resumption: Resumption) -> None:
        self._engine, self._readiness, self._metrics = engine, readiness, metrics
        self._resumption = resumption

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineDelta, None]:
        """Generate, and yield what comes, also of an engine that starts again; closing the generator cancels it all.

        Raises:
            InflightError: the engine's error; or how it broke away, where the request cannot go on.
            ApiError: 503: the engine was away, and has not come back in time; 500: it has crashed once too often.
        """
        answer = _Answer(request)
        if not await self._comes(answer) and not answer.is_late:
            self._readiness.check()
        while not answer.is_late:
            try:
                async with aclosing(self._deltas(answer)) as deltas:
                    async for delta in deltas:
                        self._count(answer)
                        yield answer.take(delta)
                if not answer.unfinished:
                    return
                raise ServerUnreachable("the engine's stream ended before its sequences did", broke=True)
            except (ServerUnreachable, NotFound, QueueFull) as error:
                await self._recover(answer, error)
        for delta in answer.cut_off():
            yield delta

    async def close(self) -> None:
        """Close the connection to the engine."""
        await self._engine.close()

    async def _deltas(self, answer: _Answer) -> AsyncGenerator[EngineDelta, None]:
        """Ask for all that has not come, and yield it."""
        answer.sent()
        if not answer.has_begun:
            async with aclosing(self._engine.generate(answer.whole())) as deltas:
                async for delta in deltas:
                    yield delta
            return
        numbers = answer.unfinished
        streams = [self._engine.generate(answer.rest(number)) for number in numbers]
        async with aclosing(merged(streams, AT_ONCE)) as parts:
            async for place, delta in parts:
                yield replace(delta, index=numbers[place])

    async def _recover(self, answer: _Answer, error: InflightError) -> None:
        """Wait until the request can be sent again, or its deadline has passed. Raises the error where it cannot."""
        if not self._resumption.enabled or (isinstance(error, QueueFull) and not answer.is_broken):
            raise error
        answer.lose(error, self._readiness.starts)
        why_not = await self._why_not(answer)
        if why_not:
            self._metrics.resumed(why_not)
            raise (crashed() if why_not == _CRASHED else error) from error

    async def _why_not(self, answer: _Answer) -> str | None:
        """Wait for the engine, and return why the request cannot go on; None: it can."""
        if answer.crashes > MOST_CRASHES + answer.has_begun:
            return _CRASHED
        if answer.has_begun and not self._resumption.behind_tokens:
            return "unsupported"
        left_s = answer.patience_s(self._resumption.wait_s)
        await asyncio.sleep(min(answer.pause_s, left_s))
        if (left_s > 0 and await self._comes(answer)) or answer.is_late:
            return None
        return "not_back"

    async def _comes(self, answer: _Answer) -> bool:
        """Wait for an engine that is away, as long as the request may; return whether it is back."""
        if not self._resumption.kept:
            return await self._readiness.comes(answer.patience_s(self._resumption.wait_s))
        began = _now()
        back = await self._readiness.comes(answer.left_s)
        answer.excuse(_now() - began)
        return back

    def _count(self, answer: _Answer) -> None:
        """Count a request that goes on, with the first delta behind a break."""
        if answer.is_broken:
            outcome = "resumed" if answer.has_begun else "repeated"
            log.info("request %s goes on after a break of the engine: %s", answer.request.request_id, outcome)
            self._metrics.resumed(outcome)


@dataclass(slots=True)
class _Sequence:
    """What has come of one sequence."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    resumed: int = 0
    """How many of the tokens it goes on behind."""
    ended: bool = False


class _Answer:
    """What has come of a request, and how often the engine has broken away from it."""

    def __init__(self, request: GenerateRequest) -> None:
        if request.temperature and request.seed is None:
            request = replace(request, seed=secrets.randbits(64))
        self.request = request
        self.crashes = 0
        """Crashes of the engine that may be this request's fault."""
        self._sequences = [_Sequence() for _ in range(request.sequences)]
        self._began = self._sent_at = _now()
        self._tries = 0
        """How many times it has been sent."""
        self._lost_at: float | None = None
        """When the engine broke away; None: something has come since then."""
        self._pauses = 0
        self._starts: int | None = None
        """The start of the engine that the last crash was of; None: there was none since something came."""

    @property
    def has_begun(self) -> bool:
        """Whether a token has come, or a sequence has ended."""
        return any(one.tokens or one.ended for one in self._sequences)

    @property
    def is_broken(self) -> bool:
        """Whether the engine has broken away, and nothing has come since."""
        return self._lost_at is not None

    @property
    def is_late(self) -> bool:
        """Whether its deadline has passed."""
        return self.left_s <= 0

    @property
    def unfinished(self) -> list[int]:
        """The numbers of the sequences that have not ended."""
        return [number for number, one in enumerate(self._sequences) if not one.ended]

    @property
    def pause_s(self) -> float:
        """Seconds until the next try."""
        return min(_MOST_PAUSE_S, _PAUSE_S * 2.0 ** min(self._pauses - 1, 10))

    @property
    def left_s(self) -> float:
        """Seconds until its deadline, which counts from the first call."""
        deadline_ms = self.request.deadline_ms
        return math.inf if deadline_ms is None else self._began + deadline_ms / 1000 - _now()

    def patience_s(self, wait_s: float) -> float:
        """Return how many seconds it still waits for an engine that may be away for ``wait_s``."""
        since = self._began if self._lost_at is None else self._lost_at
        return max(0.0, min(since + wait_s - _now(), self.left_s))

    def excuse(self, seconds: float) -> None:
        """Leave so many seconds out of those that it waits."""
        if self._lost_at is not None:
            self._lost_at += seconds

    def sent(self) -> None:
        """Note that it is sent."""
        self._tries += 1
        self._sent_at = _now()

    def whole(self) -> GenerateRequest:
        """Return the request for all of its sequences."""
        return self._timely(self.request, "")

    def rest(self, number: int) -> GenerateRequest:
        """Return the request for the rest of one sequence. The log-probs of the prompt come with the first's tokens."""
        request, sequence = self.request, self._sequences[number]
        seed = None if request.seed is None else (request.seed + number) % (MAX_SEED + 1)
        scored = number == 0 and not sequence.tokens
        sequence.resumed = len(sequence.tokens)
        rest = replace(
            request,
            sequences=1,
            seed=seed,
            prompt_log_probs=request.prompt_log_probs if scored else None,
            resumed_ids=tuple(sequence.tokens),
            resumed_log_probs=tuple(sequence.log_probs),
        )
        return self._timely(rest, f".{number}")

    def _timely(self, request: GenerateRequest, suffix: str) -> GenerateRequest:
        """Return a request with the rest of its time, and with an id that the engine has not seen."""
        if request.deadline_ms is not None:
            request = replace(request, deadline_ms=max(1, math.ceil(self.left_s * 1000)))
        if request.request_id and self._tries > 1:
            request = replace(request, request_id=f"{request.request_id}.{self._tries}{suffix}")
        return request

    def take(self, delta: EngineDelta) -> EngineDelta:
        """Take what has come, and return it as part of the whole answer. Raises EngineFailure: it cannot be that."""
        sequence = self._sequences[delta.index]
        if sequence.ended:
            raise EngineFailure(f"a response of sequence {delta.index} has come behind its end")
        sequence.tokens += delta.tokens
        if sequence.resumed and delta.output_tokens != len(sequence.tokens):
            counts = f"{delta.output_tokens} tokens, and {len(sequence.tokens)} have come"
            raise EngineFailure(f"sequence {delta.index} does not go on where it broke off: the engine counts {counts}")
        sequence.log_probs += delta.log_probs
        sequence.ended = delta.finish_reason is not None
        self._lost_at = self._starts = None
        if delta.finish_reason is None:
            return delta
        cached = min(delta.cached_tokens, len(self.request.prompt))  # tokens that went on count in the engine's cache
        return replace(delta, cached_tokens=cached, waited_s=self._sent_at - self._began)

    def lose(self, error: InflightError, starts: int) -> None:
        """Note that the engine has broken away.

        Args:
            error: how.
            starts: how many times it had been seen to start.
        """
        if self._lost_at is None:
            self._lost_at, self._pauses = _now(), 0
        self._pauses += 1
        broke = isinstance(error, ServerUnreachable) and error.broke
        if broke and starts != self._starts:
            self.crashes += 1
            self._starts = starts

    def cut_off(self) -> list[EngineDelta]:
        """Return the ends of all sequences at the deadline. Raises DeadlineExceeded: one of them has no token."""
        rest = [(number, self._sequences[number]) for number in self.unfinished]
        if not all(sequence.tokens for _, sequence in rest):
            raise DeadlineExceeded("the request's deadline passed before its first token")
        return [
            EngineDelta(number, [], None, "deadline", [], [], len(sequence.tokens), 0, {}) for number, sequence in rest
        ]


def _now() -> float:
    return asyncio.get_running_loop().time()
