"""/v1/responses and /v1/messages before the real engine with the demo model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.support.gateways import Beside, inside
from tests.gateway.test_agents_answers import events_of
from tests.gateway.test_messages_events import replay as replay_message
from tests.gateway.test_responses_events import without_ids
from tests.support.properties import examples

Json = dict[str, Any]
QUESTION = "What is in-flight batching?"
sampling = st.fixed_dictionaries(
    {"seed": st.integers(0, 1000), "temperature": st.sampled_from((0, 0.7, 1.5))},
    optional={"top_p": st.sampled_from((0.5, 1)), "ignore_eos": st.just(True)},
)


def model(gateway: Beside) -> str:
    with gateway.client() as client:
        return str(client.get("/v1/models").json()["data"][0]["id"])


def answer(gateway: Beside, path: str, body: Json) -> Any:
    """Return the answer: the JSON of it, or its events where it is streamed."""
    with gateway.client() as client:
        response = client.post(path, json={"model": model(gateway), **body})
        if body.get("stream"):
            return events_of(response)
        assert response.status_code == 200, response.text
        return response.json()


def comparable(response: Json) -> Json:
    """Return a response without what another request may change: ids, times, and what the cache had."""
    return without_ids(response | {"usage": {**response["usage"], "input_tokens_details": None}})


@pytest.mark.proof
@settings(max_examples=examples(0.3))
@given(sampling=sampling, log_probs=st.integers(0, 2), tokens=st.integers(1, 24))
def test_a_streamed_response_is_the_whole_one(gateway: Beside, sampling: Json, log_probs: int, tokens: int) -> None:
    body = {"input": QUESTION, "max_output_tokens": tokens, "top_logprobs": log_probs, **sampling}
    whole = answer(gateway, "/v1/responses", body)
    last = answer(gateway, "/v1/responses", body | {"stream": True})[-1]["response"]
    assert comparable(last) == comparable(whole)
    for part in (part for item in whole["output"] if item["type"] == "message" for part in item["content"]):
        entries = part["logprobs"]
        assert (
            not log_probs or b"".join(bytes(one["bytes"]) for one in entries).decode(errors="replace") == part["text"]
        )


@pytest.mark.proof
@settings(max_examples=examples(0.3))
@given(sampling=sampling, tokens=st.integers(1, 24), stop=st.sampled_from(("engine", " ", "zzz")))
def test_a_streamed_message_is_the_whole_one(gateway: Beside, sampling: Json, tokens: int, stop: str) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    body = {"messages": messages, "max_tokens": tokens, "stop_sequences": [stop], **sampling}
    whole = answer(gateway, "/v1/messages", body)
    message = replay_message(answer(gateway, "/v1/messages", body | {"stream": True}))
    for name in ("content", "stop_reason", "stop_sequence", "model", "role", "type"):
        assert message[name] == whole[name]
    assert message["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    if whole["stop_reason"] == "stop_sequence":
        assert whole["stop_sequence"] == stop
        assert all(stop not in block.get("text", "") for block in whole["content"])


def test_counted_tokens_are_those_of_the_engine(gateway: Beside) -> None:
    prompt = {"system": "Be brief.", "messages": [{"role": "user", "content": QUESTION}]}
    count = answer(gateway, "/v1/messages/count_tokens", prompt)["input_tokens"]
    usage = answer(gateway, "/v1/messages", prompt | {"max_tokens": 3})["usage"]
    assert count == sum(usage[f"{name}input_tokens"] for name in ("", "cache_read_", "cache_creation_"))
    items = [{"role": "user", "content": QUESTION}]
    response = answer(gateway, "/v1/responses", {"instructions": "Be brief.", "input": items, "max_output_tokens": 3})
    assert response["usage"]["input_tokens"] == count
    assert response["usage"]["output_tokens"] == 3


def test_what_is_longer_than_the_context_is_counted_and_refused(gateway: Beside) -> None:
    prompt = {"messages": [{"role": "user", "content": "word " * 5000}]}
    assert answer(gateway, "/v1/messages/count_tokens", prompt)["input_tokens"] > 2048
    with gateway.client() as client:
        refused = client.post("/v1/messages", json={"model": model(gateway), "max_tokens": 3, **prompt})
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "maximum context length is 2048 tokens" in refused.json()["error"]["message"]


def test_the_text_follows_its_schema(gateway: Beside) -> None:
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    response = answer(gateway, "/v1/responses", {"input": QUESTION, "text": {"format": form}, "max_output_tokens": 99})
    assert "".join(response["output"][0]["content"][0]["text"].split()) in ('{"yes":true}', '{"yes":false}')
    output = {"format": {"type": "json_schema", "schema": schema}}
    messages = [{"role": "user", "content": QUESTION}]
    message = answer(gateway, "/v1/messages", {"messages": messages, "output_config": output, "max_tokens": 99})
    assert "".join(message["content"][0]["text"].split()) in ('{"yes":true}', '{"yes":false}')


def test_a_last_message_is_continued(gateway: Beside) -> None:
    begun = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "In-flight batching means"}]
    whole = answer(gateway, "/v1/messages", {"messages": begun[:1], "max_tokens": 20, "temperature": 0})
    rest = answer(gateway, "/v1/messages", {"messages": begun, "max_tokens": 16, "temperature": 0})
    assert (begun[1]["content"] + rest["content"][0]["text"]).startswith(whole["content"][0]["text"][:60])


@pytest.mark.parametrize("header", [{"x-api-key": "secret"}, {"authorization": "Bearer secret"}])
def test_anthropics_clients_send_their_key_in_either_header(tmp_path: Path, header: dict[str, str]) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    prompt = {"model": "model", "messages": [{"role": "user", "content": "Hi"}]}
    with inside(api_keys_file=keys, model_name="model") as running, running.client() as client:
        refused = client.post("/v1/messages/count_tokens", json=prompt, headers={"x-api-key": "wrong"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert client.post("/v1/messages/count_tokens", json=prompt, headers=header).json()["input_tokens"] > 0
