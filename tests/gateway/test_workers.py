"""Work beside the event loop: what is next, and what becomes of work that nobody waits for any more."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from inflight.gateway import workers
from inflight.gateway.workers import HUGE, LARGE, off_loop

PATIENCE_S = 60


class Held:
    """Something that takes memory."""


@asynccontextmanager
async def busy() -> AsyncIterator[Callable[[], None]]:
    """Keep both threads busy; what is yielded lets one of them go on."""
    begun, may_end = threading.Semaphore(0), threading.Semaphore(0)

    def work() -> None:
        begun.release()
        may_end.acquire(timeout=PATIENCE_S)

    tasks = [asyncio.create_task(off_loop(work, LARGE)) for _ in range(2)]
    await asyncio.sleep(0)
    for _ in tasks:
        assert begun.acquire(timeout=PATIENCE_S)
    try:
        yield may_end.release
    finally:
        for _ in tasks:
            may_end.release()
        await asyncio.gather(*tasks)


def test_work_whose_client_has_left_is_forgotten_at_once() -> None:
    async def leave() -> weakref.ref[Held]:
        held = Held()
        task = asyncio.create_task(off_loop(lambda: str(held), LARGE))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return weakref.ref(held)

    async def check() -> None:
        async with busy():
            alive = await leave()
            gc.collect()
            assert alive() is None

    asyncio.run(check())


def test_small_work_is_next_and_large_work_does_not_wait_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: now))
    done: list[str] = []

    async def check() -> None:
        nonlocal now
        async with busy() as free_one:
            tasks = []
            for name, size, at in (("large", 16 << 20, 0.0), ("small", LARGE, 1.0), ("late", LARGE, 17.0)):
                now = at
                tasks.append(asyncio.create_task(off_loop(lambda name=name: done.append(name), size)))  # type: ignore[misc]
                await asyncio.sleep(0)
            free_one()
            await asyncio.gather(*tasks)

    asyncio.run(check())
    assert done == ["small", "large", "late"]


@pytest.mark.parametrize("size", [LARGE - 1, LARGE])
def test_what_work_raises_comes_to_who_waits_for_it(size: int) -> None:
    def fail() -> None:
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        asyncio.run(off_loop(fail, size))


def test_what_takes_longest_leaves_a_thread_to_others() -> None:
    begun, may_end, done = threading.Semaphore(0), threading.Semaphore(0), list[str]()

    def hold() -> None:
        begun.release()
        may_end.acquire(timeout=PATIENCE_S)
        done.append("huge")

    async def check() -> None:
        huge = [asyncio.create_task(off_loop(hold, 4 << 20)) for _ in range(3)]
        await asyncio.sleep(0)
        assert await asyncio.to_thread(begun.acquire, timeout=PATIENCE_S)
        await asyncio.gather(*(off_loop(lambda: done.append("small"), HUGE - 1) for _ in range(3)))
        assert done == ["small"] * 3
        assert not begun.acquire(blocking=False), "one at a time"
        may_end.release(3)
        await asyncio.gather(*huge)

    asyncio.run(check())
    assert done == ["small"] * 3 + ["huge"] * 3


def test_what_large_work_has_used_is_given_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "TRIM_S", 0.01)
    given, may_end = threading.Semaphore(0), threading.Event()

    def trim(pad: int) -> None:
        assert may_end.wait(PATIENCE_S)
        given.release()

    memory = workers.Memory(trim)
    memory.give_back_soon()
    may_end.set()
    assert given.acquire(timeout=PATIENCE_S)
    memory.give_back_soon()
    assert given.acquire(timeout=PATIENCE_S), "after each time"
    workers.Memory(None).give_back_soon()
