"""Malformed requests: each gets its status and a message naming the field; neighbours and server are unharmed."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc as grpc_api
import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as grpc_aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from inflight.client import Client, GenerateOptions
from tests.support.tables import each_row
from tests.triton.support.servers import Running
from tests.triton.support.tensors import grpc_inputs

pytestmark = pytest.mark.any_engine

TEXT = {"text_input": "Hello", "max_tokens": 4}
INVALID, UNSUPPORTED = "INVALID_ARGUMENT", "UNIMPLEMENTED"
USER = '[{"role": "user", "content": "Hi"}]'
LONG = "word " * 3000
BEAMS = ("beam_width", "length_penalty")
VOCABULARY = 4096
"""Of the demo's model."""

# (the request's fields, beside text_input and max_tokens unless they are given as None; status; what the message says)
ENSEMBLE: list[tuple[dict[str, Any], str, str]] = [
    ({"text_input": ""}, INVALID, "text_input is empty"),
    ({"text_input": None}, INVALID, "text_input is missing"),
    ({"text_input": LONG}, INVALID, "prompt length"),
    ({"messages": USER}, INVALID, "text_input and messages are both given"),
    ({"text_input": None, "messages": "["}, INVALID, "messages is not valid JSON"),
    ({"text_input": None, "messages": "{}"}, INVALID, "messages must be a JSON list"),
    ({"text_input": None, "messages": "[]"}, INVALID, "at least one message"),
    ({"text_input": None, "messages": "[3]"}, INVALID, "messages[0] is int"),
    ({"text_input": None, "messages": '[{"role": "user"}]'}, INVALID, "messages[0].content"),
    ({"text_input": None, "messages": '[{"content": "x"}]'}, INVALID, "messages[0].role"),
    (
        {"text_input": None, "messages": USER, "chat_template_kwargs": "nope"},
        INVALID,
        "chat_template_kwargs is not valid",
    ),
    ({"text_input": None, "messages": USER, "chat_template_kwargs": "[]"}, INVALID, "must be a JSON object"),
    (
        {"text_input": None, "messages": USER, "chat_template_kwargs": '{"messages": 1}'},
        INVALID,
        "chat_template_kwargs",
    ),
    ({"text_input": None, "messages": '[{"role": "user", "content": "\\ud800"}]'}, INVALID, "lone surrogate"),
    ({"text_input": None, "messages": '[{"role": "user", "content": []}]'}, INVALID, "messages[0].content"),
    (
        {"text_input": None, "messages": '[{"role": "\\ud800", "content": "x"}]'},
        INVALID,
        "messages[0].role is '\\ud800'",
    ),
    (
        {"text_input": None, "messages": USER, "chat_template_kwargs": "[" * 9999},
        INVALID,
        "chat_template_kwargs is not",
    ),
    ({"text_input": None, "messages": USER, "chat_template_kwargs": '{"tool": 1}'}, INVALID, "did you mean 'tools'?"),
    ({"stop_words": ["x"] * 300}, INVALID, "stop_words has 300 words; the limit is 256"),
    ({"stop_words": ["x" * 9000]}, INVALID, "stop_words has 9000 bytes of words; the limit is 8192"),
    ({"bad_words": ["x" * 9000]}, INVALID, "bad_words has 9000 bytes of words; the limit is 8192"),
    ({"chat_template_kwargs": "{}"}, INVALID, "chat_template_kwargs is given without messages"),
    ({"max_tokens": 0}, INVALID, "max_tokens is 0; it must be at least 1"),
    ({"max_tokens": -5}, INVALID, "max_tokens is -5"),
    ({"min_tokens": -1}, INVALID, "min_tokens is -1"),
    ({"min_tokens": 5}, INVALID, "min_tokens is 5; it must be between 0 and max_tokens (4)"),
    ({"temperature": -0.5}, INVALID, "temperature is -0.5"),
    ({"top_k": -1}, INVALID, "top_k is -1"),
    ({"top_p": 1.5}, INVALID, "top_p is 1.5"),
    ({"min_p": -0.5}, INVALID, "min_p is -0.5"),
    ({"min_p": 1.5}, INVALID, "min_p is 1.5"),
    ({"repetition_penalty": 0.0}, INVALID, "repetition_penalty is 0.0"),
    ({"repetition_penalty": -1.0}, INVALID, "repetition_penalty is -1.0"),
    ({"num_return_sequences": 0}, INVALID, "num_return_sequences is 0"),
    ({"num_return_sequences": 99}, INVALID, "num_return_sequences is 99"),
    ({"num_top_log_probs": -1}, INVALID, "num_top_log_probs is -1"),
    ({"num_top_log_probs": 21}, INVALID, "num_top_log_probs is 21"),
    ({"deadline_ms": 0}, INVALID, "deadline_ms is 0"),
    ({"deadline_ms": -3}, INVALID, "deadline_ms is -3"),
    ({"client_id": "somebody"}, UNSUPPORTED, "client_id is not supported by this"),
    ({"end_id": -2}, INVALID, "end_id is -2"),
    (
        {"embedding_bias_words": ["a", "b"], "embedding_bias_weights": [1.0]},
        INVALID,
        "embedding_bias_words has 2 words",
    ),
    ({"embedding_bias_words": ["a"]}, INVALID, "embedding_bias_words has 1 words"),
    ({"embedding_bias_weights": [1.0]}, INVALID, "embedding_bias_weights 1 weights"),
    ({"beam_width": 0}, INVALID, "beam_width is 0"),
    ({"beam_width": 999}, INVALID, "beam_width is 999"),
    ({"length_penalty": 0.5}, INVALID, "length_penalty is 0.5; it must be 0 or 1 where beam_width is 1"),
    ({"beam_width": 2, "num_return_sequences": 2}, INVALID, "num_return_sequences"),
    ({"beam_width": 2, "temperature": 0.5}, UNSUPPORTED, "temperature"),
    ({"beam_width": 2, "stop_words": ["x"]}, UNSUPPORTED, "stop_words"),
    ({"beam_width": 2, "num_top_log_probs": 2}, UNSUPPORTED, "num_top_log_probs"),
    ({"beam_width": 2, "return_generation_logits": True}, UNSUPPORTED, "return_generation_logits"),
    ({"lora_task_id": 7}, UNSUPPORTED, "lora_task_id"),
    ({"prompt_vocab_size": 5}, UNSUPPORTED, "prompt_vocab_size"),
    ({"prompt_table_extra_id": 5}, UNSUPPORTED, "prompt_table_extra_id"),
    ({"decoder_text_input": "x"}, UNSUPPORTED, "decoder_text_input"),
]
# Over HTTP only: JSON keys that are no tensors become request parameters.
PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"tempreature": 0.5}, "did you mean 'temperature'?"),
    ({"max_token": 5}, "did you mean 'max_tokens'?"),
    ({"stop_word": "x"}, "did you mean 'stop_words'?"),
    ({"prompt": "x"}, "did you mean 'text_input'?"),
    ({"stop": "x"}, "did you mean 'stop_words'?"),
    ({"n": 2}, "did you mean 'num_return_sequences'?"),
    ({"x-inflight-client": "x"}, "x-inflight-client is not supported by this deployment"),
]
FORGED = {
    "output_ids": np.ones((1, 1, 1), np.int32),
    "sequence_length": [1],
    "stream_key": [7],
    "num_input_tokens": [0],
}
# Over gRPC only: JSON cannot say them, or Triton's JSON reader judges first.
TENSORS: list[tuple[str, dict[str, Any], str, str]] = [
    ("ensemble", {"text_input": b"\xff\xfe"}, INVALID, "text_input"),
    ("ensemble", {**TEXT, "stop_words": [b"\xff"]}, INVALID, "stop_words"),
    ("ensemble", {**TEXT, "temperature": float("nan")}, INVALID, "temperature is nan"),
    ("ensemble", {**TEXT, "temperature": float("inf")}, INVALID, "temperature is inf"),
    ("ensemble", {**TEXT, "top_p": float("nan")}, INVALID, "top_p is nan"),
    ("ensemble", {**TEXT, "presence_penalty": float("inf")}, INVALID, "presence_penalty is inf"),
    ("ensemble", {**TEXT, "frequency_penalty": float("nan")}, INVALID, "frequency_penalty is nan"),
    ("ensemble", {**TEXT, "lora_weights": np.ones((1, 2, 2), np.float16)}, UNSUPPORTED, "lora_weights"),
    ("ensemble", {**TEXT, "prompt_embedding_table": np.ones((1, 2, 2), np.float16)}, UNSUPPORTED, "prompt_embedding"),
    ("tensorrt_llm", {"input_lengths": 3, "request_output_len": 4}, INVALID, "input_ids is missing"),
    ("tensorrt_llm", {"input_ids": [1, 2], "input_lengths": 3, "request_output_len": 4}, INVALID, "input_lengths is 3"),
    ("tensorrt_llm", {"input_ids": [1, 2], "input_lengths": 0, "request_output_len": 4}, INVALID, "input_lengths is 0"),
    ("tensorrt_llm", {"input_ids": [1, 2], "input_lengths": 2}, INVALID, "request_output_len"),
    ("tensorrt_llm", {"input_ids": [1, 2], "request_output_len": 0}, INVALID, "request_output_len is 0"),
    ("tensorrt_llm", {"input_ids": [-1, 2], "request_output_len": 4}, INVALID, "input_ids has token -1"),
    ("tensorrt_llm", {"input_ids": [1, 99999], "request_output_len": 4}, INVALID, "input_ids has token 99999"),
    (
        "tensorrt_llm",
        {"input_ids": [1], "request_output_len": 4, "stop_strings": [f"w{number}" for number in range(257)]},
        INVALID,
        "stop_strings has 257 words; the limit is 256",
    ),
    (
        "tensorrt_llm",
        {"input_ids": [1], "request_output_len": 4, "end_ids": list(range(257))},
        INVALID,
        "end_ids has 257 elements; the limit is 256",
    ),
    (
        "tensorrt_llm",
        {"input_ids": [1], "request_output_len": 4, "embedding_bias": [-np.inf] * VOCABULARY},
        INVALID,
        "ban every token that could come next",
    ),
    (
        "tensorrt_llm",
        {"input_ids": [1], "request_output_len": 4, "embedding_bias": [1.0, 2.0]},
        INVALID,
        "embedding_bias",
    ),
    (
        "tensorrt_llm",
        {"input_ids": [1], "request_output_len": 4, "draft_input_ids": [1]},
        UNSUPPORTED,
        "draft_input_ids",
    ),
    (
        "tensorrt_llm",
        {"input_ids": [1], "request_output_len": 4, "beam_width": 2, "beam_search_diversity_rate": 0.5},
        UNSUPPORTED,
        "beam_search_diversity_rate",
    ),
    (
        "tensorrt_llm",
        {"input_ids": [1], "request_output_len": 4, "lookahead_window_size": 5},
        UNSUPPORTED,
        "lookahead_window_size",
    ),
    (
        "tensorrt_llm",
        {"input_ids": [1], "request_output_len": 4, "bad_words_list": np.array([[[5, 6], [9, -1]]], np.int32)},
        INVALID,
        "bad_words_list",
    ),
    ("tensorrt_llm", {"stop": True}, INVALID, "request ID is not provided"),
    ("tensorrt_llm", {"temperature": np.ones((0, 1), np.float32)}, "", "input byte size mismatch"),  # Triton's own
    ("tokenizer", {"text_input": b"\xff"}, INVALID, "text_input is not valid UTF-8"),
    ("tokenizer", {"max_tokens": 3}, INVALID, "text_input is missing"),
    ("detokenizer", {"stream_key": [1]}, INVALID, "output_ids is missing"),
    ("detokenizer", {"output_ids": np.ones((1, 1, 1), np.int32)}, INVALID, "sequence_length is missing"),
    ("detokenizer", FORGED | {"output_ids": np.full((1, 1, 1), -5, np.int32)}, INVALID, "output_ids has token -5"),
    ("detokenizer", FORGED | {"sequence_length": [9]}, INVALID, "sequence_length is [9]"),
]


