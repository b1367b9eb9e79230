"""How many threads compute on a CPU, by the number of its cores and by what computes."""

from __future__ import annotations

import os

import pytest

from inflight.settings.threads import cpu_threads


@pytest.mark.parametrize(
    ("cores", "native", "torch"), [(1, 1, 1), (2, 2, 1), (4, 4, 3), (7, 7, 6), (8, 7, 7), (64, 63, 63)]
)
def test_a_small_machine_computes_on_all_its_cores(
    cores: int, native: int, torch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert (cpu_threads(native=True), cpu_threads(native=False)) == (native, torch)
