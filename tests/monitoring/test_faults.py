"""Alerts proven by faults: a real server is hurt, and the alert fires in its time, shortened by ``SCALE``.

The limits of the waits have room for a busy machine; that an alert does not fire early is promtool's to show.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from inflight.client import AsyncClient, GenerateOptions
from inflight.errors import EngineFailure, QueueFull
from inflight.monitoring.health import HEARTBEAT_S
from inflight.monitoring.timescale import MINUTE
from inflight.observability import METRICS_VARIABLE
from inflight.resources import DEMO
from inflight.serve import server as serve_server
from inflight.text.tokenizer import Tokenizer
from tests.monitoring.stack import SLOW_ENGINE, Stack, in_thread, stack, stopped, wait_for, watch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus is not installed"),
]


BLOCK = 8


@contextmanager
def load(
    running: Stack, count: int, max_tokens: int, prompt: str | Callable[[], str] = "What is a paged KV cache?"
) -> Iterator[None]:
    """Keep ``count`` requests in a server from a thread, whatever becomes of them; ``prompt`` may make each round's."""

    def drive(over: threading.Event) -> None:
        while not over.is_set():
            with suppress(asyncio.TimeoutError):
                text = prompt if isinstance(prompt, str) else prompt()
                asyncio.run(asyncio.wait_for(running.ask(count, max_tokens, text), 30))

    with in_thread(drive):
        yield


def test_a_stalled_engine(tmp_path: Path) -> None:
    with stack(tmp_path) as running, load(running, 4, 1500):
        gauge = "sum(min_over_time(inflight_running_requests[3s])) > 0"
        wait_for(lambda: running.prometheus.instant(gauge), 30, "no request runs")
        with stopped(running.stub("tensorrt_llm")):
            said = running.wait_firing("InflightNoTokenProgress", MINUTE)
            assert said["severity"] == "critical"
            assert said["instance"] in said["summary"]
            assert running.wait_firing("InflightStageDead", HEARTBEAT_S)["model"] == "tensorrt_llm"
        running.wait_quiet("InflightNoTokenProgress", "InflightStageDead")


def test_a_kv_cache_that_is_promised_and_hardly_used(tmp_path: Path) -> None:
    # Room for one request of so many tokens: it holds it all from the start, and the others wait.
    answer, blocks = 1500, 1500 // BLOCK + 4
    with stack(tmp_path, kv_cache={"tokens": blocks * BLOCK, "block_size": BLOCK}) as running, ExitStack() as loads:
        # Two loads, so that one has requests waiting while the other begins anew.
        for _ in range(2):
            loads.enter_context(load(running, 8, answer))
        assert "%" in running.wait_firing("InflightKvCacheFull", 0)["description"]
        used = 'min_over_time(inflight_kv_cache_blocks{state="used"}[30s])'
        assert float(running.prometheus.instant(used)[0]["value"][1]) < 0.5 * blocks
        running.wait_firing("InflightKvCacheHigh", 0)


def test_a_kv_cache_too_small_for_what_runs(tmp_path: Path) -> None:
    small = {"tokens": 64 * BLOCK, "block_size": BLOCK}
    policy = {"policy": "max_utilization"}
    with stack(tmp_path, kv_cache=small, batching=policy) as running, ExitStack() as loads:
        # Equal prompts have equal answers, which share their blocks.
        for number in range(6):
            loads.enter_context(load(running, 1, 300, f"{number} and {number} are how many?"))
        running.wait_firing("InflightPreemptions", 5 * MINUTE)


def test_a_slow_engine_with_a_full_queue(tmp_path: Path) -> None:
    engine = {"kind": "replay", "replay_prefill_ms": 1500, "replay_step_ms": 150, "dtype": "auto"}
    batching = {"max_batch_size": 8, "max_queue_size": 8}
    with stack(tmp_path, engine=engine, batching=batching) as running, ExitStack() as loads:
        for _ in range(2):
            loads.enter_context(load(running, 16, 40))
        running.wait_firing("InflightQueueNearLimit", 0)
        for alert in SLOW_ENGINE:
            running.wait_firing(alert, 5 * MINUTE)
        assert running.wait_firing("InflightRequestsRefused", 5 * MINUTE)["outcome"] == QueueFull.label


