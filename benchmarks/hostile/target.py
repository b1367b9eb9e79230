"""The server under siege, as its machine sees it: its processes, their memory, and what it says it is doing."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.server_soak.processes import DOOR_PROGRAM, shared_by
from inflight.addresses import is_loopback, read_directly
from inflight.client.transport import Address, parse_address
from inflight.errors import EngineFailure, InvalidRequest

_BUSY = re.compile(
    r"^(?:nv_inference_pending_request_count|inflight_running_requests|inflight_waiting_requests)(?:{[^}]*})? (\S+)$",
    re.MULTILINE,
)


def own_address(text: str, option: str, scheme: str) -> Address:
    """Return the address of a server on this machine that ``option`` names as ``host:port``.

    Raises:
        InvalidRequest: it is none, or not of this machine: nobody else's server is to be besieged.
    """
    address = parse_address(text, scheme, option, (scheme,))
    if not is_loopback(text):
        raise InvalidRequest(f"{option} is {text!r}: only a loopback address is besieged")
    return address


@dataclass(frozen=True)
class Places:
    """Where one server listens."""

    http: Address
    grpc: Address
    metrics: Address
    gateway: Address | None = None
    """None: the gateway is left in peace."""


@dataclass(frozen=True)
class Holding:
    """What all processes of a server hold together at one moment."""

    memory: int
    """Bytes that are not shared."""
    files: int
    """Open file descriptors."""
    shared: int
    """Bytes of files in /dev/shm that they have mapped."""

    def __str__(self) -> str:
        shared = f"{self.shared / 2**20:,.0f} MiB of shared memory"
        return f"{self.memory / 2**20:,.0f} MiB, {self.files:,} descriptors, {shared}"


class Target:
    """The processes that serve: those that listen, their children, and `inflight serve` above them where it is."""

    def __init__(self, places: Places) -> None:
        """
        Raises:
            EngineFailure: nothing that this user can see listens there.
        """
        self._metrics = places.metrics
        wanted = {one.port for one in (places.http, places.grpc, places.gateway) if one is not None}
        listens = {
            one.pid
            for one in psutil.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and one.laddr.port in wanted and one.pid
        }
        if not listens:
            raise EngineFailure(f"no process of this user listens on {places.http.place}")
        self.is_door = all(psutil.Process(pid).name() == DOOR_PROGRAM for pid in listens)
        """Whether all that listens there is the door."""
        roots = {_root(psutil.Process(pid)) for pid in listens}
        family = {one for root in roots for one in (root, *root.children(recursive=True))}
        self._processes = sorted(family, key=lambda one: one.pid)
        self._logs = {log for one in self._processes if (log := _log_of(one)) is not None}
        self._told = self._tracebacks()

    def gone(self) -> list[int]:
        """Return the processes that have ended since the beginning; another one with the same id is none of them."""
        return [one.pid for one in self._processes if not _runs(one)]

    def holding(self) -> Holding:
        """Return what the processes hold; one that has ended holds nothing."""
        memory, files, shared = 0, 0, dict[str, int]()
        for one in self._processes:
            with suppress(psutil.Error, OSError):
                memory += one.memory_full_info().uss
                files += one.num_fds()
                shared |= shared_by(one.pid)
        return Holding(memory, files, sum(shared.values()))

    def new_tracebacks(self) -> int:
        """Return how many tracebacks the logs have got since the beginning."""
        return self._tracebacks() - self._told

    def _tracebacks(self) -> int:
        return sum(log.read_bytes().count(b"Traceback (most recent call last)") for log in self._logs if log.is_file())

    def requests_left(self, patience_s: float) -> float:
        """Return how many requests the server still has in flight, after so many seconds at most to end them."""
        deadline = time.monotonic() + patience_s
        while True:
            page = read_directly(f"{self._metrics.url}/metrics", timeout_s=60).decode()
            left = sum(map(float, _BUSY.findall(page)))
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.5)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it has ended between the two looks
        return False


def _root(process: psutil.Process) -> psutil.Process:
    """Return the `inflight serve` that has started a process, or else the process."""
    parent = process.parent()
    words = parent.cmdline() if parent is not None else []
    return parent if parent is not None and "serve" in words and "inflight" in " ".join(words) else process


def _log_of(process: psutil.Process) -> Path | None:
    try:
        path = Path(f"/proc/{process.pid}/fd/2").readlink()
    except OSError:
        return None
    return path if path.is_file() else None
