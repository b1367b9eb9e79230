"""Runs a workload against a server: sends on time or keeps so many running, and writes down what comes back."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from inflight.client import AsyncClient, AsyncHttpClient, Retry
from inflight.errors import InflightError
from inflight.load.arrivals import most_slots, next_active
from inflight.load.measurements import RequestRecord
from inflight.load.observation import Observation
from inflight.load.overhead import LoopWatch
from inflight.load.workload import Session, Workload

ONCE = Retry(attempts=1)
"""What the clients of a load test get: a request that was refused is counted, and not sent again."""
_PAUSE_AFTER_ERROR_S = 0.1
"""Of a slot of a closed loop: against a server that refuses everything it would send nothing but refused requests."""
_RECENT = 50


class SessionFault(InflightError):
    """A session that could not be run, through no doing of the server; the message is one line and names it."""


@dataclass
class Progress:
    """What there is to show while a test runs."""

    running: int = 0
    tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """Requests by outcome."""
    recent_ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))


class Runner:
    """One load test. ``run`` may be called once; ``stop`` ends it early, with what was measured."""

    def __init__(
        self, workload: Workload, client: AsyncClient | AsyncHttpClient, block_tokens: int | None = None
    ) -> None:
        """
        Args:
            workload: what to send and when.
            client: made with ``retry=ONCE``.
            block_tokens: tokens of the server's KV cache blocks, if known.
        """
        self.workload = workload
        self.records: list[RequestRecord] = []
        self.progress = Progress()
        self.interrupted = False
        self.load_ended_s = 0.0
        """When the last session could start: the end of the phases, or of an interrupted test."""
        self._client = client
        self._block_tokens = block_tokens
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[object]] = set()
        self._stopped = asyncio.Event()
        self.fault = ""
        """What ended the test before its time, in a line; empty: nothing did."""
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
            self._start_senders()
            await self._pause(self.workload.duration_s)
            self.load_ended_s = min(self.clock(), self.workload.duration_s)
            await self._drain()
        finally:
            await self._end_all()
            watching.cancel()

    def _start_senders(self) -> None:
        if self.workload.scenario.open:
            self._start(self._arrive())
            return
        for slot in range(most_slots(self.workload.scenario.phases)):
            self._start(self._fill(slot))

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
        """Send the turns of a session; return False if one was refused or failed.

        Args:
            at: when it is to begin, open loop only.
        """
        answers: list[str] = []
        for number, turn in enumerate(session.turns):
            if number:
                due = self.clock() + turn.think_s
                await asyncio.sleep(turn.think_s)
                at = None if at is None else due
                if self.clock() >= self.workload.duration_s:
                    break
            one = Observation(session, number, self.clock, at, self._block_tokens)
            with _blamed_on(session.number):
                await self._observe(one, answers)
            answers.append(one.text)
            if not one.completed:
                return self.records[-1].outcome == "cancelled"
        return True

    async def _observe(self, one: Observation, answers: list[str]) -> None:
        self.progress.running += 1
        try:
            await one.run(self._client, answers, self._count)
        finally:
            record = one.record()
            self.records.append(record)
            self.progress.running -= 1
            self.progress.ended[record.outcome] += 1

    def _count(self, one: Observation, tokens: int) -> None:
        self.progress.tokens += tokens
        if one.first_text_s is not None and one.responses == 1:
            self.progress.recent_ttft_s.append(one.first_text_s)

    def _start(self, work: Coroutine[None, None, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fault = self.fault or (str(error) if isinstance(error, SessionFault) else one_line(error))
            self.stop()

    async def _pause(self, until: float) -> None:
        """Wait until a time of the load's clock, or until stopped."""
        try:
            await asyncio.wait_for(self._stopped.wait(), max(0.0, until - self.clock()))
        except TimeoutError:
            return

    async def _drain(self) -> None:
        """Wait until nothing runs, the scenario's ``drain_s`` have passed, or stopped."""
        end = self.clock() + self.workload.scenario.drain_s
        while self._tasks and self.clock() < end and not self._stopped.is_set():
            stopped = asyncio.ensure_future(self._stopped.wait())
            await asyncio.wait({*self._tasks, stopped}, timeout=end - self.clock(), return_when="FIRST_COMPLETED")
            stopped.cancel()

    async def _end_all(self) -> None:
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


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


def client_for(url: str, http: bool) -> AsyncClient | AsyncHttpClient:
    """Return a client that sends every request once."""
    return AsyncHttpClient(url, retry=ONCE) if http else AsyncClient(url, retry=ONCE)
