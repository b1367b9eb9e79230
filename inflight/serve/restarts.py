"""Restarts: when a server is started again, how often that was done, and why."""

from __future__ import annotations

from inflight.metrics import RESTART_CAUSES

PAUSES_S = (0, 1, 2, 4, 8, 16)
"""The pauses before the new starts in a row: what ended the server may last a while."""
WELL_S = 180
"""Serving for so long ends a row: what comes after it is a new trouble."""


class Restarts:
    """Decides when a server is started again: after pauses that grow, and not for ever. It knows no processes."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(RESTART_CAUSES, 0)
        """The number of new starts by their cause."""
        self.in_a_row = 0
        """Ends since the server last served well."""

    def after(self, cause: str, served_s: float = 0.0) -> int | None:
        """Take note of an end, and return the seconds to pause before the next start; None: there is to be none.

        Args:
            cause: one of those of ``counts``.
            served_s: how long the server was ready before.
        """
        if served_s >= WELL_S:
            self.in_a_row = 0
        if self.in_a_row == len(PAUSES_S):
            return None
        self.counts[cause] += 1
        self.in_a_row += 1
        return PAUSES_S[self.in_a_row - 1]
