"""Numbers and durations at the edges of their units."""

from __future__ import annotations

import pytest

from inflight.report.units import duration, quantity, significant


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0"),
        (4e-9, "0.004 µs"),
        (0.00064, "640 µs"),
        (0.00099951, "1 ms"),
        (0.001, "1 ms"),
        (0.0125, "12.5 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (90, "90 s"),
        (119.4, "119 s"),
        (120, "2 min"),
        (999.6, "16.7 min"),
        (7199, "2 h"),
        (2 * 86400, "2 d"),
        (2000 * 86400, "2,000 d"),
        (-0.9996, "-1 s"),
    ],
)
def test_durations(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0"), (0.03124, "0.0312"), (4.0, "4"), (99.96, "100"), (999.4, "999"), (999.7, "1,000"), (1204.4, "1,204"),
        (-999.7, "-1,000"),
    ],
)  # fmt: skip
def test_quantities(value: float, expected: str) -> None:
    assert quantity(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), (0.0123456, 0.01235), (999.96, 1000.0), (1234.5, 1234.0), (98765.4, 98765.0), (-1234.6, -1235.0)],
)
def test_significant_digits(value: float | None, expected: float | None) -> None:
    assert significant(value) == expected
