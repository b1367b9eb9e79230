"""Options to tensors, errors from text, chunks to completions: all without a server."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from inflight import contract, errors
from inflight.client.answer import Chunk, Collector, Usage, read_chunk
from inflight.client.errors import RequestTimeout, ServerUnreachable, from_wire
from inflight.client.grpc_transport import decode_response, encode_request
from inflight.client.http_transport import body, error_of, read_event
from inflight.client.request import INPUTS, GenerateOptions, build_request
from inflight.client.retry import Attempts, Retry
from inflight.errors import EngineFailure
from tests.support.tables import each_row


def test_every_option_is_a_supported_tensor_of_the_contract() -> None:
    for option in fields(GenerateOptions):
        assert option.name in INPUTS
        assert INPUTS[option.name].served_by != ()


def test_every_supported_input_of_ours_can_be_sent() -> None:
    offered = {option.name for option in fields(GenerateOptions)} | {"text_input", "messages", "stream"}
    logits = {"return_context_logits", "return_generation_logits"}  # the core model's business: too large for text
    assert {tensor.name for tensor in contract.ENSEMBLE_INPUTS if tensor.served_by != ()} - logits == offered


def test_what_is_not_set_is_not_sent() -> None:
    request = build_request("Hi", GenerateOptions(), stream=True)
    assert request.inputs == {"text_input": ["Hi"], "exclude_input_in_output": [True], "stream": [True]}


def test_chat_and_mappings_travel_as_json() -> None:
    messages = [{"role": "user", "content": "Grüß Gott 🙂"}]
    options = GenerateOptions(chat_template_kwargs={"enable_thinking": False})
    inputs = build_request(messages, options, stream=False).inputs
    assert "text_input" not in inputs
    assert json.loads(inputs["messages"][0]) == messages
    assert json.loads(inputs["chat_template_kwargs"][0]) == {"enable_thinking": False}


@each_row(
    ("option", "value", "word"),
    [
        ("max_tokens", 2**31, "32 bits"),
        ("max_tokens", 3.0, "whole number"),
        ("max_tokens", True, "whole number"),
        ("seed", -1, "0 to 2\\*\\*64"),
        ("temperature", math.nan, "finite"),
        ("temperature", "hot", "finite"),
        ("ignore_eos", 1, "true or false"),
        ("stop_words", "ab", "list"),
        ("stop_words", ["\ud800"], "UTF-8"),
        ("chat_template_kwargs", {"x": object()}, "JSON"),
    ],
)
def test_values_that_no_tensor_carries_are_refused_by_name(option: str, value: object, word: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=rf"(?s){option}.*{word}"):
        build_request("Hi", GenerateOptions(**{option: value}), stream=True)  # type: ignore[arg-type]


@each_row("prompt", [b"Hi", 3, ["Hi"], None])
def test_a_prompt_is_text_or_messages(prompt: object) -> None:
    with pytest.raises(errors.InvalidRequest, match="text or a list of chat messages"):
        build_request(prompt, GenerateOptions(), stream=True)  # type: ignore[arg-type]


def test_tensors_on_the_wire() -> None:
    options = GenerateOptions(seed=2**64 - 1, stop_words=["a", "ßß"], temperature=1, bad_words=[])
    request = build_request("é", options, stream=True, request_id="7")
    message = encode_request(request, "ensemble")
    tensors = {
        tensor.name: (tensor.datatype, list(tensor.shape), raw)
        for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True)
    }
    assert message.id == "7"
    assert tensors["text_input"] == ("BYTES", [1, 1], b"\x02\0\0\0\xc3\xa9")
    assert tensors["stop_words"] == ("BYTES", [1, 2], b"\x01\0\0\0a\x04\0\0\0\xc3\x9f\xc3\x9f")
    assert tensors["seed"] == ("UINT64", [1, 1], b"\xff" * 8)
    assert tensors["temperature"] == ("FP32", [1, 1], b"\0\0\x80\x3f")
    assert "bad_words" not in tensors
    assert body(request)["stop_words"] == ["a", "ßß"]
    assert body(request)["seed"] == 2**64 - 1
    assert json.dumps(body(request)["temperature"]) == "1.0"  # Triton refuses an integer for FP32
    assert body(request)["id"] == "7"


def test_response_without_its_raw_contents_is_not_taken_for_an_empty_one() -> None:
    response = pb.ModelInferResponse(model_name="ensemble")
    response.outputs.add(name="text_output", datatype="BYTES", shape=[1, 1])
    with pytest.raises(EngineFailure, match=r"cannot be decoded: .*zip"):
        decode_response(response)


@each_row(
    ("datatype", "raw"), [("FP64", b"12345678"), ("INT32", b"123"), ("BYTES", b"\x09\0\0\0a"), ("BYTES", b"\x01")]
)
def test_a_tensor_that_is_not_what_it_says_is_the_servers_failure(datatype: str, raw: bytes) -> None:
    response = pb.ModelInferResponse(model_name="ensemble", raw_output_contents=[raw])
    response.outputs.add(name="x", datatype=datatype, shape=[1, 1])
    with pytest.raises(EngineFailure, match="a response cannot be decoded"):
        decode_response(response)


@each_row(
    "outputs",
    [
        {"sequence_index": ["a"]},
        {"text_output": ["a", "b"], "cum_log_probs": [1.0]},
        {"top_log_prob_ids": [1], "top_log_probs": []},
        {"output_log_probs": [None], "text_output": 5},
    ],
)
def test_tensors_that_do_not_go_together_are_the_servers_failure(outputs: dict[str, Any]) -> None:
    with pytest.raises(EngineFailure, match="a response is not one of Inflight's"):
        read_chunk(outputs)


def test_an_error_that_is_no_text_is_still_the_servers() -> None:
    with pytest.raises(EngineFailure, match="broken"):
        read_event(b'data: {"error": {"message": "broken"}}')


@each_row(
    ("message", "status", "kind", "text"),
    [
        ("INVALID_ARGUMENT: top_p is 2; it must be at most 1", "INTERNAL", errors.InvalidRequest, "top_p is 2"),
        ("in ensemble 'ensemble', NOT_FOUND: no x", "INTERNAL", errors.NotFound, "no x"),
        ("UNIMPLEMENTED: beam_width is 2", "INVALID_ARGUMENT", errors.UnsupportedFeature, "beam_width"),
        ("DEADLINE_EXCEEDED: waited 3 s", "UNAVAILABLE", errors.DeadlineExceeded, "waited"),
        ("CANCELLED: stop", "INTERNAL", errors.RequestCancelled, "stop"),
        ("INTERNAL: broken", "UNKNOWN", errors.EngineFailure, "broken"),
        ("UNAVAILABLE: the queue is full", "INTERNAL", errors.QueueFull, "full"),
        ("Exceeds maximum queue size", "UNAVAILABLE", errors.QueueFull, "queue size"),
        ("UNAVAILABLE: the server is shutting down", "INTERNAL", errors.ShuttingDown, "down"),
        ("Server is stopping, no new requests", "UNAVAILABLE", errors.ShuttingDown, "stopping"),
        ("failed to connect to all addresses", "UNAVAILABLE", ServerUnreachable, "connect"),
        ("unknown model", "NOT_FOUND", errors.NotFound, "unknown model"),
        ("message: Stub process 'x_0_0' is not healthy.", "INTERNAL", ServerUnreachable, "not healthy"),
        ("message: Stub process 'x_0_0' is not healthy.", "INVALID_ARGUMENT", ServerUnreachable, "not healthy"),
        ("anything", "UNKNOWN", errors.EngineFailure, "anything"),
    ],
)
def test_errors_are_rebuilt_from_their_text(
    message: str, status: str, kind: type[errors.InflightError], text: str
) -> None:
    error = from_wire(message, status)
    assert type(error) is kind
    assert text in str(error)
    assert not str(error).startswith(kind.status)


def test_every_server_error_survives_the_wire() -> None:
    kinds = [kind for kind in errors.InflightError.__subclasses__() if kind.__module__ == errors.__name__]
    unsent = {errors.DeploymentError, errors.ShuttingDown}  # the latter is told by its words, see above
    for kind in set(kinds) - unsent:
        assert type(from_wire(kind("x").wire_message())) is kind


def test_client_errors_have_a_place_in_the_family() -> None:
    assert issubclass(ServerUnreachable, errors.InflightError)
    assert issubclass(RequestTimeout, errors.InflightError)


def test_a_status_of_http_tells_the_error_of_a_text_that_names_none() -> None:
    assert isinstance(error_of(503, b"no healthy upstream"), ServerUnreachable)
    assert error_of(418, b"no").status == "INTERNAL"


def test_chunk_reads_its_tensors() -> None:
    outputs = {
        "text_output": ["ab"],
        "sequence_index": [1],
        "finish_reason": ["stop"],
        "num_output_tokens": [2],
        "output_log_probs": [-1.0, -2.0],
        "top_log_prob_ids": [1, 2, 3, 4],
        "top_log_probs": [-1.0, -1.5, -2.0, -2.5],
    }
    chunk = read_chunk(outputs, top_log_probs=2)
    assert (chunk.text, chunk.index, chunk.finish_reason, chunk.usage) == ("ab", 1, "stop", Usage(None, 2))
    assert chunk.top_log_probs == (((1, -1.0), (2, -1.5)), ((3, -2.0), (4, -2.5)))


def test_collector_keeps_sequences_apart_and_knows_the_end() -> None:
    collector = Collector(2)
    for chunk in (Chunk("a"), Chunk("x", index=1), Chunk("b", finish_reason="stop", log_probs=(-1.0,))):
        collector.add(chunk)
    assert not collector.complete
    collector.add(Chunk("y", index=1, finish_reason="length"))
    assert collector.complete
    answer = collector.completion()
    assert (answer.text, answer.finish_reason, answer.log_probs) == ("ab", "stop", (-1.0,))
    assert [(other.text, other.finish_reason) for other in answer.alternatives] == [("xy", "length")]


def test_collector_notices_a_gap() -> None:
    collector = Collector()
    collector.add(Chunk("ab", start=0, end=2))
    with pytest.raises(errors.EngineFailure, match="up to 2, then from 3"):
        collector.add(Chunk("d", start=3, end=4))


@pytest.mark.parametrize("sequences", [1, 2])
def test_collector_refuses_a_sequence_that_was_not_asked_for(sequences: int) -> None:
    collector = Collector(sequences)
    collector.add(Chunk("a", index=sequences - 1))
    with pytest.raises(errors.EngineFailure, match=f"sequence_index is {sequences}; {sequences} sequences were asked"):
        collector.add(Chunk("b", index=sequences))


def test_pauses_grow_and_end() -> None:
    attempts = Attempts(Retry(attempts=5, first_pause=1.0, longest_pause=3.0))
    for most in (1.0, 2.0, 3.0, 3.0):
        pause = attempts.pause(errors.QueueFull("full"), progressed=False)
        assert pause is not None
        assert most / 2 <= pause <= most
    assert attempts.pause(errors.QueueFull("full"), progressed=False) is None
    assert Attempts(Retry(attempts=1)).pause(errors.QueueFull("full"), progressed=False) is None


def test_a_stream_has_an_id_of_its_own() -> None:
    ids = {build_request("a", GenerateOptions(), stream=True).id for _ in range(3)}
    assert len(ids) == 3
    assert "" not in ids
    assert build_request("a", GenerateOptions(), stream=False).id == ""
