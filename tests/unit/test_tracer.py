"""The tracer alone, before a collector: ids that were announced, sampling, collectors that come and go."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest

from inflight.triton.tracing import tracer as module
from inflight.triton.tracing.record import SpanEnd
from inflight.triton.tracing.tracer import Tracer
from tests.triton.support.otlp_sink import OtlpSink

PARENT = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "a=1,b=2"}
DONE = SpanEnd({"inflight.outcome": "stop"})


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpSink]:
    monkeypatch.setattr(module, "EXPORT_INTERVAL_MS", 20)
    monkeypatch.setattr(module, "FLUSH_S", 30.0)
    monkeypatch.setattr(logging.getLogger("opentelemetry"), "handlers", [])  # a stage's process has one tracer
    with OtlpSink() as one:
        yield one


def test_the_span_has_the_ids_that_its_children_were_told(sink: OtlpSink) -> None:
    tracer = Tracer(sink.endpoint, 1.0)
    trace = tracer.begin(PARENT, "chat model", 100)
    tracer.child(trace, "tokenize", 100, 200, {"inflight.prompt_tokens": 3})
    tracer.end(trace, SpanEnd({"n": 1}, error="INTERNAL: no"), 900)
    tracer.child(trace, "detokenize", 300, 800, {})
    tracer.close()
    first, server, last = sink.spans
    assert (server.trace_id, server.span_id, server.parent_id) == (trace.trace_id, trace.span_id, "00f067aa0ba902b7")
    assert (server.name, server.start, server.end, server.error) == ("chat model", 100, 900, "INTERNAL: no")
    assert server.is_server
    assert {span.parent_id for span in (first, last)} == {server.span_id}
    assert len({span.span_id for span in sink.spans}) == 3
    assert {span.trace_state for span in sink.spans} == {"a=1,b=2"}


def test_names_of_parameters_are_as_headers_are(sink: OtlpSink) -> None:
    tracer = Tracer(sink.endpoint, 1.0)
    trace = tracer.begin({"TraceParent": PARENT["traceparent"], "priority": 3}, "chat model", 1)
    assert trace.parent_id == "00f067aa0ba902b7"
    assert not tracer.begin({"traceparent": PARENT["traceparent"][:-1] + "0"}, "chat model", 1).sampled
    tracer.close()


@pytest.mark.parametrize(("ratio", "sampled"), [(0.0, False), (1.0, True)])
def test_the_share_is_of_those_whose_client_has_not_decided(sink: OtlpSink, ratio: float, sampled: bool) -> None:
    tracer = Tracer(sink.endpoint, ratio)
    own = tracer.begin({}, "chat model", 1)
    assert own.sampled is sampled
    assert tracer.begin(PARENT, "chat model", 1).sampled
    tracer.child(own, "tokenize", 1, 2, {})
    tracer.end(own, DONE, 3)
    tracer.close()
    assert bool(sink.spans) is sampled


def test_a_collector_that_fails_is_told_of_once_and_so_is_its_return(
    sink: OtlpSink, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "inflight")
    sink.answer = lambda: 400
    tracer = Tracer(sink.endpoint, 1.0)

    def send() -> None:
        posts = sink.posts
        tracer.end(tracer.begin({}, "chat model", 1), DONE, 2)
        sink.wait(lambda: sink.posts > posts)

    for _ in range(3):
        send()
    sink.answer = lambda: 200
    for _ in range(2):
        send()
    tracer.close()
    lost, again = [record.getMessage() for record in caplog.records if record.name.startswith("inflight")]
    assert lost.startswith(f"spans are lost: {sink.endpoint} does not take them (")
    assert "400" in lost
    assert again == f"{sink.endpoint} takes spans again"
    assert len(sink.spans) == 2


def test_spans_lost_to_a_full_queue_are_told_of_once(
    sink: OtlpSink, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 0.2)
    sink.answer = lambda: time.sleep(1) or 200  # type: ignore[func-returns-value]
    tracer = Tracer(sink.endpoint, 1.0)
    trace = tracer.begin({}, "chat model", 1)
    for _ in range(2):
        for _ in range(4_000):
            tracer.child(trace, "decode", 1, 2, {})
        for logged in list(logging.getLogger("opentelemetry.sdk._shared_internal").filters):
            vars(logged).pop("last_log", None)  # so that OpenTelemetry, which repeats itself later, does so now
    tracer.close()
    told = [record.getMessage() for record in caplog.records if "queue is full" in record.getMessage()]
    assert len(told) == 1


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, "inflight"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=blue,region=north"}, "blue"),
        ({"OTEL_SERVICE_NAME": "green", "OTEL_RESOURCE_ATTRIBUTES": "service.name=blue"}, "green"),
    ],
)
def test_the_environment_may_name_the_service(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], name: str
) -> None:
    for variable in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    tracer = Tracer("http://127.0.0.1:1/v1/traces", 1.0)
    assert tracer._resource.attributes["service.name"] == name
    tracer.close()


def test_the_end_does_not_wait_for_a_collector_that_hangs(sink: OtlpSink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 0.2)
    sink.answer = lambda: time.sleep(30) or 200  # type: ignore[func-returns-value]
    tracer = Tracer(sink.endpoint, 1.0)
    tracer.end(tracer.begin({}, "chat model", 1), DONE, 2)
    began = time.monotonic()
    tracer.close()
    assert time.monotonic() - began < 25, "it waited for the collector, which hangs for 30 s"
