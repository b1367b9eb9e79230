"""The benchmark `faults`: what counts as a broken promise, a place of its own, and one fault from start to end."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import cast

import pytest

from benchmarks.faults import kinds, place, report, rolling, run, streams
from benchmarks.faults.streams import WHOLE, Clients, Seen, have_all_run
from inflight.errors import EngineFailure

_FAULT = kinds.Fault("SIGKILL", "gateway", "a new gateway", lambda *_: nullcontext(), ends_openai=True)
_KEPT = run.Outcome(_FAULT, good_s=3.0, equal=2, errors=Counter({f"{streams.OPENAI}: ReadError": 2}), exit_code=0)


def test_a_promise_is_broken_by_each_thing_that_must_not_be() -> None:
    assert report.broken_promises(_KEPT, 4) == []
    broken = {
        "good_s": (None, "no good answer"),
        "unequal": (1, "1 wrong texts"),
        "errors": (Counter({f"{streams.GRPC}: ServerUnreachable": 3}), "3 of 4 streams lost"),
        "endless": (1, "1 streams without an end"),
        "exit_code": (1, "exit code 1"),
        "processes": (["tritonserver"], "processes left: tritonserver"),
        "files": (["/dev/shm/a"], "files left: /dev/shm/a"),
        "failure": ("it did not start", "it did not start"),
    }
    for name, (value, words) in broken.items():
        assert report.broken_promises(replace(_KEPT, **{name: value}), 4) == [words]
    [late] = report.broken_promises(replace(_KEPT, good_s=_FAULT.good_s + 0.1), 4)
    assert "a good answer after" in late
    not_allowed = replace(_KEPT, fault=replace(_FAULT, ends_openai=False))
    assert report.broken_promises(not_allowed, 4) == ["2 of 4 streams lost"]


def test_streams_are_counted_by_their_ends_and_texts() -> None:
    outcome = run.Outcome(_FAULT)
    seen = [Seen("a", end=WHOLE), Seen("b", end=WHOLE), Seen("c", end="gRPC: QueueFull"), Seen("d")]
    outcome.count(seen, ["a", "other", "c", "d"])
    assert (outcome.equal, outcome.unequal, outcome.endless) == (1, 1, 1)
    assert outcome.errors == {"gRPC: QueueFull": 1}
    result = report.faults_result([outcome], 4)
    assert result.rows[0]["lost"] == 3
    assert result.figure is not None


def test_a_rolling_update_counts_stops_and_kills_apart() -> None:
    rows = [
        {"way": rolling.STOPPED, "requests": 10, "failed": 0, "not as promised": 0},
        {"way": "SIGKILL of all", "requests": 20, "failed": 3, "not as promised": 1},
    ]
    finding = rolling.rolling_result(rows).finding
    assert "0 of 10 requests failed" in finding
    assert "3 of 20 failed, 1 of them against the promise" in finding


@pytest.mark.skipif(os.getuid() != 0, reason="a mount namespace needs root")
def test_a_place_has_files_and_processes_of_its_own_and_can_be_full() -> None:
    with place.make_place() as made:
        made.path("/tmp/left").touch()
        assert made.files() == ["/tmp/left"]
        left = subprocess.Popen(made.command("sleep", "1000"))
        while made.processes() != {left.pid: "sleep 1000"}:
            assert left.poll() is None
            time.sleep(0.05)
        with made.full("/dev/shm"), pytest.raises(OSError, match="No space left"):
            made.path("/dev/shm/more").write_bytes(bytes(1 << 16))
        made.path("/dev/shm/more").write_bytes(bytes(1 << 16))
        left.kill()
        left.wait()
        assert made.wait_until_empty() == {}


class _Uneven:
    """Clients whose first stream comes to its end before the second has begun, in the first try or in all."""

    def __init__(self, tries: float, end: str = WHOLE) -> None:
        self.tries, self.end, self.started = tries, end, 0

    async def run(self, place: int, seen: Seen) -> None:
        """Run one of two streams."""
        self.started += 1
        if self.started <= 2 * self.tries:
            if place == 0:
                seen.end = self.end
            seen.runs.set()
        else:
            seen.add("text")
            await asyncio.Event().wait()
        seen.end = seen.end or WHOLE


def test_streams_that_did_not_run_at_once_are_started_anew() -> None:
    clients = _Uneven(1)
    seen, _ = asyncio.run(have_all_run(cast(Clients, clients), 2))
    assert ([one.text for one in seen], clients.started) == (["text", "text"], 4)
    with pytest.raises(EngineFailure, match="before all of them ran: whole"):
        asyncio.run(have_all_run(cast(Clients, _Uneven(math.inf)), 2))
    broken = _Uneven(math.inf, "gRPC: EngineFailure")
    with pytest.raises(EngineFailure, match="before all of them ran: gRPC: EngineFailure"):
        asyncio.run(have_all_run(cast(Clients, broken), 1))
    assert broken.started == 1


@pytest.mark.proof
@pytest.mark.skipif(os.getuid() != 0, reason="a mount namespace needs root")
def test_a_killed_engine_comes_back_and_leaves_nothing() -> None:
    with place.make_place() as made:
        [fault] = [one for one in kinds.all_faults(made) if one.title == "SIGKILL, tensorrt_llm"]
    outcome = run.try_fault(fault, run.unbroken_texts(4))
    assert (outcome.failure, outcome.endless, outcome.unequal) == ("", 0, 0)
    assert outcome.good_s is not None
    assert (outcome.equal, outcome.errors) == (4, {}) or outcome.good_s > 20  # clients and gateway wait for 30 s
    assert outcome.said == "the stage tensorrt_llm ended on SIGKILL"
    assert (outcome.exit_code, outcome.processes, outcome.files) == (0, [], [])
