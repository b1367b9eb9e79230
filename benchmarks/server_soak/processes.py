"""What the processes of a server hold: memory, open files, threads, shared memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from inflight.contract import DETOKENIZER, ENGINE, TOKENIZER

SERVER = "triton"
_SHARED = re.compile(r"/dev/shm/\S+$", re.MULTILINE)
_BLOCK = 512
"""Bytes; stat(2) counts in these."""


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


@dataclass(frozen=True)
class Sample:
    """One moment."""

    at_s: float
    processes: Mapping[str, Held]
    """The processes by name: ``triton`` and the stages; a process that is gone is left out."""
    shared: int
    """Bytes in /dev/shm that the server uses."""
    requests: int
    """How many requests have ended so far."""


def take_sample(server: int, at_s: float, requests: int) -> Sample:
    """Return what a server, by its process id, and its stages hold."""
    held, shared = dict[str, Held](), set[str]()
    for name, process in _processes(server):
        try:
            memory = process.memory_full_info()
            held[name] = Held(memory.uss, memory.pss, process.num_fds(), process.num_threads())
            shared |= set(_SHARED.findall(Path(f"/proc/{process.pid}/maps").read_text()))
        except (psutil.Error, OSError):
            continue
    return Sample(at_s, held, sum(map(_size, shared)), requests)


def _processes(server: int) -> Iterator[tuple[str, psutil.Process]]:
    process = psutil.Process(server)
    yield SERVER, process
    for child in process.children(recursive=True):
        try:
            words = " ".join(child.cmdline())
        except psutil.Error:
            continue
        for stage in (TOKENIZER, DETOKENIZER, ENGINE):
            if f"/{stage}/" in words:
                yield stage, child
                break


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_blocks * _BLOCK
    except OSError:  # its name is gone already
        return 0
