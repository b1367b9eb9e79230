"""Cancellation from every side: blocks come back, nothing stays in flight, shutdown stays fast."""

from __future__ import annotations

import asyncio
import os
import queue
import random
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as grpc_aio

from inflight.client import AsyncClient, Client, Completion, GenerateOptions
from inflight.errors import DeadlineExceeded
from tests.support.waiting import wait_until
from tests.triton.support.metrics_page import read_metric
from tests.triton.support.servers import Running, on_engine, run
from tests.triton.support.tensors import grpc_inputs

LONG = GenerateOptions(max_tokens=1900, ignore_eos=True)
PATIENCE_S = 30.0
When = Callable[[], Awaitable[object]]
"""Waits for the moment to cancel."""
SHARED_MEMORY = Path("/dev/shm")


def is_idle(server: Running) -> bool:
    """Whether no sequence runs, and every block is free or cached."""
    used = read_metric(server.metrics, "inflight_kv_cache_blocks", state="used")
    active = read_metric(server.metrics, "nv_trt_llm_request_metrics", request_type="active")
    states = [read_metric(server.metrics, "inflight_kv_cache_blocks", state=state) for state in ("free", "cached")]
    total = read_metric(server.metrics, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="max")
    return used == active == 0 and sum(states) == total > 0


def outcome(server: Running, label: str) -> float:
    """Return how many sequences have ended this way."""
    return read_metric(server.metrics, "inflight_requests_total", outcome=label)


async def cancel_grpc_stream(server: Running, when: When, name: str) -> None:
    """Begin a streaming request over gRPC and cancel it ``when`` it is time."""
    async with AsyncClient(server.grpc) as client:
        stream = client.stream(f"Tell {name}", LONG)
        reader = asyncio.create_task(_drain(stream))
        await when()
        await stream.cancel()
        await reader


async def cancel_grpc_whole(server: Running, when: When, name: str) -> None:
    """Begin a request that does not stream over gRPC and cancel it ``when`` it is time."""
    async with AsyncClient(server.grpc) as client:
        task = asyncio.create_task(client.generate(f"Tell {name}", LONG))
        await when()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def close_http_stream(server: Running, when: When, name: str) -> None:
    """Begin a ``generate_stream`` and close its connection ``when`` it is time."""
    body = {"text_input": f"Tell {name}", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    url = f"{server.http}/v2/models/ensemble/generate_stream"

    async def read() -> None:
        async with httpx.AsyncClient(timeout=60) as client, client.stream("POST", url, json=body) as response:
            async for _ in response.aiter_lines():
                pass

    task = asyncio.create_task(read())
    await when()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def send_stop(server: Running, when: When, name: str) -> None:
    """Begin a streaming request and end it with a ``stop`` to the engine; its stream ends normally."""
    async with AsyncClient(server.grpc) as client, grpc_aio.InferenceServerClient(server.grpc) as other:
        stream = client.stream(f"Tell {name}", LONG, request_id=name)
        reader = asyncio.create_task(_drain(stream))
        await when()
        while not reader.done():  # a stop that comes before its request finds nothing to end

            async def requests():
                yield {
                    "model_name": "tensorrt_llm",
                    "inputs": grpc_inputs("tensorrt_llm", {"stop": True}),
                    "request_id": name,
                    "enable_empty_final_response": True,
                }

            async for _, error in other.stream_infer(requests()):
                assert error is None, error
            await asyncio.wait([reader], timeout=0.5)
        assert await reader in ("cancelled", "length")


async def _drain(stream: object) -> str | None:
    reason = None
    async for chunk in stream:  # type: ignore[attr-defined]
        reason = chunk.finish_reason or reason
    return reason


async def once(server: Running, state: str, timeout_s: float = PATIENCE_S) -> bool:
    """Wait until a request is ``active`` or ``waiting``; return whether one was."""

    def is_one() -> bool:
        return read_metric(server.metrics, "nv_trt_llm_request_metrics", request_type=state) == 1

    return await asyncio.to_thread(wait_until, is_one, timeout_s)


WAYS: list[Callable[[Running, When, str], Awaitable[None]]] = [
    cancel_grpc_stream,
    cancel_grpc_whole,
    close_http_stream,
    send_stop,
]


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_each_way_of_cancellation_ends_the_generation(
    server: Running, way: Callable[[Running, When, str], Awaitable[None]]
) -> None:
    before = outcome(server, "cancelled")
    for _ in range(5):  # a request may come to its end before a machine that stands still has seen it run
        asyncio.run(way(server, partial(once, server, "active", 5), "one"))
        assert wait_until(lambda: is_idle(server), PATIENCE_S)
        if wait_until(lambda: outcome(server, "cancelled") > before, 5):
            return
    pytest.fail("each request ran on")


def test_deadline_ms_ends_the_generation_with_its_text(server: Running) -> None:
    with Client(server.grpc) as client:
        for deadline_ms in (300, 600, 1200, 2400):  # before the first token it is an error, on a machine that is slow
            with suppress(DeadlineExceeded):
                answer = client.generate("Tell me", replace(LONG, deadline_ms=deadline_ms))
                break
    assert answer.finish_reason == "deadline"
    assert answer.text
    assert wait_until(lambda: is_idle(server), PATIENCE_S)


def test_cancelling_a_request_to_tensorrt_llm(server: Running) -> None:
    before = outcome(server, "cancelled")
    values = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 1900, "streaming": True}
    for _ in range(5):  # as above
        with grpc.InferenceServerClient(server.grpc) as client:
            client.start_stream(callback=lambda result, error: None)
            client.async_stream_infer("tensorrt_llm", grpc_inputs("tensorrt_llm", values))
            asyncio.run(once(server, "active", 5))
            client.stop_stream(cancel_requests=True)
        assert wait_until(lambda: is_idle(server), PATIENCE_S)
        if wait_until(lambda: outcome(server, "cancelled") > before, 5):
            return
    pytest.fail("each request ran on")


