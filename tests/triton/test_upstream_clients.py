"""Clients of the upstream TensorRT-LLM ensemble work unchanged, in streaming and in unary deployments."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http

from inflight.resources import DEMO
from inflight.text.tokenizer import Tokenizer
from tests.triton.support.servers import Running
from tests.triton.support.upstream_clients import PERF_OUTPUTS, TextClient, tensor
from tests.triton.support.upstream_engine_client import EngineClient

pytestmark = pytest.mark.any_engine
PROMPT = "What is a paged KV cache?"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_checkpoint(DEMO / "model")


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode_batch([PROMPT])[0]


@pytest.fixture(scope="module")
def reference(server: Running, prompt: list[int]) -> list[int]:
    """What the prompt gives, prompt included; the programs compare with such a list of their own."""
    [tokens] = EngineClient(server.grpc, prompt, streaming=True).run()
    assert len(tokens) == len(prompt) + 16
    return tokens


@pytest.fixture(params=["streaming", "unary"])
def mode(request: pytest.FixtureRequest, server: Running, unary_server: Running) -> tuple[Running, dict[str, Any]]:
    """A deployment on ``engine``, and the option that its users start the programs with."""
    if request.param == "streaming":
        return server, {"streaming": True}
    return unary_server, {}


STOP_MS = 20
"""Soon: a fast engine has made the whole answer before a later stop."""
Mode = tuple[Running, dict[str, Any]]


def _most_tokens(server: Running) -> int:
    """Return the length of a request that is to outlast a stall; what stands in for a compiled engine takes 1024."""
    return 900 if server.engine == "tensorrtllm" else 1900


def test_engine_client_output(mode: Mode, prompt: list[int], reference: list[int]) -> None:
    server, options = mode
    assert EngineClient(server.grpc, prompt, **options).run() == [reference]


def test_engine_client_without_the_prompt(mode: Mode, prompt: list[int], reference: list[int]) -> None:
    server, options = mode
    client = EngineClient(server.grpc, prompt, exclude_input_in_output=True, **options)
    assert client.run() == [reference[len(prompt) :]]


def test_engine_client_stops_by_message(mode: Mode, prompt: list[int]) -> None:
    server, options = mode
    # Where no reply comes before the end, a stop may be too early, or too late: it stops nothing then.
    for stop_ms in (STOP_MS, 100, 250, 500):
        client = EngineClient(
            server.grpc,
            prompt,
            request_output_len=_most_tokens(server),
            stop_after_ms=stop_ms,
            request_id=f"stop me after {stop_ms}",
            **options,
        )
        with contextlib.suppress(AssertionError):  # the program's own: nothing was stopped
            [tokens] = client.run()
            break
    else:
        pytest.fail("no stop was in time")
    assert client.cancelled or client.streaming  # only a unary stop has a reply of its own
    assert len(prompt) <= len(tokens) < len(prompt) + _most_tokens(server)


def test_engine_client_stops_by_cancelling(mode: Mode, prompt: list[int]) -> None:
    server, options = mode
    client = EngineClient(
        server.grpc,
        prompt,
        request_output_len=_most_tokens(server),
        stop_after_ms=STOP_MS,
        stop_via_request_cancel=True,
        **options,
    )
    [tokens] = client.run()
    assert client.cancelled
    assert len(tokens) < len(prompt) + _most_tokens(server)


def test_engine_client_requested_outputs(mode: Mode, prompt: list[int], reference: list[int]) -> None:
    server, options = mode
    client = EngineClient(server.grpc, prompt, requested_outputs=["output_ids", "sequence_length"], **options)
    assert client.run() == [reference]


def test_engine_client_scores_and_figures(mode: Mode, prompt: list[int]) -> None:
    server, options = mode
    client = EngineClient(
        server.grpc,
        prompt,
        return_log_probs=True,
        return_context_logits=True,
        return_generation_logits=True,
        return_perf_metrics=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        **options,
    )
    client.run()
    vocab = 4096
    assert client.replies[-1].as_numpy("context_logits").shape == (1, len(prompt), vocab)
    last = client.replies[-1]
    upstream = server.engine == "tensorrtllm"
    in_each = [reply.as_numpy("context_logits").size > 0 for reply in client.replies]
    assert in_each == [upstream] * (len(in_each) - 1) + [True]
    logits = [reply.as_numpy("generation_logits") for reply in client.replies]
    if upstream and client.streaming:  # as this backend shapes those of a stream: beams behind tokens
        assert np.concatenate(logits, axis=1).shape == (1, 16, 1, vocab)
    else:
        assert np.concatenate(logits, axis=2).shape == (1, 1, 16, vocab)
    log_probs = np.concatenate([reply.as_numpy("output_log_probs")[0, 0] for reply in client.replies])
    if upstream:  # each response has those of all tokens so far
        log_probs = last.as_numpy("output_log_probs")[0, 0]
    assert log_probs.shape == (16,)
    assert last.as_numpy("cum_log_probs")[0, 0] == pytest.approx(log_probs.sum(), rel=1e-4)
    figures = {name: last.as_numpy(name).item() for name in PERF_OUTPUTS}
    times = [figures[f"{name}_time_ns"] for name in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert times == sorted(times)
    assert figures["kv_cache_alloc_total_blocks"] >= 1
    assert last.as_numpy("num_input_tokens").item() == len(prompt)
    counted = last.as_numpy("output_ids").size if upstream else 16  # it counts what it sends, the prompt included
    assert last.as_numpy("num_output_tokens").item() == counted


SCORES = ("return_log_probs", "return_context_logits", "return_generation_logits", "return_perf_metrics")


@pytest.mark.parametrize("by_cancelling", [False, True])
def test_engine_client_stops_with_scores(server: Running, prompt: list[int], by_cancelling: bool) -> None:
    """However a stream ends, the program finds what it asked for in the last response that it got."""
    client = EngineClient(
        server.grpc,
        prompt,
        streaming=True,
        request_output_len=_most_tokens(server),
        stop_after_ms=STOP_MS,
        stop_via_request_cancel=by_cancelling,
        request_id=f"scores {by_cancelling}",
        **dict.fromkeys(SCORES, True),
    )
    [tokens] = client.run()
    assert len(tokens) > len(prompt)


def test_engine_client_requests_scores_by_name(mode: Mode, prompt: list[int], reference: list[int]) -> None:
    """The program requires that each response has all that it names, and nothing else."""
    server, options = mode
    scores = "cum_log_probs output_log_probs context_logits generation_logits".split()
    client = EngineClient(
        server.grpc,
        prompt,
        requested_outputs=["output_ids", "sequence_length", *scores, *PERF_OUTPUTS],
        **dict.fromkeys(SCORES, True),
        **options,
    )
    assert client.run() == [reference]


@pytest.mark.parametrize("streaming", [True, False])
def test_engine_client_return_sequences_with_scores(server: Running, prompt: list[int], streaming: bool) -> None:
    """It stacks the last scores of the sequences, which must therefore be alike in shape."""
    client = EngineClient(
        server.grpc, prompt, streaming=streaming, num_return_sequences=3, top_k=50, **dict.fromkeys(SCORES, True)
    )
    assert [len(tokens) for tokens in client.run()] == [len(prompt) + 16] * 3


def test_engine_client_return_sequences(server: Running, prompt: list[int], reference: list[int]) -> None:
    """Sequences behind the first must differ when they are sampled; hot, for the demo model is very sure of itself."""
    client = EngineClient(server.grpc, prompt, num_return_sequences=3, temperature=20.0, top_k=50)
    sequences = client.run()
    assert all(tokens[: len(prompt)] == prompt and len(tokens) == len(reference) for tokens in sequences)
    assert len({tuple(tokens) for tokens in sequences}) == 3


def test_text_client(mode: Mode) -> None:
    server, options = mode
    [text] = TextClient(server.grpc, PROMPT, output_len=24, **options).run()
    [without] = TextClient(server.grpc, PROMPT, output_len=24, exclude_input_in_output=True, **options).run()
    assert text == (without if options else PROMPT + without)
    assert "blocks" in text


def test_text_client_options(mode: Mode) -> None:
    server, options = mode
    client = TextClient(
        server.grpc,
        PROMPT,
        output_len=24,
        request_id="7",
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        stop_words=["stores"],
        bad_words=["paged"],
        embedding_bias_words=["fixed"],
        embedding_bias_weights=[-3.0],
        return_log_probs=True,
        return_context_logits=True,
        return_generation_logits=True,
        return_perf_metrics=True,
        end_id=-1,
        pad_id=50256,
        exclude_input_in_output=True,
        **options,
    )
    [text] = client.run()
    assert "stores" not in text
    assert "paged" not in text
    for reply in client.replies:  # the program reads the figures of each
        assert [reply.as_numpy(name).shape for name in PERF_OUTPUTS] == [(1, 1)] * len(PERF_OUTPUTS)


@pytest.mark.parametrize("streaming", [True, False])
def test_text_client_batches(server: Running, streaming: bool) -> None:
    """The program reads one row of each reply, so a batch needs a deployment that streams, as it did upstream."""
    prompts = [PROMPT, "What is TTFT?", "Hello"]
    alone = TextClient(server.grpc, prompts, output_len=12, streaming=streaming).run()
    assert all(alone)
    assert TextClient(server.grpc, prompts, output_len=12, streaming=streaming, batch_inputs=True).run() == alone


@pytest.mark.parametrize("batch_inputs", [False, True])
def test_text_client_sequences(server: Running, batch_inputs: bool) -> None:
    prompts = [PROMPT, "What is TTFT?"]
    client = TextClient(server.grpc, prompts, output_len=12, streaming=True, batch_inputs=batch_inputs)
    expected = [text for text in client.run() for _ in range(2)]
    client.num_return_sequences = 2
    assert client.run() == expected


def test_text_client_beams(mode: Mode) -> None:
    """The program reads the first of a reply's texts, which is the best beam's."""
    server, options = mode
    if server.engine != "pytorch":
        pytest.skip("this engine refuses beams by name")
    best, other = TextClient(server.grpc, PROMPT, output_len=12, beam_width=2, **options).run()
    assert best
    assert other == ""


def test_core_model_benchmark(mode: Mode) -> None:
    """`benchmark_core_model.py`: bare requests to the engine; output length from the first returned output."""
    server, options = mode
    ids = np.array([[5, 6, 7, 8]], np.int32)
    scalars = {"input_lengths": 4, "request_output_len": 10, "pad_id": 0, "end_id": 1}
    arrays = {"input_ids": ids} | {name: np.array([[value]], np.int32) for name, value in scalars.items()}
    if options:
        shapes: list[list[int]] = []
        with grpc.InferenceServerClient(server.grpc) as client:
            client.start_stream(callback=lambda result, error: shapes.append(result.get_response().outputs[0].shape))
            client.async_stream_infer(
                "tensorrt_llm", [tensor(name, array) for name, array in arrays.items()], request_id="1"
            )
            client.stop_stream()
        [shape] = shapes
    else:
        with http.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
            inputs = [tensor(name, array, http) for name, array in arrays.items()]
            shape = (
                client.async_infer("tensorrt_llm", inputs, request_id="1")
                .get_result()
                .get_response()["outputs"][0]["shape"]
            )
    assert list(shape) == [1, 1, 14]
