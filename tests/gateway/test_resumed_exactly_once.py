"""Each token comes once and in its place, whatever the engine does; or the request ends with an error."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.client.errors import ServerUnreachable, from_wire
from inflight.client.grpc_transport import GrpcTransport
from inflight.errors import DeadlineExceeded, EngineFailure, InflightError, QueueFull
from inflight.gateway import resuming
from inflight.gateway.engine_client import EngineDelta, GenerateRequest
from inflight.gateway.errors import ApiError
from inflight.gateway.metrics import GatewayMetrics
from inflight.gateway.readiness import Readiness
from inflight.gateway.resuming import ResumingEngine, Resumption
from tests.support.properties import examples

CRASH = ServerUnreachable("Socket closed", broke=True)
AWAY = ServerUnreachable("failed to connect to all addresses")
DEAD = from_wire("in ensemble, Stub process 'tensorrt_llm_0_0' is not healthy.")
FULL = QueueFull("the queue is full")
Sequences = list[list[int]]


@dataclass
class Fault:
    """What happens to one call: after so many responses it ends with an error, or as if it were whole (None)."""

    after: int
    error: InflightError | None


@dataclass
class Faulty:
    """An engine with faults, one after the other, each of one call; then it has none."""

    outputs: Sequences
    faults: list[Fault]
    seed: int
    forgets: bool = False
    """It does not know `resumed_ids`, and begins again."""
    repeats: bool = False
    """It ends its first sequence twice."""
    calls: list[GenerateRequest] = field(default_factory=list)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineDelta, None]:
        """Yield the responses of all sequences, mixed and late."""
        self.calls.append(request)
        fault = self.faults.pop(0) if self.faults else None
        draw = random.Random(self.seed + len(self.calls))
        waiting = [self._responses(request, index, draw) for index in range(request.sequences)]
        given = 0
        while waiting:
            for _ in range(draw.randint(0, 3)):
                await asyncio.sleep(0)
            if fault is not None and given >= fault.after:
                if fault.error is not None:
                    raise fault.error
                return
            place = draw.randrange(len(waiting))
            yield waiting[place].pop(0)
            given += 1
            waiting = [one for one in waiting if one]

    def _responses(self, request: GenerateRequest, index: int, draw: random.Random) -> list[EngineDelta]:
        output = self.outputs[((request.seed or 0) + index) % len(self.outputs)]
        done = 0 if self.forgets else len(request.resumed_ids)
        assert self.forgets or output[:done] == list(request.resumed_ids)
        made: list[EngineDelta] = []
        while not made or made[-1].finish_reason is None:
            part = output[done : done + draw.randint(0, 3)]
            done += len(part)
            reason = "stop" if done == len(output) and draw.random() < 0.5 else None
            scores = [float(-token) for token in part]
            made.append(EngineDelta(index, part, None, reason, scores, [], done, 0, {}))
        return made + ([made[-1]] if self.repeats and index == 0 else [])

    async def close(self) -> None:
        """Close nothing."""


async def read(engine: Faulty, *, enabled: bool = True, deadline_ms: int | None = None) -> Sequences:
    """Return the tokens of each sequence as they came."""
    metrics = GatewayMetrics()
    readiness = Readiness(GrpcTransport("127.0.0.1:1", "none", 1), metrics)
    readiness.show(True)
    resumed = ResumingEngine(
        engine, readiness, metrics, Resumption(enabled, behind_tokens=True, wait_s=600, kept=False)
    )
    request = GenerateRequest(
        prompt=[1],
        max_tokens=99,
        sequences=len(engine.outputs),
        temperature=1,
        seed=0,
        log_probs=True,
        deadline_ms=deadline_ms,
    )
    tokens: Sequences = [[] for _ in engine.outputs]
    scores: list[list[float]] = [[] for _ in engine.outputs]
    ended: list[int] = []
    try:
        async for delta in resumed.generate(request):
            tokens[delta.index] += delta.tokens
            scores[delta.index] += delta.log_probs
            ended += [delta.index] if delta.finish_reason else []
    finally:
        for place, output in enumerate(engine.outputs):
            assert tokens[place] == output[: len(tokens[place])], "what has come is a beginning of the answer"
            assert scores[place] == [-token for token in tokens[place]]
    assert sorted(ended) == list(range(len(engine.outputs)))
    return tokens


async def outcome(engine: Faulty) -> Sequences | InflightError | ApiError:
    """Return the tokens of each sequence, or the error with which the request ends."""
    try:
        return await read(engine)
    except (InflightError, ApiError) as error:
        return error


@pytest.fixture(autouse=True, scope="module")
def hasty() -> Any:
    """Have nothing wait between two tries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resuming, "_PAUSE_S", 0.0)
        yield


