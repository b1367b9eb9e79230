"""Log-probs of prompts and of given tokens, and embeddings, through a real server, as transformers has them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from tritonclient import grpc

from inflight import errors
from inflight.client import Client, Completion, GenerateOptions, HttpClient
from inflight.resources import DEMO
from inflight.text.tokenizer import Tokenizer
from tests.triton.support.servers import STEP_TOKENS, Running
from tests.triton.support.tensors import grpc_inputs

pytestmark = pytest.mark.parametrize("engine", ["pytorch"], indirect=True)  # the others refuse them

PROMPT = "Once upon a time, there was a small fox who lived in the forest. " * 9
IDS = (17, 400, 5)
OPTIONS = GenerateOptions(
    max_tokens=6, ignore_eos=True, return_log_probs=True, num_top_log_probs=2,
    num_prompt_log_probs=3, log_prob_token_ids=IDS, return_num_input_tokens=True,
)  # fmt: skip
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


@functools.cache
def _reference() -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
    return model.eval()


def _prompt() -> list[int]:
    return list(Tokenizer.from_checkpoint(DEMO / "model").encode_batch([PROMPT])[0])


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, server: Running) -> Iterator[Client | HttpClient]:
    with Client(server.grpc) if request.param == "grpc" else HttpClient(server.http) as made:
        yield made


def _check(answer: Completion) -> None:
    prompt = _prompt()
    assert len(prompt) > STEP_TOKENS, "the prompt comes in chunks"
    assert answer.usage.input_tokens == len(prompt)
    scores, generated = answer.scores, [row[0][0] for row in answer.top_log_probs]
    with torch.inference_mode():
        expected = _reference()(torch.tensor([[*prompt, *generated]])).logits[0].log_softmax(-1)
    own = expected[: len(prompt) - 1].gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(scores.prompt_log_probs), own, **CLOSE)
    best = torch.tensor([[value for _, value in row] for row in scores.prompt_top_log_probs])
    torch.testing.assert_close(best, expected[: len(prompt) - 1].topk(3, -1).values, **CLOSE)
    given = expected[len(prompt) - 1 : -1, list(IDS)]
    torch.testing.assert_close(torch.tensor(scores.token_log_probs), given, **CLOSE)
    for token, value, row in zip(prompt[1:], scores.prompt_log_probs, scores.prompt_top_log_probs, strict=True):
        assert dict(row).get(token, value) == value, "a token's own value is its value among the likeliest"


def test_an_answer_has_the_scores_that_were_asked_for(client: Client | HttpClient) -> None:
    _check(client.generate(PROMPT, OPTIONS))


def test_a_stream_has_those_of_the_prompt_once_and_first(client: Client | HttpClient) -> None:
    with client.stream(PROMPT, OPTIONS) as stream:
        chunks = list(stream)
    _check(stream.completion())
    assert stream.completion().scores == client.generate(PROMPT, OPTIONS).scores
    with_prompt = [chunk.scores is not None and bool(chunk.scores.prompt_log_probs) for chunk in chunks]
    assert with_prompt == [True] + [False] * (len(chunks) - 1)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding_is_transformers_hidden_states(client: Client | HttpClient, pooling: str) -> None:
    answer = client.generate(PROMPT, GenerateOptions(pooling=pooling, return_num_output_tokens=True))
    with torch.inference_mode():
        states = _reference().model(torch.tensor([_prompt()])).last_hidden_state[0].double()
    expected = states[-1] if pooling == "last" else states.mean(0)
    torch.testing.assert_close(torch.tensor(answer.scores.embedding), expected.float(), **CLOSE)
    assert (answer.text, answer.finish_reason, answer.usage.output_tokens) == ("", "stop", 0)


def test_several_sequences_have_the_prompt_s_with_the_first_alone(client: Client | HttpClient) -> None:
    options = GenerateOptions(max_tokens=3, temperature=1.5, seed=4, num_return_sequences=3, num_prompt_log_probs=0)
    with client.stream(PROMPT, options) as stream:
        for _ in stream:
            pass
    first, *others = [stream.completion(), *stream.completion().alternatives]
    assert len(first.scores.prompt_log_probs) == len(_prompt()) - 1
    assert first.scores.prompt_top_log_probs == ()
    assert [other.scores.prompt_log_probs for other in others] == [(), ()]


def test_the_generate_endpoint_takes_and_gives_them(server: Running) -> None:
    body = {"text_input": "Once upon", "max_tokens": 1, "num_prompt_log_probs": 2, "log_prob_token_ids": list(IDS)}
    url = f"{server.http}/v2/models/ensemble/generate"
    reply = httpx.post(url, json=body, timeout=60).raise_for_status().json()
    assert len(reply["prompt_top_log_probs"]) == 2 * len(reply["prompt_log_probs"])
    assert len(reply["token_log_probs"]) == 3
    embedded = httpx.post(url, json={"text_input": "Once upon", "pooling": "mean"}, timeout=60).json()
    assert len(embedded["embedding"]) == _reference().config.hidden_size
    assert embedded["text_output"] == ""


def test_the_core_model_needs_no_output_length_for_an_embedding(server: Running) -> None:
    client = grpc.InferenceServerClient(server.grpc)
    replies = list[Any]()
    client.start_stream(lambda result, error: replies.append((result, error)))
    values = {"input_ids": np.array([_prompt()], np.int32), "pooling": "last"}
    client.async_stream_infer("tensorrt_llm", grpc_inputs("tensorrt_llm", values), request_id="embed")
    client.stop_stream()
    client.close()
    [(result, error)] = replies
    assert error is None
    assert result.as_numpy("embedding").shape == (1, _reference().config.hidden_size)
    assert result.as_numpy("finish_reason").reshape(-1).tolist() == [b"stop"]
    assert result.as_numpy("output_ids").size == 0


def test_a_batch_of_rows_is_padded(unary_server: Running) -> None:
    with grpc.InferenceServerClient(unary_server.grpc) as client:
        texts = np.array([[b"Once"], [b"Once upon a time, there was"]], object)
        values: dict[str, Any] = {"text_input": texts, "max_tokens": np.array([[1], [1]], np.int32)}
        values["num_prompt_log_probs"] = np.array([[1], [2]], np.int32)
        result = client.infer("ensemble", grpc_inputs("ensemble", values))
    short, long = (Tokenizer.from_checkpoint(DEMO / "model").encode_batch([text.decode()])[0] for [text] in texts)
    own, best = result.as_numpy("prompt_log_probs"), result.as_numpy("prompt_top_log_probs")
    assert own.shape == (2, len(long) - 1)
    assert best.shape == (2, len(long) - 1, 2)
    assert (own[0, len(short) - 1 :] == -1).all()
    assert (best[0, len(short) - 1 :] == -1).all()
    assert own[1].max() <= 0
    assert (own[1] <= best[1, :, 0]).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_prompt_log_probs": 21}, errors.InvalidRequest, "num_prompt_log_probs is 21"),
        ({"num_prompt_log_probs": -1}, errors.InvalidRequest, "num_prompt_log_probs is -1"),
        ({"log_prob_token_ids": [9999]}, errors.InvalidRequest, "log_prob_token_ids has token 9999"),
        ({"log_prob_token_ids": [1] * 257}, errors.InvalidRequest, "log_prob_token_ids has 257 elements"),
        ({"pooling": "max"}, errors.InvalidRequest, "pooling is 'max'"),
        ({"pooling": "mean", "num_return_sequences": 2}, errors.InvalidRequest, "num_return_sequences"),
        ({"pooling": "mean", "stop_words": ["x"]}, errors.UnsupportedFeature, "stop_strings"),
        ({"beam_width": 2, "log_prob_token_ids": [1]}, errors.UnsupportedFeature, "log_prob_token_ids"),
    ],
)
def test_bad_input_is_refused_by_name(
    client: Client | HttpClient, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        client.generate("Once", GenerateOptions(**options))
