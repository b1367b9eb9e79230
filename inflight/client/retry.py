"""When a request that failed is tried again, and when it is given up. Knows nothing of what is sent."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from inflight.client.errors import STAGE_DEAD, ServerUnreachable
from inflight.errors import InflightError, QueueFull

_MOST_BREAKS = 3
_LONGEST_AWAY_PAUSE_S = 1.0
_LONGEST_RETRY_AFTER_S = 30.0


@dataclass(frozen=True, slots=True)
class Retry:
    """When a request is tried again: pauses double and are shaken, not to come in step.

    Only a connection that was refused or broke, a full queue and a server that stops are tried again. A server that
    says in its answer when to ask again (``Retry-After``) is not asked before, unless that is more than 30 s away.
    A request that has met three breaks ends with the fourth, since it may be the cause of them.
    """

    attempts: int = 4
    """Tries in all; 1: no second one."""
    first_pause: float = 0.2
    """The seconds before the second try, at most."""
    longest_pause: float = 5.0
    resume: bool = False
    """Whether a stream that breaks midway goes on, with the very tokens that it would have had.

    Without it nothing is tried again after the first chunk: a second try could show another answer. With it a request
    also waits for a server that is away, and asks at least once a second meanwhile.
    """
    longest_outage: float = 30.0
    """With ``resume``: how many seconds a request waits for a server that is away."""


class Attempts:
    """The tries of one request that have failed."""

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self._failed = 0
        """Tries that failed since the last chunk, the first of them at ``_since``."""
        self._since = 0.0
        self._breaks = 0
        self._begun = False
        self._stage_dead = False
        """Whether the last try met a dead stage."""

    def pause(self, error: InflightError, progressed: bool) -> float | None:
        """Return the seconds to wait after a try that failed with a retryable ``error``; None: give up.

        ``progressed``: whether chunks had come of this try.
        """
        retry, now = self._retry, time.monotonic()
        if progressed:
            self._failed, self._begun = 0, True
            if not retry.resume:
                return None
        self._breaks += self._is_new_break(error, progressed)
        if self._breaks > _MOST_BREAKS:
            return None
        self._since = self._since if self._failed else now
        self._failed += 1
        waits = retry.resume and (self._begun or not isinstance(error, QueueFull))
        longest = min(retry.longest_pause, _LONGEST_AWAY_PAUSE_S) if waits else retry.longest_pause
        pause = min(retry.first_pause * 2 ** (self._failed - 1), longest) * random.uniform(0.5, 1.0)
        pause = max(pause, min(error.retry_after_s or 0.0, _LONGEST_RETRY_AFTER_S))
        if not waits:
            return pause if self._failed < retry.attempts else None
        return pause if now + pause - self._since <= retry.longest_outage else None

    def _is_new_break(self, error: InflightError, progressed: bool) -> bool:
        """Return whether the request may have been running when a server broke.

        While a server with a dead stage still answers, each try meets the same break, to the connection's end.
        """
        dead, known = STAGE_DEAD in str(error), self._stage_dead
        self._stage_dead = dead
        broke = isinstance(error, ServerUnreachable) and error.broke
        return progressed or (broke and not known)
