"""Alerts proven by faults: what a server gets, or is made of, is too much for it, and the alert fires in its time.

That time is shortened by a scale. The limits of the waits have room for a busy machine; that an alert does not fire
early is promtool's to show.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from inflight.client import AsyncClient, GenerateOptions
from inflight.errors import EngineFailure, QueueFull
from inflight.resources import DEMO
from inflight.text.tokenizer import Tokenizer
from monitoring.generate.rule import MINUTE
from tests.monitoring.support.stack import FAST_SCALE, SLOW_ENGINE, Stack, in_thread, load, stack

pytestmark = [
    pytest.mark.proof(waits=True),
    pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus is not installed"),
]

BLOCK = 8


def test_a_kv_cache_that_is_promised_and_hardly_used(tmp_path: Path) -> None:
    # Room for one request of so many tokens: it holds it all from the start, and the others wait.
    answer, blocks = 1500, 1500 // BLOCK + 4
    with (
        stack(tmp_path, FAST_SCALE, kv_cache={"tokens": blocks * BLOCK, "block_size": BLOCK}) as running,
        ExitStack() as loads,
    ):
        # Two loads, so that one has requests waiting while the other begins anew.
        for _ in range(2):
            loads.enter_context(load(running, 8, answer))
        assert "%" in running.wait_firing("InflightKvCacheFull", 0)["description"]
        used = 'min_over_time(inflight_kv_cache_blocks{state="used"}[30s])'
        assert float(running.prometheus.instant(used)[0]["value"][1]) < 0.5 * blocks
        running.wait_firing("InflightKvCacheHigh", 0)


def test_a_kv_cache_too_small_for_what_runs(tmp_path: Path) -> None:
    # Short requests in few blocks: a machine that is slow preempts often enough all the same.
    small = {"tokens": 16 * BLOCK, "block_size": BLOCK}
    policy = {"policy": "max_utilization"}
    with stack(tmp_path, FAST_SCALE, kv_cache=small, batching=policy) as running, ExitStack() as loads:
        # Equal prompts have equal answers, which share their blocks.
        for number in range(6):
            loads.enter_context(load(running, 1, 80, f"{number} and {number} are how many?"))
        running.wait_firing("InflightPreemptions", 5 * MINUTE)


def test_a_slow_engine_with_a_full_queue(tmp_path: Path) -> None:
    engine = {"kind": "replay", "replay_prefill_ms": 1500, "replay_step_ms": 150}
    batching = {"max_batch_size": 8, "max_queue_size": 8}
    with stack(tmp_path, FAST_SCALE, engine=engine, batching=batching) as running, ExitStack() as loads:
        for _ in range(2):
            loads.enter_context(load(running, 16, 20))
        running.wait_firing("InflightQueueNearLimit", 0)
        for alert in SLOW_ENGINE:
            running.wait_firing(alert, 5 * MINUTE)
        assert running.wait_firing("InflightRequestsRefused", 5 * MINUTE)["outcome"] == QueueFull.label


def test_a_queue_that_grows_steadily(tmp_path: Path) -> None:
    engine = {"kind": "replay", "replay_step_ms": 1000}
    batching = {"max_batch_size": 2, "max_queue_size": 250}
    with stack(tmp_path, FAST_SCALE, engine=engine, batching=batching) as running, _arrivals(running, per_second=5):
        running.wait_firing("InflightQueueGrowing", 5 * MINUTE)
        if running.prometheus.instant("instance:inflight_queue:ratio < 0.7"):  # else a slow machine was late to see it
            assert "InflightQueueNearLimit" not in running.firing()


@contextmanager
def _arrivals(running: Stack, per_second: float) -> Iterator[None]:
    """Send requests at a rate, whatever becomes of those before, and leave them all at the end."""

    async def drive(over: threading.Event) -> None:
        async with AsyncClient(running.grpc) as client:
            sent: list[asyncio.Task[object]] = []
            while not over.is_set():
                sent.append(asyncio.create_task(client.generate("One more.", GenerateOptions(max_tokens=200))))
                await asyncio.sleep(1 / per_second)
            for task in sent:
                task.cancel()
            await asyncio.gather(*sent, return_exceptions=True)

    with in_thread(lambda over: asyncio.run(drive(over))):
        yield


def test_weights_that_are_no_numbers_for_one_word(tmp_path: Path) -> None:
    damaged = _damaged(tmp_path / "model", "Z")
    with stack(tmp_path, FAST_SCALE, model=damaged) as running, load(running, 1, 8), load(running, 1, 8, "ZZZ"):
        assert asyncio.run(running.ask(1, 8, "ZZZ")) == [EngineFailure.__name__]
        running.wait_firing("InflightEngineErrors", 5 * MINUTE)


def _damaged(directory: Path, word: str) -> Path:
    """Write the demo's checkpoint with an embedding that is no number for one word's first token."""
    shutil.copytree(DEMO / "model", directory)
    tensors = load_file(directory / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone()
    embedding[Tokenizer.from_checkpoint(directory).encode_batch([word])[0][0]] = float("nan")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(
        config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    )
    return directory
