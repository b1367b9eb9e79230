"""What an engine shows of itself: true, bounded, without text or stream keys, and told between two steps."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from inflight.engine.config import EngineConfig
from inflight.engine.kvcache.manager import KvCacheManager
from inflight.engine.loop import EngineLoop
from inflight.engine.replay import Pace, ReplayEngine
from inflight.engine.snapshot import MAX_CELLS, MAX_REQUESTS, Snapshot, portable_snapshot, short_id
from inflight.engine.stats import EngineStats
from inflight.errors import EngineFailure, ShuttingDown
from tests.engine.support.checkpoints import checkpoint
from tests.engine.support.driving import ask, fill, finish, load


def test_the_portable_engines_requests_and_cache() -> None:
    engine = load(checkpoint("llama"), num_blocks=64, max_batch_size=2, max_tokens_per_step=8)
    prompts = [[5, 6, 7, 8, 9], list(range(20, 40)), [9, 8, 7]]
    for index, prompt in enumerate(prompts):
        engine.submit(ask(prompt, 12, request_id=f"request-{index}", priority=-index))
    assert [one.state for one in engine.snapshot().requests] == ["waiting"] * 3
    for _ in range(2):
        engine.step()
    shot = engine.snapshot()
    assert (shot.running, shot.waiting, shot.max_batch_size, shot.steps) == (2, 1, 2, 2)
    first, second, third = shot.requests
    assert [one.prompt_tokens for one in shot.requests] == [5, 20, 3]
    assert (first.state, first.prompt_tokens, first.generated_tokens, first.max_tokens) == ("decode", 5, 2, 12)
    assert first.tokens_per_second is not None
    assert (second.state, second.generated_tokens, second.priority) == ("prefill", 0, -1)
    assert (third.state, third.queue_s) == ("waiting", third.age_s)
    assert first.queue_s is not None
    assert 0 <= first.queue_s <= first.age_s
    cache = shot.kv_cache
    assert cache is not None
    assert [cache.map().count(state) for state in ("used", "cached", "free")] == [cache.used, cache.cached, cache.free]
    assert cache.used > 0
    finish(engine)
    idle = engine.snapshot()
    assert (idle.running, idle.waiting, idle.requests) == (0, 0, ())
    assert idle.kv_cache is not None
    assert idle.kv_cache.used == 0 < (idle.kv_cache.cached or 0)


def test_a_preempted_sequence_waits_again() -> None:
    engine = load(checkpoint("llama"), num_blocks=6, max_batch_size=2, policy="max_utilization")
    for prompt in ([5, 6, 7, 8, 9, 1, 2], [9, 8, 7, 6, 5, 4, 3]):
        engine.submit(ask(prompt, 16))
    seen: list[tuple[str, int]] = []
    while engine.busy:
        engine.step()
        seen += [(one.state, one.preemptions) for one in engine.snapshot().requests]
    assert ("waiting", 1) in seen
    assert ("decode", 1) in seen


def test_its_json_is_whole_and_holds_no_secret() -> None:
    engine = ReplayEngine(EngineConfig(Path(), max_batch_size=1), Pace(0, 10, 1))
    request = ask([123456, 654321], 7, request_id="mine \u2028 \U0001f600 is this")
    engine.submit(request)
    engine.step()
    shot = engine.snapshot()
    text = shot.to_json()
    assert Snapshot.from_json(text) == shot
    assert shot.requests[0].state == "prefill"
    assert shot.kv_cache is None
    for secret in (str(request.key), "123456", "654321", "is this"):
        assert secret not in text


@pytest.mark.parametrize(
    ("whole", "shown"),
    [("", ""), ("mine", "#3fd3054"), ("12345678", "#ef797c8"), ("123456789", "12345678…")],
)
def test_an_id_is_shown_so_that_it_cannot_be_stopped_by(whole: str, shown: str) -> None:
    assert short_id(whole) == shown
    engine = ReplayEngine(EngineConfig(Path(), max_batch_size=1), Pace(0, 10, 1))
    engine.submit(ask([5, 6], 7, request_id=whole))
    assert [one.request_id for one in engine.snapshot().requests] == [shown]


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"kv_cache": null, "requests": [{}]}'])
def test_what_is_no_snapshot_is_said(text: str) -> None:
    with pytest.raises(EngineFailure, match="snapshot cannot be read"):
        Snapshot.from_json(text)


def test_it_is_bounded() -> None:
    cache = KvCacheManager(num_blocks=10 * MAX_CELLS + 1, block_size=2)
    tables = [fill(cache, [index, index + 1]) for index in range(200)]
    for table in tables[::2]:
        cache.free(table)
    shot = portable_snapshot(EngineStats(), [], cache)
    assert shot.kv_cache is not None
    assert len(shot.kv_cache.map()) <= MAX_CELLS
    assert shot.kv_cache.stride == 11
    assert (shot.kv_cache.used, shot.kv_cache.cached) == (100, 100)
    engine = ReplayEngine(EngineConfig(Path(), max_batch_size=4), Pace(0, 10, 1))
    for _ in range(3 * MAX_REQUESTS):
        engine.submit(ask([5], 9))
    engine.step()
    shot = engine.snapshot()
    assert (len(shot.requests), shot.running, shot.waiting) == (MAX_REQUESTS, 4, 3 * MAX_REQUESTS - 4)
    assert [one.state for one in shot.requests[:5]] == ["prefill"] * 4 + ["waiting"]
    assert len(json.dumps(shot.to_json())) < 100_000


def test_the_loop_calls_between_steps_in_its_own_thread() -> None:
    engine = load(checkpoint("llama"))
    inside, threads, done = threading.Lock(), [], threading.Semaphore(0)
    step = engine.step

    def guarded() -> list:  # type: ignore[type-arg]
        with inside:
            return step()

    def look() -> None:
        assert not inside.locked()
        threads.append(threading.current_thread().name)
        done.release()

    engine.step = guarded  # type: ignore[method-assign]
    loop = EngineLoop(engine, lambda output: None, max_queue_size=10)
    loop.between_steps(look)  # an idle engine answers too
    assert done.acquire(timeout=60)
    loop.submit(ask([5, 6, 7], 200))
    for _ in range(20):
        loop.between_steps(look)
        assert done.acquire(timeout=60)
    loop.between_steps(lambda: 1 / 0)
    loop.between_steps(look)
    assert done.acquire(timeout=60), "a fault of a call must not end the engine's thread"
    loop.close()
    assert set(threads) == {"engine"}
    with pytest.raises(ShuttingDown):
        loop.between_steps(look)
