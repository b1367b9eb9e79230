"""The signals that ask `inflight serve` to stop: raised as KeyboardInterrupt, but not amid what must be done whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STDERR = 2


class StopSignals:
    """SIGTERM, SIGINT and SIGHUP. SIGINT even where it is ignored, as a shell starts background jobs; SIGHUP is left
    ignored where it is, as `nohup` has it."""

    def __init__(self) -> None:
        self._terminal = os.isatty(_STDERR)
        self._held = self._asked = False
        for number in _STOP:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._take)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raise what arrives within only at its end."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._asked:
            raise KeyboardInterrupt

    def ignore(self) -> None:
        """From here on nothing interrupts."""
        for number in _STOP:
            signal.signal(number, signal.SIG_IGN)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self._terminal:  # the terminal has gone: each word to it would be an error
            os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)
        self._asked = True
        if not self._held:
            raise KeyboardInterrupt