def _body(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in (TEXT | fields).items() if value is not None}


async def _grpc_error(url: str, model: str, values: dict[str, Any]) -> str:
    """Send one request on a stream of its own; return the text of its error."""

    async def requests():
        yield {"model_name": model, "inputs": grpc_inputs(model, values), "enable_empty_final_response": True}

    async with grpc_aio.InferenceServerClient(url) as client:
        async for _, error in client.stream_infer(requests()):
            if error is not None:
                return str(error)
            break
    return "no error"


def _expected(server: Running, values: dict[str, Any], status: str, said: str) -> tuple[str, str]:
    """Return what this engine says: one that has not what a field asks for refuses it, and looks no further."""
    lacks = {"pytorch": (), "trtllm": BEAMS, "tensorrtllm": (*BEAMS, "min_p", "num_top_log_probs", "deadline_ms")}
    for name in lacks[server.engine]:
        if name in values:
            by_the_engine = (name, server.engine) == ("length_penalty", "trtllm")
            return UNSUPPORTED, "len_penalty" if by_the_engine else f"{name} is not supported"
    return status, said


def _is_upstreams_own(server: Running, model: str) -> bool:
    """Whether requests to a model go straight to upstream's backend, which refuses in its own words, as INTERNAL."""
    return (server.engine, model) == ("tensorrtllm", "tensorrt_llm")


