"""The server that the programs speak to, and the environments of their clients, made when the first test needs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.clients import CLIENTS
from benchmarks.environments import Home
from benchmarks.gateway.served import Served, serve
from inflight.resources import DEMO
from tests.support.made import made

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def demo_gateway() -> Iterator[Served]:
    """The demo behind the gateway, which wants a key."""
    settings = {
        "model": str(DEMO / "model"),
        "engine": {"dtype": "float32"},
        "batching": {"max_batch_size": 32},
        "limits": {"default_max_tokens": 160},
    }
    with serve(settings, keys=True) as served:
        yield served


def environment(name: str) -> Home:
    """Return a client's environment, made if need be; without packages the test is skipped, but not in CI."""
    return made(CLIENTS, name, ROOT / CLIENTS.folder)
