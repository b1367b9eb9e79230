"""ForkServer: calls functions in processes of their own, each of which ends with its call.

Python runs one thread at a time, and some functions hold all of them up: JSON of 15 MB, a chat template. In another
process, of lower priority, they hold up nobody's stream; its memory goes with it, and nobody computes on when a client
has left. The processes are forked from one that does nothing else, as those of ``multiprocessing``'s server of this
name are: one with threads cannot be forked safely, since a lock that another thread holds stays locked in the fork.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import pickle
import resource
import signal
import socket
import struct
import threading
import traceback
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, NoReturn, TypeVar

from inflight.errors import InflightError
from inflight.gateway.errors import ApiError, away

log = logging.getLogger(__name__)

MOST_CPU_S = 60
"""Seconds of processor time that a call may take."""
_NICE = 10
"""How much less urgent a call is than the streams; a fork has a tenth of a processor that others want whole."""
_CALL, _BEGUN = b"c", b"b"
"""The messages that ask for a process, and that it sends when it has begun."""
_NO_PROCESS = "the server cannot make one more process for a large request"
_LONG = 64
"""Numbers of a list that is written as one."""
Context = TypeVar("Context")
Result = TypeVar("Result")


class ForkServer(Generic[Context]):
    """The process that forks. It ends with the one that made it."""

    def __init__(self, context: Context, shared: Sequence[object]) -> None:
        """Fork it from this process, which must not have other threads that run Python.

        Args:
            context: the first argument of every function that is called.
            shared: objects of the context that results may refer to: in this process they are the same objects again.
        """
        self.context, self.shared = context, tuple(shared)
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            _fork_calls(theirs, self)
        theirs.close()
        ours.setblocking(False)
        self._control, self._is_gone = ours, False

    def call(self, function: Callable[..., Result], *arguments: Any) -> Call[Result]:
        """Return the call of a module's function with the context and ``arguments``; it has not begun.

        What cannot be sent to another process must not be among them; bytes are sent without a copy.
        """
        return Call(self, function, arguments)

    def fork(self) -> socket.socket | None:
        """Return a connection to a new process, which takes one call; None: the process that forks has ended.

        Raises:
            OSError: there is no room for one more.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [_CALL], [theirs.fileno()])
        except ConnectionError:
            ours.close()
            if not self._is_gone:
                self._is_gone = True
                log.error("the process that forks has ended; until the gateway starts again, its own does all work")
            return None
        except OSError:
            ours.close()
            raise
        return ours


class Call(Generic[Result]):
    """A call in a process of its own."""

    def __init__(self, server: ForkServer[Any], function: Callable[..., Result], arguments: Sequence[Any]) -> None:
        self._server, self._function, self._arguments = server, function, arguments
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._is_over = False

    def result(self) -> Result:
        """Make the call, and wait for its result. Other threads run meanwhile.

        Raises:
            ApiError, InflightError: what the function raises; or 503: there is no process for it, or 500: it has ended.
            RuntimeError: what else it raises, with its traceback.
        """
        try:
            connection = self._server.fork()
        except OSError as error:
            log.warning("no process for a large request: %s", error)
            raise away(_NO_PROCESS) from None
        if connection is None:
            return self._function(self._server.context, *self._arguments)
        with connection:
            self._begin(connection)
            try:
                if connection.recv(1) != _BEGUN:
                    raise away(_NO_PROCESS)
                _send(connection, (self._function, [*map(_uncopied, self._arguments)]), self._server.shared)
                succeeded, result = _receive(connection, self._server.shared)
            except (OSError, EOFError):
                raise _ended() from None
            finally:
                with self._lock:
                    self._connection = None
        if succeeded:
            return result  # type: ignore[no-any-return]
        try:
            raise result
        finally:
            del result  # its traceback has this frame

    def _begin(self, connection: socket.socket) -> None:
        """Let the connection be ended by others. Raises ApiError: the call has been ended before."""
        with self._lock:
            self._connection = connection
            if self._is_over:
                raise _ended()

    def end(self) -> None:
        """End the process, if it has not ended; or never begin."""
        with self._lock:
            self._is_over = True
            if self._connection is not None:
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)


def _uncopied(argument: Any) -> Any:
    return pickle.PickleBuffer(argument) if isinstance(argument, bytes | bytearray) else argument