def _check(message: str, status: str, said: str) -> None:
    assert status in message, message
    assert said in message, message
    assert "Traceback" not in message
    assert ".py" not in message


@each_row(("fields", "status", "said"), ENSEMBLE)
def test_malformed_fields_are_refused_by_name_over_http(
    server: Running, fields: dict[str, Any], status: str, said: str
) -> None:
    reply = httpx.post(f"{server.http}/v2/models/ensemble/generate", json=_body(fields), timeout=30)
    assert reply.status_code in (400, 501), reply.text
    _check(reply.json()["error"], *_expected(server, fields, status, said))


@each_row(("fields", "status", "said"), ENSEMBLE)
def test_malformed_fields_are_refused_by_name_over_grpc(
    server: Running, fields: dict[str, Any], status: str, said: str
) -> None:
    message = asyncio.run(_grpc_error(server.grpc, "ensemble", _body(fields)))
    _check(message, *_expected(server, fields, status, said))


@each_row(("model", "values", "status", "said"), TENSORS)
def test_malformed_tensors_are_refused_by_name(
    server: Running, model: str, values: dict[str, Any], status: str, said: str
) -> None:
    if _is_upstreams_own(server, model):
        return
    message = asyncio.run(_grpc_error(server.grpc, model, values))
    _check(message, *_expected(server, values, status, said))


