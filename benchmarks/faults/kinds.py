"""The faults: what is done to a server, for how long, and what it promises."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.command import FOLDER
from benchmarks.faults.place import KEPT, Place
from benchmarks.faults.served import DOOR, GATEWAY, SUPERVISOR, VICTIMS, Served
from inflight.contract import ENGINE

Act = Callable[[Served, Place], AbstractContextManager[None]]
"""Hurts a server from its beginning to its end."""
_CLOCK_FILE, _CLOCK = f"{KEPT}/clock", "faketime/libfaketimeMT.so.1"
_SLEEPS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int (*stepped)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    struct timespec now;
    int (*next)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    next(CLOCK_REALTIME, &now);
    stepped = next;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    return stepped ? stepped(clock, now) : syscall(SYS_clock_gettime, clock, now);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    return syscall(SYS_clock_nanosleep, clock, flags, until, left) ? errno : 0;
}

int nanosleep(const struct timespec *time, struct timespec *left) { return syscall(SYS_nanosleep, time, left); }

int poll(struct pollfd *files, nfds_t count, int timeout) { return syscall(SYS_poll, files, count, timeout); }
"""
"""A library before libfaketime (0.9.10): there clock_nanosleep breaks if the monotonic clock is left alone. And Envoy's
allocator, at its start, sleeps and reads the clock, at which libfaketime asks that allocator for memory and hangs."""
_CLOCK_S = 1.2
"""After which every process has seen a step."""
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
        step = place.path(f"{_CLOCK_FILE}.new")
        step.write_text(f"{hours:+d}h\n")
        step.rename(place.path(_CLOCK_FILE))
        time.sleep(_CLOCK_S)
        yield

    return act


def clock_environment() -> dict[str, str] | None:
    """Return the variables by which a process has a clock that a file can step; None: libfaketime is not installed.

    The file is read once a second. Timers and sleeps are left as they are, as a real step leaves them.
    """
    found = [path for root in ("/usr/lib", "/usr/local/lib") for path in Path(root).glob(f"**/{_CLOCK}")]
    if not found or not shutil.which("cc"):
        return None
    sleeps = (FOLDER / "sleeps.so").absolute()  # the place hides /tmp
    sleeps.parent.mkdir(parents=True, exist_ok=True)
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(sleeps)]
    subprocess.run(command, input=_SLEEPS, text=True, check=True)
    return {
        "LD_PRELOAD": f"{sleeps}:{found[0]}",
        "FAKETIME_TIMESTAMP_FILE": _CLOCK_FILE,
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_RESET": "1",
    }


_AGAIN = "a new server, and every stream goes on"
_THROUGH = "every stream goes on"
_ENDS_OPENAI = "gRPC's streams go on, the gateway's end with an error"


def all_faults(place: Place) -> list[Fault]:
    """Return the faults that this machine allows; ``place``: one as they will have it."""
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    faults = [Fault("SIGKILL", victim, _AGAIN, _signal(kill, victim)) for victim in VICTIMS]
    faults.append(Fault("SIGKILL", GATEWAY, f"a new gateway; {_ENDS_OPENAI}", _signal(kill, GATEWAY), ends_openai=True))
    faults.append(Fault("SIGKILL", DOOR, f"a new door; {_ENDS_OPENAI}", _signal(kill, DOOR), ends_openai=True))
    started = f"started again from outside; {_ENDS_OPENAI}"
    faults.append(Fault("SIGKILL", SUPERVISOR, started, _signal(kill, SUPERVISOR), ends_openai=True))
    for seconds, name, promise in ((_SHORT_S, "SIGSTOP for 3 s", _THROUGH), (_FROZEN_S, "SIGSTOP", _AGAIN)):
        faults += [Fault(name, victim, promise, _signal(stop, victim), seconds) for victim in VICTIMS]
    if clock := clock_environment():
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
