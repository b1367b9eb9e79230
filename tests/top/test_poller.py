"""Where `inflight top` looks, how long it waits, and to which moment its rates belong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest
from typer.testing import CliRunner

from inflight.cli import app
from inflight.client.answer import Outputs
from inflight.client.errors import RequestTimeout
from inflight.client.request import Request
from inflight.top.poller import PATIENCE_S, Page, ServerPoller
from tests.top.support.pages import SNAPSHOT, page, plain


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("localhost:8001", "localhost"),
        ("node.example:8001", "node.example"),
        ("grpcs://node.example:9", "node.example"),
        ("grpcs://node.example", "node.example"),
        ("http://node.example/", "node.example"),
        ("http://[::1]:8000", "[::1]"),
        ("[::1]:8001", "[::1]"),
    ],
)
def test_metrics_are_on_the_same_host_by_default(url: str, expected: str) -> None:
    assert ServerPoller(url, None).metrics == f"{expected}:8002"


class SlowPoller(ServerPoller):
    """Its page is there at once, its snapshot ``late_s`` later."""

    late_s = 0.05
    answered_s = 0.0

    def __init__(self, url: str, metrics: str | None, patience_s: float = PATIENCE_S) -> None:
        super().__init__(url, metrics, patience_s)
        self._transport.replies = self._replies  # type: ignore[method-assign]

    async def _page(self) -> Page:
        return page(1)

    async def _replies(self, _request: Request) -> AsyncGenerator[Outputs, None]:
        await asyncio.sleep(self.late_s)
        self.answered_s = time.monotonic()
        yield {"snapshot": [SNAPSHOT.to_json()]}


async def test_rates_are_taken_over_the_time_between_pages_however_late_a_snapshot_is() -> None:
    poller = SlowPoller("127.0.0.1:9", None)
    poll = await poller.poll()
    assert poll.snapshot == SNAPSHOT
    assert poll.at_s < poller.answered_s


async def test_a_look_takes_no_longer_than_its_patience() -> None:
    poller = SlowPoller("127.0.0.1:9", None, patience_s=0.01)
    poller.late_s = 30.0
    poll = await poller.poll()
    assert isinstance(poll.snapshot, RequestTimeout)
    assert "no snapshot within 0.01 s" in str(poll.snapshot)
    assert not poll.failed, "the page is there"


def test_one_frame_waits_longer_than_the_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other poll follows that could have what this one lacks."""
    waited = []

    class Impatient(SlowPoller):
        def __init__(self, url: str, metrics: str | None, patience_s: float = PATIENCE_S) -> None:
            super().__init__(url, metrics, patience_s)
            waited.append(patience_s)

    monkeypatch.setattr("inflight.top.top.ServerPoller", Impatient)
    done = CliRunner().invoke(app, ["top", "--once", "--after", "0.1"])
    assert done.exit_code == 0, done.output
    assert "engine pytorch" in plain(done.output)
    assert waited[0] > PATIENCE_S