@each_row(("fields", "said"), PARAMETERS)
def test_misspelt_parameters_are_named_with_the_nearest_known(
    server: Running, fields: dict[str, Any], said: str
) -> None:
    reply = httpx.post(f"{server.http}/v2/models/ensemble/generate", json=_body(fields), timeout=30)
    assert reply.status_code == 400
    _check(reply.json()["error"], INVALID, said)


@each_row(
    ("path", "body"),
    [
        ("ensemble/generate", "{"),
        ("ensemble/generate", ""),
        ("ensemble/generate", "[]"),
        ("ensemble/generate", '{"text_input": "x", "max_tokens": "many"}'),
        ("ensemble/generate", '{"text_input": {"a": 1}}'),
        ("ensemble/generate", '{"text_input": "x", "stream": "perhaps"}'),
        ("nothing/generate", json.dumps(TEXT)),
        ("ensemble/versions/9/generate", json.dumps(TEXT)),
    ],
)
def test_malformed_json_is_tritons_own_refusal(server: Running, path: str, body: str) -> None:
    reply = httpx.post(f"{server.http}/v2/models/{path}", content=body, timeout=30)
    assert 400 <= reply.status_code < 600
    assert reply.json()["error"]


@each_row(
    ("field", "said"), [(b'"x\xff": 1', "parameter"), (b'"x": "\xff"', "parameter"), (b'"id": "\xff"', "parameter")]
)
@each_row("path", ["ensemble/generate", "ensemble/generate_stream", "tensorrt_llm/generate"])
def test_invalid_utf8_is_refused_by_name(server: Running, path: str, field: bytes, said: str) -> None:
    """It is told by what it is in, and not by where it was read."""
    if _is_upstreams_own(server, path.partition("/")[0]):
        return
    body = b'{"text_input": "x", "max_tokens": 2, "temperature": 0.5, %s}' % field
    reply = httpx.post(f"{server.http}/v2/models/{path}", content=body, timeout=30)
    _check(reply.text, INVALID, "is not valid UTF-8")
    assert said in reply.text


