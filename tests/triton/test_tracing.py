"""Traces of a real server, as a collector gets them: contexts, parents, times."""

from __future__ import annotations

import asyncio
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest

from inflight.client import AsyncClient, AsyncHttpClient, Client, GenerateOptions, HttpClient
from tests.support.tables import each_row
from tests.triton.support.draw_trace import draw
from tests.triton.support.otlp_sink import Span
from tests.triton.support.servers import STEP_TOKENS
from tests.triton.support.traced_server import PHASES, QUESTION, SHORT, Traced, context


@pytest.mark.parametrize("client_type", [Client, HttpClient])
@pytest.mark.parametrize("stream", [True, False])
def test_server_span_is_a_child_of_the_traceparent(traced: Traced, client_type: type[Any], stream: bool) -> None:
    headers, trace_id, span_id = context()
    name = f"{client_type.__name__}-{stream}"
    server = traced.server
    with client_type(server.grpc if client_type is Client else server.http) as client:
        if stream:
            list(client.stream(QUESTION, SHORT, request_id=name, trace_context=headers))
        else:
            client.generate(QUESTION, SHORT, request_id=name, trace_context=headers)
    span, children = traced.trace_of(name)
    assert (span.trace_id, span.parent_id, span.trace_state) == (trace_id, span_id, "vendor=1")
    assert span.name == "text_completion model"
    assert span.error is None
    assert {one.service for one in traced.sink.spans} == {"inflight"}
    assert {name: len(spans) for name, spans in children.items()} == dict.fromkeys(PHASES, 1)


def test_clients_send_the_current_opentelemetry_span(traced: Traced) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    tracer = TracerProvider().get_tracer("application")

    async def asynchronous() -> None:
        async with AsyncClient(traced.server.grpc) as one, AsyncHttpClient(traced.server.http) as other:
            await one.generate(QUESTION, SHORT, request_id="async-grpc")
            await other.generate(QUESTION, SHORT, request_id="async-http")

    with tracer.start_as_current_span("application's own") as span:
        with Client(traced.server.grpc) as client:
            list(client.stream(QUESTION, SHORT, request_id="blocking-stream"))
            client.generate(QUESTION, SHORT, request_id="blocking")
            client.generate(QUESTION, SHORT, request_id="apart", trace_context={})
        asyncio.run(asynchronous())
    own = span.get_span_context()
    for name in ("async-grpc", "async-http", "blocking-stream", "blocking"):
        server, _ = traced.trace_of(name)
        assert server.trace_id == trace.format_trace_id(own.trace_id)
        assert server.parent_id == trace.format_span_id(own.span_id)
    assert traced.trace_of("apart")[0].parent_id == ""


