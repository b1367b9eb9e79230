"""The log of a real server: the stages' lines as JSON, one for each finished request."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from inflight import errors
from inflight.client import Client, GenerateOptions
from tests.support.waiting import wait_until
from tests.triton.support.servers import Running, on_engine, run
from tests.triton.support.traced_server import Traced

OPTIONS = GenerateOptions(max_tokens=12, ignore_eos=True, return_perf_metrics=True)


def lines(server: Running, request_id: str = "") -> list[dict[str, Any]]:
    """Return the stages' lines, or those of one request."""
    entries = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    return [entry for entry in entries if not request_id or entry.get("request_id") == request_id]


def line(server: Running, request_id: str) -> dict[str, Any]:
    """Return the last line of a request: of a test that is tried again there are others."""
    assert wait_until(lambda: bool(lines(server, request_id)), 30)
    return lines(server, request_id)[-1]


def test_log_format_json_makes_every_line_an_object(server: Running) -> None:
    with Client(server.grpc) as client:
        client.generate("Hi", OPTIONS)
    assert lines(server)
    for entry in lines(server):
        assert {"time", "level", "logger", "message"} <= set(entry)
    assert not re.search(r"^\d{4}-\d\d-\d\d .* inflight", server.log, re.MULTILINE)


def test_log_says_what_was_chosen_at_the_start(server: Running) -> None:
    """What the stages log below a warning is there too."""
    found = [one for one in lines(server) if one["logger"] == "inflight.engine.model_runner"]
    for says in (r"engine.threads is \d+: ", r"Llama\w+ on \S+ in torch\.\w+: \d+ layers"):
        assert server.engine != "pytorch" or any(re.match(says, one["message"]) for one in found)
    assert all(one["level"] == "info" for one in found)


def test_log_requests_has_one_line_with_the_requests_figures(traced: Traced) -> None:
    server = traced.server
    with Client(server.grpc) as client:
        last = list(client.stream("What is TTFT?", OPTIONS, request_id="logged stream"))[-1].outputs
        client.generate("What is TTFT?", OPTIONS, request_id="logged whole")
    entry = line(server, "logged stream")
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
    assert entry["trace_id"] == traced.trace_of("logged stream")[0].trace_id
    assert len(lines(server, "logged stream")) == len(traced.sink.servers("logged stream"))
    assert line(server, "logged whole")["outcome"] == "length"


def test_log_requests_has_refused_requests(server: Running) -> None:
    with Client(server.grpc) as client:
        with pytest.raises(errors.InvalidRequest):
            client.generate("Hi", GenerateOptions(max_tokens=0), request_id="logged by the tokenizer")
        with pytest.raises(errors.InvalidRequest):
            client.generate("Hi", GenerateOptions(temperature=-1.0), request_id="logged by the engine")
    for name in ("logged by the tokenizer", "logged by the engine"):
        entry = line(server, name)
        assert (entry["outcome"], entry["level"]) == ("invalid", "info")


def test_log_requests_has_cancelled_requests(server: Running) -> None:
    for number in range(5):  # the engine may have made all tokens before the client goes
        name = f"logged and gone {number}"
        with Client(server.grpc) as client:
            stream = client.stream("Tell me", GenerateOptions(max_tokens=1900, ignore_eos=True), request_id=name)
            next(stream)
            stream.cancel()
        entry = line(server, name)
        if entry["outcome"] != "length":
            break
    assert entry["outcome"] == "cancelled"
    assert 0 < entry["generated_tokens"] < 1900


def test_log_requests_is_off_by_default(tmp_path: Path) -> None:
    """And text is the format of a deployment that does not say."""
    settings = {"log_level": "info"}
    for server in run(on_engine("replay", tmp_path, observability=settings)):
        with Client(server.grpc) as client:
            client.generate("Hi", OPTIONS, request_id="quiet")
        assert "quiet" not in server.log
        assert re.search(r"^\d{4}-\d\d-\d\d .* INFO inflight", server.log, re.MULTILINE)