def test_wrong_types_and_shapes_are_tritons_own_refusal(server: Running) -> None:
    wrong = grpc.InferInput("max_tokens", [1, 1], "FP32")
    wrong.set_data_from_numpy(np.ones((1, 1), np.float32))
    wide = grpc.InferInput("text_input", [1, 2], "BYTES")
    wide.set_data_from_numpy(np.array([[b"a", b"b"]], object))
    with grpc.InferenceServerClient(server.grpc) as client:
        for inputs in ([wrong], [wide]):
            with pytest.raises(InferenceServerException):
                client.infer("ensemble", inputs)


def test_malformed_requests_leave_their_neighbours_unharmed(server: Running) -> None:
    """Good and bad requests in one burst: each bad one fails alone."""
    with Client(server.grpc) as client:
        expected = client.generate("What is TTFT?", GenerateOptions(max_tokens=8)).text
    bad = [_body(fields) for fields, *_ in ENSEMBLE]
    good = {"text_input": "What is TTFT?", "max_tokens": 8, "exclude_input_in_output": True}

    def post(body: dict[str, Any]) -> httpx.Response:
        return http.post(f"{server.http}/v2/models/ensemble/generate", json=body)

    # A pool of httpx that closes idle connections may close one that another thread has just been given.
    unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
    with httpx.Client(timeout=60, limits=unlimited) as http, ThreadPoolExecutor(32) as pool:
        bodies = [body for pair in zip(bad, [good] * len(bad), strict=True) for body in pair]
        replies = list(pool.map(post, bodies))
    for body, reply in zip(bodies, replies, strict=True):
        assert (reply.status_code == 200) == (body is good), reply.text
        if body is good:
            assert reply.json()["text_output"] == expected


def test_a_string_shorter_than_it_says_fails_no_neighbour(server: Running) -> None:
    """A whole burst waits for the tokenizer at once, where a dynamic batcher would make one batch of it."""
    sound, forged = (grpc_inputs("tokenizer", {"text_input": "Hello", "max_tokens": 4}) for _ in range(2))
    forged[0]._raw_content = (99).to_bytes(4, "little") + b"short"

    async def burst() -> list[Any]:
        async with grpc_aio.InferenceServerClient(server.grpc) as client:
            asked = [client.infer("tokenizer", inputs) for _ in range(100) for inputs in (sound, forged)]
            return await asyncio.gather(*asked, return_exceptions=True)

    outcomes = asyncio.run(burst())
    assert [isinstance(one, InferenceServerException) for one in outcomes] == [False, True] * 100
    assert all("incomplete string data" in str(one) for one in outcomes[1::2])


@each_row(
    ("model", "name", "datatype"),
    [("tokenizer", "bad_words", "BYTES"), ("tensorrt_llm", "input_ids", "INT32"), ("detokenizer", "embedding", "FP32")],
)
def test_requests_without_a_row_are_refused_by_name(server: Running, model: str, name: str, datatype: str) -> None:
    """Triton's Python backend forgets them, where it is not told otherwise, and their clients wait for ever."""
    if _is_upstreams_own(server, model):
        return
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name=name, datatype=datatype, shape=[0, 0])
    request.raw_input_contents.append(b"")
    with grpc_api.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        [answer] = stub.ModelStreamInfer(iter([request]), timeout=60)
    _check(answer.error_message, INVALID, " is missing")


def test_malformed_tables_are_long_and_the_server_lives_on(server: Running) -> None:
    assert len(ENSEMBLE) + len(PARAMETERS) + len(TENSORS) >= 60
    with Client(server.grpc) as client:
        assert client.generate("Hello", GenerateOptions(max_tokens=2)).text
    assert "Traceback" not in server.log


def test_unary_server_refuses_stream_and_several_sequences(unary_server: Running) -> None:
    for fields in ({"stream": True}, {"num_return_sequences": 2}):
        reply = httpx.post(f"{unary_server.http}/v2/models/ensemble/generate", json=_body(fields), timeout=30)
        assert reply.status_code == 400
        _check(reply.json()["error"], INVALID, "decoupled")
