"""Beam search through a whole server: every beam's ids, scores and text arrive, over gRPC and HTTP, streamed or not."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
import tritonclient.grpc as grpc

from inflight import errors
from inflight.client import Client, GenerateOptions, HttpClient
from inflight.resources import DEMO
from inflight.text.tokenizer import Tokenizer
from tests.triton.support.servers import Running
from tests.triton.support.tensors import grpc_inputs
from tests.triton.support.upstream_engine_client import EngineClient

PROMPT = "Once upon a time"
TOKENS = 10


@pytest.fixture
def beams(server: Running) -> Running:
    """A server that has beams."""
    if server.engine != "pytorch":
        with Client(server.grpc) as client, pytest.raises(errors.UnsupportedFeature, match="beam_width"):
            client.generate(PROMPT, GenerateOptions(max_tokens=4, beam_width=2))
        pytest.skip("this engine refuses beams by name, as it has just done")
    return server


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_checkpoint(DEMO / "model")


@functools.cache
def found(width: int, penalty: float, early_stopping: bool, *ends: int) -> list[tuple[list[int], float]]:
    """Return the new tokens and the score of each beam that transformers finds; ``ends``: ids, or the checkpoint's."""
    ends = ends or tuple(tokenizer().config.end_ids)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
    [ids] = tokenizer().encode_batch([PROMPT], True)
    beams = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        max_new_tokens=TOKENS,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=penalty,
        early_stopping=early_stopping,
        eos_token_id=list(ends),
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    rows = [[token for token in row[len(ids) :].tolist() if token not in ends] for row in beams.sequences]
    return list(zip(rows, beams.sequences_scores.tolist(), strict=True))


@pytest.mark.proof
@pytest.mark.sweep(most=3)
@pytest.mark.parametrize("kind", [Client, HttpClient])
@pytest.mark.parametrize("streams", [True, False])
def test_beam_width_gives_the_beams_of_transformers(
    beams: Running, kind: type[Client | HttpClient], streams: bool
) -> None:
    options = GenerateOptions(max_tokens=TOKENS, beam_width=3, return_log_probs=True)
    url = beams.grpc if kind is Client else beams.http
    with kind(url) as client:
        if streams:
            with client.stream(PROMPT, options) as stream:
                assert len(list(stream)) == 1, "which beams are given out is known at the end"
            answer = stream.completion()
        else:
            answer = client.generate(PROMPT, options)
    expected = found(3, 0.0, True)
    assert [one.text for one in (answer, *answer.alternatives)] == [tokenizer().decode(ids) for ids, _ in expected]
    scores = [one.cum_log_prob for one in (answer, *answer.alternatives)]
    assert scores == pytest.approx([score for _, score in expected], abs=1e-3)


@pytest.mark.proof
def test_engine_stage_takes_input_ids_with_beam_width(beams: Running) -> None:
    [ids] = tokenizer().encode_batch([PROMPT], True)
    values = {
        "input_ids": ids,
        "request_output_len": TOKENS,
        "end_ids": sorted(tokenizer().config.end_ids),
        "beam_width": 4,
        "len_penalty": 1.5,
        "early_stopping": False,
        "exclude_input_in_output": True,
    }
    answers: list[grpc.InferResult] = []
    with grpc.InferenceServerClient(beams.grpc) as client:
        client.start_stream(lambda result, error: answers.append(error or result))
        client.async_stream_infer("tensorrt_llm", grpc_inputs("tensorrt_llm", values))
        client.stop_stream()
    [answer] = answers
    lengths = answer.as_numpy("sequence_length")
    rows = [row[:length].tolist() for row, length in zip(answer.as_numpy("output_ids")[0], lengths[0], strict=True)]
    assert rows == [row for row, _ in found(4, 1.5, False)]


@pytest.mark.proof
def test_unary_beams_have_the_prompt_before_each(unary_server: Running) -> None:
    if unary_server.engine != "pytorch":
        pytest.skip("this engine refuses beams by name")
    values = {"text_input": PROMPT, "max_tokens": TOKENS, "beam_width": 3, "stream": False}
    with grpc.InferenceServerClient(unary_server.grpc) as client:
        answer = client.infer("ensemble", grpc_inputs("ensemble", values))
    texts = answer.as_numpy("text_output")
    assert texts.shape == (3,)
    assert all(text.decode().startswith(PROMPT) for text in texts)
    assert len(set(texts)) == 3
    assert answer.as_numpy("finish_reason").shape == (1, 1)


@pytest.mark.proof
def test_upstreams_client_gets_beams(beams: Running) -> None:
    [ids] = tokenizer().encode_batch([PROMPT], True)
    end_id = min(tokenizer().config.end_ids)
    client = EngineClient(
        beams.grpc,
        ids,
        streaming=True,
        beam_width=2,
        request_output_len=TOKENS,
        end_id=end_id,
        return_log_probs=True,
        requested_outputs=["output_ids", "sequence_length", "cum_log_probs", "output_log_probs"],
    )
    expected = found(2, 0.0, True, end_id)
    assert client.run() == [[*ids, *expected[0][0]], ids]  # of a stream, the program reads the best beam
    [reply] = client.replies
    lengths = reply.as_numpy("sequence_length")[0].tolist()
    assert lengths == [len(row) for row, _ in expected]
    for name in ("output_ids", "output_log_probs"):
        assert reply.as_numpy(name).shape == (1, 2, max(lengths))
    assert reply.as_numpy("cum_log_probs")[0].tolist() == pytest.approx([score for _, score in expected], abs=1e-3)
