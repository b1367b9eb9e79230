"""What exporting metrics costs, computed from counts; the whole of it is tests/triton/test_bench_observability.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from benchmarks.export_cost import SETTLE_S, CallCost, CpuUse, export_cost, process_cpu_seconds
from benchmarks.medians import median_interval
from inflight.errors import EngineFailure


def test_both_sides_are_counted_over_all_rounds_and_charged_to_the_load() -> None:
    uses = [
        CpuUse(at_s=2.0 + SETTLE_S, total_s=3.0, server_s=1.0, exporting_s=0.006, calls=200),
        CpuUse(at_s=3.0 + SETTLE_S, total_s=1.0, server_s=0.5, exporting_s=0.004, calls=300),
    ]
    cost = export_cost(uses, CallCost(per_call=20e-6, per_scrape=1.0))
    # 10 ms in the stages, and 500 calls of 20 us in the server, in 5 s of load that took 4 s of CPU time.
    assert cost.ms_per_second == pytest.approx(4.0)
    assert cost.percent == pytest.approx(0.5)


def test_what_is_used_in_between_is_a_difference() -> None:
    assert CpuUse(5.0, 4.0, 3.0, 2.0, 9.0).since(CpuUse(1.0, 1.5, 1.0, 0.5, 2.0)) == CpuUse(4.0, 2.5, 2.0, 1.5, 7.0)


def test_cpu_time_of_a_process_is_read_finer_than_ticks() -> None:
    before = time.process_time()
    read = process_cpu_seconds(os.getpid())
    assert before <= read <= time.process_time()
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        started = process_cpu_seconds(other.pid)
        other.communicate(b"\n")
    assert started % 0.01  # a tick of /proc is 10 ms


def test_a_process_that_is_gone_is_said_by_its_id() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(EngineFailure, match=f"process {gone.pid} cannot be read"):
        process_cpu_seconds(gone.pid)


def test_the_interval_of_a_median_is_narrow_where_ratios_agree() -> None:
    low, high = median_interval([0.99, 1.0, 1.01, 0.995, 1.005, 1.0, 0.998, 1.002])
    assert 0.98 < low < 1.0 < high < 1.02
    wide_low, wide_high = median_interval([0.6, 1.4, 0.9, 1.1, 0.7, 1.3, 0.8, 1.2])
    assert wide_high - wide_low > 10 * (high - low)


def test_one_round_has_no_interval() -> None:
    assert median_interval([0.9]) == (0.9, 0.9)
