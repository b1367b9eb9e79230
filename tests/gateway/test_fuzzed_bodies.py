"""Bodies that no client should send: each is answered, none by a fault of ours, and neighbours are answered right."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

import httpx
import pytest

from benchmarks.hostile.over_gateway import VALID, forged
from tests.gateway.support.gateways import Beside
from tests.support.waiting import wait_until
from tests.triton.support.metrics_page import read_metric

AT_ONCE = 8
ANSWER_S = 90
SEED = "fuzzed bodies"
QUESTION = {"messages": [{"role": "user", "content": "What is Triton?"}], "temperature": 0, "max_tokens": 8}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.release)])
def test_no_body_is_answered_by_a_fault(gateway: Beside, count: int) -> None:
    process = gateway.process.process.pid
    flaws, right = asyncio.run(send_all(gateway.url, count))
    assert not flaws, f"{len(flaws)} flaws, the first: {flaws[0]}"
    assert right > count // 100
    assert gateway.process.process.pid == process, "the gateway was started again"
    assert "Traceback" not in gateway.log
    assert "Traceback" not in gateway.triton.log
    assert wait_until(lambda: read_metric(gateway.triton.metrics, "inflight_running_requests") == 0, 60)
    assert wait_until(lambda: read_metric(gateway.triton.metrics, "inflight_kv_cache_blocks", state="used") == 0, 60)


async def send_all(url: str, count: int) -> tuple[list[str], int]:
    """Send so many bodies, some at once; return what was wrong, and how many right answers a neighbour got."""
    limits = httpx.Limits(max_connections=AT_ONCE + 1)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, trust_env=False, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        numbers, flaws = iter(range(count)), list[str]()
        over = asyncio.Event()
        neighbour = asyncio.create_task(ask_again_and_again(client, model, over, count // 100 + 1))

        async def work() -> None:
            for number in numbers:
                path, body = forged(Random(f"{SEED} {number}"), model)
                if flaw := await flaw_of(client, path, body):
                    flaws.append(f"body {number} to {path}, {body[:300]!r}: {flaw}")

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        over.set()
        wrong, right = await neighbour
        return flaws + wrong, right


async def ask_again_and_again(
    client: httpx.AsyncClient, model: str, over: asyncio.Event, least: int
) -> tuple[list[str], int]:
    """Ask one thing until it is over, and ``least`` times at the least, however slow the engine is beside the rest.

    Return the answers that were others than the first, and how many were not.
    """
    answers = []
    while not over.is_set() or len(answers) < least:
        answer = await client.post("/v1/chat/completions", json=QUESTION | {"model": model})
        answers.append(answer.json()["choices"][0]["message"] if answer.is_success else answer.text)
    wrong = [f"a neighbour got {one}" for one in answers if one != answers[0]]
    return wrong, len(answers) - len(wrong)


async def flaw_of(client: httpx.AsyncClient, path: str, body: bytes) -> str:
    """Send a body; return what is wrong with its answer."""
    try:
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    text = answer.text
    if "Traceback" in text or ".py" in text[:2000]:
        return f"it was told {text[:500]}"
    if answer.status_code >= 500:
        return f"{answer.status_code} {text[:500]}"
    if answer.headers["content-type"].startswith("text/event-stream"):
        return flaw_of_stream(text)
    return flaw_of_answer(answer.status_code, json.loads(text))


def flaw_of_answer(status: int, body: Any) -> str:
    """Return what is wrong with an answer that is one JSON document."""
    if status < 400:
        return ""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not error.get("message") or not error.get("type"):
        return f"{status} without an error that SDKs read: {str(body)[:300]}"
    return ""


def flaw_of_stream(text: str) -> str:
    """Return what is wrong with a stream: an event that is no JSON, or an error of ours."""
    for line in text.splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        error = event.get("error") if isinstance(event, dict) else None
        if error and (error.get("type") or "") in ("server_error", "internal_error"):
            return f"in a stream: {error}"
    return ""


@pytest.mark.parametrize("path", VALID)
def test_the_body_that_is_changed_is_served_unchanged(gateway: Beside, path: str) -> None:
    """Otherwise every change of it would be refused for the same reason."""
    with gateway.client() as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        answer = client.post(path, json=VALID[path] | {"model": model})
    assert answer.status_code == 200, answer.text
