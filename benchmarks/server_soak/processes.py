"""What the processes of a server hold: memory, open files, threads, shared memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from inflight.contract import DETOKENIZER, ENGINE, TOKENIZER

SERVER, GATEWAY, DOOR, SUPERVISOR = "triton", "gateway", "door", "supervisor"
STAGES = (TOKENIZER, ENGINE, DETOKENIZER)
DOOR_PROGRAM = "envoy"


@dataclass(frozen=True)
class Held:
    """What one process holds at one moment."""

    uss: int
    """Bytes that nobody else has: what would be free without it."""
    pss: int
    """The same, and its share of what it has in common with others."""
    files: int
    """Open file descriptors."""
    threads: int
    process: int
    age_s: float
    """Since it was started: another process of this name may have been there before."""


@dataclass(frozen=True)
class Sample:
    """One moment."""

    at_s: float
    processes: Mapping[str, Held]
    """The processes by name, those that ``take_sample`` looks at; a process that is gone is left out."""
    shared: int
    """Bytes of files in /dev/shm that the processes have mapped."""
    requests: int
    """How many requests have ended so far."""


def take_sample(server: int, at_s: float, requests: int) -> Sample:
    """Return what a server, by its process id, and its stages hold; or `inflight serve`, and all that it has begun."""
    held, shared = dict[str, Held](), dict[str, int]()
    for name, process in family(server):
        try:
            memory, age_s = process.memory_full_info(), time.time() - process.create_time()
            counts = process.num_fds(), process.num_threads()
            held[name] = Held(memory.uss, memory.pss, *counts, process.pid, age_s)
            shared |= shared_by(process.pid)
        except (psutil.Error, OSError):
            continue
    return Sample(at_s, held, sum(shared.values()), requests)


def family(root: int) -> Iterator[tuple[str, psutil.Process]]:
    """Yield a server and its stages, or `inflight serve` and all that it has started, each with its name."""
    with suppress(psutil.Error):
        first = psutil.Process(root)
        for process in (first, *first.children(recursive=True)):
            with suppress(psutil.Error):
                if name := _name(process):
                    yield name, process


def _name(process: psutil.Process) -> str:
    """Return what a process is; "" where it is none of ours, or has become none yet."""
    words = process.cmdline()
    if process.name() in ("tritonserver", DOOR_PROGRAM):
        return SERVER if process.name() == "tritonserver" else DOOR
    if "inflight.gateway" in words:
        return GATEWAY
    if "serve" in words:
        return SUPERVISOR
    return next((stage for stage in STAGES if f"/{stage}/" in " ".join(words)), "")


def shared_by(process: int) -> dict[str, int]:
    """Return the bytes of each file in /dev/shm that a process has mapped, by inode: most have no name any more."""
    sizes: dict[str, int] = {}
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        if "/dev/shm/" in line:
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            inode = line.split()[4]
            sizes[inode] = max(sizes.get(inode, 0), last - first)
    return sizes