def _ended() -> ApiError:
    message = f"the request took more than {MOST_CPU_S} s of processor time to read, or more memory than there is"
    return ApiError(500, message, code="internal_error", headers={"x-should-retry": "false"})


def _fork_calls(control: socket.socket, server: ForkServer[Any]) -> NoReturn:
    """Fork a process for each call, until the gateway's process is gone."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # a group's signal is for the gateway, which ends this
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        os.nice(_NICE)
        gc.freeze()
        while True:
            message, descriptors, *_ = socket.recv_fds(control, 1, 1)
            if not message:
                break
            for descriptor in descriptors:
                with socket.socket(fileno=descriptor) as connection:
                    _fork_call(control, connection, server)
        code = 0
    except Exception:
        log.exception("the process that forks ends")
    finally:
        os._exit(code)


def _fork_call(control: socket.socket, connection: socket.socket, server: ForkServer[Any]) -> None:
    """Fork a process for one call, unless nobody waits for it any more."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return  # it has ended, since nothing is sent before the process says that it has begun
    except BlockingIOError:
        pass
    try:
        if os.fork() == 0:
            control.close()
            _serve(connection, server)
    except OSError as error:
        log.warning("no process for a large request: %s", error)


def _serve(connection: socket.socket, server: ForkServer[Any]) -> NoReturn:
    """Make one call, in its own process."""
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where memory runs out, this ends before the gateway
        try:
            connection.sendall(_BEGUN)
            function, arguments = _receive(connection, server.shared)
            threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
            _send(connection, _outcome(function, server.context, arguments), server.shared)
        except (OSError, EOFError):
            pass  # nobody waits for it
        except Exception:  # what cannot be sent, in one direction or the other
            _send(connection, (False, RuntimeError(traceback.format_exc())), server.shared)
    finally:
        os._exit(0)


def _outcome(function: Callable[..., Any], context: Any, arguments: Sequence[Any]) -> tuple[bool, Any]:
    """Return whether a call succeeds, and its result, or what it raises."""
    try:
        return True, function(context, *arguments)
    except (ApiError, InflightError) as error:
        return False, error
    except Exception:
        return False, RuntimeError(traceback.format_exc())


def _end_with(connection: socket.socket) -> None:
    """End the process with the connection: nobody waits for its result any more."""
    with suppress(OSError):
        connection.recv(1)
    os._exit(0)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, shared: Sequence[object], take: Callable[[pickle.PickleBuffer], object]):
        super().__init__(file, 5, buffer_callback=take)
        self._places = {id(one): place for place, one in enumerate(shared)}

    def persistent_id(self, obj: Any) -> int | bytes | None:
        """Return the place of a shared object, or the numbers of a long list, such as the tokens of a prompt.

        Each list is then read by a call of its own, between which other threads run.
        """
        if type(obj) is list and len(obj) >= _LONG and set(map(type, obj)) == {int}:
            with suppress(OverflowError):
                return array("q", obj).tobytes()
        return self._places.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytearray, shared: Sequence[object], buffers: Sequence[bytearray]) -> None:
        super().__init__(io.BytesIO(content), buffers=buffers)
        self._shared = shared

    def persistent_load(self, pid: Any) -> object:
        return array("q", pid).tolist() if isinstance(pid, bytes) else self._shared[pid]


def _send(connection: socket.socket, value: object, shared: Sequence[object]) -> None:
    """Send a value: the number of its parts and the size of each, the value itself, and its buffers."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(file, shared, buffers.append).dump(value)
    parts = [file.getbuffer(), *(one.raw() for one in buffers)]
    connection.sendall(struct.pack(f"<{len(parts) + 1}Q", len(parts), *map(len, parts)))
    for part in parts:
        connection.sendall(part)


def _receive(connection: socket.socket, shared: Sequence[object]) -> Any:
    """Return a value that has been sent. Raises EOFError: the connection has ended before."""
    (count,) = struct.unpack("<Q", _exactly(connection, 8))
    sizes = struct.unpack(f"<{count}Q", _exactly(connection, 8 * count))
    content, *buffers = [_exactly(connection, size) for size in sizes]
    return _Unpickler(content, shared, buffers).load()


def _exactly(connection: socket.socket, size: int) -> bytearray:
    content = bytearray(size)
    rest = memoryview(content)
    while rest:
        taken = connection.recv_into(rest)
        if not taken:
            raise EOFError
        rest = rest[taken:]
    return content
