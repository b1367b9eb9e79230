"""The locustfile against real servers with the replay engine: its figures are those of ``inflight load``."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from inflight.load.measurements import measure
from inflight.load.pipeline import replay_server
from inflight.load.result import REPORT, read_records, read_summary
from inflight.resources import DEMO
from inflight.serve.server import TritonServer, free_ports

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
CLOSED = """
drain_s = 20
[[phases]]
duration_s = 4
concurrency = 3
[[classes]]
name = "a"
system_prompt = { tokens = 16, variants = 2 }
prompt_tokens = { distribution = "uniform", min = 8, max = 40 }
output_tokens = { distribution = "uniform", min = 10, max = 30 }
"""
CANCELLED = CLOSED + "cancellations = { share = 0.5, after_tokens = { distribution = 'fixed', value = 3 } }\n"
FIGURES = ("itl_ms", "e2e_ms", "ttft_ms")
STEP_MS = 40.0
OPEN = CLOSED.replace("concurrency = 3", 'rate = 6\narrivals = "constant"')


@dataclass(frozen=True)
class Run:
    """What a run of locust has left."""

    code: int
    output: str
    directory: Path
    rows: dict[tuple[str, str], dict[str, str]]
    """Of the CSV, by type and name."""

    @property
    def summary(self) -> dict[str, Any]:
        return read_summary(self.directory)

    def count(self, name: str, kind: str = "gRPC") -> int:
        return int(self.rows[kind, name]["Request Count"])


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    with replay_server(DEMO / "model", 5.0) as running:
        yield running


@pytest.fixture
def locust(tmp_path: Path) -> Callable[..., Run]:
    def run(scenario: str, ports: tuple[int, int], *more: str) -> Run:
        command = [*_command(tmp_path, scenario, ports), "--headless", "--only-summary"]
        command += ["--csv", str(tmp_path / "out"), "--result", str(tmp_path / "result"), *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
        output = done.stdout + done.stderr
        assert "Traceback" not in output
        with (tmp_path / "out_stats.csv").open() as file:
            rows = {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}
        return Run(done.returncode, output, tmp_path / "result", rows)

    return run


def _command(directory: Path, scenario: str, ports: tuple[int, int]) -> list[str]:
    (directory / "it.toml").write_text(scenario)
    command = [str(BIN / "locust"), "-f", "loadtest/locustfile.py", "--scenario", str(directory / "it.toml")]
    return [*command, "--host", f"http://127.0.0.1:{ports[0]}", "--grpc-url", f"127.0.0.1:{ports[1]}"]


def _ports(server: TritonServer) -> tuple[int, int]:
    return server.settings.http_port, server.settings.grpc_port


def test_both_users_fire_every_event_and_leave_the_same_result(
    server: TritonServer, locust: Callable[..., Run]
) -> None:
    run = locust(CLOSED, _ports(server))
    assert run.code == 0, run.output[-2000:]
    records = read_records(run.directory)
    assert {one.outcome for one in records} == {"completed"}
    for name in ("E2E", "TTFT", "queue"):
        assert run.count(name, "gRPC") + run.count(name, "HTTP") == len(records)
    assert run.count("ITL", "gRPC") + run.count("ITL", "HTTP") == sum(len(one.itl_s) for one in records)
    assert run.count("chunk gap", "gRPC") + run.count("chunk gap", "HTTP") == sum(len(one.gaps_s) for one in records)
    assert run.summary["transport"] == "grpc and http"
    assert (run.directory / REPORT).stat().st_size > 10_000
    cost = run.summary["swarm"]
    assert cost["client_cpu_s"] > 0
    assert cost["server_cpu_s"] > 0
    assert "locust used" in run.output


@pytest.mark.alone
def test_requests_and_figures_are_those_of_inflight_load(locust: Callable[..., Run], tmp_path: Path) -> None:
    other = tmp_path / "other"
    command = [str(BIN / "inflight"), "load", "run", str(tmp_path / "it.toml"), "--output", str(other)]
    with replay_server(DEMO / "model", STEP_MS) as slow:  # the engine's pace is nearly all that is measured
        ours = locust(OPEN, _ports(slow), "GrpcUser")
        url = f"127.0.0.1:{_ports(slow)[1]}"
        subprocess.run([*command, "--url", url], check=True, timeout=120, capture_output=True)
    seen, known = ({(one.session, one.turn): one for one in read_records(where)} for where in (ours.directory, other))
    assert len(seen) == 24
    assert seen.keys() == known.keys()
    for records, figures in ((seen, ours.summary["figures"]), (known, read_summary(other)["figures"])):
        # The engine is never faster. A machine that stands still adds to some requests, and not to the least of all.
        paces = [1000 * one.e2e_s / one.output_tokens / STEP_MS for one in records.values()]
        assert 0.85 < min(paces) < 1.5
        counted = measure(list(records.values()), tuple(figures["window_s"]), {})
        for name in FIGURES:
            assert figures[name]["p50"] == pytest.approx(getattr(counted, name).p50, abs=0.01)
    for key, one in seen.items():
        assert (one.scheduled_s, one.input_tokens, one.output_tokens) == (
            known[key].scheduled_s,
            known[key].input_tokens,
            known[key].output_tokens,
        )


def test_cancelled_requests_are_no_failures(server: TritonServer, locust: Callable[..., Run]) -> None:
    run = locust(CANCELLED, _ports(server), "GrpcUser")
    assert run.code == 0, run.output[-2000:]
    outcomes = [one.outcome for one in read_records(run.directory)]
    assert run.count("cancelled") == outcomes.count("cancelled") > 0
    assert run.count("E2E") == outcomes.count("completed") > 0
    assert int(run.rows["", "Aggregated"]["Failure Count"]) == 0


@pytest.mark.alone  # a worker that is not heard of in time is taken for lost
def test_two_workers_share_the_workload(server: TritonServer, locust: Callable[..., Run]) -> None:
    master = str(free_ports(3)[0])
    options = ["--processes", "2", "--master-bind-host", "127.0.0.1", "--master-bind-port", master]
    run = locust(CLOSED, _ports(server), "GrpcUser", *options, "--master-port", master)
    assert run.code == 0, run.output[-2000:]
    sessions = [one.session for one in read_records(run.directory)]
    assert len(sessions) == len(set(sessions)) == run.count("E2E")
    assert {number % 2 for number in sessions} == {0, 1}
    cost = run.summary["swarm"]
    assert (cost["workers"], cost["lost_workers"]) == (2, 0)


def test_files_that_locust_ends_with_are_written_to_until_it_is_gone(tmp_path: Path) -> None:
    program = f"""
