"""`inflight serve` as a container runtime or systemd runs it: in a place of its own, and again when it has ended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import yaml

from benchmarks.faults.place import CLOCK, KEPT, Place
from inflight.contract import DETOKENIZER, ENGINE, TOKENIZER
from inflight.errors import EngineFailure
from inflight.resources import DEMO
from inflight.serve.server import free_ports

SUPERVISOR, TRITON, GATEWAY, DOOR = "supervisor", "Triton", "gateway", "door"
STAGES = (TOKENIZER, ENGINE, DETOKENIZER)
VICTIMS = (*STAGES, TRITON)
"""The processes whose end is an end of the engine."""
_WORDS = {TRITON: "tritonserver", GATEWAY: "inflight.gateway", DOOR: "envoy"} | {one: f"/{one}/" for one in STAGES}
"""What the command lines of the processes have in them; that of a stage has the server's too."""
_ORDER = (*STAGES, GATEWAY, DOOR, TRITON)
_QUESTIONERS = 2
"""Sequences that have room beside the streams, so that a question does not wait for one of them to end."""
_FILE = "deployment.yaml"
_AGAIN_S = 0.1
"""The pause of both compose and systemd before they start a service again."""
_END_S = 60.0


@dataclass
class Served:
    """A running `inflight serve` with the demo."""

    command: Sequence[str]
    environment: Mapping[str, str]
    said: Path
    """The file of what it has said, of all its starts."""
    http: str
    grpc: str
    metrics: str
    gateway: str
    again: bool
    """Whether it is started again when it ends."""
    codes: list[int] = field(default_factory=list)
    """The exit codes so far."""
    _process: subprocess.Popen[bytes] | None = None
    _ending: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._keep, name="outer loop", daemon=True)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process of the last start."""
        assert self._process is not None, "it was not started"
        return self._process

    def start(self) -> None:
        """Start it; nothing is ready yet."""
        self._spawn()
        self._thread.start()

    def end(self) -> int:
        """Ask it to stop, and return its exit code; where it does not stop within its time, it is killed."""
        self._ending.set()
        self.process.terminate()
        self._thread.join(_END_S)
        with suppress(ProcessLookupError):
            self.process.kill()
        self._thread.join()
        return self.codes[-1]

    def process_of(self, victim: str) -> int:
        """Return the id of a process of the server.

        Raises:
            EngineFailure: there is no such process.
        """
        if victim == SUPERVISOR:
            return self.process.pid
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                line = " ".join(child.cmdline())
                if next((name for name in _ORDER if _WORDS[name] in line), None) == victim:
                    return child.pid
        raise EngineFailure(f"there is no process of {victim}")

    @property
    def starts(self) -> int:
        """How often it has started its server again, and that was ready."""
        return self.said.read_text(errors="replace").count("ready again in")

    def last_words(self) -> str:
        """Return what was said last of a new start, or of an end; empty: nothing was."""
        lines = [line.removeprefix("inflight: ") for line in self.said.read_text(errors="replace").splitlines()]
        told = [line.partition("; ")[0] for line in lines if " restarts in " in line or "gives up" in line]
        return told[-1] if told else ""

    def _spawn(self) -> None:
        with self.said.open("a") as file:
            self._process = subprocess.Popen(
                self.command, stderr=file, env=self.environment, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def _keep(self) -> None:
        while True:
            self.codes.append(self.process.wait())
            if not self.again or self._ending.wait(_AGAIN_S):
                return
            self._spawn()


@contextmanager
def serving(
    place: Place | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    deployment: Path | None = None,
    behind_a_door: bool = False,
) -> Iterator[Served]:
    """Serve the demo on free ports; at the end it is stopped, if it runs still.

    Args:
        place: where; without one it has this process's files and no door, and is not started again.
        deployment: what is served without a place; None: the demo without its gateway.
        environment: variables that it has beside this process's.
        behind_a_door: whether another door stands before its own.
    """
    ports = free_ports(4)
    names = ("http", "grpc", "metrics", "gateway")
    with TemporaryDirectory(prefix="inflight-served-") as folder:
        command = [str(Path(sys.executable).with_name("inflight")), "serve"]
        command += [f"--{name}-port={port}" for name, port in zip(names, ports, strict=True)]
        if place is not None:
            command += ["--door", f"{KEPT}/demo"]
        else:
            command += ["--no-door", "--no-gateway" if deployment is None else str(deployment)]
        state = folder if place is None else f"{KEPT}/state"
        command += ["--behind-a-door"] if behind_a_door else []
        if place is not None:
            _lay_out(place)
            command = place.command(*command)
        variables = os.environ | {"XDG_STATE_HOME": state} | dict(environment or {})
        http, grpc, metrics, gateway = (f"127.0.0.1:{port}" for port in ports)
        said = Path(folder) / "said"
        served = Served(command, variables, said, http, grpc, metrics, gateway, again=place is not None)
        served.start()
        try:
            yield served
        finally:
            if served.process.poll() is None or served.again:
                served.end()


def _lay_out(place: Place) -> None:
    """Put the deployment, with room for questions, and a right clock into the place."""
    room = yaml.safe_load((DEMO / _FILE).read_text())["batching"]["max_batch_size"] + _QUESTIONERS
    demo_with(place.path(f"{KEPT}/demo"), batching={"max_batch_size": room})
    place.path(CLOCK).write_bytes(bytes(8))


def demo_with(folder: Path, **sections: Mapping[str, Any]) -> Path:
    """Copy the demo to a folder, change keys in sections of its deployment, and return the folder."""
    deployment = shutil.copytree(DEMO, folder, dirs_exist_ok=True) / _FILE
    settings = yaml.safe_load(deployment.read_text())
    for name, keys in sections.items():
        settings[name] = {**settings.get(name, {}), **keys}
    deployment.write_text(yaml.safe_dump(settings))
    return folder
