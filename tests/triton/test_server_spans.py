"""Whatever a request ends with, it has one server span; and collectors that fail change nothing for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http

from inflight import errors
from inflight.client import AsyncClient, Client, GenerateOptions
from inflight.serve.server import free_ports
from tests.support.waiting import wait_until
from tests.triton.support.metrics_page import read_metric
from tests.triton.support.servers import Running
from tests.triton.support.tensors import grpc_inputs
from tests.triton.support.traced_server import QUESTION, SHORT, Traced, context, serve_traced

LONG = GenerateOptions(max_tokens=1900, ignore_eos=True)


def _stream_and_leave(server: Running, name: str) -> None:
    with Client(server.grpc) as client:
        stream = client.stream("Tell me", LONG, request_id=name)
        next(stream)
        stream.cancel()


def _ask_and_leave(server: Running, name: str) -> None:
    def running() -> float:
        return read_metric(server.metrics, "inflight_running_requests")

    async def ask() -> None:
        assert await asyncio.to_thread(wait_until, lambda: running() == 0)
        async with AsyncClient(server.grpc) as client:
            task = asyncio.create_task(client.generate("Tell me", LONG, request_id=name))
            assert await asyncio.to_thread(wait_until, lambda: task.done() or running() == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(ask())


def _outcomes(traced: Traced, leave: Callable[[Running, str], None], name: str) -> dict[str, str]:
    """Leave a request, and others if the engine has made all tokens before; return the outcome of each by its id."""
    outcomes: dict[str, str] = {}
    for number in range(5):
        request_id = f"{name} {number}"
        leave(traced.server, request_id)
        span, _ = traced.trace_of(request_id, [])
        outcomes[request_id] = span.attributes["inflight.outcome"]
        if outcomes[request_id] != "length":
            break
    assert outcomes[request_id] == "cancelled"
    return outcomes


def _run_late(client: Client, name: str) -> bool:
    """Return whether the deadline was an error: it is one before the first token.

    The deadline is far shorter than the fastest machine takes for all tokens, and a slow one has no token by then.
    """
    try:
        assert client.generate("Tell me", replace(LONG, deadline_ms=100), request_id=name).finish_reason == "deadline"
    except errors.DeadlineExceeded:
        return True
    return False


def _refused(server: Running, name: str, error: type[Exception], **options: Any) -> None:
    with Client(server.grpc) as client, pytest.raises(error):
        client.generate(QUESTION, GenerateOptions(**options), request_id=name)


def _straight_to_the_engine(server: Running, name: str, traceparent: str) -> None:
    body = {"id": name, "input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 4, "traceparent": traceparent}
    answer = httpx.post(f"{server.http}/v2/models/tensorrt_llm/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


@pytest.mark.proof
def test_every_request_ends_in_one_server_span(engine: str, tmp_path: Path) -> None:
    """Whatever a request ends with, and the last spans are sent before the server has ended."""
    serving = serve_traced(tmp_path, engine, batching={"max_batch_size": 2, "max_queue_size": 4})
    traced = next(serving)
    server, sink = traced.server, traced.sink
    headers, trace_id, span_id = context()
    with Client(server.grpc) as client:
        client.generate(QUESTION, SHORT, request_id="length")
        several = GenerateOptions(max_tokens=6, ignore_eos=True, num_return_sequences=3, temperature=1.0, seed=1)
        client.generate(QUESTION, several, request_id="several")
        late_failed = _run_late(client, "deadline")
    _refused(server, "invalid", errors.InvalidRequest, max_tokens=0)
    _refused(server, "invalid at the engine", errors.InvalidRequest, temperature=-1.0)
    _refused(server, "unsupported", errors.UnsupportedFeature, beam_width=2, temperature=0.5)
    _refused(server, "too many", errors.InvalidRequest, num_return_sequences=5, temperature=1.0)
    left = _outcomes(traced, _stream_and_leave, "left") | _outcomes(traced, _ask_and_leave, "left, not streaming")
    _straight_to_the_engine(server, "straight", headers["traceparent"])
    next(serving, None)
    ends = left | {
        "length": "length",
        "several": "length",
        "deadline": "deadline",
        "invalid": "invalid",
        "invalid at the engine": "invalid",
        "unsupported": "unsupported",
        "too many": "invalid",
        "straight": "length",
    }
    servers = [span for span in sink.spans if span.is_server]
    assert sorted(span.attributes["inflight.request_id"] for span in servers) == sorted(ends)
    for span in servers:
        outcome = ends[span.attributes["inflight.request_id"]]
        assert span.attributes["inflight.outcome"] == outcome
        failed = outcome in ("invalid", "unsupported") or (outcome == "deadline" and late_failed)
        assert (span.error is not None) == failed == ("error.type" in span.attributes)
        for child in (one for spans in sink.children(span).values() for one in spans):
            assert span.start <= child.start <= child.end <= span.end
    ids = {span.span_id for span in servers}
    assert all(span.parent_id in ids for span in sink.spans if not span.is_server)
    (several_span,), (straight,) = sink.servers("several"), sink.servers("straight")
    for name in ("queue", "prefill", "decode", "detokenize"):
        assert len(sink.children(several_span)[name]) == 3
    indices = [one.attributes.get("inflight.sequence_index", 0) for one in sink.children(several_span)["decode"]]
    assert sorted(indices) == [0, 1, 2]
    assert (straight.trace_id, straight.parent_id) == (trace_id, span_id)
    assert set(sink.children(straight)) == {"queue", "prefill", "decode"}


@pytest.mark.sweep(most=1)
def test_server_spans_of_unary_requests_and_batches(traced_unary: Traced) -> None:
    """Triton hands on the headers of gRPC and of HTTP's infer."""
    server = traced_unary.server
    by_grpc, by_http = context(), context()
    values = {"text_input": QUESTION, "max_tokens": 5, "ignore_eos": True}
    with grpc.InferenceServerClient(server.grpc) as client:
        client.infer("ensemble", grpc_inputs("ensemble", values), request_id="grpc", headers=by_grpc[0])
    with http.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
        text = http.InferInput("text_input", [2, 1], "BYTES")
        text.set_data_from_numpy(np.array([[b"Hello"], [QUESTION.encode()]], object))
        most = http.InferInput("max_tokens", [2, 1], "INT32")
        most.set_data_from_numpy(np.array([[3], [5]], np.int32))
        headers = {"Traceparent": by_http[0]["traceparent"]}
        client.infer("ensemble", [text, most], request_id="http", headers=headers)
    for name, (_, trace_id, span_id) in (("grpc", by_grpc), ("http", by_http)):
        span, _ = traced_unary.trace_of(name)
        assert (span.trace_id, span.parent_id) == (trace_id, span_id)
        rows = 2 if name == "http" else 1
        numbers = {"tokenize": 1, "queue": rows, "prefill": rows, "decode": rows, "detokenize": 1}

        def has_all(span: Any = span, numbers: dict[str, int] = numbers) -> bool:
            return {one: len(spans) for one, spans in traced_unary.sink.children(span).items()} == numbers

        traced_unary.sink.wait(has_all)  # the spans of the two rows may be sent one after the other


