"""The clients against a real server: what the fake one in tests/unit can only claim."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from inflight import errors
from inflight.client import AsyncClient, AsyncHttpClient, Client, GenerateOptions, HttpClient, RequestTimeout, Timeouts

pytestmark = pytest.mark.any_engine

PROMPT = "Once upon a time"
GREEDY = GenerateOptions(max_tokens=12, ignore_eos=True, return_num_input_tokens=True, return_num_output_tokens=True)
LONG = GenerateOptions(max_tokens=100, ignore_eos=True)


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, server: Any) -> Iterator[Client | HttpClient]:
    kind, port = (Client, server.grpc_port) if request.param == "grpc" else (HttpClient, server.http_port)
    with kind(f"127.0.0.1:{port}") as made:
        made.wait_ready(30)
        yield made


def test_stream_and_generate_agree(client: Client | HttpClient) -> None:
    with client.stream(PROMPT, GREEDY) as stream:
        chunks = list(stream)
    whole = client.generate(PROMPT, GREEDY)
    assert whole.text
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[-1].finish_reason == whole.finish_reason == "length"
    assert stream.completion().usage == whole.usage
    assert whole.usage.output_tokens == 12


def test_generate_agrees_over_grpc_and_http(server: Any) -> None:
    with Client(f"127.0.0.1:{server.grpc_port}") as one, HttpClient(f"127.0.0.1:{server.http_port}") as other:
        assert one.generate(PROMPT, GREEDY).text == other.generate(PROMPT, GREEDY).text


def test_plain_generate_endpoint_answers_alike(server: Any) -> None:
    base = f"http://127.0.0.1:{server.http_port}"
    body = {"text_input": PROMPT, "max_tokens": 12, "ignore_eos": True, "exclude_input_in_output": True}
    reply = httpx.post(f"{base}/v2/models/ensemble/generate", json=body, timeout=60).raise_for_status().json()
    with HttpClient(base) as client:
        assert reply["text_output"] == client.generate(PROMPT, GREEDY).text
    assert reply["finish_reason"] == "length"


def test_exclude_input_in_output_false_echoes_the_prompt(client: Client | HttpClient) -> None:
    echo = GenerateOptions(max_tokens=4, exclude_input_in_output=False)
    assert client.generate(PROMPT, echo).text.startswith(PROMPT)


def test_client_errors_are_typed_over_the_wire(client: Client | HttpClient) -> None:
    for generate in (client.generate, lambda *given: list(client.stream(*given))):
        with pytest.raises(errors.InvalidRequest, match="top_p"):
            generate(PROMPT, GenerateOptions(top_p=2.0))


def test_num_return_sequences_come_apart(client: Client | HttpClient) -> None:
    options = GenerateOptions(max_tokens=8, num_return_sequences=3, temperature=1.0, seed=7, ignore_eos=True)
    with client.stream(PROMPT, options) as stream:
        indices = {chunk.index for chunk in stream}
    answer = stream.completion()
    assert indices == {0, 1, 2}
    assert len(answer.alternatives) == 2
    assert all(each.finish_reason == "length" for each in (answer, *answer.alternatives))


def test_return_log_probs_has_one_per_token(client: Client | HttpClient, server: Any) -> None:
    # TensorRT-LLM's C++ backend, and its sampler that serves most of the contract, have no others than the token's own.
    tops = 3 if server.engine == "pytorch" else 0
    options = GenerateOptions(max_tokens=6, ignore_eos=True, return_log_probs=True, num_top_log_probs=tops)
    with client.stream(PROMPT, options) as stream:
        list(stream)
    answer = stream.completion()
    assert len(answer.log_probs) == 6
    assert len(answer.top_log_probs) == (6 if tops else 0)
    assert answer.cum_log_prob == pytest.approx(sum(answer.log_probs), abs=1e-3)
    for chosen, likeliest in zip(answer.log_probs, answer.top_log_probs, strict=bool(tops)):
        assert len(likeliest) == tops
        assert chosen == pytest.approx(likeliest[0][1], abs=1e-4)  # greedy


def test_cancelled_streams_leave_a_working_server(client: Client | HttpClient) -> None:
    for _ in range(5):
        with client.stream(PROMPT, LONG) as stream:
            next(stream)
        assert stream.completion().finish_reason in (None, "length")
    with pytest.raises(RequestTimeout):
        client.generate(PROMPT, LONG, timeouts=Timeouts(total=0.001))
    assert client.generate(PROMPT, GREEDY).usage.output_tokens == 12


@pytest.mark.parametrize("kind", [AsyncClient, AsyncHttpClient])
async def test_async_clients_many_requests_at_once(
    server: Any, kind: type[AsyncClient] | type[AsyncHttpClient]
) -> None:
    port = server.grpc_port if kind is AsyncClient else server.http_port
    async with kind(f"127.0.0.1:{port}") as client:
        alone = await client.generate(PROMPT, GREEDY)
        together = await asyncio.gather(*(client.generate(PROMPT, GREEDY) for _ in range(16)))
    assert {answer.text for answer in together} == {alone.text}


def test_errors_on_streams_leave_the_server_standing(server: Any) -> None:
    """With the header `triton_grpc_error`, which the client does not send, a few of them bring it down."""
    refused = GenerateOptions(max_tokens=4, stop_words=["x"] * 300)
    for _ in range(40):
        with (
            Client(f"127.0.0.1:{server.grpc_port}") as client,
            pytest.raises(errors.InvalidRequest, match="stop_words"),
        ):
            client.generate(PROMPT, refused)
    with Client(f"127.0.0.1:{server.grpc_port}", model="nothing") as client, pytest.raises(errors.NotFound):
        client.generate(PROMPT, GREEDY)
    assert server.server.process.poll() is None