OUTPUTS = st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=3)
FAULTS = st.lists(
    st.builds(Fault, st.integers(0, 9), st.sampled_from([CRASH, AWAY, DEAD, FULL, None])), min_size=1, max_size=6
)


@settings(max_examples=examples(3))
@given(outputs=OUTPUTS, faults=FAULTS, seed=st.integers(0, 999))
def test_an_answer_is_whole_or_ends_with_an_error(outputs: Sequences, faults: list[Fault], seed: int) -> None:
    engine = Faulty(outputs, list(faults), seed)
    came = asyncio.run(outcome(engine))
    if isinstance(came, ApiError):
        assert came.code == "engine_crashed"
        assert sum(one.error in (CRASH, DEAD, None) for one in faults) > resuming.MOST_CRASHES
    elif isinstance(came, QueueFull):
        assert FULL in [one.error for one in faults]
    else:
        assert came == outputs
    assert len(engine.calls) <= len(outputs) * (1 + len(faults))


@given(outputs=OUTPUTS, after=st.integers(0, 9), seed=st.integers(0, 999))
def test_a_stream_that_ends_short_is_no_answer(outputs: Sequences, after: int, seed: int) -> None:
    assert asyncio.run(read(Faulty(outputs, [Fault(after, None)], seed))) == outputs
    engine = Faulty(outputs, [Fault(0, None)], seed)
    with pytest.raises(ServerUnreachable):
        asyncio.run(read(engine, enabled=False))


@given(after=st.integers(2, 9), seed=st.integers(0, 999))
def test_an_engine_that_begins_again_is_found_out(after: int, seed: int) -> None:
    engine = Faulty([[5, 5, 6, 7] * 9], [Fault(after, CRASH)], seed, forgets=True)
    came = asyncio.run(outcome(engine))
    if engine.calls[-1].resumed_ids:
        assert isinstance(came, EngineFailure)
        assert "does not go on where it broke off" in str(came)
    else:
        assert came == engine.outputs


@given(seed=st.integers(0, 999))
def test_a_sequence_ends_once(seed: int) -> None:
    engine = Faulty([[5, 6], [7, 8, 9]], [], seed, repeats=True)
    with pytest.raises(EngineFailure, match="sequence 0 has come behind its end"):
        asyncio.run(read(engine))


@pytest.mark.parametrize("begun", [[0, 1], [1]])
def test_a_deadline_ends_what_has_tokens_and_is_an_error_where_one_has_none(
    begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(resuming, "_now", lambda: now[0])

    class Leaving(Faulty):
        """It gives a token of some sequences, and is away until the deadline has passed."""

        async def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineDelta, None]:
            for index in begun:
                yield EngineDelta(index, [5], None, None, [-5.0], [], 1, 0, {})
            now[0] = 2.0
            raise AWAY

    engine = Leaving([[5, 6], [5, 6]], [], 0)
    if begun == [0, 1]:
        assert asyncio.run(read(engine, deadline_ms=1_000)) == [[5], [5]]
    else:
        with pytest.raises(DeadlineExceeded):
            asyncio.run(read(engine, deadline_ms=1_000))
