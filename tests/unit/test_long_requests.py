"""Long requests are prepared aside: the shortest first, and with less of the CPU than all else gets."""

from __future__ import annotations

import itertools
import os
import threading
from queue import Queue

import pytest

from inflight.triton.long_requests import LONGEST_BYTES, LongRequests


@pytest.mark.parametrize("old", [False, True])
def test_the_shortest_goes_first_unless_a_longer_one_is_older(old: bool) -> None:
    clock = itertools.count(0, 60 * old)  # seconds: longer than the largest is put off
    requests, gate, done = LongRequests(lambda: next(clock)), threading.Semaphore(0), Queue[int]()
    started = Queue[int]()

    def hold() -> None:
        started.put(0)
        gate.acquire()

    held = len(requests._threads)
    for _ in range(held):
        requests.put(0, hold)
    for _ in range(held):
        started.get(timeout=60)
    for size in (30, 10, 20):
        requests.put(size << 20, lambda size=size: done.put(size))
    gate.release()  # one thread goes on, and does them one after the other
    assert [done.get(timeout=60) for _ in range(3)] == ([30, 10, 20] if old else [10, 20, 30])
    gate.release(held)
    requests.close()
    for thread in requests._threads:
        thread.join(60)
        assert not thread.is_alive()


def test_they_get_less_of_the_cpu() -> None:
    requests, seen = LongRequests(), Queue[int]()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    requests.put(1, lambda: seen.put(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    assert seen.get(timeout=60) > own
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
    requests.close()


class Panic(BaseException):
    """A fault that is none of Python's own errors, as those of libraries in Rust."""


@pytest.mark.parametrize("fault", [MemoryError("no shared memory is left"), Panic("it gave up")])
@pytest.mark.parametrize("size", [1, LONGEST_BYTES])
def test_a_fault_ends_no_thread(size: int, fault: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    requests, done = LongRequests(), Queue[int]()

    def fail() -> None:
        raise fault

    for _ in requests._threads:
        requests.put(size, fail)
    requests.put(size + 1, lambda: done.put(2))
    assert done.get(timeout=60) == 2
    requests.close()
    for thread in requests._threads:
        thread.join(60)
    assert caplog.messages == ["a long request could not be answered"] * len(requests._threads)


def test_the_longest_leave_a_thread_to_others() -> None:
    requests, began, may_end, done = LongRequests(), Queue[int](), threading.Semaphore(0), Queue[int]()

    def hold() -> None:
        began.put(0)
        may_end.acquire()

    held = len(requests._threads)
    for _ in range(held):
        requests.put(1 << 20, hold)
    began.get(timeout=60)
    requests.put(20 << 10, lambda: done.put(1))
    assert done.get(timeout=60) == 1
    assert began.empty(), "one at a time"
    may_end.release(held)
    for _ in range(held - 1):
        began.get(timeout=60)
    requests.close()
