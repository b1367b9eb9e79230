"""Answers ``inspect`` requests with a snapshot of the engine, which its own thread takes between two steps.

The engine's thread takes at most one snapshot per ``PERIOD_S``, however many requests wait, and does nothing else for
them: this module's own thread serializes it, once for all requests that wait, and answers them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from inflight.engine.loop import EngineLoop, SteppedEngine
from inflight.engine.snapshot import ModelFacts, Snapshot
from inflight.errors import InvalidRequest, ShuttingDown, UnsupportedFeature
from inflight.settings.deployment import Deployment, model_name
from inflight.triton.response_writer import Arrays
from inflight.triton.streams import Sender

log = logging.getLogger(__name__)

INSPECT, SNAPSHOT = "inspect", "snapshot"
PERIOD_S = 0.1
"""The shortest time between two snapshots. A request that comes in between is answered with the next one."""


class DebugSnapshots:
    """Answers the ``inspect`` requests to one engine."""

    def __init__(
        self,
        deployment: Deployment,
        engine: SteppedEngine,
        loop: EngineLoop,
        sampling_defaults: Mapping[str, float],
    ) -> None:
        """
        Args:
            deployment: says whether snapshots are allowed, and the facts that they name.
            engine: the thread of ``loop`` takes snapshots of it.
            loop: see there.
            sampling_defaults: of the checkpoint (``TextConfig``), which clients of chats go by.
        """
        self._deployment, self._sampling_defaults = deployment, sampling_defaults
        self._engine = engine
        self._loop = loop
        self._askers: list[Sender] = []
        self._asked = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="snapshots", daemon=True)
        self._thread.start()

    def answer(self, arrays: Arrays, sender: Sender) -> None:
        """Put a request into the queue of those that are answered with the next snapshot.

        Raises:
            UnsupportedFeature: the deployment does not allow it.
            InvalidRequest: the request has other inputs, which would be ignored.
            ShuttingDown: the engine is stopping.
        """
        if not self._deployment.observability.inspection:
            raise UnsupportedFeature("inspect is not allowed: observability.inspection of the deployment is false")
        others = sorted(name for name, array in arrays.items() if name != INSPECT and array.size)
        if others:
            raise InvalidRequest(f"inspect goes alone; the request has {', '.join(others)} too")
        with self._asked:
            if self._closing.is_set():
                raise ShuttingDown("the server is stopping")
            self._askers.append(sender)
            self._asked.notify()

    def close(self) -> None:
        """Answer the requests that wait and end the thread; the engine's loop must run or be closed, not hang."""
        with self._asked:
            self._closing.set()
            self._asked.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._asked:
                self._asked.wait_for(lambda: self._askers or self._closing.is_set())
                askers, self._askers = self._askers, []
            if askers:
                self._answer_all(askers)
            elif self._closing.is_set():
                return
            self._closing.wait(PERIOD_S)

    def _answer_all(self, askers: list[Sender]) -> None:
        answer: bytes | Exception
        try:
            answer = self._take_snapshot().to_json().encode()
        except Exception as error:  # each asker must have an answer
            answer = error
        for sender in askers:
            try:
                if isinstance(answer, Exception):
                    sender.fail(answer)
                else:
                    sender.send({SNAPSHOT: np.array([[answer]], np.object_)}, final=True)
            except Exception:  # the others get theirs
                log.exception("an answer to inspect could not be sent")

    def _take_snapshot(self) -> Snapshot:
        """Return the engine's snapshot, completed from the deployment. Raises ShuttingDown once the loop is closed."""
        taken: Future[Snapshot] = Future()

        def take() -> None:
            try:
                taken.set_result(self._engine.snapshot())
            except Exception as error:
                taken.set_exception(error)

        self._loop.between_steps(take)
        settings = self._deployment
        name, longest = model_name(settings.model), self._engine.max_sequence_length
        model = ModelFacts(name, longest, settings.limits.default_max_tokens, self._sampling_defaults)
        queue = settings.batching.max_queue_size
        return replace(taken.result(), engine=settings.engine.kind, max_queue_size=queue, model=model)
