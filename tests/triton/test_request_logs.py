"""The log of a real server: the stages' lines as JSON, one for each finished request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight import errors
from inflight.client import Client, GenerateOptions
from inflight.observability import ObservabilitySettings
from tests.triton.conftest import Running, on_engine, run
from tests.triton.metrics_page import wait_until

OPTIONS = GenerateOptions(max_tokens=12, ignore_eos=True, return_perf_metrics=True)


@pytest.fixture(scope="module")
def logging_server(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The deployment says text, and ``inflight serve`` JSON."""
    directory = on_engine(engine, tmp_path_factory.mktemp(engine), observability={"log_requests": "info"})
    yield from run(directory, observability=ObservabilitySettings(log_format="json", log_requests="info"))


def lines(server: Running, request_id: str = "") -> list[dict[str, Any]]:
    """Return the stages' lines, or those of one request."""
    entries = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    return [entry for entry in entries if not request_id or entry.get("request_id") == request_id]


def line(server: Running, request_id: str) -> dict[str, Any]:
    """Return the one line of a request."""
    assert wait_until(lambda: bool(lines(server, request_id)), 10)
    (entry,) = lines(server, request_id)
    return entry


def test_every_line_of_the_stages_is_a_json_object(logging_server: Running) -> None:
    with Client(logging_server.grpc) as client:
        client.generate("Hi", OPTIONS)
    assert lines(logging_server)
    for entry in lines(logging_server):
        assert {"time", "level", "logger", "message"} <= set(entry)
    assert not re.search(r"^\d{4}-\d\d-\d\d .* inflight", logging_server.log, re.MULTILINE)


def test_a_request_has_one_line_with_its_own_figures(logging_server: Running) -> None:
    with Client(logging_server.grpc) as client:
        last = list(client.stream("What is TTFT?", OPTIONS, request_id="streamed"))[-1].outputs
        client.generate("What is TTFT?", OPTIONS, request_id="whole")
    entry = line(logging_server, "streamed")
    arrival, scheduled, first, end = (
        last[f"{name}_time_ns"][0] for name in ("arrival", "first_scheduled", "first_token", "last_token")
    )
    assert entry["outcome"] == "length"
    assert entry["generated_tokens"] == 12
    assert entry["prompt_tokens"] > 0 <= entry["cached_tokens"]
    assert entry["queue_ms"] == pytest.approx((scheduled - arrival) / 1e6, abs=0.001)
    assert entry["prefill_ms"] == pytest.approx((first - scheduled) / 1e6, abs=0.001)
    assert entry["decode_ms"] == pytest.approx((end - first) / 1e6, abs=0.001)
    assert entry["total_ms"] >= entry["queue_ms"] + entry["prefill_ms"] + entry["decode_ms"]
    assert "trace_id" not in entry
    assert line(logging_server, "whole")["outcome"] == "length"


def test_a_refused_request_has_a_line_too(logging_server: Running) -> None:
    with Client(logging_server.grpc) as client:
        with pytest.raises(errors.InvalidRequest):
            client.generate("Hi", GenerateOptions(max_tokens=0), request_id="by the tokenizer")
        with pytest.raises(errors.InvalidRequest):
            client.generate("Hi", GenerateOptions(temperature=-1.0), request_id="by the engine")
    for name in ("by the tokenizer", "by the engine"):
        entry = line(logging_server, name)
        assert (entry["outcome"], entry["level"]) == ("invalid", "info")


def test_a_cancelled_request_has_a_line_too(logging_server: Running) -> None:
    with Client(logging_server.grpc) as client:
        stream = client.stream("Tell me", GenerateOptions(max_tokens=900, ignore_eos=True), request_id="gone")
        next(stream)
        stream.cancel()
    entry = line(logging_server, "gone")
    assert entry["outcome"] == "cancelled"
    assert 0 < entry["generated_tokens"] < 900


def test_nothing_is_logged_that_is_not_asked_for(tmp_path: Path) -> None:
    """And text is the format of a deployment that does not say."""
    settings = {"log_level": "info"}
    for server in run(on_engine("replay", tmp_path, observability=settings)):
        with Client(server.grpc) as client:
            client.generate("Hi", OPTIONS, request_id="quiet")
        assert "quiet" not in server.log
        assert re.search(r"^\d{4}-\d\d-\d\d .* INFO inflight", server.log, re.MULTILINE)
