"""What upstream's test tools check: shapes over HTTP, and what a full queue says."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
import tritonclient.http as http

from tests.triton.support.servers import Running
from tests.triton.support.upstream_clients import TextClient, fire_together, tensor

PROMPT = "What is a paged KV cache?"


def test_upstream_tools_get_text_output_as_a_flat_list(unary_server: Running) -> None:
    """As upstream's postprocessing sends it: of a batch the rows one after another, without a dimension for them."""
    arrays = {
        "text_input": np.array([[PROMPT.encode()], [b"Hello"], [b"What is TTFT?"]], object),
        "max_tokens": np.full((3, 1), 12, np.int32),
    }
    with http.InferenceServerClient(f"127.0.0.1:{unary_server.http_port}") as client:
        result = client.infer("ensemble", [tensor(name, array, http) for name, array in arrays.items()])
    texts = result.as_numpy("text_output")
    assert texts.shape == (3,)
    assert [text.decode()[:5] for text in texts] == [PROMPT[:5], "Hello", "What "]
    body = {"text_input": PROMPT, "max_tokens": 12}
    reply = httpx.post(f"{unary_server.http}/v2/models/ensemble/generate", json=body, timeout=60).json()
    assert reply["text_output"] == texts[0].decode()


@pytest.mark.any_engine
def test_upstream_end_to_end_test_over_http(unary_server: Running) -> None:
    """`end_to_end_test.py`: empty word lists mean none, and the scores have the ranks it checks."""
    arrays = {
        "text_input": np.array([[PROMPT.encode()]], object),
        "max_tokens": np.array([[12]], np.int32),
        "bad_words": np.array([[b""]], object),
        "stop_words": np.array([[b""]], object),
        "return_log_probs": np.array([[True]]),
        "return_context_logits": np.array([[True]]),
        "return_generation_logits": np.array([[True]]),
    }
    with http.InferenceServerClient(f"127.0.0.1:{unary_server.http_port}") as client:
        result = client.infer("ensemble", [tensor(name, array, http) for name, array in arrays.items()])
    assert result.as_numpy("text_output").item().decode().startswith(PROMPT)
    assert result.as_numpy("context_logits").ndim == 3
    assert result.as_numpy("generation_logits").shape[:3] == (1, 1, 12)
    assert result.as_numpy("cum_log_probs").item() == pytest.approx(result.as_numpy("output_log_probs").sum(), rel=1e-4)


LONG = 600
"""Tokens of an answer that takes long enough for all to wait at once, however busy the machine is."""


def test_max_queue_size_over_http(narrow_server: Running) -> None:
    def call() -> str:
        body = {"text_input": PROMPT, "max_tokens": LONG, "ignore_eos": True, "return_log_probs": True}
        reply = httpx.post(f"{narrow_server.http}/v2/models/ensemble/generate", json=body, timeout=60)
        return f"{reply.status_code} {reply.text}"

    said = fire_together(16, call)
    refused = [one for one in said if "Maximum queue size of" in one]
    assert refused
    # Triton's generate endpoint answers 400 to every error; the status is the first word of the message.
    assert all("UNAVAILABLE" in one for one in refused)
    assert len(refused) == sum(not one.startswith("200") for one in said)


def test_max_queue_size_over_grpc(narrow_server: Running) -> None:
    def call() -> str:
        try:
            return TextClient(narrow_server.grpc, PROMPT, output_len=LONG, end_id=3, return_log_probs=True).run()[0]
        except AssertionError as error:
            return str(error)

    assert any("Exceeds maximum queue size" in one for one in fire_together(16, call))
