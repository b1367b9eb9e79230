"""The locustfile: real processes of locust against a real server with the replay engine."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pipeline import serve
from inflight.load.measurements import RequestRecord
from inflight.load.scenario import load_scenario
from inflight.load.workload import PromptWriter, Workload
from inflight.resources import DEMO
from inflight.serve.server import TritonServer, free_ports

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
STEP_MS = 5.0
CHAT = """
[[phases]]
duration_s = 4
concurrency = 3
[[classes]]
name = "chat"
system_prompt = { tokens = 16, variants = 2 }
prompt_tokens = { distribution = "uniform", min = 8, max = 40 }
output_tokens = { distribution = "uniform", min = 10, max = 30 }
"""
ALL_KINDS = """
[[phases]]
duration_s = 4
concurrency = 3
[[classes]]
name = "tokens"
prompt_tokens = { distribution = "fixed", value = 8 }
output_tokens = { distribution = "fixed", value = 200 }
cancellations = { share = 1.0, after_tokens = { distribution = "fixed", value = 3 } }
[[classes]]
name = "time"
prompt_tokens = { distribution = "fixed", value = 8 }
output_tokens = { distribution = "fixed", value = 200 }
cancellations = { share = 1.0, after_ms = { distribution = "fixed", value = 50 } }
[[classes]]
name = "talk"
format = "messages"
prompt_tokens = { distribution = "fixed", value = 8 }
output_tokens = { distribution = "fixed", value = 5 }
turns = { count = { distribution = "fixed", value = 2 } }
"""


@dataclass(frozen=True)
class Run:
    """What a run of locust has left."""

    code: int
    output: str
    rows: dict[tuple[str, str], dict[str, Any]]
    """Locust's statistics by type and name; its CSV is up to a second old."""
    cpu: dict[str, float]
    """Cores that each process used."""
    records: list[RequestRecord]

    def count(self, kind: str, name: str = "chat") -> int:
        return int(self.rows.get((kind, name), {}).get("num_requests", 0))


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    engine = {"kind": "replay", "replay_step_ms": STEP_MS}
    with serve({"model": str(DEMO / "model"), "engine": engine, "limits": {"max_prompt_bytes": 4000}}) as running:
        yield running


@pytest.fixture
def locust(server: TritonServer, tmp_path: Path) -> Callable[..., Run]:
    def run(scenario: str, until: Callable[[Run], bool], *more: str, workers: int = 0) -> Run:
        """Run locust until its files show what is wanted, however long the machine takes for it."""
        command = [*_command(tmp_path, scenario, server), "--headless", "--only-summary", *more]
        command += ["--json-file", str(tmp_path / "out")]
        command += ["--records", str(tmp_path / "records")]
        command += ["--master", "--expect-workers", str(workers)] if workers else []
        port = free_ports(3)[0]
        command += ["--master-bind-host", "127.0.0.1", "--master-bind-port", str(port)] if workers else []
        joining = [str(BIN / "locust"), "-f", "loadtest/locustfile.py", "--worker", "--master-port", str(port)]
        joined = [subprocess.Popen(joining, cwd=ROOT, stderr=subprocess.DEVNULL) for _ in range(workers)]
        try:
            code, output = _run(command, tmp_path, lambda: until(_read(tmp_path)))
            assert [one.wait(60) for one in joined] == [0] * workers
        finally:
            for one in joined:
                one.kill()
        assert "Traceback" not in output
        return _read(tmp_path, code, output)

    return run


def _command(directory: Path, scenario: str, server: TritonServer) -> list[str]:
    (directory / "it.toml").write_text(scenario)
    http, grpc = server.settings.http_port, server.settings.grpc_port
    command = [str(BIN / "locust"), "-f", "loadtest/locustfile.py", "--scenario", str(directory / "it.toml")]
    command += ["--users", "4", "--spawn-rate", "4"]
    return [*command, "--host", f"http://127.0.0.1:{http}", "--grpc-url", f"127.0.0.1:{grpc}"]


def _run(command: list[str], directory: Path, done: Callable[[], bool]) -> tuple[int, str]:
    """Run locust until its files show what is wanted; return its code and what it said."""
    command = [*command, "--csv", str(directory / "out")]
    with (directory / "log").open("w") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process:
        try:
            _wait(done, process)
        finally:
            process.terminate()
            code = process.wait(60)
    return code, (directory / "log").read_text()


