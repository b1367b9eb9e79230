"""Arrival processes have the mean and the dispersion that they claim; lengths the distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from inflight.load.arrivals import Phase, arrival_times, next_active
from inflight.load.lengths import Lengths


def _times(*phases: dict[str, Any], seed: int = 1) -> np.ndarray:
    return np.array(arrival_times([Phase.model_validate(phase) for phase in phases], np.random.default_rng(seed)))


@pytest.mark.parametrize(
    ("settings", "variation"),
    [
        ({"arrivals": "poisson"}, 1.0),
        ({"arrivals": "gamma", "burstiness": 0.25}, 2.0),
        ({"arrivals": "gamma", "burstiness": 4.0}, 0.5),
        ({"arrivals": "constant"}, 0.0),
    ],
    ids=str,
)
def test_rate_and_dispersion(settings: dict[str, Any], variation: float) -> None:
    times = _times({"duration_s": 2000, "rate": 5, **settings})
    gaps = np.diff(times)
    assert len(times) / 2000 == pytest.approx(5, rel=0.05)
    assert gaps.min() >= 0
    assert times.max() < 2000
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.08, abs=1e-9), "coefficient of variation"


def test_poisson_counts_have_their_mean_as_variance() -> None:
    counts = np.bincount(_times({"duration_s": 4000, "rate": 3}).astype(int), minlength=4000)
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.1)


def test_a_ramp_has_the_rate_of_each_moment() -> None:
    times = _times({"duration_s": 1000, "rate": 0, "to_rate": 20})
    assert len(times) == pytest.approx(10_000, rel=0.05)
    assert (times < 500).sum() / len(times) == pytest.approx(0.25, abs=0.02)
    falling = _times({"duration_s": 1000, "rate": 20, "to_rate": 0, "arrivals": "constant"})
    assert len(falling) == 10_000
    assert (falling < 500).sum() / len(falling) == pytest.approx(0.75, abs=0.001)


def test_phases_follow_each_other() -> None:
    times = _times(
        {"duration_s": 10, "rate": 2, "arrivals": "constant"},
        {"duration_s": 10, "rate": 0},
        {"duration_s": 10, "rate": 4, "arrivals": "constant"},
    )
    assert np.diff(times).min() >= 0
    assert [((times >= a) & (times < a + 10)).sum() for a in (0, 10, 20)] == [20, 0, 40]


def test_arrivals_are_repeatable() -> None:
    phase = {"duration_s": 100, "rate": 5}
    assert (_times(phase) == _times(phase)).all()
    assert len(_times(phase, seed=2)) != len(_times(phase)) or (_times(phase, seed=2) != _times(phase)).any()


def test_slots_of_a_closed_loop() -> None:
    phases = [
        Phase(duration_s=10, concurrency=0, to_concurrency=4),
        Phase(duration_s=10, concurrency=4),
        Phase(duration_s=10, concurrency=1),
    ]
    begins = [next_active(phases, slot, 0.0) for slot in range(5)]
    assert begins[:4] == pytest.approx([0, 2.5, 5, 7.5])
    assert begins[4] is None
    assert next_active(phases, 2, 12.0) == 12.0
    assert next_active(phases, 2, 20.0) is None, "the third slot ends with its phase"
    assert next_active(phases, 0, 25.0) == 25.0
    assert next_active(phases, 0, 30.0) is None


@pytest.mark.parametrize(
    ("settings", "mean", "low", "high"),
    [
        ({"distribution": "fixed", "value": 7}, 7, 7, 7),
        ({"distribution": "uniform", "min": 3, "max": 9}, 6, 3, 9),
        ({"distribution": "normal", "mean": 50, "std": 5, "min": 1, "max": 100}, 50, 20, 80),
        ({"distribution": "lognormal", "median": 100, "sigma": 0.5}, 100 * np.exp(0.125), 1, 2000),
        # sum of k * k**-1 over sum of k**-1, k = 1, 2, 3
        ({"distribution": "zipf", "skew": 1.0, "min": 1, "max": 3}, 3 / (1 + 1 / 2 + 1 / 3), 1, 3),
    ],
    ids=lambda value: value["distribution"] if isinstance(value, dict) else "",
)
def test_lengths(settings: dict[str, Any], mean: float, low: int, high: int) -> None:
    lengths = TypeAdapter(Lengths).validate_python(settings)
    drawn = [lengths.draw(generator) for generator in [np.random.default_rng(3)] for _ in range(4000)]
    assert np.mean(drawn) == pytest.approx(mean, rel=0.03)
    assert low <= min(drawn) <= max(drawn) <= high
    assert drawn == [lengths.draw(generator) for generator in [np.random.default_rng(3)] for _ in range(4000)]


def test_lengths_are_clipped() -> None:
    lengths = TypeAdapter(Lengths).validate_python(
        {"distribution": "lognormal", "median": 50, "sigma": 2, "min": 10, "max": 90}
    )
    generator = np.random.default_rng(3)
    drawn = [lengths.draw(generator) for _ in range(200)]
    assert (min(drawn), max(drawn)) == (10, 90)


def test_lengths_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("12\n300\n\n7\n")
    adapter: TypeAdapter[Any] = TypeAdapter(Lengths)
    settings = {"distribution": "file", "file": "lengths.txt"}
    lengths = adapter.validate_python(settings, context={"directory": tmp_path})
    generator = np.random.default_rng(3)
    assert {lengths.draw(generator) for _ in range(100)} == {12, 300, 7}
    file.write_text("12\ntwelve\n")
    with pytest.raises(ValidationError, match="one whole number per line is expected; found 'twelve'"):
        adapter.validate_python(settings, context={"directory": tmp_path})
