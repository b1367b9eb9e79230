"""Clients that leave at random moments: their blocks come back, nothing stays in flight, and others are served on."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from random import Random
from typing import Any

import httpx
import pytest

from tests.gateway.support.gateways import Beside
from tests.support.waiting import wait_until
from tests.triton.support.metrics_page import read_metric
from tests.triton.test_inspection import inspect

AT_ONCE = 48
"""More than run at once in the demo, so that some leave the queue."""
LONGEST_S = 0.6
SEED = "clients that leave"
WORDS = "requests join and leave the running batch at any step while others decode".split()


def body_of(random: Random, model: str) -> tuple[str, dict[str, Any]]:
    """Return a path, and a body of a request that takes long: streamed or not, with a long prompt or many choices."""
    words = " ".join(random.choices(WORDS, k=random.choice([3, 50, 700])))
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": 1000,
        "ignore_eos": True,
        "stream": random.random() < 0.6,
        "n": random.choice([1, 1, 1, 2, 4]),
        "seed": random.randrange(100),
    }
    if random.random() < 0.3:
        return "/v1/completions", body | {"prompt": random.choice([words, [words, words]])}
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": words}]}


async def leave(port: int, random: Random, path: str, body: dict[str, Any]) -> None:
    """Send a request, wait for a random time, and close the connection, in order or by a reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    await asyncio.sleep(LONGEST_S * random.random() ** 2)
    if random.random() < 0.3:  # a reset, in place of an end in order
        own: socket.socket = writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    del reader
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def all_leave(gateway: Beside, count: int, model: str) -> None:
    """Have so many clients come and leave, many at once."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            random = Random(f"{SEED} {number}")
            await leave(httpx.URL(gateway.url).port or 80, random, *body_of(random, model))

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


def is_idle(gateway: Beside) -> bool:
    """Whether no sequence runs or waits, and every block is free or kept for equal prefixes."""
    snapshot = inspect(gateway.triton)
    cache = snapshot.kv_cache
    assert cache is not None
    return not (snapshot.running or snapshot.waiting or cache.used) and (
        cache.free + (cache.cached or 0) == cache.num_blocks
    )


def busy_routes(client: httpx.Client) -> list[str]:
    """Return the lines of the gateway's metrics that say that a request runs, but for this one."""
    lines = client.get("/metrics").text.splitlines()
    running = [line for line in lines if line.startswith("inflight_gateway_running_requests{")]
    assert running
    return [line for line in running if not line.endswith(" 0.0") and "/metrics" not in line]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.proof)])
def test_clients_that_leave_leave_nothing(gateway: Beside, count: int) -> None:
    question: dict[str, Any] = {"messages": [{"role": "user", "content": "What is Triton?"}], "max_tokens": 16}
    with gateway.client() as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        asked = question | {"model": model, "temperature": 0}
        before = client.post("/v1/chat/completions", json=asked).json()["choices"]
        asyncio.run(all_leave(gateway, count, model))
        assert wait_until(lambda: is_idle(gateway), 120), inspect(gateway.triton)
        assert client.post("/v1/chat/completions", json=asked).json()["choices"] == before
        assert wait_until(lambda: not busy_routes(client), 120), busy_routes(client)
    for name in ("inflight_running_requests", "inflight_waiting_requests"):
        assert wait_until(lambda name=name: read_metric(gateway.triton.metrics, name) == 0, 120), name
    assert "Traceback" not in gateway.log
