"""A process that has a fork server, for tests: one with threads, as theirs is, cannot be forked safely.

``python -m tests.gateway.support.forked CASE`` runs one case, which says what it finds.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from inflight.errors import InvalidRequest
from inflight.gateway import fork_server
from inflight.gateway.errors import ApiError, invalid
from inflight.gateway.fork_server import ForkServer

PATIENCE_S = 120.0


class Shared:
    """An object that results refer to."""

    def __reduce__(self) -> str:
        raise AssertionError("it is never sent")


fork_server.MOST_CPU_S = 1
SHARED = Shared()
SERVER: ForkServer[str]


def echo(context: str, body: bytes, *more: object) -> tuple[object, ...]:
    return context, os.getpid(), bytes(body[:3]), len(body), os.nice(0), *more


def refuse(_: str) -> None:
    raise invalid("n is 3; it must be even", "n")


def refuse_text(_: str) -> None:
    raise InvalidRequest("text: it is refused")


def fail(_: str) -> None:
    raise LookupError("gone")


def keep(_: str) -> object:
    return lambda: None


def hold(_: str, place: str) -> None:
    """Say who this is, and never end."""
    Path(place).write_text(str(os.getpid()))
    while True:
        time.sleep(60)


def burn(_: str) -> None:
    while True:
        sum(range(1000))


def end(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raised(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it raises nothing")


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _held() -> tuple[fork_server.Call[None], threading.Thread, int]:
    """Return a call that never ends, the thread that waits for it, and its process."""
    place = Path(sys.argv[2])
    call = SERVER.call(hold, str(place))

    def wait() -> None:
        try:
            call.result()
        except ApiError as error:
            print(error.status)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    _until(lambda: place.exists() and bool(place.read_text()))
    return call, thread, int(place.read_text())


def results() -> None:
    """Results come as they are, from a process of lower priority, and what is shared is the same again."""
    body = bytearray(b"abc") + bytes(20 << 20)
    given = {"ids": [*range(-99, 99)], "flags": [True] * 99, "large": [1 << 80] * 99, "mixed": [1, None] * 99}
    context, pid, begin, size, nice, shared, other = SERVER.call(echo, body, SHARED, given).result()
    assert (context, begin, size) == ("the context", b"abc", len(body))
    assert repr(other) == repr(given)
    assert shared is SHARED
    assert pid != os.getpid()
    assert nice == os.nice(0) + 10
    assert SERVER.call(echo, b"d").result()[1] != pid, "each call has its own"


def errors() -> None:
    """An error is the same as without the process; one of ours comes with where it was raised."""
    error = _raised(SERVER.call(refuse).result)
    assert isinstance(error, ApiError)
    assert (error.status, str(error), error.param) == (400, "n is 3; it must be even", "n")
    error = _raised(SERVER.call(refuse_text).result)
    assert (type(error), str(error)) == (InvalidRequest, "text: it is refused")
    for function, said in ((fail, "LookupError: gone"), (keep, "Can't pickle")):
        assert said in str(_raised(SERVER.call(function).result))


def ended() -> None:
    """A call that is ended, by itself, by a limit or by whoever waits for it, is an error; the next one is made."""
    for function in end, burn:
        error = _raised(SERVER.call(function).result)
        assert isinstance(error, ApiError)
        assert (error.status, error.headers) == (500, {"x-should-retry": "false"})
    call, thread, pid = _held()
    call.end()
    thread.join(PATIENCE_S)
    _until(lambda: not psutil.pid_exists(pid))
    late = SERVER.call(echo, b"")
    late.end()
    assert isinstance(_raised(late.result), ApiError), "it has been ended before it began"
    assert SERVER.call(echo, b"a").result()


def without() -> None:
    """This process makes the calls where the server has ended."""
    [server] = psutil.Process().children()
    server.kill()
    _until(lambda: server.status() == psutil.STATUS_ZOMBIE)
    assert SERVER.call(echo, b"abc").result()[:3] == ("the context", os.getpid(), b"abc")


def crowded() -> None:
    """A call is refused for now where there can be no more processes; the next one finds room."""
    error = _raised(SERVER.call(echo, b"").result)
    assert isinstance(error, ApiError)
    assert (error.status, error.headers["x-should-retry"]) == (503, "true")
    assert SERVER.call(echo, b"a").result()[2] == b"a"


def stopped() -> None:
    """While the server stands still, calls can be ended, and are refused once too many wait. None is made later."""
    [server] = psutil.Process().children()
    server.suspend()
    call, refused = SERVER.call(hold, sys.argv[2]), list[Exception]()
    thread = threading.Thread(target=lambda: refused.append(_raised(call.result)))
    thread.start()
    _until(lambda: call._connection is not None)
    call.end()
    thread.join(PATIENCE_S)
    try:
        while connection := SERVER.fork():
            connection.close()
    except OSError as error:
        refused += [error, _raised(SERVER.call(hold, sys.argv[2]).result)]
    assert [getattr(one, "status", None) for one in refused] == [503, None, 503]
    server.resume()
    _until(_is_served)
    assert not Path(sys.argv[2]).exists()


def _is_served() -> bool:
    """Return whether there is room for a call."""
    try:
        return SERVER.call(echo, b"a").result()[2] == b"a"
    except ApiError:
        return False


def _has_no_room_at_first() -> None:
    """Let the second fork fail, which is the first one of the server."""
    fork, forks = os.fork, list[None]()

    def fail_once() -> int:
        forks.append(None)
        if len(forks) == 2:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return fork()

    os.fork = fail_once


def leave() -> None:
    """End while a call runs, and say which processes there are."""
    _held()
    print(*(one.pid for one in psutil.Process().children(recursive=True)))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "crowded":
        _has_no_room_at_first()
    SERVER = ForkServer("the context", [SHARED])
    globals()[sys.argv[1]]()
    print("done")
