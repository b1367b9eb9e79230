"""Fairness on a server: the client's name goes through the ensemble, and a flood does not hold up who comes later."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.client import AsyncClient, GenerateOptions
from tests.triton.support.servers import Running, on_engine, run

FLOOD = 40


@pytest.fixture
def fair_server(tmp_path: Path) -> Iterator[Running]:
    batching = {"max_batch_size": 1, "fairness": "client", "mode": "inflight", "priority_aging_s": 5}
    yield from run(on_engine("pytorch", tmp_path, batching=batching))


async def _order(server: Running) -> list[str]:
    """Have one client send many requests at once, and another one when the first of them has ended."""
    ended: list[str] = []
    async with AsyncClient(server.grpc) as client:

        async def ask(name: str) -> None:
            options = GenerateOptions(max_tokens=48, ignore_eos=True, client_id=name)
            answer = await client.generate(f"Tell {name} a story", options)
            assert answer.text
            ended.append(name)

        flood = [asyncio.create_task(ask("flood")) for _ in range(FLOOD)]
        await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(ask("quiet"), *flood)
    return ended


@pytest.mark.proof
def test_fairness_client_serves_another_client_beside_a_flood(fair_server: Running) -> None:
    ended = asyncio.run(_order(fair_server))
    assert len(ended) == FLOOD + 1
    assert ended.index("quiet") < FLOOD - 3, "it waits for what runs, not for all that came before it"
