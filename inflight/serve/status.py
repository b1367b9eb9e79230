"""What `inflight serve` knows of itself: whether requests can be answered, since when, and what its restarts were for.

The main thread writes; the status server's thread reads, at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """What `inflight serve` does."""

    STARTING = "starting"
    READY = "ready"
    """The server serves: a generation has passed since its last start."""
    RESTARTING = "restarting"
    STOPPING = "stopping"


@dataclass(frozen=True)
class _Since:
    state: State
    moment_s: float
    """``time.monotonic()`` when it began."""
    clock_s: float
    """The machine's clock then, since the epoch; for people, as it may be set."""


class Status:
    """The state, and the counts of restarts. A change replaces one object, so a reader never sees half of one."""

    def __init__(
        self, counts: Callable[[], Mapping[str, int]] = dict, gateway_answers: Callable[[], bool] = lambda: True
    ) -> None:
        """
        Args:
            counts: returns the restarts so far by their cause.
            gateway_answers: returns whether the gateway does, or there is to be none.
        """
        self._counts, self._gateway_answers = counts, gateway_answers
        self._since = _Since(State.STARTING, time.monotonic(), time.time())
        self.last_cause: str | None = None
        """The cause of the last restart of the server."""

    @property
    def state(self) -> State:
        """The state now."""
        return self._since.state

    @property
    def ready(self) -> bool:
        """Whether all that is served can be: by the server, which is not to stop, and by the gateway."""
        return self.state is State.READY and self._gateway_answers()

    @property
    def restarts(self) -> Mapping[str, int]:
        """The restarts so far by their cause, those of the gateway and of the door among them."""
        return self._counts()

    def change(self, state: State, cause: str | None = None) -> None:
        """Note a new state; none follows on STOPPING. ``cause`` is that of a restart."""
        if self.state is not State.STOPPING:
            self.last_cause = cause or self.last_cause
            self._since = _Since(state, time.monotonic(), time.time())

    def snapshot(self) -> dict[str, Any]:
        """Return all of it, as JSON can have it."""
        since = self._since
        return {
            "state": since.state.value,
            "ready": self.ready,
            "since": datetime.fromtimestamp(since.clock_s, UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - since.moment_s, 3),
            "restarts": dict(self.restarts),
            "last_cause": self.last_cause,
        }
