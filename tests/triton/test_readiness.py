"""What asks whether a server serves is answered on every engine, streaming or not."""

from __future__ import annotations

import grpc
import pytest
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from inflight.serve.generation import generate
from inflight.serve.stream_probe import question
from tests.triton.support.servers import Running


@pytest.mark.any_engine
def test_a_token_is_generated_where_models_stream(server: Running) -> None:
    assert generate(server.http, 180) == ""


@pytest.mark.any_engine
def test_a_token_is_generated_where_models_answer_once(unary_server: Running) -> None:
    assert generate(unary_server.http, 180) == ""


@pytest.mark.any_engine
def test_the_question_whether_streams_are_answered_is_refused_at_once(server: Running, unary_server: Running) -> None:
    for address in (server.grpc, unary_server.grpc):
        with grpc.insecure_channel(address) as channel:
            [answer] = GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([question()]), timeout=180)
            assert answer.error_message.startswith("Request for unknown model")
