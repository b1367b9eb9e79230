"""Runs a workload against a server: sends on time or keeps so many running, and writes down what comes back."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from inflight.client import AsyncClient, AsyncHttpClient, Retry
from inflight.errors import InflightError
from inflight.load.arrivals import next_active
from inflight.load.measurements import RequestRecord
from inflight.load.observation import Observation
from inflight.load.overhead import LoopWatch
from inflight.load.workload import Session, Workload

ONCE = Retry(attempts=1)
"""What the clients of a load test get: a request that was refused is counted, and not sent again."""
_PAUSE_AFTER_ERROR_S = 0.1
"""How long a slot of a closed loop waits after an error: else one that refuses everything would only be flooded."""
_RECENT = 50


class SessionFault(InflightError):
    """A session that could not be run, through no doing of the server; the message is one line and names it."""


class Runner:
    """One load test. ``run`` may be called once; ``stop`` ends it early, with what was measured."""

    def __init__(
        self, workload: Workload, client: AsyncClient | AsyncHttpClient, block_tokens: int | None = None
    ) -> None:
        """``client`` is that of ``client_for``; ``block_tokens`` are those of a KV cache block, if known."""
        self.workload = workload
        self.records: list[RequestRecord] = []
        self.running = self.tokens = 0
        """Requests that run, and output tokens that have come so far."""
        self.ended: Counter[str] = Counter()
        """Requests by outcome."""
        self.recent_ttft_s: deque[float] = deque(maxlen=_RECENT)
        self.interrupted = False
        self.load_ended_s = 0.0
        """When the last session could start: the end of the phases, or of an interrupted test."""
        self.fault = ""
        """What ended the test before its time, in a line; empty: nothing did."""
        self._client, self._block_tokens = client, block_tokens
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[object]] = set()
        self._stopped = asyncio.Event()
        self._began = time.perf_counter()
        self.watch = LoopWatch(self.clock)

    def clock(self) -> float:
        """Return the seconds since the begin of the load."""
        return time.perf_counter() - self._began

    def stop(self) -> None:
        """End the test; requests that run are cancelled and count as unfinished."""
        self.interrupted = True
        self._stopped.set()

    async def run(self) -> None:
        """Send everything, and wait until all answers are there or ``drain_s`` of the scenario have passed.

        An error that is not an answer's ends the test as ``stop`` does, and is in ``fault``.
        """
        self._began = time.perf_counter()
        watching = asyncio.create_task(self.watch.watch())
        try:
            if self.workload.scenario.open:
                self._start(self._arrive())
            else:
                most = max(max(phase.ends) for phase in self.workload.scenario.phases)
                for slot in range(math.ceil(most)):
                    self._start(self._fill(slot))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), max(0.0, self.workload.duration_s - self.clock()))
            self.load_ended_s = min(self.clock(), self.workload.duration_s)
            await self._drain()
        finally:
            while self._tasks:
                tasks = list(self._tasks)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            watching.cancel()

    async def _arrive(self) -> None:
        """Open loop: start each session at its time, whatever became of those before."""
        for number, at in enumerate(self.workload.arrivals):
            with _blamed_on(number):
                session = self.workload.session(number)
            await asyncio.sleep(max(0.0, at - self.clock()))
            self._start(self._converse(session, at))

    async def _fill(self, slot: int) -> None:
        """Closed loop: one session after the other while the slot is active."""
        phases = self.workload.scenario.phases
        while (at := next_active(phases, slot, self.clock())) is not None:
            if at > self.clock():
                await asyncio.sleep(at - self.clock())
                continue
            number = next(self._numbers)
            with _blamed_on(number):
                session = self.workload.session(number)
            if not await self._converse(session, None):
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    async def _converse(self, session: Session, at: float | None) -> bool:
        """Send the turns of a session, which in an open loop begins ``at`` a time; return False if one was refused or
        failed."""
        answers: list[str] = []
        for number, turn in enumerate(session.turns):
            if number:
                due = self.clock() + turn.think_s
                await asyncio.sleep(turn.think_s)
                at = None if at is None else due
                if self.clock() >= self.workload.duration_s:
                    break
            one = Observation(session, number, self.clock, at, self._block_tokens)
            self.running += 1
            try:
                with _blamed_on(session.number):
                    await one.run(self._client, answers, self._count)
            finally:
                self.records.append(one.record)
                self.running -= 1
                self.ended[one.record.outcome] += 1
            answers.append(one.text)
            if not one.record.completed:
                return one.record.outcome == "cancelled"
        return True

    def _count(self, record: RequestRecord, tokens: int) -> None:
        self.tokens += tokens
        if record.ttft_s is not None and len(record.arrivals) == 1:
            self.recent_ttft_s.append(record.ttft_s)

    def _start(self, work: Coroutine[None, None, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fault = self.fault or (str(error) if isinstance(error, SessionFault) else one_line(error))
            self.stop()

    async def _drain(self) -> None:
        """Wait until nothing runs, the scenario's ``drain_s`` have passed, or stopped."""
        end = self.clock() + self.workload.scenario.drain_s
        while self._tasks and self.clock() < end and not self._stopped.is_set():
            stopped = asyncio.ensure_future(self._stopped.wait())
            await asyncio.wait({*self._tasks, stopped}, timeout=end - self.clock(), return_when="FIRST_COMPLETED")
            stopped.cancel()


@contextmanager
def _blamed_on(number: int) -> Iterator[None]:
    """Raise a SessionFault for whatever is raised inside."""
    try:
        yield
    except Exception as error:
        raise SessionFault(f"session {number} could not be run: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Return kind and message of an error that nobody has foreseen, without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def client_for(url: str, http: bool, resume: bool = False) -> AsyncClient | AsyncHttpClient:
    """Return a client that sends every request once; with ``resume`` its streams go on where the server breaks."""
    retry = replace(ONCE, resume=resume)
    return AsyncHttpClient(url, retry=retry) if http else AsyncClient(url, retry=retry)
