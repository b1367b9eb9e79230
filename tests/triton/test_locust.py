"""The locust file against a live server: no failures, and figures that agree with the server's metrics."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.triton.conftest import Running, run
from tests.triton.metrics_page import read_metric, wait_until

USERS, SECONDS = 16, 60
LOCUSTFILE = Path(__file__).parents[2] / "loadtest/locustfile.py"
TTFT = "inflight_time_to_first_token_seconds"


@pytest.fixture
def fresh_server() -> Iterator[Running]:
    yield from run()


@pytest.mark.slow
def test_a_minute_of_sixteen_users(fresh_server: Running) -> None:
    server = fresh_server
    command = [str(Path(sys.executable).with_name("locust")), "-f", str(LOCUSTFILE), "--headless", "--json"]
    command += ["-u", str(USERS), "-r", str(USERS), "-t", f"{SECONDS}s", "--stop-timeout", "10"]
    command += ["--host", server.http, "--grpc-url", server.grpc]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS + 60)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {(row["method"], row["name"]): row for row in json.loads(done.stdout[done.stdout.index("[") :])}
    for kind in ("gRPC", "HTTP"):
        assert rows[kind, "E2E"]["num_requests"] > 50
        assert all(rows[kind, name]["num_failures"] == 0 for name in ("E2E", "TTFT", "ITL"))
    sent = sum(rows[kind, "E2E"]["num_requests"] for kind in ("gRPC", "HTTP"))
    assert wait_until(lambda: abs(read_metric(server.metrics, f"{TTFT}_count") - sent) <= USERS, 5)
    seen = sum(rows[kind, "TTFT"]["total_response_time"] for kind in ("gRPC", "HTTP")) / sent / 1000
    made = read_metric(server.metrics, f"{TTFT}_sum") / read_metric(server.metrics, f"{TTFT}_count")
    # What a client sees is the engine's time, and tokenizing and transport on a machine that is busy with both sides.
    assert made < seen < made + 0.1
