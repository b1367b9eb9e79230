"""`inflight serve` with the demo and its gateway, on free ports, with the door in front or without it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from benchmarks.hostile.front import Front
from benchmarks.hostile.target import Places
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
    process: subprocess.Popen[bytes]
    said: Path
    """The file of what it has said."""

    @property
    def restarts(self) -> int:
        """How often it has started a process again."""
        return self.said.read_text(errors="replace").count(" restarts in ")

    @property
    def last_cause(self) -> str:
        """Why it did so the last time."""
        lines = [line for line in self.said.read_text(errors="replace").splitlines() if " restarts in " in line]
        return lines[-1].removeprefix("inflight: ").partition(";")[0] if lines else ""

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
def serving(door: bool, template: str = "") -> Iterator[Serve]:
    """Run `inflight serve` with the demo on free ports; it is stopped at the end.

    Args:
        door: whether the door is in front.
        template: what stands before the demo's chat template.
    """
    http, grpc, metrics, gateway = free_ports(4)
    with TemporaryDirectory(prefix="inflight-attacks-") as folder:
        said = Path(folder) / "said"
        deployment = yaml.safe_load((DEMO / "deployment.yaml").read_text()) | {"model": str(DEMO / "model")}
        if door:
            deployment["door"] = {"enabled": True}
        if template:
            deployment["model"] = str(_with_template(template, Path(folder) / "demo"))
        (Path(folder) / "deployment.yaml").write_text(yaml.safe_dump(deployment))
        ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}", f"--gateway-port={gateway}"]
        environment = os.environ | {"XDG_STATE_HOME": folder}
        with said.open("w") as file:
            command = [sys.executable, "-m", "inflight", "serve", folder, *ports]
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True, env=environment)
        places = Places(*_addresses(http, grpc, metrics, gateway))
        try:
            serve = Serve(Front(places, _model(places, process, said)), process, said)
            serve.wait_until_served()
            yield serve
        finally:
            process.terminate()
            process.wait()


def _with_template(template: str, model: Path) -> Path:
    """Copy the demo's model, with a text before its chat template."""
    file = shutil.copytree(DEMO / "model", model) / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"chat_template": template + settings["chat_template"]}))
    return model


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
