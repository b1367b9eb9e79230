"""Errors name what is at fault by its place in the request, in the words that clients of each API look for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.support.gateways import Inside, inside

CHAT, MESSAGES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def running() -> Iterator[Inside]:
    with inside(ready=True, model_name="model") as running:
        yield running


def error_of(running: Inside, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with running.client() as client:
        answer = client.post(path, json={"model": "model", **body})
    assert answer.status_code == 400
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize(("prompt", "param"), [("", "prompt"), (["Hi", ""], "prompt[1]"), ([[5], []], "prompt[1]")])
def test_a_prompt_without_tokens_is_named(running: Inside, prompt: Any, param: str) -> None:
    assert error_of(running, COMPLETIONS, {"prompt": prompt})["param"] == param


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_a_token_that_the_vocabulary_has_not_is_named(running: Inside, field: str) -> None:
    size = running.gateway.tokenizer.config.vocab_size
    for path, prompt in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "Hi"})):
        assert error_of(running, path, {**prompt, field: [5, size]})["param"] == f"{field}[1]"


def test_two_limits_of_a_chat_say_the_same(running: Inside) -> None:
    error = error_of(running, CHAT, {"messages": HI, "max_tokens": 5, "max_completion_tokens": 6})
    assert error["param"] == "max_tokens"


def test_a_prompt_that_is_too_long_is_told_in_the_words_of_each_api(running: Inside) -> None:
    messages = [{"role": "user", "content": "Hi " * 5000}]
    with running.client() as client:
        count = client.post("/tokenize", json={"messages": messages}).json()["count"]
    longest = running.gateway.max_model_len
    words = f"This model's maximum context length is {longest} tokens"
    error = error_of(running, CHAT, {"messages": messages})
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(words)
    error = error_of(running, MESSAGES, {"messages": messages, "max_tokens": 5})
    assert error["message"].startswith(f"prompt is too long: {count} tokens > {longest - 1} maximum. {words}")
