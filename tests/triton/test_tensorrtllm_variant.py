"""The ensemble on upstream's C++ backend, with a stand-in: the portable engine's text, in upstream's tensors."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc.aio as grpc_aio

from inflight.client import AsyncClient, Client, GenerateOptions
from inflight.errors import UnsupportedFeature
from tests.support.waiting import wait_until
from tests.triton.support.servers import Running
from tests.triton.support.servers import run as serve_portable

PROMPTS = ["What is in-flight batching?", "What is a paged KV cache?", "Naïve café 🙂", "List three metrics."]


pytestmark = [
    pytest.mark.any_engine,
    pytest.mark.parametrize("engine", ["tensorrtllm"], indirect=True, scope="session"),
]


@pytest.fixture
def upstream(server: Running) -> Running:
    """The server of all tests on the stand-in."""
    return server


@pytest.fixture(scope="module")
def portable() -> Iterator[Running]:
    yield from serve_portable()


def test_streams_are_the_portable_engines(upstream: Running, portable: Running) -> None:
    options = GenerateOptions(max_tokens=40)
    with Client(upstream.grpc) as here, Client(portable.grpc) as there:
        for prompt in PROMPTS:
            with here.stream(prompt, options) as stream:  # the client gives it an id
                chunks = [chunk.text for chunk in stream]
            assert len(chunks) > 3
            assert "".join(chunks) == there.generate(prompt, options).text


def test_whole_answers_are_the_portable_engines(upstream: Running, portable: Running) -> None:
    for prompt in PROMPTS:
        for exclude in (True, False):
            body = {"text_input": prompt, "max_tokens": 24, "exclude_input_in_output": exclude}
            texts = {
                httpx.post(f"{server.http}/v2/models/ensemble/generate", json=body, timeout=60).json()["text_output"]
                for server in (upstream, portable)
            }
            assert len(texts) == 1
            assert texts.pop().startswith(prompt) is not exclude


def test_tensorrtllm_many_streams_stay_apart(upstream: Running, portable: Running) -> None:
    options = GenerateOptions(max_tokens=24, ignore_eos=True)
    prompts = [f"Request {index}: what is {PROMPTS[index % 3]}" for index in range(40)]

    async def one(client: AsyncClient, index: int) -> str:
        return "".join(
            [chunk.text async for chunk in client.stream(prompts[index], options, request_id=f"many-{index}")]
        )

    async def all_of_them() -> list[str]:
        async with AsyncClient(upstream.grpc) as client:
            return await asyncio.gather(*(one(client, index) for index in range(len(prompts))))

    texts = asyncio.run(all_of_them())
    with Client(portable.grpc) as there:
        for index in range(0, len(prompts), 7):
            assert texts[index] == there.generate(prompts[index], options).text


def test_tensorrtllm_streams_of_one_id_stay_apart(upstream: Running, portable: Running) -> None:
    options = GenerateOptions(max_tokens=24)

    async def both() -> list[str]:
        async with AsyncClient(upstream.grpc) as client:

            async def one(prompt: str) -> str:
                return await _join(client.stream(prompt, options, request_id="same"))

            return await asyncio.gather(*map(one, PROMPTS[:2]))

    texts = asyncio.run(both())
    with Client(portable.grpc) as there:
        assert texts == [there.generate(prompt, options).text for prompt in PROMPTS[:2]]


def test_a_stop_word_ends_the_answer_before_it(upstream: Running) -> None:
    """Upstream's engine leaves it in the text; the detokenizer cuts it, as on the other engines."""
    with Client(upstream.grpc) as client:
        whole = client.generate(PROMPTS[1], GenerateOptions(max_tokens=40)).text
        word = whole.split()[4].strip(".,")
        answer = client.generate(PROMPTS[1], GenerateOptions(max_tokens=40, stop_words=[word]))
    assert answer.text == whole[: whole.index(word)]
    assert answer.finish_reason == "stop"


def test_tensorrtllm_counts_and_log_probs(upstream: Running) -> None:
    options = GenerateOptions(max_tokens=9, ignore_eos=True, return_num_output_tokens=True, return_log_probs=True)
    with Client(upstream.grpc) as client, client.stream(PROMPTS[0], options, request_id="counts") as stream:
        list(stream)
        answer = stream.completion()
    assert answer.usage.output_tokens == 9


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"min_p": 0.5}, "min_p"),
        ({"priority": 3}, "priority"),
        ({"deadline_ms": 500}, "deadline_ms"),
        ({"num_top_log_probs": 2}, "num_top_log_probs"),
    ],
)
def test_what_upstream_has_not_is_refused_by_name(upstream: Running, options: dict[str, Any], name: str) -> None:
    with Client(upstream.grpc) as client, pytest.raises(UnsupportedFeature, match=name):
        client.generate("Hi", GenerateOptions(max_tokens=4, **options))


