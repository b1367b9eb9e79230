"""Prompts that take long to tokenize: answered as others are, and holding up none of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import tritonclient.grpc as grpc

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
    """Without a way beside them, one short prompt is answered after each long one, and none before the first."""
    answered = 0
    with ThreadPoolExecutor(2) as pool, Client(server.grpc) as client:
        long = [pool.submit(_post, server, LONG) for _ in range(2)]
        while not any(one.done() for one in long):
            client.generate("Hello", GenerateOptions(max_tokens=2))
            answered += 1
        for one in long:
            assert one.result().status_code == 400
            assert "prompt length" in one.result().json()["error"]
    assert answered > 1


def test_tokenizer_long_prompt_has_the_same_tokens(unary_server: Running) -> None:
    """Of a batch with short ones, in a deployment whose stages answer once."""
    text = "Füße 😀 and more of it. " * 3000
    tokenizer = Tokenizer.from_checkpoint(unary_server.server.deployment.model)
    with grpc.InferenceServerClient(unary_server.grpc) as client, ThreadPoolExecutor(8) as pool:
        texts = [text, *(f"short {index}" for index in range(6)), text]
        answers = pool.map(lambda one: client.infer("tokenizer", grpc_inputs("tokenizer", {"text_input": one})), texts)
        for one, answer in zip(texts, answers, strict=True):
            assert answer.as_numpy("input_ids").tolist() == tokenizer.encode_batch([one], add_special_tokens=True)