@pytest.mark.proof
def test_cancelling_a_queued_request(narrow_server: Running) -> None:
    """A stream that has had no token yet: nothing runs for it that Triton could mark as cancelled."""
    server = narrow_server

    def waiting() -> float:
        return read_metric(server.metrics, "nv_trt_llm_request_metrics", request_type="waiting")

    async def the_last_goes() -> bool:
        async with AsyncClient(server.grpc) as client:
            running = [asyncio.create_task(_drain(client.stream(f"Go on {index}", LONG))) for index in range(6)]
            await asyncio.to_thread(wait_until, lambda: waiting() == 5, 5)
            all_wait = partial(asyncio.to_thread, wait_until, lambda: waiting() == 6, 1)
            await cancel_grpc_stream(server, all_wait, "waiter")
            assert await asyncio.to_thread(wait_until, lambda: waiting() == 0, PATIENCE_S)
            outlasted = not all(task.done() for task in running)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        assert await asyncio.to_thread(wait_until, lambda: is_idle(server), PATIENCE_S)
        return outlasted

    # Those before it may all come to their end while the machine stands still.
    assert any(asyncio.run(the_last_goes()) for _ in range(10))


@pytest.mark.proof
def test_a_client_that_leaves_before_its_deadline_passes_in_the_queue(engine: str, tmp_path: Path) -> None:
    """An error to a client that has gone would stay with Triton, which then waits for it when it is to stop."""
    # Longer than a busy machine takes to unload the stages.
    narrow = run(on_engine(engine, tmp_path, batching={"max_batch_size": 1}), exit_timeout_s=60)
    server = next(narrow)
    first = replace(LONG, priority=1)
    late = GenerateOptions(max_tokens=8, deadline_ms=300)

    async def leave(client: AsyncClient, index: int) -> None:
        async with client.stream(f"Leave {index}", late) as stream:
            reader = asyncio.create_task(_drain(stream))
            await asyncio.sleep(0.1 + 0.005 * index)
            await stream.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def load() -> bool:
        async with AsyncClient(server.grpc) as client:
            # Their tokens come at the end, so that reading them takes this process no time.
            running = [asyncio.create_task(client.generate("Go on", first)) for _ in range(20)]
            await once(server, "scheduled", 5)
            await asyncio.gather(*(leave(client, index) for index in range(24)))
            [stayed] = await asyncio.gather(client.generate("Stay", late), return_exceptions=True)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            if isinstance(stayed, Completion):
                return False
            assert isinstance(stayed, DeadlineExceeded)
            assert "before its first token" in str(stayed)
            return True

    # The server may have made all tokens of those before it while this process stood still, and the client not know.
    assert any(asyncio.run(load()) for _ in range(5))
    assert wait_until(lambda: is_idle(server), PATIENCE_S)
    # Triton keeps some requests all the same, of clients that leave in the moment of the answer: nobody waits for them.
    assert server.server.stop() != 1, "with 1 Triton ends when its exit timeout is over"
    narrow.close()