@pytest.mark.proof
@each_row(
    "given",
    [
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        "nonsense",
        "",
        7,
    ],
)
def test_invalid_traceparent_begins_a_new_trace(traced: Traced, given: object) -> None:
    name = f"invalid-{given}"[:60]
    body = {"text_input": QUESTION, "max_tokens": 2, "id": name, "traceparent": given}
    answer = httpx.post(f"{traced.server.http}/v2/models/ensemble/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    server, _ = traced.trace_of(name, PHASES[:3])
    assert server.parent_id == ""
    assert server.trace_id != "4bf92f3577b34da6a3ce929d0e0e4736"


def test_traceparent_of_a_later_version_is_read(traced: Traced) -> None:
    body = {"text_input": QUESTION, "max_tokens": 2, "id": "later"}
    body["traceparent"] = "cc-4bf92f3577b34da6a3ce929d0e0e4737-00f067aa0ba902b7-01-what-comes-then"
    httpx.post(f"{traced.server.http}/v2/models/ensemble/generate", json=body, timeout=60).raise_for_status()
    assert traced.trace_of("later", PHASES[:3])[0].trace_id == "4bf92f3577b34da6a3ce929d0e0e4737"


def test_unsampled_traceparent_is_not_traced(traced: Traced) -> None:
    headers, trace_id, _ = context(sampled=False)
    with Client(traced.server.grpc) as client:
        client.generate(QUESTION, SHORT, request_id="unsampled", trace_context=headers)
        client.generate(QUESTION, SHORT, request_id="after")
    traced.trace_of("after")
    assert trace_id not in {span.trace_id for span in traced.sink.spans}


def test_span_times_are_those_of_perf_metrics(traced: Traced) -> None:
    options = GenerateOptions(max_tokens=40, ignore_eos=True, return_perf_metrics=True)
    with Client(traced.server.grpc) as client:
        last = list(client.stream(QUESTION, options, request_id="times"))[-1].outputs
    server, children = traced.trace_of("times")
    tokenize, queue, prefill, decode, detokenize = (children[name][0] for name in PHASES)
    arrival, scheduled, first, end = (
        last[f"{name}_time_ns"][0] for name in ("arrival", "first_scheduled", "first_token", "last_token")
    )
    assert [(one.start, one.end) for one in (queue, prefill, decode)] == [
        (arrival, scheduled),
        (scheduled, first),
        (first, end),
    ]
    assert server.start == tokenize.start <= tokenize.end <= queue.start <= queue.end <= prefill.end <= decode.end
    assert prefill.end <= detokenize.start <= detokenize.end == server.end
    assert decode.end <= server.end
    assert detokenize.attributes["inflight.calls"] >= 1
    assert 0 < detokenize.attributes["inflight.busy_ms"] <= (detokenize.end - detokenize.start) / 1e6
    assert server.attributes | {"inflight.request_id": "times"} == {
        "inflight.request_id": "times",
        "inflight.outcome": "length",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.request.max_tokens": 40,
        "gen_ai.usage.input_tokens": prefill.attributes["inflight.prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": prefill.attributes["inflight.cached_tokens"],
        "gen_ai.usage.output_tokens": 40,
    }
    assert decode.attributes["inflight.generated_tokens"] == 40
    if traced.server.engine == "pytorch":  # the other one does not say
        assert (prefill.attributes["inflight.steps"], decode.attributes["inflight.steps"]) == (1, 39)


def test_server_span_of_messages_is_named_chat(traced: Traced) -> None:
    with Client(traced.server.grpc) as client:
        client.generate([{"role": "user", "content": "What is TTFT?"}], SHORT, request_id="chat")
    assert traced.trace_of("chat")[0].name == "chat model"


@pytest.mark.parametrize("engine", ["pytorch"], indirect=True, scope="session")
def test_prefill_span_counts_steps_and_cached_tokens(traced: Traced) -> None:
    prompt = "chunks of a prefill " * 48  # no other test's begins so
    with Client(traced.server.grpc) as client:
        client.generate(prompt, SHORT, request_id="first")
        client.generate(prompt, SHORT, request_id="second")
    first, second = (traced.trace_of(name)[1]["prefill"][0].attributes for name in ("first", "second"))
    assert first["inflight.cached_tokens"] == 0
    assert first["inflight.steps"] == -(-first["inflight.prompt_tokens"] // STEP_TOKENS) > 2
    assert second["inflight.cached_tokens"] > STEP_TOKENS
    assert second["inflight.steps"] < first["inflight.steps"]


def test_draw_trace_draws_spans() -> None:
    def span(name: str, start: int, end: int, **attributes: object) -> Span:
        return Span("a<b", "1", "2", "", "", name, name == "server", start * 10**6, end * 10**6, attributes, None)

    spans = [span("own", 0, 1300), span("server", 1, 1299), span("queue", 2, 9), span("decode", 9, 1290)]
    texts = [one.text for one in ElementTree.fromstring(draw(spans)).iter("{http://www.w3.org/2000/svg}text")]
    assert "1000 ms" in texts
    assert "a<b: server" in texts
    assert "1281.0 ms" in texts