def test_a_killed_stage_which_triton_does_not_notice_then_the_whole_server_then_restarts(tmp_path: Path) -> None:
    with stack(tmp_path) as running:
        os.kill(running.stub("tensorrt_llm"), signal.SIGKILL)
        assert running.wait_firing("InflightStageDead", HEARTBEAT_S)["model"] == "tensorrt_llm"
        http = f"http://127.0.0.1:{running.server.settings.http_port}/v2"
        for path in ("/health/ready", "/models/ensemble/ready", "/models/tensorrt_llm/ready"):
            assert httpx.get(http + path).status_code == 200
        with load(running, 2, 8):
            assert running.wait_firing("InflightMostRequestsFailing", 5 * MINUTE)["severity"] == "critical"
            running.wait_firing("InflightRequestsFailing", 5 * MINUTE)
        running.server.stop()
        assert running.wait_firing("InflightTargetDown", 0)["severity"] == "warning"
        assert running.wait_firing("InflightTargetGone", 0)["severity"] == "critical"
        # All that was said of the server goes with it: what is gone has no figures.
        gone = {"InflightTargetDown", "InflightTargetGone"}
        wait_for(lambda: set(running.firing()) == gone, 45, f"still firing: {list(running.firing())}")
        for _ in range(3):
            begin = time.time()
            with running.server:
                running.server.wait_ready(180)
                seen = f"inflight_start_time_seconds > {begin}"
                wait_for(lambda seen=seen: running.prometheus.instant(seen), 20, "the start is not scraped")
        running.wait_firing("InflightRestartLoop", 0)


def test_a_queue_that_grows_steadily(tmp_path: Path) -> None:
    engine = {"kind": "replay", "replay_step_ms": 1000, "dtype": "auto"}
    batching = {"max_batch_size": 2, "max_queue_size": 250}
    with stack(tmp_path, engine=engine, batching=batching) as running, _arrivals(running, per_second=3):
        running.wait_firing("InflightQueueGrowing", 5 * MINUTE)
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
    with stack(tmp_path, model=damaged) as running, load(running, 1, 8), load(running, 1, 8, "ZZZ"):
        assert asyncio.run(running.ask(1, 8, "ZZZ")) == [EngineFailure.__name__]
        running.wait_firing("InflightEngineErrors", 5 * MINUTE)


def _damaged(directory: Path, word: str) -> Path:
    """Write the demo's checkpoint with an embedding that is no number for one word's first token."""
    shutil.copytree(DEMO / "model", directory)
    tensors = load_file(directory / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone()
    embedding[Tokenizer.from_checkpoint(directory).encode_words([word])[0][0]] = float("nan")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(
        config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    )
    return directory


def test_stages_without_exporters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_server, "METRICS_VARIABLE", "NOT_" + METRICS_VARIABLE)
    monkeypatch.setenv(METRICS_VARIABLE, "off")
    with stack(tmp_path) as running:
        assert running.wait_firing("InflightMetricsMissing", 0)["severity"] == "warning"


def test_a_stop_that_hangs(tmp_path: Path) -> None:
    """A connection from before is answered with 200 until the end, so it takes a Prometheus that asks anew."""
    with stack(tmp_path, exit_timeout_s=120) as running, load(running, 2, 1500):
        wait_for(lambda: running.prometheus.instant("inflight_running_requests > 0"), 30, "no request runs")
        with stopped(running.stub("tensorrt_llm")):
            os.kill(running.server.process.pid, signal.SIGTERM)
            folder = tmp_path / "anew"
            folder.mkdir()
            with watch(running.server, folder) as anew:
                assert replace(running, prometheus=anew).wait_firing("InflightNotReady", 0)["severity"] == "critical"
        os.kill(running.server.process.pid, signal.SIGKILL)
