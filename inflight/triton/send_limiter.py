"""Limits how fast responses leave: to a steady rate, and to the rate at which the detokenizer answers them.

Each response costs the ensemble one to two milliseconds of CPU, whatever it carries. One that leaves too early does not
arrive earlier: it waits in Triton, ahead of other requests' first tokens. One that leaves later carries more tokens.
Few streams get each token at once; of many, each gets its tokens a few at a time, and the cores compute meanwhile.
"""

from __future__ import annotations

import os
import time

from inflight.shared_counters import SharedCounter

CORES = len(os.sched_getaffinity(0))
_FEW_STREAMS = 8
_LONGEST_WAIT_S = 0.107
"""How long each of many streams waits for its next response, at most, while the rate allows: it still reads as a steady
flow."""
ANSWERED = "answered"
"""The shared counter of responses that the detokenizer has answered."""
MOST_UNANSWERED = 3
"""The most responses that the detokenizer has not answered; with fewer, it would wait for the next one."""
_MOST_ARREARS_S = 0.005
"""How far responses that never wait may delay the others."""
_MOST_WAIT_S = 0.1
"""How long unanswered responses hold back others. After this time, first tokens come faster than they are answered, or
some responses are lost: Triton drops those of requests that have failed."""


def responses_per_second(streams: int, cores: int = CORES) -> float:
    """Return how many responses may leave in a second, on so many cores, while so many streams are under way.

    Few streams get 600 a second for each core, 2,400 at most: from four cores on the detokenizer's one instance is what
    limits. From 8 streams on the rate falls with their number, to 150 a core, which takes about a quarter of two cores,
    since cores that send responses do not compute tokens. It rises again where a stream would wait for too long.
    """
    most = min(2_400.0, 600.0 * cores)
    of_many = max(most * _FEW_STREAMS / max(streams, 1), 150.0 * cores, streams / _LONGEST_WAIT_S)
    return min(most, of_many)


RESPONSES_PER_SECOND = responses_per_second(1)
"""The most responses that leave the engine stage in a second."""


class SendLimiter:
    """Says when the next response that can wait may leave. Used by one thread."""

    def __init__(self, answered: SharedCounter) -> None:
        """``answered`` counts the responses that the detokenizer has answered."""
        self._answered = answered
        self._next_send = 0.0
        self._sent = 0
        self._full_since: float | None = None

    @property
    def wait_s(self) -> float:
        """Seconds until the next response may leave, as far as the rate is concerned."""
        return max(0.0, self._next_send - time.monotonic())

    def may_send(self, now: float) -> bool:
        """Return whether a response that can wait may leave now; if not, ask again after ``wait_s``."""
        if now < self._next_send:
            return False
        if not self._is_full(now):
            return True
        self._next_send = now + 1 / RESPONSES_PER_SECOND
        return False

    def reserve(self, urgent: int, waited: int, now: float, streams: int) -> None:
        """Delay the next response that can wait for those that leave now.

        Args:
            urgent: responses that could not wait. They count at the full rate, so that many of them leave room for the
                others.
            waited: responses that could.
            now: the time, in seconds.
            streams: those that are under way.
        """
        slot_s = 1 / responses_per_second(streams)
        next_send = max(now, self._next_send) + urgent / RESPONSES_PER_SECOND + waited * slot_s
        self._next_send = min(next_send, now + max(_MOST_ARREARS_S, slot_s))

    def sent(self) -> None:
        """Count a response that the detokenizer will answer."""
        self._sent += 1

    def _is_full(self, now: float) -> bool:
        answered = self._answered.count
        self._sent = max(self._sent, answered)
        if self._sent - answered < MOST_UNANSWERED:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = now
        elif now - self._full_since > _MOST_WAIT_S:
            self._sent, self._full_since = answered, None
        return self._full_since is not None
