"""When a server is started again: after pauses that grow, and not for ever. This module knows no processes."""

from __future__ import annotations

from inflight.metrics import RESTART_CAUSES

PAUSES_S = (0, 1, 2, 4, 8, 16)
"""Before each new start in a row: what ended the server may last a while."""
WELL_S = 180
"""Serving for so long ends a row: what comes after it is a new trouble."""


class Restarts:
    """The ends of one deployment's server, one after the other."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(RESTART_CAUSES, 0)
        """New starts by their cause."""
        self._in_a_row = 0

    @property
    def in_a_row(self) -> int:
        """Ends since the server last served well."""
        return self._in_a_row

    def after(self, cause: str, served_s: float = 0.0) -> int | None:
        """Take note of an end, and return the seconds to pause before the next start; None: there is to be none.

        Args:
            cause: one of those of ``counts``.
            served_s: how long the server was ready before.
        """
        if served_s >= WELL_S:
            self._in_a_row = 0
        if self._in_a_row == len(PAUSES_S):
            return None
        self.counts[cause] += 1
        self._in_a_row += 1
        return PAUSES_S[self._in_a_row - 1]
