"""Prompts that take long to tokenize: answered as others are, and holding up none of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from inflight.client import Client, GenerateOptions
from inflight.text.tokenizer import Tokenizer
from tests.triton.support.servers import Running
from tests.triton.support.tensors import grpc_inputs

LONG = "hello wor " * 150_000
"""1.5 MB: it takes seconds."""


def _post(server: Running, text: str) -> httpx.Response:
    body = {"text_input": text, "max_tokens": 4}
    return httpx.post(f"{server.http}/v2/models/ensemble/generate", json=body, timeout=300)


@pytest.mark.any_engine
def test_tokenizer_answers_short_prompts_beside_long_ones(server: Running) -> None:
    with ThreadPoolExecutor(2) as pool, Client(server.grpc) as client:
        long = [pool.submit(_post, server, LONG) for _ in range(2)]
        assert client.generate("Hello", GenerateOptions(max_tokens=2)).text
        for one in long:
            assert one.result().status_code == 400
            assert "prompt length" in one.result().json()["error"]


def test_tokenizer_long_prompts_are_refused_by_name_beside_short_ones(unary_server: Running) -> None:
    """In a deployment whose stages answer once."""
    tokenizer = Tokenizer.from_checkpoint(unary_server.server.deployment.model)
    with grpc.InferenceServerClient(unary_server.grpc) as client, ThreadPoolExecutor(8) as pool:

        def ids(text: str) -> list[list[int]] | str:
            try:
                found = client.infer("tokenizer", grpc_inputs("tokenizer", {"text_input": text})).as_numpy("input_ids")
            except InferenceServerException as error:
                return str(error)
            return list(found.tolist())

        short = [f"short {index}" for index in range(6)]
        first, *others, last = pool.map(ids, [LONG, *short, LONG])
    assert first == last
    if unary_server.engine == "pytorch":
        assert "text_input: the prompt length (more than 3278 tokens) exceeds the limit; " in str(first)
    else:  # only the engine knows how long a prompt may be
        assert first == tokenizer.encode_batch([LONG], add_special_tokens=True)
    assert others == [tokenizer.encode_batch([one], add_special_tokens=True) for one in short]
