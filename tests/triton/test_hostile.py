"""The siege: a server stands some hundreds of hostile requests, and what a siege looks for is found."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from random import Random

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import bench
from benchmarks.hostile.over_gateway import gateway_attack
from benchmarks.hostile.over_grpc import grpc_attack
from benchmarks.hostile.over_http import KINDS, http_attack
from benchmarks.hostile.sending import REFUSED
from benchmarks.hostile.siege import Siege, besiege
from benchmarks.hostile.target import Holding, Places, Target, own_address
from inflight.client.transport import Address
from inflight.errors import EngineFailure, InvalidRequest
from inflight.serve.server import free_ports
from tests.triton.support.servers import Running

REQUESTS = 400


def _address(port: int, scheme: str = "http") -> Address:
    return Address(scheme, "127.0.0.1", port)


@pytest.mark.proof
def test_hostile_requests_leave_the_same_processes_serving(server: Running) -> None:
    rpc = _address(server.grpc_port, "grpc")
    places = Places(_address(server.http_port), rpc, _address(server.metrics_port))
    siege = besiege(places, REQUESTS, seed=1, first=0, say=print)
    assert siege.flaws() == []
    assert siege.requests == REQUESTS
    assert siege.right > 0
    assert set(KINDS) <= set(siege.outcomes)
    assert sum(counts[REFUSED] for counts in siege.outcomes.values()) > REQUESTS / 3
    assert "Traceback" not in server.log


def test_hostile_request_follows_from_its_number() -> None:
    for number in range(60):
        assert http_attack(Random(f"0 {number}")) == http_attack(Random(f"0 {number}"))
        assert grpc_attack(Random(f"0 {number}")) == grpc_attack(Random(f"0 {number}"))
        assert gateway_attack(Random(f"0 {number}"), "m") == gateway_attack(Random(f"0 {number}"), "m")


def test_hostile_report_tells_every_flaw() -> None:
    held = [Holding(1, 10, 0), Holding(1, 10, 0), Holding(2, 100, 0)]
    siege = Siege({"one": Counter(refused=4000)}, ["Traceback …"], [7], 5, ["other text"], held, 3)
    siege.failed = {"broken JSON: 500 failed": [8], "fields of the gateway: 500 a fault": [9, 10]}
    siege.tracebacks = 2
    assert siege.flaws() == [
        "request 7 got no answer in 300 s",
        "a client was told: Traceback …",
        "a neighbour got: other text",
        "request 9, fields of the gateway: 500 a fault",
        "the logs have 2 tracebacks more",
        "memory has grown more than 1.5-fold in the second half",
        "90 descriptors more than after half are open",
        "3 requests are still in flight",
    ]


def test_hostile_report_notices_a_process_that_ends() -> None:
    [port] = free_ports(1)
    with subprocess.Popen([sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]) as process:
        places = Places(_address(port), _address(port), _address(port))
        for _ in range(600):
            try:
                target = Target(places)
                break
            except EngineFailure:
                time.sleep(0.1)
        assert target.gone() == []
        assert target.holding().memory > 0
        process.kill()
        process.wait()
    assert target.gone() == [process.pid]
    with pytest.raises(EngineFailure, match="no process of this user listens on 127.0.0.1"):
        Target(places)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("address", "said"),
    [("192.0.2.1:8000", "only a loopback address"), ("https://127.0.0.1:8000", "the scheme must be")],
)
def test_bench_hostile_takes_this_machine_only(address: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        own_address(address, "--http", "http")
    result = CliRunner().invoke(bench, ["hostile", "--http", address])
    assert result.exit_code == 1