def _read(directory: Path, code: int = 0, output: str = "") -> Run:
    """Return what locust has written; while it runs, its statistics are up to a second old."""
    if (last := directory / "out.json").exists():
        rows = {(row["method"], row["name"]): row for row in json.loads(last.read_text())}
    else:
        interim = _csv_rows(directory / "out_stats.csv")
        rows = {(row["Type"], row["Name"]): {"num_requests": row["Request Count"]} for row in interim}
    cpu = {row["Process"]: float(row["Share of one core"]) for row in _csv_rows(directory / "out_cpu.csv")}
    lines = [
        line for path in sorted(directory.glob("records/*")) for line in path.read_text().splitlines(keepends=True)
    ]
    records = [RequestRecord.from_json(json.loads(line)) for line in lines if line.endswith("\n")]
    return Run(code, output, rows, cpu, records)


def _csv_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.proof
def test_grpc_and_http_users_fire_ttft_itl_and_tpot_of_every_stream(locust: Callable[..., Run], tmp_path: Path) -> None:
    def has_all(run: Run) -> bool:
        """Return whether answers have come by both, and one in several responses: of one alone there is no TPOT."""
        return all(run.count(kind) for kind in ("gRPC", "HTTP", "TPOT"))

    run = locust(CHAT, has_all, "--tags", "stream", "--seed", "7")
    assert run.code == 0, run.output[-2000:]
    assert run.count("gRPC") + run.count("HTTP") == run.count("TTFT") == len(run.records)
    counted = {row["Type"] or row["Name"]: int(row["Request Count"]) for row in _csv_rows(tmp_path / "out_stats.csv")}
    assert counted["Aggregated"] == counted["gRPC"] + counted["HTTP"], "samples are no requests"
    assert run.count("ITL") == sum(len(one.itl_s) for one in run.records)
    longest = max(one.ttft_s or 0 for one in run.records)
    assert run.rows["TTFT", "chat"]["max_response_time"] == pytest.approx(1000 * longest, abs=0.01)
    several = [one.output_tokens for one in run.records if one.itl_s]  # of one response alone there is no such time
    assert run.count("TPOT") == len(several)
    assert run.rows["TPOT", "chat"]["total_content_length"] == sum(several)
    assert 0 < run.cpu["locust"] <= 4
    assert "of one core" in run.output
    workload = Workload(load_scenario(tmp_path / "it.toml"), PromptWriter.of_checkpoint(DEMO / "model"), 7)
    assert len({one.session for one in run.records}) == len(run.records)
    for one in run.records:
        assert one.outcome == "completed"
        assert one.output_tokens == workload.session(one.session).turns[0].max_tokens
        assert sum(arrival.tokens for arrival in one.arrivals) == one.output_tokens
        assert one.e2e_s >= 0.85 * one.output_tokens * STEP_MS / 1000  # the engine is never faster


@pytest.mark.proof
def test_cancellations_are_no_failures_and_conversations_have_all_turns(locust: Callable[..., Run]) -> None:
    def has_all(run: Run) -> bool:
        turns = {one.turn for one in run.records if one.class_name == "talk"}
        return turns == {0, 1} and all(run.count("cancelled", name) for name in ("tokens", "time"))

    run = locust(ALL_KINDS, has_all, "--tags", "stream")
    assert run.code == 0
    assert not any(row["num_failures"] for row in run.rows.values())
    for name in ("tokens", "time"):
        outcomes = [one.outcome for one in run.records if one.class_name == name]
        assert set(outcomes) <= {"cancelled", "completed"}  # of a machine that stood still, the whole answer has come
        assert run.count("cancelled", name) == outcomes.count("cancelled")
        assert run.count("TTFT", name) == outcomes.count("completed")


@pytest.mark.proof
def test_unary_answers_have_no_time_to_the_first_token(locust: Callable[..., Run]) -> None:
    run = locust(CHAT, lambda run: {kind for kind, _ in run.rows} >= {"gRPC", "HTTP"}, "--tags", "unary")
    assert run.rows.keys() == {("gRPC", "chat unary"), ("HTTP", "chat unary")}
    assert run.count("gRPC", "chat unary") + run.count("HTTP", "chat unary") == len(run.records)


@pytest.mark.proof
def test_failures_bear_the_name_of_their_kind(server: TritonServer, tmp_path: Path) -> None:
    long = CHAT.replace("min = 8, max = 40", "min = 4000, max = 4000")
    gone = [f"127.0.0.1:{port}" for port in free_ports(3)[:2]]
    nowhere = ["--host", f"http://{gone[0]}", "--grpc-url", gone[1]]
    failures = tmp_path / "out_failures.csv"

    def have_both_failed() -> bool:
        return {row["Method"] for row in _csv_rows(failures)} >= {"gRPC", "HTTP"}

    for kind, scenario, more in (("invalid", long, []), ("unreachable", CHAT, nowhere)):
        command = [*_command(tmp_path, scenario, server), "--headless", "--tags", "stream", *more]
        code, output = _run(command, tmp_path, have_both_failed)
        failures.unlink()
        assert code == 1
        assert f"gRPC chat: {kind}" in output
        assert f"HTTP chat: {kind}" in output
        assert f"the first failure of its kind: {kind}: " in output


