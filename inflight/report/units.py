"""Numbers and durations as people read them.

Both are rounded to three digits before their unit is chosen: what rounds to 1000 ms is 1 s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_SECONDS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_TWICE = 60.0
"""A unit of so many seconds or more is used from two of it on: 90 s says more than 1.5 min."""


def significant(value: float | None) -> float | None:
    """Return a value to four significant digits, or with all before the point; None stays None."""
    if value is None:
        return None
    return round(value, 0) if abs(value) >= 1000 else float(f"{value:.4g}")


def with_floats(value: Any, write: Callable[[float], float]) -> Any:
    """Return a JSON value in which every float is what ``write`` makes of it, and tuples are lists."""
    if isinstance(value, Mapping):
        return {key: with_floats(entry, write) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [with_floats(entry, write) for entry in value]
    return write(value) if isinstance(value, float) else value


def quantity(value: float) -> str:
    """Return a number with three digits, or with all before the point: ``0.0312``, ``25``, ``1,204``."""
    rounded = _rounded(value)
    return f"{value:,.0f}" if abs(rounded) >= 1000 else f"{rounded:.3g}"


def duration(seconds: float) -> str:
    """Return a time in the unit it is read in: ``640 µs``, ``12.5 ms``, ``90 s``, ``3 h``; ``0`` for none."""
    rounded = _rounded(seconds)
    if not rounded:
        return "0"
    reached = ((size, unit) for size, unit in _SECONDS if abs(rounded) >= (2 * size if size >= _TWICE else size))
    size, unit = next(reached, _SECONDS[-1])
    return f"{quantity(seconds / size)} {unit}"


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