def test_detokenizer_logs_a_refused_stop(server: Running) -> None:
    """It alone is told whether the client is still there: an error to one that has gone would stay with Triton."""
    given = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 4, "temperature": -5.0, "heartbeat": True}
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("tensorrt_llm", grpc_inputs("tensorrt_llm", given))
        result, error = answers.get(timeout=60)
    assert error is None
    code, message = result.as_numpy("failure").reshape(-1)
    assert code == b"INVALID_ARG"
    assert message.startswith(b"INVALID_ARGUMENT: temperature is -5.0")


@pytest.mark.proof
def test_a_stop_does_not_wait_for_requests_that_triton_keeps(engine: str, tmp_path: Path) -> None:
    """A client that cancels in the moment of its last response may leave its request in Triton for good."""
    # Longer than a busy machine takes to unload the stages.
    narrow = run(on_engine(engine, tmp_path, batching={"max_batch_size": 1, "max_queue_size": 1}), exit_timeout_s=60)
    server = next(narrow)

    async def leave(client: AsyncClient, index: int) -> None:
        async with client.stream(f"Leave {index}", GenerateOptions(max_tokens=8)) as stream:
            reader = asyncio.create_task(_drain(stream))
            await asyncio.sleep(0.001 * (index % 60))
            await stream.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def load() -> None:
        async with AsyncClient(server.grpc) as client:
            running = asyncio.create_task(_drain(client.stream("Go on", LONG)))
            for _ in range(3):
                await asyncio.gather(*(leave(client, index) for index in range(60)))
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(load())
    assert wait_until(lambda: is_idle(server), PATIENCE_S)
    assert server.server.stop() != 1, "with 1 Triton ends when its exit timeout is over"
    narrow.close()


def _files() -> set[str]:
    """Return what this test's servers have in shared memory; what is other servers' comes and goes."""
    return {file.name for file in SHARED_MEMORY.glob(f"*inflight_{os.getpid()}_*")}


def _stop(server: Running) -> str:
    """Stop a server with SIGTERM; return what its log said at the end."""
    process, log = server.server.process, server.server.log_path
    process.terminate()
    process.wait(120)
    return log.read_text(errors="replace")


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_hundreds_of_cancellations_leave_nothing_behind(engine: str, tmp_path: Path) -> None:
    files = _files()
    busy = run(on_engine(engine, tmp_path))
    server = next(busy)
    chance = random.Random(7)
    count = 500 if engine == "pytorch" else 150  # the stages, and what Triton does, are the same

    async def storm() -> None:
        gate = asyncio.Semaphore(24)

        async def one(index: int) -> None:
            async with gate:
                when = partial(asyncio.sleep, chance.uniform(0, 0.75))
                await WAYS[index % len(WAYS)](server, when, f"storm-{index}")

        await asyncio.gather(*(one(index) for index in range(count)))

    asyncio.run(storm())
    assert wait_until(lambda: is_idle(server), PATIENCE_S)
    with Client(server.grpc) as client:
        assert client.generate("What is TTFT?", GenerateOptions(max_tokens=8)).finish_reason == "length"
    log = _stop(server)
    waited = re.findall(r"Found (\d+) model versions that have in-flight inferences", log)
    assert waited
    assert set(waited) == {"0"}
    assert "Traceback" not in log
    busy.close()
    assert _files() == files
