"""Work beside the event loop, whose thread serves the streams of all clients: in one of two threads where it is much.

More threads would not be faster, since one of them at a time runs Python, and they would hold up the event loop's.
Work that waits for a thread has its turn by when it came and how large it is: what is small overtakes what is large,
and nothing waits for good. One thread at most does what takes longest, or waits for the process that does
(``fork_server``), so that the rest never waits for that. Work whose client leaves while it waits is forgotten, with all
the memory that it holds.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from json import JSONEncoder
from typing import Any, TypeVar

LARGE = 16 << 10
"""Bytes of a body, or pieces of an answer, from which on the work takes milliseconds."""
HUGE = 128 << 10
"""Bytes or pieces from which on work may take seconds."""
TRIM_S = 5.0
"""Seconds from the end of such work until its memory is given back."""
_HEAD_START_S = 1 / (1 << 20)
"""Seconds that smaller work may come later and still be first, for each byte or piece that it has less."""
_ELEMENTS_AT_ONCE = 64
"""Elements of a list that are written by one call, which holds all threads up."""
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="prepare")
_Result = TypeVar("_Result")


@dataclass(order=True, slots=True)
class _Task:
    """Work that waits for a thread."""

    turn: float
    number: int
    huge: bool = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    result: Future[Any] = field(compare=False, default_factory=Future)

    def run(self) -> None:
        """Work, and say what came of it."""
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self.work())
        except BaseException as error:
            self.result.set_exception(error)
            del self  # it has the error, whose traceback has this frame


class Memory:
    """Gives the system back what large work has used, once its answers have left: the C library would keep it."""

    def __init__(self, trim: Callable[[int], object] | None) -> None:
        """``trim`` is the C library's ``malloc_trim``; None: it has none."""
        self._trim = trim
        self._lock = threading.Lock()
        self._is_due = False

    def give_back_soon(self) -> None:
        """Do so after ``TRIM_S``, unless that is due already."""
        with self._lock:
            if self._trim is None or self._is_due:
                return
            self._is_due = True
        timer = threading.Timer(TRIM_S, self._give_back)
        timer.daemon = True
        timer.start()

    def _give_back(self) -> None:
        with self._lock:
            self._is_due = False
        if self._trim is not None:
            self._trim(0)


_MEMORY = Memory(getattr(ctypes.CDLL(None), "malloc_trim", None))


class _Queue:
    """The work that waits, of all event loops of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[_Task] = []
        self._numbers = itertools.count()
        self._huge_runs = False

    def put(self, work: Callable[[], Any], size: int) -> _Task:
        """Have a thread do ``work``."""
        with self._lock:
            task = _Task(time.monotonic() + size * _HEAD_START_S, next(self._numbers), size >= HUGE, work)
            self._waiting.append(task)
        _THREADS.submit(self._run_next)
        return task

    def forget(self, task: _Task) -> None:
        """Take a task out, if it waits still."""
        with self._lock:
            if task in self._waiting:
                self._waiting.remove(task)

    def _next(self) -> _Task | None:
        """Take what is next."""
        with self._lock:
            may_run = [task for task in self._waiting if not (task.huge and self._huge_runs)]
            task = min(may_run, default=None)
            if task is not None:
                self._waiting.remove(task)
                self._huge_runs = self._huge_runs or task.huge
            return task

    def _run_next(self) -> None:
        """Do what is next; nothing, where that is huge and another thread does such work, which looks again then."""
        if (task := self._next()) is None:
            return
        huge = task.huge
        task.run()
        del task  # the frames that an error has passed are this one's callees, and refer to it
        if huge:
            with self._lock:
                self._huge_runs = False
            _MEMORY.give_back_soon()
            _THREADS.submit(self._run_next)


_QUEUE = _Queue()


async def off_loop(work: Callable[[], _Result], size: int) -> _Result:
    """Return what ``work`` does for ``size`` bytes or pieces: in another thread where there are many."""
    if size < LARGE:
        return work()
    task = _QUEUE.put(work, size)
    try:
        result: _Result = await asyncio.wrap_future(task.result)
        return result
    except asyncio.CancelledError:
        _QUEUE.forget(task)
        raise


def written(value: Any, other: Callable[[Any], Any] | None = None) -> str:
    """Return a value as JSON in one line, written by many short calls where its lists are long.

    Args:
        value: what JSON has, with strings as the names of fields; and objects of other kinds.
        other: returns what is written for one of these.

    Raises:
        ValueError: it has a number that JSON cannot write.
    """

    def write(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{dump(name)}:{write(one)}" for name, one in value.items()) + "}"
        if not isinstance(value, list):
            return dump(value)
        if len(value) <= _ELEMENTS_AT_ONCE:
            return "[" + ",".join(map(write, value)) + "]"
        parts = (
            dump(value[first : first + _ELEMENTS_AT_ONCE])[1:-1] for first in range(0, len(value), _ELEMENTS_AT_ONCE)
        )
        return "[" + ",".join(parts) + "]"

    dump = JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=other).encode
    return write(value)
