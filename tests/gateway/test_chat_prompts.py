"""The prompt of a chat: where a last message ends that is continued, and which variables a request may give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from inflight.text.chat import ChatTemplate
from tests.gateway.support.answers import MODEL
from tests.gateway.support.gateways import Inside, inside
from tests.support.tables import each_row

TURNS = "{% for message in messages %}<{{ message.role }}>{{ MESSAGE }}</{{ message.role }}>\n{% endfor %}"
PLAIN = TURNS.replace("MESSAGE", "message.content")
STRIPPED = TURNS.replace("MESSAGE", "message.content | trim")
UPPER = TURNS.replace("MESSAGE", "message.content | upper")
TWICE = PLAIN + "Last: {{ messages[-1].content }}"
SHORT = TURNS.replace("MESSAGE", "message.content[:3]")


@pytest.fixture(scope="module")
def served() -> Iterator[Inside]:
    with inside(ready=True) as running:
        yield running


def prompt_of(served: Inside, template: str, **body: Any) -> Any:
    """Return the prompt of a chat as text, or the error."""
    app: Any = served.server.config.app
    app.state.gateway = replace(served.gateway, chat_template=ChatTemplate(template, {}))
    with served.client() as client:
        answer = client.post("/tokenize", json={"model": MODEL, **body}).json()
        if "error" in answer:
            return answer["error"]
        return client.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]


def continued(served: Inside, template: str, content: str) -> Any:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    return prompt_of(served, template, messages=messages, continue_final_message=True)


CONTINUED = [
    (PLAIN, "Once upon", "Once upon"),
    (PLAIN, "a", "a"),  # the text stands in what the template puts behind it, too
    (PLAIN, "assistant", "assistant"),
    (PLAIN, "Once ", "Once "),
    (STRIPPED, "Once ", "Once"),
    (STRIPPED, " a\n", "a"),
]


@each_row("row", CONTINUED)
def test_a_last_message_is_continued_at_its_end(served: Inside, row: tuple[str, str, str]) -> None:
    template, content, kept = row
    assert continued(served, template, content) == f"<user>Hi</user>\n<assistant>{kept}"


@pytest.mark.parametrize("template", [UPPER, TWICE, SHORT])
def test_a_last_message_that_the_prompt_does_not_have_once_is_not_continued(served: Inside, template: str) -> None:
    error = continued(served, template, "Once upon")
    assert error["param"] == "messages[1]"
    assert "cannot be continued" in error["message"]


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message"])
def test_a_variable_with_a_field_of_its_own_is_not_an_option(served: Inside, name: str) -> None:
    template = PLAIN + "{{ tools }}{{ documents }}{{ add_generation_prompt }}"
    messages = [{"role": "user", "content": "Hi"}]
    error = prompt_of(served, template, messages=messages, chat_template_kwargs={name: []})
    assert error["param"] == f"chat_template_kwargs.{name}"
    assert f"use the field {name}" in error["message"]


@pytest.mark.parametrize(
    ("template", "name", "effort", "value"),
    [
        ("{{ reasoning_effort }}", "reasoning_effort", "low", "high"),
        ("{{ enable_thinking }}", "enable_thinking", "none", True),
        ("{{ reasoning_effort }}{{ enable_thinking }}", "enable_thinking", "none", True),
    ],
)
def test_the_effort_is_said_once(served: Inside, template: str, name: str, effort: str, value: Any) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "reasoning_effort": effort,
        "chat_template_kwargs": {name: value},
    }
    app: Any = served.server.config.app
    app.state.gateway = replace(served.gateway, chat_template=ChatTemplate(PLAIN + template, {}))
    with served.client() as client:
        error = client.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == f"chat_template_kwargs.{name}"
