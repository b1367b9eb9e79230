"""What the clients of `inflight.client` make of a request that the door refuses."""

from __future__ import annotations

import pytest

from inflight.client import Client, HttpClient, Retry, ServerUnreachable
from inflight.errors import InflightError, QueueFull
from tests.door.support.doors import Door, door
from tests.support.waiting import wait_until

ONCE = Retry(attempts=1)


def refused(running: Door, kind: type[Client | HttpClient]) -> InflightError:
    """Return the error of a request."""
    with kind(f"127.0.0.1:{running.port}", retry=ONCE) as client, pytest.raises(InflightError) as caught:
        client.generate("Hi")
    return caught.value


def test_too_many_requests_are_told_when_to_come_again() -> None:
    with door(rate_limit={"requests": 1, "interval_s": 3600, "burst": 1}) as running:
        assert running.ask("GET", "/v2").status == 200
        told = refused(running, HttpClient)
        assert (type(told), told.retry_after_s) == (QueueFull, 2)
        # gRPC's library at times tells no more than that the stream is over.
        assert wait_until(lambda: type(refused(running, Client)) is QueueFull)


def test_a_server_that_is_away_has_not_broken_under_the_request() -> None:
    with door("grpc", "http", retries=1) as running:
        for relay in running.relays.values():
            relay.cut()
        for kind in (Client, HttpClient):
            error = refused(running, kind)
            assert isinstance(error, ServerUnreachable)
            assert not error.broke
            assert error.retry_after_s == 2


def test_a_server_may_have_broken_under_a_request_that_it_had_got() -> None:
    with door() as running:
        running.http.breaks = 100
        error = refused(running, HttpClient)
        assert isinstance(error, ServerUnreachable)
        assert error.broke
        assert error.retry_after_s == 2


def test_a_door_that_drains_has_broken_nothing() -> None:
    with door() as running:
        running.process.begin_drain()
        assert wait_until(lambda: running.ask("GET", "/v1/models").status == 503)
        errors = {kind: refused(running, kind) for kind in (Client, HttpClient)}
        assert {type(error) for error in errors.values()} == {ServerUnreachable}
        told = errors[HttpClient]  # gRPC's library at times tells no more than that the stream is over
        assert isinstance(told, ServerUnreachable)
        assert not told.broke
