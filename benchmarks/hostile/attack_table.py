"""Runs the table of attacks against `inflight serve` with the demo, without the door and with it in front."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from benchmarks.hostile.attacks import ATTACKS, Attack
from benchmarks.hostile.front import Front
from benchmarks.hostile.target import Places, Target
from benchmarks.result import Result, Row
from inflight.addresses import read_directly
from inflight.client.transport import Address
from inflight.errors import EngineFailure
from inflight.resources import DEMO
from inflight.serve.server import free_ports

_START_S = 180.0


@dataclass(frozen=True)
class Serve:
    """A running `inflight serve` with the demo and its gateway."""

    front: Front
    said: Path
    """The file of what it has said."""

    @property
    def restarts(self) -> int:
        """How often it has started a process again."""
        return self.said.read_text(errors="replace").count(" restarts in ")

    def wait_until_served(self) -> None:
        """Wait until every port answers.

        Raises:
            EngineFailure: it does not for long.
        """
        deadline = time.monotonic() + _START_S
        while self.front.neighbour() != "served":
            if time.monotonic() > deadline:
                raise EngineFailure(f"the server does not answer; it said: {self.said.read_text()[-1000:]}")
            time.sleep(0.2)


@contextmanager
def serving(door: bool) -> Iterator[Serve]:
    """Run `inflight serve` with the demo on free ports, with the door or without it; it is stopped at the end."""
    http, grpc, metrics, gateway = free_ports(4)
    with TemporaryDirectory(prefix="inflight-attacks-") as folder:
        said = Path(folder) / "said"
        deployment = yaml.safe_load((DEMO / "deployment.yaml").read_text()) | {"model": str(DEMO / "model")}
        if door:
            deployment["door"] = {"enabled": True}
        (Path(folder) / "deployment.yaml").write_text(yaml.safe_dump(deployment))
        ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}", f"--gateway-port={gateway}"]
        environment = os.environ | {"XDG_STATE_HOME": folder}
        with said.open("w") as file:
            command = [sys.executable, "-m", "inflight", "serve", folder, *ports]
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True, env=environment)
        places = Places(*_addresses(http, grpc, metrics, gateway))
        try:
            serve = Serve(Front(places, _model(places, process, said)), said)
            serve.wait_until_served()
            yield serve
        finally:
            process.terminate()
            process.wait()


def _addresses(http: int, grpc: int, metrics: int, gateway: int) -> list[Address]:
    ports = ("http", http), ("grpc", grpc), ("http", metrics), ("http", gateway)
    return [Address(scheme, "127.0.0.1", port) for scheme, port in ports]


def _model(places: Places, process: subprocess.Popen[bytes], said: Path) -> str:
    """Return what the gateway calls its model, as soon as it answers."""
    assert places.gateway is not None, "the pair has a gateway"
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError, ValueError, LookupError):
            return str(json.loads(read_directly(f"{places.gateway.url}/v1/models", timeout_s=5))["data"][0]["id"])
        time.sleep(0.2)
    raise EngineFailure(f"`inflight serve` has not started: {said.read_text()[-1000:]}")


def _attempt(serve: Serve, attack: Attack) -> Row:
    """Run one attack; return what was seen of it, whether the server has survived, and what it holds more."""
    target, restarts = Target(serve.front.places), serve.restarts
    before = target.holding()
    answers = Counter(attack.run(serve.front))
    gone, tracebacks = target.gone(), target.new_tracebacks()
    serve.wait_until_served()
    held: Row = {"MiB": "-", "descriptors": "-"}
    if not gone:
        after = target.holding()
        memory = after.memory + after.shared - before.memory - before.shared
        held = {"MiB": round(memory / 2**20), "descriptors": after.files - before.files}
    return {
        "answers": ", ".join(f"{count} x {answer}" for answer, count in sorted(answers.items())),
        "ended": len(gone),
        "restarts": serve.restarts - restarts,
        "tracebacks": tracebacks,
        **held,
    }


def attack_table(doors: list[bool], chosen: str, say: Callable[[str], object]) -> Result:
    """Run every attack whose name has ``chosen`` in it, one after another, on each server.

    Raises:
        EngineFailure: a server does not serve after an attack.
    """
    rows: list[Row] = []
    for door in doors:
        with serving(door) as serve:
            for attack in ATTACKS:
                if chosen in attack.name:
                    row = {"attack": attack.name, "door": "yes" if door else "no", **_attempt(serve, attack)}
                    say(str(row))
                    rows.append(row)
    rows.sort(key=lambda row: [attack.name for attack in ATTACKS].index(str(row["attack"])))
    return Result("attacks", "The attacks by name", _finding(rows), rows)


def _finding(rows: list[Row]) -> str:
    parts = []
    for door, words in (("no", "Without the door"), ("yes", "With the door")):
        of_one = [row for row in rows if row["door"] == door]
        if of_one:
            ended = [str(row["attack"]) for row in of_one if row["ended"]]
            told = sum(int(row["tracebacks"]) for row in of_one)
            parts.append(
                f"{words}, {len(of_one)} attacks: {', '.join(ended) if ended else 'none'} ended a process, and the "
                f"logs have {told} tracebacks."
            )
    return " ".join(parts) + (
        " MiB and descriptors are what all processes hold more than before the attack; a server that has ended has "
        "been started again by `inflight serve`, and served the next request."
    )


def flaws(rows: list[Row]) -> list[str]:
    """Return what should not have been: an end that SECURITY.md does not tell of, or a traceback."""
    known = {attack.name for attack in ATTACKS if attack.known_to_end}
    found = [f"{row['attack']} ended a process" for row in rows if row["ended"] and row["attack"] not in known]
    return found + [f"{row['attack']}: {row['tracebacks']} tracebacks" for row in rows if row["tracebacks"]]