@pytest.mark.proof
def test_trace_sample_ratio_is_of_whole_traces(tmp_path: Path) -> None:
    for traced in serve_traced(tmp_path, "replay", observability={"trace_sample_ratio": 0.3}):
        headers, *_ = context()
        with Client(traced.server.grpc) as client:
            for index in range(40):
                client.generate("Hi", GenerateOptions(max_tokens=2, ignore_eos=True), request_id=f"share-{index}")
            client.generate("Hi", SHORT, request_id="decided", trace_context=headers)
        traced.trace_of("decided")
        servers = [span for span in traced.sink.spans if span.is_server]
        assert 1 < len(servers) < 35
        for span in servers:
            traced.trace_of(span.attributes["inflight.request_id"])


@pytest.mark.proof
@pytest.mark.parametrize("fault", ["refuses", "fails, then hangs"])
def test_trace_endpoint_that_is_dead_changes_nothing_for_clients(tmp_path: Path, fault: str) -> None:
    (nobody,) = free_ports(1)
    serving = serve_traced(
        tmp_path,
        "replay",
        observability={"trace_endpoint": f"http://127.0.0.1:{nobody}/v1/traces"} if fault == "refuses" else {},
    )
    traced = next(serving)
    traced.sink.answer = lambda: 500
    with Client(traced.server.grpc) as client:

        def ask_ten() -> set[str]:
            return {client.generate(QUESTION, SHORT, request_id=f"{index}").text for index in range(10)}

        texts = ask_ten()
        assert len(texts) == 1
        deadline = time.monotonic() + 30
        while traced.server.log.count("spans are lost") < 3 and time.monotonic() < deadline:
            client.generate("Hi", SHORT)
            time.sleep(0.2)
        time.sleep(2)
        assert traced.server.log.count("spans are lost") == 3, "once for each stage"
        if fault != "refuses":  # what hangs is known to be lost after the exporter's own timeout of 10 s only
            failed = traced.sink.posts
            traced.sink.answer = lambda: time.sleep(60) or 200
            assert ask_ten() == texts
            traced.sink.wait(lambda: traced.sink.posts > failed)
        assert "Traceback" not in traced.server.log
    began = time.monotonic()
    next(serving, None)
    assert time.monotonic() - began < 40, "it waited for the collector, which hangs for 60 s"


@pytest.mark.proof
def test_what_an_engine_fails_is_an_error_in_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spans are sent although the server ends for the failure."""
    faults = tmp_path / "faults.json"
    faults.write_text("{}")
    monkeypatch.setenv("FAKE_TENSORRT_LLM", str(faults))
    serving = serve_traced(tmp_path, "trtllm", tensorrt_llm={"watchdog_s": 5})
    traced = next(serving)
    faults.write_text('{"stall_after": 3}')
    with Client(traced.server.grpc) as client, pytest.raises(errors.EngineFailure):
        list(client.stream(QUESTION, LONG, request_id="stalled"))
    traced.server.server.process.wait(60)
    next(serving, None)
    (span,) = traced.sink.servers("stalled")
    assert span.attributes["error.type"] == span.attributes["inflight.outcome"] == "internal"
    assert span.error is not None
    assert "no progress for 5 s" in span.error
    assert "decode" in traced.sink.children(span)
