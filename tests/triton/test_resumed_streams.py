"""Streams of a real server that a client broke off and resumes: they go on as if they had not been broken."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient import grpc

from inflight.contract import ENGINE
from tests.support.waiting import wait_until
from tests.triton.support.metrics_page import read_metric
from tests.triton.support.servers import Running
from tests.triton.support.tensors import grpc_inputs
from tests.triton.test_request_logs import line

pytestmark = pytest.mark.parametrize("engine", ["pytorch"], indirect=True)  # the others refuse it

ASK: dict[str, Any] = {
    "text_input": "Write a long story about a fox, naïvely.", "max_tokens": 48, "ignore_eos": True, "stream": True,
    "return_token_ids": True, "return_log_probs": True, "return_num_output_tokens": True, "min_tokens": 8,
    "stop_words": ["zebra", " the f", ", an"],
}  # fmt: skip
RESUMED = "inflight_resumed_requests_total"
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "sampled": {"temperature": 1.6, "top_p": 0.95},
    "seeded": {"temperature": 1.3, "seed": 7, "min_p": 0.01},
}


def _stream(server: Running, request_id: str = "", **body: Any) -> list[dict[str, Any]]:
    """Return the answer's chunks; ids and log-probs as lists."""
    answer = httpx.post(
        f"{server.http}/v2/models/ensemble/generate_stream", json=ASK | body | {"id": request_id}, timeout=60
    )
    chunks = [json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data:")]
    for chunk in chunks:
        assert "error" not in chunk, chunk
        for name in ("token_ids", "output_log_probs"):
            chunk[name] = np.atleast_1d(chunk[name]).tolist()
    return chunks


def _joined(chunks: list[dict[str, Any]], name: str) -> list[Any]:
    return [value for chunk in chunks for value in chunk[name]]


def _seed(chunks: list[dict[str, Any]]) -> dict[str, int]:
    assert all("used_seed" not in chunk for chunk in chunks[1:]), "it comes once"
    return {"seed": chunks[0]["used_seed"]} if "used_seed" in chunks[0] else {}


def _goes_on(server: Running, whole: list[dict[str, Any]], place: int, **body: Any) -> None:
    """Resume behind the chunk at ``place``; the rest is that of the whole answer."""
    seen, left = whole[: place + 1], whole[place + 1 :]
    rest = _stream(
        server, **body, resumed_ids=_joined(seen, "token_ids"), resumed_log_probs=_joined(seen, "output_log_probs")
    )
    assert rest[0]["text_start"] == seen[-1]["text_end"]
    assert "".join(chunk["text_output"] for chunk in rest) == "".join(chunk["text_output"] for chunk in left)
    for name in ("token_ids", "output_log_probs"):
        assert _joined(rest, name) == _joined(left, name)
    for name in ("text_end", "num_output_tokens", "finish_reason"):
        assert rest[-1][name] == whole[-1][name]
    assert rest[-1]["cum_log_probs"] == pytest.approx(whole[-1]["cum_log_probs"], rel=1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_goes_on_behind_any_chunk(server: Running, kind: str) -> None:
    whole = _stream(server, **KINDS[kind])
    seed = _seed(whole)
    assert bool(seed) == (kind in ("sampled", "seeded"))
    for place in range(0, len(whole) - 1, 3):
        _goes_on(server, whole, place, **KINDS[kind] | seed)


def test_each_sequence_of_a_broken_request_goes_on_alone(server: Running) -> None:
    sampling: dict[str, Any] = {"temperature": 1.5}
    chunks = _stream(server, num_return_sequences=2, **sampling)
    for index in range(2):
        whole = [chunk for chunk in chunks if chunk["sequence_index"] == index]
        for place in range(0, len(whole) - 1, 4):
            _goes_on(server, whole, place, **sampling, **_seed(whole))


def test_it_is_logged_and_counted(server: Running) -> None:
    before = read_metric(server.metrics, RESUMED)
    whole = _stream(server)
    ids, log_probs = whole[0]["token_ids"], whole[0]["output_log_probs"]
    _stream(server, "a resumed stream", resumed_ids=ids, resumed_log_probs=log_probs)
    assert line(server, "a resumed stream")["resumed_tokens"] == len(ids)
    assert wait_until(lambda: read_metric(server.metrics, RESUMED) > before, 30)


def test_the_engine_asked_directly_gives_new_ids_alone(server: Running) -> None:
    values = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 12, "streaming": True}
    whole = _ids(server, values)
    assert len(whole) == 12
    assert _ids(server, values | {"resumed_ids": whole[:5]}) == whole[5:]


def _ids(server: Running, values: dict[str, Any]) -> list[int]:
    """Return the ``output_ids`` of the engine's own stream, which the detokenizer does not see."""
    client = grpc.InferenceServerClient(server.grpc)
    answers: list[Any] = []
    client.start_stream(lambda result, error: answers.append(error or result))
    client.async_stream_infer(ENGINE, grpc_inputs(ENGINE, values), enable_empty_final_response=True)
    client.stop_stream()
    client.close()
    assert all(isinstance(answer, grpc.InferResult) for answer in answers), answers
    made = [answer.as_numpy("output_ids") for answer in answers]
    assert all(answer.as_numpy("resumed_output_ids") is None for answer in answers)
    return [token for ids in made if ids is not None for token in ids.reshape(-1).tolist()]