def test_beams_and_too_many_sequences_are_refused(upstream: Running) -> None:
    url = f"{upstream.http}/v2/models/ensemble/generate"
    for extra, name in (
        ({"beam_width": 2}, "beam_width"),
        ({"num_return_sequences": 99}, "num_return_sequences is 99"),
    ):
        answer = httpx.post(url, json={"text_input": "Hi", "max_tokens": 4} | extra, timeout=60)
        assert name in answer.text
        assert answer.status_code == 400


def test_streams_without_an_id_are_told_apart_or_refused(upstream: Running, portable: Running) -> None:
    """As upstream's own clients send them; what cannot be told apart, and is to end otherwise, is refused by name."""
    url = "v2/models/ensemble/generate_stream"

    async def both(*most: int) -> list[str]:
        async with httpx.AsyncClient(timeout=60) as client:
            bodies = [{"text_input": PROMPTS[0], "max_tokens": one, "stream": True} for one in most]
            return [
                one.text
                for one in await asyncio.gather(*(client.post(f"{upstream.http}/{url}", json=b) for b in bodies))
            ]

    for text in asyncio.run(both(30, 30)):
        assert text.count('"finish_reason"') == 1
        assert "error" not in text
    first, second = asyncio.run(both(400, 401))
    refused = [text for text in (first, second) if "give each an id of its own" in text]
    served = [text for text in (first, second) if '"finish_reason"' in text]
    assert len(refused) + len(served) == 2
    assert served


def finished(server: Running) -> float:
    """Return how many requests the engine's model has answered to their end."""
    page = httpx.get(server.metrics, timeout=60).text
    return sum(map(float, re.findall(r'nv_inference_request_success\{model="tensorrt_llm",version="1"\} (\d+)', page)))


LONG = GenerateOptions(max_tokens=900, ignore_eos=True)
LONG_COUNTED = replace(LONG, return_num_output_tokens=True)


def test_a_stop_by_id_ends_the_stream(upstream: Running) -> None:
    """Upstream marks the end of a stopped request by a response without a token alone.

    The engine may have made all tokens before the stop arrives; then the test tries again.
    """

    async def run() -> int | None:
        async with AsyncClient(upstream.grpc) as client, grpc_aio.InferenceServerClient(upstream.grpc) as other:
            stream = client.stream("Tell me", LONG_COUNTED, request_id="to-stop")
            reader = await _begun(stream)

            async def stop() -> Any:
                yield {"model_name": "tensorrt_llm", "inputs": _stop_inputs(), "request_id": "to-stop"}

            async for _, error in other.stream_infer(stop()):
                assert error is None
                break
            await asyncio.wait_for(reader, 30)
            made = stream.completion()
            assert made.finish_reason in ("cancelled", "length")
            return made.usage.output_tokens if made.finish_reason == "cancelled" else None

    stopped = next(made for made in (asyncio.run(run()) for _ in range(20)) if made is not None)
    assert 0 < stopped < 900


def test_a_client_that_goes_away_ends_its_stream(upstream: Running) -> None:
    """The detokenizer notices, and stops the engine by the request's id: one request and one stop are answered.

    The engine may have made all tokens before the client has gone; then only the request is, and the test tries again.
    """
    before = finished(upstream)

    async def run() -> None:
        async with AsyncClient(upstream.grpc) as client:
            stream = client.stream("Tell me", LONG, request_id="to-cancel")
            reader = await _begun(stream)
            await stream.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    for tries in range(1, 21):
        asyncio.run(run())
        if wait_until(lambda tries=tries: finished(upstream) > before + tries, 5):  # type: ignore[misc]
            return
    raise AssertionError("no stop was answered")


async def _begun(stream: Any) -> asyncio.Task[None]:
    """Read a stream on, and return the task that does when the first chunk is there."""
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in stream:
            begun.set()

    reader = asyncio.create_task(read())
    await asyncio.wait_for(begun.wait(), 60)
    return reader


async def _join(stream: Any) -> str:
    return "".join([chunk.text async for chunk in stream])


def _stop_inputs() -> list[grpc_aio.InferInput]:
    """Return upstream's stop, with the two inputs that it requires of every request."""
    inputs = []
    for name, kind, array in (
        ("stop", "BOOL", np.array([[True]])),
        ("input_lengths", "INT32", np.array([[1]], np.int32)),
        ("request_output_len", "INT32", np.array([[1]], np.int32)),
    ):
        tensor = grpc_aio.InferInput(name, [1, 1], kind)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def test_tensorrtllm_unary_answers(unary_server: Running, portable: Running) -> None:
    url = f"{unary_server.http}/v2/models/ensemble/generate"
    body = {"text_input": PROMPTS[0], "max_tokens": 24}
    same = {
        httpx.post(f"{one.http}/v2/models/ensemble/generate", json=body, timeout=60).json()["text_output"]
        for one in (unary_server, portable)
    }
    assert len(same) == 1
    assert "Streaming is only supported" in httpx.post(url, json=body | {"stream": True, "id": "a"}, timeout=60).text
