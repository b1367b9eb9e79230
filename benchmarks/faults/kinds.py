"""The faults: what is done to a server, for how long, and what it promises."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.command import FOLDER
from benchmarks.faults.place import CLOCK, KEPT, Place
from benchmarks.faults.served import DOOR, GATEWAY, SUPERVISOR, VICTIMS, Served
from inflight.contract import ENGINE

Act = Callable[[Served, Place], AbstractContextManager[None]]
"""Hurts a server from its beginning to its end."""
_CLOCK_SOURCE = Path(__file__).with_name("clock.c")
_SHORT_S, _FROZEN_S = 3.0, 60.0
_GOOD_S = 10.0
_LATER_S = _SHORT_S + _GOOD_S
"""The limit where nothing can answer before what breaks the server is over."""


@dataclass(frozen=True)
class Fault:
    """One fault."""

    name: str
    process: str
    """What is hurt."""
    promise: str
    act: Act
    lasts_s: float = 0.0
    good_s: float = _GOOD_S
    """Within which a new question is to get a good answer."""
    ends_openai: bool = False
    """Whether the streams through the gateway may end with an error, since what holds their connections is gone."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What the server needs to have in its environment from the beginning."""

    @property
    def title(self) -> str:
        """Its name in a table."""
        return f"{self.name}, {self.process}"


@contextmanager
def _nothing(_served: Served, _place: Place) -> Iterator[None]:
    yield


def _signal(number: signal.Signals, victim: str) -> Act:
    @contextmanager
    def act(served: Served, _place: Place) -> Iterator[None]:
        process = served.process_of(victim)
        os.kill(process, number)
        yield
        if number == signal.SIGSTOP:
            resume(process)

    return act


def resume(process: int) -> None:
    """Let a process go on, unless it is gone."""
    if Path(f"/proc/{process}").is_dir():
        os.kill(process, signal.SIGCONT)


def _full(folder: str, *, killed: bool) -> Act:
    @contextmanager
    def act(served: Served, place: Place) -> Iterator[None]:
        with place.full(folder):
            if killed:
                os.kill(served.process_of(ENGINE), signal.SIGKILL)
            yield

    return act


@contextmanager
def _short_of_memory(_served: Served, place: Place) -> Iterator[None]:
    with place.short_of_memory():
        yield


@contextmanager
def _without_checkpoint(served: Served, place: Place) -> Iterator[None]:
    model = place.path(f"{KEPT}/demo/model")
    away = model.rename(model.with_name("away"))
    os.kill(served.process_of(ENGINE), signal.SIGKILL)
    yield
    away.rename(model)


def _clock(hours: int) -> Act:
    @contextmanager
    def act(_served: Served, place: Place) -> Iterator[None]:
        with place.path(CLOCK).open("r+b", buffering=0) as clock:
            clock.write(struct.pack("=q", hours * 3600 * 10**9))
        yield

    return act


def _clock_environment() -> dict[str, str] | None:
    """Return the variables by which a process has a clock that a file can step; None: this machine cannot make one."""
    if not shutil.which("cc") or platform.machine() != "x86_64":
        return None
    library = (FOLDER / "clock.so").absolute()  # the place hides /tmp
    library.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(_CLOCK_SOURCE), "-o", str(library)], check=True)
    return {"LD_PRELOAD": str(library), "INFLIGHT_CLOCK": CLOCK}


_AGAIN = "a new server, and every stream goes on"
_THROUGH = "every stream goes on"
_ENDS_OPENAI = "gRPC's streams go on, the gateway's end with an error"


def all_faults(place: Place) -> list[Fault]:
    """Return the faults that this machine allows; ``place``: one as they will have it."""
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    faults = [Fault("nothing", "none", _THROUGH, _nothing)]
    faults += [Fault("SIGKILL", victim, _AGAIN, _signal(kill, victim)) for victim in VICTIMS]
    faults.append(Fault("SIGKILL", GATEWAY, f"a new gateway; {_ENDS_OPENAI}", _signal(kill, GATEWAY), ends_openai=True))
    faults.append(Fault("SIGKILL", DOOR, f"a new door; {_ENDS_OPENAI}", _signal(kill, DOOR), ends_openai=True))
    started = f"started again from outside; {_ENDS_OPENAI}"
    faults.append(Fault("SIGKILL", SUPERVISOR, started, _signal(kill, SUPERVISOR), ends_openai=True))
    for seconds, name, promise in ((_SHORT_S, "SIGSTOP for 3 s", _THROUGH), (_FROZEN_S, "SIGSTOP", _AGAIN)):
        faults += [Fault(name, victim, promise, _signal(stop, victim), seconds) for victim in VICTIMS]
    if clock := _clock_environment():
        faults.append(Fault("clock one hour forward", "all", _THROUGH, _clock(1), _SHORT_S, environment=clock))
        faults.append(Fault("clock one hour back", "all", _THROUGH, _clock(-1), _SHORT_S, environment=clock))
    faults.append(Fault("/dev/shm full for 3 s", "all", _THROUGH, _full("/dev/shm", killed=False), _SHORT_S))
    faults.append(Fault("disk full for 3 s", "all", _THROUGH, _full("/tmp", killed=False), _SHORT_S))
    for folder, name in (("/dev/shm", "/dev/shm"), ("/tmp", "disk")):
        hurt = _full(folder, killed=True)
        faults.append(Fault(f"{name} full for 3 s, SIGKILL", ENGINE, _AGAIN, hurt, _SHORT_S, _LATER_S))
    away = "checkpoint away for 3 s, SIGKILL"
    faults.append(Fault(away, ENGINE, _AGAIN, _without_checkpoint, _SHORT_S, _LATER_S))
    if place.limits_memory:
        faults.append(Fault("out of memory", "the largest", _AGAIN, _short_of_memory))
    return faults
