"""The clock of deadlines, durations and stamps: a step of the machine's wall clock does not move it."""

import time

_WALL_NS = time.time_ns() - time.monotonic_ns()
"""What the monotonic clock lacked of the time since 1970 when this process began."""


def now_ns() -> int:
    """Return nanoseconds since 1970: what the wall clock had when the process began, and what has passed since then.

    The clock is this process' own. Those of two processes of a machine differ by how far its wall clock was stepped
    between their beginnings, which is nothing for the stages of one server unless it was stepped while they started.
    """
    return _WALL_NS + time.monotonic_ns()
