"""``truncate_prompt_tokens: -1``: a prompt is cut to what leaves room for the answer that was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inflight.gateway.engine_client import GenerateRequest
from inflight.resources import DEMO
from inflight.settings.deployment import load_deployment
from tests.gateway.support.gateways import Inside
from tests.gateway.support.scripted import Script, scripted

CHAT, MESSAGES, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"
LONG = "Hi " * 5000
"""Longer than the context."""
DEFAULT = load_deployment(DEMO).limits.default_max_tokens


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Inside, Script]]:
    with scripted(model_name="model") as running:
        yield running


def ask(running: Inside, path: str, text: str, **more: Any) -> dict[str, Any]:
    prompts = {COMPLETIONS: {"prompt": text}, RESPONSES: {"input": text}}
    prompt = prompts.get(path, {"messages": [{"role": "user", "content": text}]})
    with running.client() as client:
        answer = client.post(path, json={"model": "model", "truncate_prompt_tokens": -1, **prompt, **more})
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body


def asked_of_engine(served: tuple[Inside, Script], path: str, text: str, **more: Any) -> GenerateRequest:
    running, script = served
    script.text = "Yes."
    ask(running, path, text, **more)
    assert script.request is not None
    return script.request


@pytest.mark.parametrize(
    ("path", "more", "room"),
    [
        (CHAT, {"max_completion_tokens": 700}, 700),
        (CHAT, {}, DEFAULT),
        (MESSAGES, {"max_tokens": 700}, 700),
        (MESSAGES, {"max_tokens": 10**6}, None),  # half of the context
        (RESPONSES, {"max_output_tokens": 700}, 700),
        (RESPONSES, {}, DEFAULT),
        (COMPLETIONS, {"max_tokens": 700}, 700),
        (COMPLETIONS, {}, 16),
    ],
)
def test_room_is_kept_for_the_answer(
    served: tuple[Inside, Script], path: str, more: dict[str, Any], room: int | None
) -> None:
    longest = served[0].gateway.max_model_len
    assert longest is not None
    request = asked_of_engine(served, path, LONG, **more)
    assert request.max_tokens == (longest // 2 if room is None else room)
    assert len(request.prompt) + request.max_tokens == longest


@pytest.mark.parametrize(("path", "limit"), [(CHAT, {}), (MESSAGES, {"max_tokens": 700}), (RESPONSES, {})])
def test_a_prompt_that_leaves_the_room_is_not_cut(
    served: tuple[Inside, Script], path: str, limit: dict[str, int]
) -> None:
    whole = asked_of_engine(served, path, "Hi", **limit, truncate_prompt_tokens=None)
    assert asked_of_engine(served, path, "Hi", **limit).prompt == whole.prompt


@pytest.mark.parametrize("kept", [-1, 5])
def test_a_response_says_that_its_prompt_may_be_cut(served: tuple[Inside, Script], kept: int) -> None:
    running, script = served
    script.text = "Yes."
    assert ask(running, RESPONSES, "Hi", truncate_prompt_tokens=kept)["truncation"] == "auto"
    assert ask(running, RESPONSES, "Hi", truncate_prompt_tokens=None)["truncation"] == "disabled"


def test_a_response_is_not_cut_where_truncation_is_disabled(served: tuple[Inside, Script]) -> None:
    running, _ = served
    asked = {"model": "model", "input": "Hi", "truncation": "disabled"}
    with running.client() as client:
        error = client.post(RESPONSES, json={**asked, "truncate_prompt_tokens": 5})
        assert (error.status_code, error.json()["error"]["param"]) == (400, "truncation")
        assert client.post(RESPONSES, json=asked).json()["truncation"] == "disabled"


@pytest.mark.parametrize(("path", "more"), [(CHAT, {}), (MESSAGES, {"max_tokens": 5}), (COMPLETIONS, {})])
def test_no_room_is_kept_in_a_context_that_is_not_known(
    served: tuple[Inside, Script], path: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, _ = served
    monkeypatch.setattr(type(running.gateway), "max_model_len", None)
    prompt = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Hi"}]}
    with running.client() as client:
        answer = client.post(path, json={"model": "model", "truncate_prompt_tokens": -1, **prompt, **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
    assert "limits.max_sequence_length" in answer.json()["error"]["message"]


def test_nothing_is_left_of_no_prompt(served: tuple[Inside, Script]) -> None:
    running, _ = served
    with running.client() as client:
        error = client.post(COMPLETIONS, json={"model": "model", "prompt": "Hi", "truncate_prompt_tokens": 0})
    assert (error.status_code, error.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
