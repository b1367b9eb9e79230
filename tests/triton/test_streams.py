"""Many streams at once through the real ensemble: nothing lost, doubled or reordered; each ends once."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import tritonclient.grpc.aio as grpc_aio
from tritonclient.utils import InferenceServerException

from inflight.client import Client, GenerateOptions, HttpClient
from tests.triton.support.servers import Running
from tests.triton.support.tensors import grpc_inputs

STREAMS, TOKENS = 100, 64
OPTIONS = GenerateOptions(max_tokens=TOKENS, ignore_eos=True)


async def _one_stream(url: str, request_id: str, prompt: str) -> list[tuple[str, int, int, int, bool]]:
    """Return the responses of one request as (text, start, end, tokens so far, final)."""
    flags = {"stream": True, "ignore_eos": True, "return_num_output_tokens": True}
    values = {"text_input": prompt, "max_tokens": TOKENS} | flags

    async def requests():
        inputs = grpc_inputs("ensemble", values)
        named = {"model_name": "ensemble", "inputs": inputs, "request_id": request_id}
        yield named | {"enable_empty_final_response": True}

    responses = []
    async with grpc_aio.InferenceServerClient(url) as client:
        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            final = result.get_response().parameters["triton_final_response"].bool_param
            if result.as_numpy("text_output") is None:
                responses.append(("", -1, -1, -1, final))
                continue
            text = result.as_numpy("text_output")[0].decode()
            start, end, tokens = (
                int(result.as_numpy(name).flat[0]) for name in ("text_start", "text_end", "num_output_tokens")
            )
            responses.append((text, start, end, tokens, final))
    return responses


@pytest.mark.sweep(most=1)
@pytest.mark.any_engine
def test_hundred_streams_lose_no_token(server: Running) -> None:
    prompts = [f"Request {index}: what is {'in-flight batching' * (index % 4)}" for index in range(STREAMS)]

    async def all_streams() -> list[list[tuple[str, int, int, int, bool]]]:
        return await asyncio.gather(
            *(_one_stream(server.grpc, f"stream {index}", prompt) for index, prompt in enumerate(prompts))
        )

    streams = asyncio.run(all_streams())
    for responses in streams:
        assert [final for *_, final in responses] == [False] * (len(responses) - 1) + [True]
        data = [response for response in responses if response[1] >= 0]
        assert data[-1][3] == TOKENS
        position = 0
        counts = [0]
        for text, start, end, tokens, _ in data:
            assert (start, end) == (position, position + len(text))
            position = end
            counts.append(tokens)
        assert counts == sorted(set(counts)), "a response repeats or goes back"
    with Client(server.grpc) as client:
        for index in range(0, STREAMS, 17):
            alone = client.generate(prompts[index], OPTIONS).text
            assert "".join(text for text, *_ in streams[index]) == alone


@pytest.mark.any_engine
def test_stop_words_end_the_answer_and_never_leak(server: Running) -> None:
    with Client(server.grpc) as client, HttpClient(server.http) as http:
        whole = client.generate("What is a paged KV cache?", GenerateOptions(max_tokens=40)).text
        for start in range(3, len(whole) - 6, 11):
            stop = whole[start : start + 5]
            expected = whole[: whole.index(stop)]
            options = GenerateOptions(max_tokens=40, stop_words=[stop, "never in it"])
            for one in (client, http):
                with one.stream("What is a paged KV cache?", options) as stream:
                    shown = "".join(chunk.text for chunk in stream)
                    assert shown == expected
                    assert stream.completion().finish_reason == "stop"


@pytest.mark.any_engine
def test_stop_words_end_the_generation_within_one_step(server: Running) -> None:
    prompt = "What is a paged KV cache?"
    count = GenerateOptions(max_tokens=40, return_num_output_tokens=True)
    with Client(server.grpc) as client:
        whole = client.generate(prompt, count)
        stop = whole.text[len(whole.text) // 2 :][:4]
        tokens = client.generate(
            prompt, GenerateOptions(max_tokens=40, return_num_output_tokens=True, stop_words=[stop])
        ).usage.output_tokens
        assert tokens is not None
        shorter = client.generate(prompt, GenerateOptions(max_tokens=tokens - 1)).text
    assert stop not in shorter, "the token before the last already completed the stop string"


@pytest.mark.any_engine
def test_messages_answer_alike_over_http_and_grpc(server: Running) -> None:
    messages = [{"role": "user", "content": "What is TTFT?"}]
    with Client(server.grpc) as client, HttpClient(server.http) as http:
        answers = {one.generate(messages, GenerateOptions(max_tokens=48)).text for one in (client, http)}
    assert len(answers) == 1
    assert "first token" in answers.pop()


@pytest.mark.any_engine
def test_unary_batches_come_back_by_row(unary_server: Running) -> None:
    """A batch of texts in one unary request: each row is what its text alone gives; upstream's backend takes none."""
    import tritonclient.http as http

    prompts = ["What is TTFT?", "What is FP8?", "Hi"]
    with http.InferenceServerClient(f"127.0.0.1:{unary_server.http_port}") as client:

        def texts(rows: list[str]) -> list[str]:
            text = http.InferInput("text_input", [len(rows), 1], "BYTES")
            text.set_data_from_numpy(np.array([[row.encode()] for row in rows], object))
            most = http.InferInput("max_tokens", [len(rows), 1], "INT32")
            most.set_data_from_numpy(np.full((len(rows), 1), 16, np.int32))
            result = client.infer("ensemble", [text, most])
            return [one.decode() for one in result.as_numpy("text_output")]

        if unary_server.engine == "tensorrtllm":
            with pytest.raises(InferenceServerException, match="a batch of rows needs a decoupled deployment"):
                texts(prompts)
            return
        together = texts(prompts)
        assert together == [texts([prompt])[0] for prompt in prompts]
