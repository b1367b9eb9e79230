"""The engine's thread: takes requests and cancellations from any thread, steps while there is work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from inflight.clock import now_ns
from inflight.engine.request import Output, Request
from inflight.engine.snapshot import Snapshot
from inflight.engine.stats import EngineStats
from inflight.errors import EngineFailure, InflightError, QueueFull, ShuttingDown

log = logging.getLogger(__name__)


class SteppedEngine(Protocol):
    """What the loop, and the engine's stage around it, need of an engine."""

    stats: EngineStats
    """What the engine does and has done."""

    @property
    def max_sequence_length(self) -> int | None:
        """Most tokens of a prompt and its output together; None: it has no limit."""

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""

    @property
    def due_in_s(self) -> float:
        """Seconds until a step of a busy engine has something to do, if nothing is asked before; 0: now."""

    @property
    def num_waiting(self) -> int:
        """Requests in the queue; read from any thread."""

    def validate(self, request: Request) -> None:
        """Check a request, from any thread."""

    def submit(self, request: Request) -> None:
        """Put a request into the queue."""

    def cancel(self, key: int) -> None:
        """End a request."""

    def step(self) -> list[Output]:
        """Do one step."""

    def fail_all(self, error: InflightError) -> list[Output]:
        """End every request."""

    def snapshot(self) -> Snapshot:
        """Return the state of its requests and of its cache, between two steps."""


class EngineLoop:
    """Owns the engine and its thread."""

    def __init__(
        self,
        engine: SteppedEngine,
        deliver: Callable[[Output], object],
        max_queue_size: int,
        turn_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """
        Args:
            engine: used by this loop's thread alone, but for ``validate``.
            deliver: called with each output, in the loop's thread; must not block.
            max_queue_size: requests that may wait for their first step.
            turn_context: returns the context in which a turn of the loop runs; a turn that does not end hangs.
        """
        self._engine = engine
        self._deliver = deliver
        self._max_queue_size = max_queue_size
        self._turn_context = turn_context
        self._inbox: list[Request] = []
        self._cancels: list[int] = []
        self._calls: list[Callable[[], object]] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, *requests: Request) -> None:
        """Hand requests over, all or none; their outputs come through ``deliver``.

        Raises:
            InvalidRequest: a request does not fit the model.
            QueueFull: as many requests wait as may.
            ShuttingDown: the loop is closing.
        """
        for request in requests:
            self._engine.validate(request)
            request.arrival_ns = now_ns()
        with self._changed:
            if self._closing:
                raise ShuttingDown("the server is stopping")
            if len(self._inbox) + self._engine.num_waiting + len(requests) > self._max_queue_size:
                raise QueueFull(
                    "Exceeds maximum queue size: "
                    f"Maximum queue size of {self._max_queue_size} has been reached; try again later"
                )
            self._inbox += requests
            self._changed.notify()

    def cancel(self, key: int) -> None:
        """End a request, if it still runs; its last output comes through ``deliver``."""
        with self._changed:
            self._cancels.append(key)
            self._changed.notify()

    def between_steps(self, call: Callable[[], object]) -> None:
        """Have the engine's thread call ``call`` between two steps; ``call`` must not block.

        Raises:
            ShuttingDown: the loop is closing.
        """
        with self._changed:
            if self._closing:
                raise ShuttingDown("the server is stopping")
            self._calls.append(call)
            self._changed.notify()

    def close(self) -> None:
        """End what runs, and the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._wait()
                refused = self._take_requests()
                cancels, self._cancels = self._cancels, []
                calls, self._calls = self._calls, []
                closing = self._closing
            with self._turn_context():
                for call in calls:
                    _guarded(call)
                for output in refused + self._step(cancels, closing):
                    _guarded(self._deliver, output)
            if closing:
                return

    def _wait(self) -> None:
        """Wait, under the lock, until there is something to do."""
        self._changed.wait_for(lambda: self._asked() or self._engine.busy)
        if (seconds := self._engine.due_in_s) > 0:
            self._changed.wait_for(self._asked, seconds)

    def _asked(self) -> bool:
        return bool(self._closing or self._inbox or self._cancels or self._calls)

    def _take_requests(self) -> list[Output]:
        """Hand the inbox to the engine, under the lock, so that ``submit`` counts each request as waiting exactly once.

        Returns the last outputs of those that the engine could not take.
        """
        requests, self._inbox = self._inbox, []
        refused = []
        for request in requests:
            try:
                self._engine.submit(request)
            except Exception:
                log.exception("request %d could not be submitted", request.key)
                error = EngineFailure("the engine could not take the request; the server's log says why")
                refused.append(Output(request.key, error=error))
        return refused

    def _step(self, cancels: list[int], closing: bool) -> list[Output]:
        """Cancel and step. An exception in the engine ends all requests with an error, but never the thread."""
        try:
            for key in cancels:
                self._engine.cancel(key)
            if not closing:
                return self._engine.step()
        except Exception:
            log.exception("the engine failed; everything that runs ends with an error")
            return self._engine.fail_all(EngineFailure("the engine failed; the server's log says why"))
        return self._engine.fail_all(ShuttingDown("the server is stopping"))


def _guarded(call: Callable[..., object], *arguments: object) -> None:
    """Call code that is not the engine's: what it raises is logged, and does not end the engine's thread."""
    try:
        call(*arguments)
    except Exception:
        log.exception("a fault outside the engine, in its thread")
