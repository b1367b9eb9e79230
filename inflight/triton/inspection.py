"""Answers ``inspect``: what the engine is doing, looked at by the engine's own thread between two steps.

The engine's thread looks at most once per ``PERIOD_S``, however many ask, and does nothing else for them: a thread of
this module's writes the answer, once for all who wait for it, and sends it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from inflight.deployment import Deployment, model_name
from inflight.engine.snapshot import ModelFacts, Snapshot
from inflight.errors import InvalidRequest, ShuttingDown, UnsupportedFeature
from inflight.triton.responses import Arrays
from inflight.triton.streams import Sender

log = logging.getLogger(__name__)

INSPECT, SNAPSHOT = "inspect", "snapshot"
PERIOD_S = 0.1
"""Between two looks at the engine; who asks meanwhile is answered with the next one."""


class Inspection:
    """Looks at one engine for whoever asks."""

    def __init__(
        self,
        deployment: Deployment,
        take: Callable[[], Snapshot],
        max_sequence_length: int | None,
        between_steps: Callable[[Callable[[], object]], None],
    ) -> None:
        """
        Args:
            deployment: says whether it is allowed, and what the engine cannot know.
            take: takes the engine's snapshot; called where ``between_steps`` calls.
            max_sequence_length: the engine's limit in tokens; None: it has none.
            between_steps: has the engine's thread make a call between two steps.
        """
        self._deployment = deployment
        self._take = take
        self._max_sequence_length = max_sequence_length
        self._between_steps = between_steps
        self._askers: list[Sender] = []
        self._asked = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inspection", daemon=True)
        self._thread.start()

    def answer(self, arrays: Arrays, sender: Sender) -> None:
        """Have the sender answered.

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
        """Answer who has asked, and end the thread; the engine's loop must run or be closed, not hang."""
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
        try:
            answer = self._look().to_json().encode()
        except Exception as error:  # whoever asked must have an answer
            failed = error
            _each(askers, lambda sender: sender.fail(failed))
            return
        _each(askers, lambda sender: sender.send({SNAPSHOT: np.array([[answer]], np.object_)}, final=True))

    def _look(self) -> Snapshot:
        """Return the engine's snapshot, with what the engine does not know.

        Raises:
            ShuttingDown: the engine has stopped.
        """
        taken: Future[Snapshot] = Future()

        def take() -> None:
            try:
                taken.set_result(self._take())
            except Exception as error:
                taken.set_exception(error)

        self._between_steps(take)
        settings = self._deployment
        model = ModelFacts(model_name(settings.model), self._max_sequence_length, settings.limits.default_max_tokens)
        queue = settings.batching.max_queue_size
        return replace(taken.result(), engine=settings.engine.kind, max_queue_size=queue, model=model)


def _each(askers: list[Sender], send: Callable[[Sender], object]) -> None:
    """Send to each; one that cannot be sent to leaves the others theirs."""
    for sender in askers:
        try:
            send(sender)
        except Exception:
            log.exception("an answer to inspect could not be sent")