import locust.stats
from inflight.load.swarm.swarm import install
install()
from gevent import sleep, spawn
from locust.env import Environment
locust.stats.CSV_STATS_INTERVAL_SEC = 0.01
writer = locust.stats.StatsCSVFileWriter(Environment(), [0.5], {str(tmp_path / "out")!r})
writing = spawn(writer)
for _ in range(50):  # each lets the writer run, however late both are
    sleep(0.01)
writer.close_files()
assert open(writer.stats_history_file_name()).read().count("Aggregated") > 1
sleep(0.05)
assert not writing.dead
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_result_that_cannot_be_written_is_refused_before_the_load(tmp_path: Path) -> None:
    command = [*_command(tmp_path, CLOSED, free_ports(3)[:2]), "--headless", "--result", str(tmp_path / "it.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("it.toml: cannot be written: File exists")
    assert "Traceback" not in done.stderr


def test_a_dead_server_gives_failures(locust: Callable[..., Run]) -> None:
    run = locust(CLOSED, free_ports(3)[:2])
    assert run.code == 1
    assert run.summary["figures"]["errors"].keys() == {"unreachable"}
    assert int(run.rows["gRPC", "E2E"]["Failure Count"]) == run.count("E2E") > 0
    assert "UNAVAILABLE unreachable" in run.output


def test_the_page_has_a_tab_with_live_figures(server: TritonServer, tmp_path: Path) -> None:
    port, endless = free_ports(3)[0], CLOSED.replace("duration_s = 4", "duration_s = 600")
    command = [*_command(tmp_path, endless, _ports(server)), "GrpcUser", "--autostart"]
    command += ["--web-host", "127.0.0.1", "--web-port", str(port), "--result", str(tmp_path / "result")]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process:
        figures: dict[str, Any] = {}
        try:
            deadline = time.monotonic() + 60
            while "ITL per token, ms" not in figures and process.poll() is None and time.monotonic() < deadline:
                figures = _figures(port)
                time.sleep(0.2)
            page = _get(f"http://127.0.0.1:{port}/")
        finally:
            process.terminate()
            process.wait(30)
    assert "extended_tabs" in page
    assert figures["running requests"]["value"] <= 3
    assert figures["TTFT, ms"]["samples"] > 0
    assert read_summary(tmp_path / "result")["interrupted"] is True


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def _figures(port: int) -> dict[str, Any]:
    """Return the rows of the tab; none before the page is there and complete."""
    try:
        stats = json.loads(_get(f"http://127.0.0.1:{port}/stats/requests"))
    except OSError:
        return {}
    rows = {row["figure"]: row for one in stats.get("extended_stats", []) for row in one["data"]}
    return rows if rows.get("ITL per token, ms", {}).get("samples") else {}
