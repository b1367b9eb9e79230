"""Alerts proven by faults: a stage or a whole server is hurt, and the alert fires in its time, shortened by a scale.

The limits of the waits have room for a busy machine; that an alert does not fire early is promtool's to show.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from inflight.serve import server as serve_server
from inflight.settings.observability import METRICS_VARIABLE
from monitoring.generate.health import HEARTBEAT_S
from monitoring.generate.rule import MINUTE
from tests.monitoring.support.stack import FAST_SCALE, ROOM_S, load, stack, stopped, wait_for, watch

pytestmark = [
    pytest.mark.proof(waits=True),
    pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus is not installed"),
]

PACED = {"kind": "replay", "replay_step_ms": 20}
"""An engine that leaves the cores to others."""
GONE = {"InflightTargetDown", "InflightTargetGone"}
"""All that fires of a server that is gone: what is gone has no figures."""


def test_a_stalled_engine(tmp_path: Path) -> None:
    # Requests that run for as long as the test looks, on any machine: between two rounds nothing would stand still.
    with stack(tmp_path, engine=PACED) as running, load(running, 4, 1400):
        gauge = "sum(min_over_time(inflight_running_requests[3s])) > 0"
        wait_for(lambda: running.prometheus.instant(gauge), 30, "no request runs")
        with stopped(running.stub("tensorrt_llm")):
            said = running.wait_firing("InflightNoTokenProgress", MINUTE)
            assert said["severity"] == "critical"
            assert said["instance"] in said["summary"]
            assert running.wait_firing("InflightStageDead", HEARTBEAT_S)["model"] == "tensorrt_llm"
        running.wait_quiet("InflightNoTokenProgress", "InflightStageDead")


def test_a_killed_stage_which_triton_does_not_notice(tmp_path: Path) -> None:
    with stack(tmp_path) as running:
        os.kill(running.stub("tensorrt_llm"), signal.SIGKILL)
        assert running.wait_firing("InflightStageDead", HEARTBEAT_S)["model"] == "tensorrt_llm"
        http = f"http://127.0.0.1:{running.server.settings.http_port}/v2"
        for path in ("/health/ready", "/models/ensemble/ready", "/models/tensorrt_llm/ready"):
            assert httpx.get(http + path, timeout=60).status_code == 200
        with load(running, 2, 8):
            assert running.wait_firing("InflightMostRequestsFailing", 5 * MINUTE)["severity"] == "critical"
            running.wait_firing("InflightRequestsFailing", 5 * MINUTE)
        running.server.stop()
        # All that was said of the server goes with it.
        wait_for(
            lambda: {"InflightTargetDown"} <= set(running.firing()) <= GONE, 60, f"firing: {list(running.firing())}"
        )


def test_a_server_that_is_gone_and_then_restarts(tmp_path: Path) -> None:
    with stack(tmp_path, FAST_SCALE, engine=PACED) as running:
        running.server.stop()
        assert running.wait_firing("InflightTargetDown", 0)["severity"] == "warning"
        assert running.wait_firing("InflightTargetGone", 0)["severity"] == "critical"
        assert set(running.firing()) == GONE
        for _ in range(4):
            begin = time.time()
            with running.server:
                running.server.wait_ready(180)
                seen = f"inflight_start_time_seconds > {begin}"
                wait_for(lambda seen=seen: running.prometheus.instant(seen), ROOM_S, "the start is not scraped")
        running.wait_firing("InflightRestartLoop", 0)


def test_stages_without_exporters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_server, "METRICS_VARIABLE", "NOT_" + METRICS_VARIABLE)
    monkeypatch.setenv(METRICS_VARIABLE, "off")
    with stack(tmp_path, FAST_SCALE, engine=PACED) as running:
        assert running.wait_firing("InflightMetricsMissing", 0)["severity"] == "warning"


def test_a_stop_that_hangs(tmp_path: Path) -> None:
    """A connection from before is answered with 200 until the end, so it takes a Prometheus that asks anew."""
    with stack(tmp_path, exit_timeout_s=120, engine=PACED) as running, load(running, 2, 1500):
        wait_for(lambda: running.prometheus.instant("inflight_running_requests > 0"), 30, "no request runs")
        with stopped(running.stub("tensorrt_llm")):
            os.kill(running.server.process.pid, signal.SIGTERM)
            folder = tmp_path / "anew"
            folder.mkdir()
            with watch(running.server, folder) as anew:
                assert replace(running, prometheus=anew).wait_firing("InflightNotReady", 0)["severity"] == "critical"
        os.kill(running.server.process.pid, signal.SIGKILL)
