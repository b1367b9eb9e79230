"""Locust's end of the link to the process that sends: greenlets wait here for what it tells."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import gevent
import gevent.socket
from gevent.event import AsyncResult, Event
from gevent.lock import RLock

from inflight.errors import InflightError
from inflight.load.swarm.lane import Settings

_START_S = 60.0
_LEAVE_S = 5.0


class SenderLost(InflightError):
    """The process that sends could not start, or ended before it was told to."""


class Link:
    """A process that sends, for one test. Bound to gevent's hub of this process."""

    def __init__(self, settings: Settings, on_message: Callable[[dict[str, Any]], None]) -> None:
        """Start the process and wait until it is ready.

        Args:
            settings: for it.
            on_message: called, in a greenlet, for each record and state.

        Raises:
            SenderLost: it did not start; the message says why.
        """
        ours, theirs = gevent.socket.socketpair()
        command = [sys.executable, "-m", "inflight.load.swarm.lane", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._socket = ours
        self._on_message = on_message
        self._ready: AsyncResult = AsyncResult()
        self._ended = Event()
        self._ending = False
        self._waiting: dict[int, AsyncResult] = {}
        self._writing = RLock()
        self._reading = gevent.spawn(self._read)
        self._tell(settings.as_json())
        error = self._ready.get(timeout=_START_S)
        if error:
            self.close()
            raise SenderLost(error)

    @property
    def lost(self) -> bool:
        """Whether the process ended without being told to."""
        return self._ended.is_set() and not self._ending

    def begin(self) -> None:
        """Set its clock to 0."""
        self._tell({"begin": True})

    def start(self, number: int, kind: str, at: float | None = None) -> AsyncResult:
        """Start a session; the result is whether it was answered."""
        result = self._waiting[number] = AsyncResult()
        self._tell({"start": number, "kind": kind, "at": at})
        if self._ended.is_set():  # nobody would answer
            result.set(False)
        return result

    def cancel(self, number: int, kind: str) -> None:
        """Break a session off."""
        self._tell({"cancel": number, "kind": kind})

    def end(self, drain_s: float) -> None:
        """Have it end, sessions under way within ``drain_s``; return when all its records are here."""
        self._ending = True
        self._tell({"end": drain_s})
        self._ended.wait(timeout=drain_s + _LEAVE_S)

    def close(self) -> None:
        """Close the link; the process ends by it, or is ended."""
        self._socket.close()
        try:
            self._process.wait(timeout=_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reading.kill(block=False)

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            with self._writing:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._ended.set()

    def _read(self) -> None:
        rest = b""
        try:
            while data := self._socket.recv(1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
        except OSError:
            pass  # closed by us
        self._ready.set("the process that sends has ended")
        self._ended.set()
        for result in list(self._waiting.values()):
            result.set(False)

    def _take(self, message: dict[str, Any]) -> None:
        if "done" in message:
            self._waiting.pop(message["done"]).set(message["answered"])
        elif "ready" in message or "error" in message:
            self._ready.set(message.get("error", ""))
        elif "ended" in message:
            self._ended.set()
        else:
            self._on_message(message)
