"""The server under siege, as its machine sees it: its processes, their memory, and what it says it is doing."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import psutil

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


class Target:
    """The processes that serve: the one that listens, and its children."""

    def __init__(self, places: Places) -> None:
        """
        Raises:
            EngineFailure: nothing that this user can see listens there.
        """
        self._metrics = places.metrics
        listens = [
            one.pid
            for one in psutil.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and one.laddr.port == places.http.port and one.pid
        ]
        if not listens:
            raise EngineFailure(f"no process of this user listens on {places.http.place}")
        server = psutil.Process(listens[0])
        self._processes = [server, *server.children(recursive=True)]

    def gone(self) -> list[int]:
        """Return the processes that have ended since the beginning; another one with the same id is none of them."""
        return [one.pid for one in self._processes if not one.is_running() or one.status() == psutil.STATUS_ZOMBIE]

    def memory(self) -> int:
        """Return the bytes of memory that the processes have, without what they share."""
        return sum(one.memory_full_info().uss for one in self._processes if one.is_running())

    def requests_left(self, patience_s: float) -> float:
        """Return how many requests the server still has in flight, after so many seconds at most to end them."""
        deadline = time.monotonic() + patience_s
        while True:
            page = read_directly(f"{self._metrics.url}/metrics", timeout_s=60).decode()
            left = sum(map(float, _BUSY.findall(page)))
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.5)
