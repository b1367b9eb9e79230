"""Waits for what comes to hold, however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], object], within_s: float = 30, every_s: float = 0.05) -> bool:
    """Wait for a condition, and look every ``every_s`` seconds; return whether it came to hold in time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(every_s)
    return bool(holds())
