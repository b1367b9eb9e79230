"""What a load test by locust costs itself: CPU of all its processes beside the server's."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

from inflight.addresses import is_loopback


@dataclass(frozen=True)
class SwarmCost:
    """CPU of a test, from its begin to its end."""

    workers: int
    """Processes with users; 1: not distributed."""
    lost_workers: int
    """Of these, whose last requests are missing in the result."""
    seconds: float
    client_cpu_s: float
    """Of all processes of locust, those that send included."""
    server_cpu_s: float | None
    """Of the server and its stages; None: it is not on this machine, or not known by its port."""

    @property
    def client_larger(self) -> bool | None:
        """Whether the client used more than the server; None: not known."""
        return None if self.server_cpu_s is None else self.client_cpu_s > self.server_cpu_s

    def sentence(self) -> str:
        """Return it in words."""
        client = f"locust used {_cores(self.client_cpu_s, self.seconds)}"
        if self.server_cpu_s is None:
            return f"{client}; the server's share is unknown: it was not found on this machine (--server-pid names it)."
        server = f"the server {_cores(self.server_cpu_s, self.seconds)}"
        if self.client_larger:
            return f"{client}, more than {server}: on one machine the figures are the client's as much as the server's."
        return f"{client}, {server}."


def _cores(cpu_s: float, seconds: float) -> str:
    return f"{cpu_s / seconds:.2f} cores" if seconds > 0 else f"{cpu_s:.2f} s of CPU"


def find_server(url: str) -> int | None:
    """Return the process that listens at ``url`` on this machine; None: there is none to be seen."""
    parts = urlsplit(url if "://" in url else f"grpc://{url}")
    if not is_loopback(url):
        return None
    for one in psutil.net_connections(kind="tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr.port == parts.port and one.pid:
            return int(one.pid)
    return None


def cpu_of(pid: int | None) -> float | None:
    """Return the CPU seconds so far of a process and all below it; None: there is no such process."""
    try:
        root = psutil.Process(pid) if pid else None
        below = root.children(recursive=True) if root else []
    except psutil.NoSuchProcess:
        return None
    return sum(_seconds(one) for one in [root, *below]) if root else None


def _seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:  # ended between the two looks
        return 0.0
    return float(times.user + times.system)
