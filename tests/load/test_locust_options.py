"""What locust does of a scenario: the users of its phases, and which options it takes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from argparse import Namespace
from typing import Any

import pytest

from inflight.errors import QueueFull
from inflight.load.measurements import RequestRecord
from inflight.load.scenario import ScenarioError
from inflight.load.swarm.gathering import Gathering
from inflight.load.swarm.lane import Lane
from inflight.load.swarm.levels import level
from inflight.load.swarm.options import command_of, settings_of
from inflight.load.swarm.station import kind_of_error
from tests.load.scenarios import scenario, workload

OPTIONS: dict[str, Any] = {
    "scenario": "smoke",
    "grpc_url": "127.0.0.1:1",
    "host": None,
    "deployment": "deployments/demo",
    "seed": None,
    "duration_scale": 1.0,
    "server_pid": None,
    "user_classes": [],
    "processes": None,
}


def test_users_follow_the_phases() -> None:
    phases = scenario(
        phases=[
            {"duration_s": 10, "concurrency": 0, "to_concurrency": 8, "steady": False},
            {"duration_s": 5, "concurrency": 8},
            {"duration_s": 5, "concurrency": 2},
        ]
    ).phases
    assert [level(phases, at) for at in (0, 2.5, 9.9, 10, 14.9, 15, 19.9, 20)] == [0, 2, 8, 8, 8, 2, 2, 0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_users": 4}, "--users"),
        ({"spawn_rate": 2}, "--spawn-rate"),
        ({"run_time": 60}, "--run-time"),
        ({"seed": -1}, "--seed is -1"),
        ({"duration_scale": 0.0}, "--duration-scale is 0"),
        ({"duration_scale": float("nan")}, "--duration-scale is nan"),
        ({"duration_scale": float("inf")}, "--duration-scale is inf"),
        ({"server_pid": 2**30}, "--server-pid is 1073741824"),
        ({"scenario": "smok"}, "did you mean 'smoke'"),
    ],
)
def test_options_that_cannot_be_used_are_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError, match=said) as caught:
        settings_of(Namespace(**OPTIONS | given))
    assert "\n" not in str(caught.value)


def test_the_command_repeats_the_test_and_has_no_paths() -> None:
    options = OPTIONS | {"scenario": "/any/where/x.toml", "seed": 3, "processes": 2, "user_classes": ["GrpcUser"]}
    expected = "locust -f loadtest/locustfile.py GrpcUser --scenario x --seed 3 --processes 2"
    assert command_of(Namespace(**options)) == expected


def test_errors_are_listed_by_status_and_kind() -> None:
    assert kind_of_error(f"{QueueFull.label}: 17 requests wait") == "UNAVAILABLE queue_full"
    assert kind_of_error("unreachable: no route to 10.0.0.1") == "UNAVAILABLE unreachable"
    assert kind_of_error("ended_error: the server ended the request") == "INTERNAL ended_error"


def test_late_sends_are_blamed_once() -> None:
    """The delay is that of all workers' requests: each of them would be named for the fault of one."""
    gathering = Gathering(workload(phases=[{"duration_s": 4, "rate": 1}]), None, distributed=True)
    row = RequestRecord(0, 0, "a", 1.5, 2.0, "completed", scheduled_s=1.0).as_json()
    for number in range(3):
        batch = {"records": [("grpc", row)], "samples": [[1.0, 0.0, 0.0], [2.0, 0.0, 0.1]], "lost": False}
        figures = {"tokens": 0, "running": 0, "cpu_s": 0.0, "locust_cpu_s": 0.0, "seconds": 4.0}
        gathering.add(f"worker-{number}", batch | figures)
    reasons = gathering.result(gathering.cost(0), 4.0, False, "").client.reasons
    assert [reason.partition(" 500")[0] for reason in reasons] == ["sends were"]


def test_a_session_is_made_before_its_time() -> None:
    """A long prompt takes some time to make, which must not be a late send."""
    made: list[float] = []
    one = workload(phases=[{"duration_s": 4, "rate": 1}])
    lane = Lane(one, None, None, lambda _message: None)  # type: ignore[arg-type]

    async def start() -> None:
        lane.begin()
        lane.start(0, 60.0)
        await asyncio.sleep(0)
        lane.cancel(0)
        await asyncio.gather(*lane.sessions, return_exceptions=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one, "session", lambda _number: made.append(lane.clock()))
        asyncio.run(start())
    assert len(made) == 1


def test_importing_these_leaves_the_process_unpatched() -> None:
    code = "import inflight.load.swarm.options, inflight.load.swarm.station, sys; assert 'locust' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
