"""Errors as the OpenAI SDK raises them: the class by the status, ``param`` is the field, ``message`` has the words."""

from __future__ import annotations

from typing import Any

from harness import Gateway, main, raised
from openai import APIStatusError, AuthenticationError, BadRequestError, NotFoundError
from openai_chat import QUESTION, client_of


def check_an_unknown_model_is_not_found(gateway: Gateway) -> None:
    """On each endpoint that takes one."""
    client = client_of(gateway)
    calls = (
        lambda: client.chat.completions.create(model="no-such-model", messages=QUESTION),
        lambda: client.completions.create(model="no-such-model", prompt="a"),
        lambda: client.responses.create(model="no-such-model", input="a"),
        lambda: client.embeddings.create(model="no-such-model", input="a"),
    )
    for call in calls:
        error = raised(NotFoundError, call)
        assert error.code == "model_not_found", error.body
        assert "no-such-model" in error.message


def check_a_wrong_key_is_refused(gateway: Gateway) -> None:
    """Everywhere, with the error's code."""
    client = client_of(gateway, api_key="wrong")
    for call in (
        client.models.list,
        lambda: client.chat.completions.create(model=gateway.model, messages=QUESTION),
        lambda: client.responses.create(model=gateway.model, input="a"),
    ):
        error = raised(AuthenticationError, call)
        assert error.code == "invalid_api_key", error.body


def check_a_wrong_value_is_named(gateway: Gateway) -> None:
    """The field is in ``param`` and in the message; nothing of it is accepted."""
    client = client_of(gateway)
    wrong: dict[str, Any] = {
        "temperature": -1,
        "top_p": 2,
        "n": 0,
        "max_completion_tokens": 0,
        "frequency_penalty": "much",
        "stop": [1],
        "seed": "one",
        "logit_bias": {"a": 1},
        "top_logprobs": 50,
        "response_format": {"type": "poem"},
        "tools": [{"type": "function"}],
        "tool_choice": "perhaps",
        "stream_options": {"include_usage": True},
    }
    for name, value in wrong.items():
        body = {name: value} | ({"logprobs": True} if name == "top_logprobs" else {})
        error = raised(
            BadRequestError,
            lambda body=body: client.chat.completions.create(model=gateway.model, messages=QUESTION, extra_body=body),
        )
        assert (error.param or "").startswith(name), (name, error.body)
        assert name in error.message, (name, error.body)
        assert error.type == "invalid_request_error", (name, error.body)


def check_wrong_messages_are_named_by_their_place(gateway: Gateway) -> None:
    """No messages, no content, a part of an unknown type, content that is no text."""
    client = client_of(gateway)
    wrong: list[Any] = [
        [],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "smell", "smell": "roses"}]}],
        [{"role": "user", "content": 3}],
    ]
    for messages in wrong:
        error = raised(
            BadRequestError,
            lambda messages=messages: client.chat.completions.create(model=gateway.model, messages=messages),
        )
        assert (error.param or "").startswith("messages"), (messages, error.body)


def check_what_is_too_long_is_told_in_the_words_that_clients_look_for(gateway: Gateway) -> None:
    """In a chat and in a completion, streamed too."""
    client = client_of(gateway)
    long = "word " * 20_000
    calls = (
        lambda: client.chat.completions.create(model=gateway.model, messages=[{"role": "user", "content": long}]),
        lambda: client.chat.completions.create(
            model=gateway.model, messages=[{"role": "user", "content": long}], stream=True
        ),
        lambda: client.completions.create(model=gateway.model, prompt=long),
    )
    for call in calls:
        error = raised(BadRequestError, call)
        assert error.code == "context_length_exceeded", error.body
        assert "maximum context length is" in error.message


def check_no_path_answers_without_an_error_object(gateway: Gateway) -> None:
    """An unknown path is 404 and a wrong method 405, both with an ``error`` that the SDK reads."""
    client = client_of(gateway)
    error = raised(NotFoundError, lambda: client.get("/no/such/path", cast_to=object))
    assert error.body, "the SDK found no error object"
    error = raised(APIStatusError, lambda: client.get("/chat/completions", cast_to=object))
    assert error.status_code == 405
    assert error.body, "the SDK found no error object"


if __name__ == "__main__":
    main(globals())