@pytest.mark.proof
def test_master_and_two_workers_share_the_sessions(locust: Callable[..., Run]) -> None:
    def have_both_reported(run: Run) -> bool:
        """Return whether the master knows of more answers than either worker has had."""
        of_each = Counter(one.session % 1024 for one in run.records)
        return run.count("TTFT") > max(of_each.values(), default=0)

    run = locust(CHAT, have_both_reported, "--tags", "stream", workers=2)
    assert run.code == 0, run.output[-2000:]
    sessions = [one.session for one in run.records]
    assert len(sessions) == len(set(sessions))
    assert {number % 1024 for number in sessions} == {0, 1}
    assert 0 < run.count("TTFT") == run.count("gRPC") + run.count("HTTP") <= len(run.records)
    assert run.cpu.keys() == {"worker 0", "worker 1", "master"}
    assert min(run.cpu["worker 0"], run.cpu["worker 1"]) > 0


@pytest.mark.proof
def test_options_that_cannot_be_used_end_locust_with_one_line(server: TritonServer, tmp_path: Path) -> None:
    command = [*_command(tmp_path, CHAT, server), "--headless", "--scenario", "smok"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("inflight: there is no scenario 'smok' (did you mean 'smoke'?)")
    assert "Traceback" not in done.stderr


@pytest.mark.proof
def test_a_process_that_uses_most_of_a_core_is_warned_of(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, "loadtest")
import locust_report
from argparse import Namespace
from locust.env import Environment
for locust_report.CPU_LIMIT in (0.0, 1000.0):
    environment = Environment(parsed_options=Namespace(records="", csv_prefix={str(tmp_path / "out")!r}))
    environment.create_local_runner()
    locust_report.Report(environment)
    environment.events.test_start.fire(environment=environment)
    sum(range(100_000))
    environment.events.test_stop.fire(environment=environment)
    environment.events.quit.fire(exit_code=0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    first, warning, last = done.stderr.splitlines()
    assert first.startswith("locust: ")
    assert last.startswith("locust: ")
    assert warning.startswith("WARNING: locust used more than 0% of one core")
    (row,) = _csv_rows(tmp_path / "out_cpu.csv")
    assert float(row["CPU s"]) > 0


@pytest.mark.proof
def test_the_page_starts_a_scenario_and_shows_its_figures(server: TritonServer, tmp_path: Path) -> None:
    port = free_ports(3)[0]
    command = [*_command(tmp_path, CHAT, server), "--web-host", "127.0.0.1", "--web-port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process:
        try:
            _wait(lambda: bool(_get(f"{url}/")), process)
            page = _get(f"{url}/")
            assert '"grpc_url"' in page
            assert '"records"' not in page  # whoever sees the page must not choose where files are written
            form = {"user_count": 2, "spawn_rate": 2, "host": f"http://127.0.0.1:{server.settings.http_port}"}
            urllib.request.urlopen(f"{url}/swarm", urllib.parse.urlencode(form | {"scenario": "smoke"}).encode())
            _wait(lambda: {("TTFT", "short"), ("ITL", "short"), ("TPOT", "short")} <= _rows(url), process)
            assert len(_get(f"{url}/stats/report")) > 10_000
        finally:
            process.terminate()
            process.wait(30)
    assert "of one core" in (tmp_path / "log").read_text()


def _wait(done: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert process.poll() is None, "locust has ended"
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _get(url: str) -> str:
    """Return the page; nothing while there is no server yet."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def _rows(url: str) -> set[tuple[str, str]]:
    return {
        (row["method"], row["name"]) for row in json.loads(_get(f"{url}/stats/requests") or '{"stats": []}')["stats"]
    }


SESSIONS = """
from types import SimpleNamespace
from locustfile import GrpcUser
seen = []
for worker in range(3):
    user = GrpcUser.__new__(GrpcUser)
    user.environment = SimpleNamespace(runner=SimpleNamespace(worker_index=worker))
    scenario = SimpleNamespace(trace=True)
    user._workload = SimpleNamespace(scenario=scenario, arrivals=range(48), session=lambda number: number)
    seen.append([user._next_session() for _ in range(48)])
print(all(sorted(one) == list(range(48)) for one in seen), len({tuple(one) for one in seen}))
"""


@pytest.mark.proof
def test_every_worker_replays_all_of_a_trace_from_a_place_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SESSIONS], cwd=ROOT / "loadtest", capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["True 3"], done.stderr
