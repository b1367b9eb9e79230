"""Hints over HTTP, on every API: obeyed where the chat template knows them, else left out and named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx

from inflight.text.chat import ChatTemplate
from inflight.text.messages import Message
from tests.gateway.support.gateways import Inside
from tests.gateway.support.scripted import Script, scripted
from tests.support.tables import each_row

Json = dict[str, Any]
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT, RESPONSES = ("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/responses", {"input": "Hi"})
MESSAGE = ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9})
COUNT = ("/v1/messages/count_tokens", {"messages": MESSAGES})
Api = tuple[str, Json]
KNOWS_BOTH = "{{ reasoning_effort }} {{ verbosity }}"
KNOWS_LOW = (
    "{% if reasoning_effort is defined and reasoning_effort != 'low' %}{{ raise_exception('no such level') }}"
    "{% endif %}{{ reasoning_effort }} so"
)


@contextmanager
def knowing(template: str, **settings: Any) -> Iterator[tuple[Inside, Script]]:
    """Serve an engine that says something, with a chat template."""
    with scripted(**settings) as (running, script):
        script.text = "Yes."
        app: Any = running.server.config.app
        app.state.gateway = replace(app.state.gateway, chat_template=ChatTemplate(template, {}))
        yield running, script


def post(running: Inside, api: Api, fields: Json) -> httpx.Response:
    path, body = api
    with running.client() as client:
        return client.post(path, json={"model": running.gateway.model_name} | body | fields)


def prompt(running: Inside, script: Script) -> str:
    """Return the prompt of the last request."""
    assert script.request is not None
    return running.gateway.tokenizer.decode(list(script.request.prompt))


FUNCTION = {"type": "function", "function": {"name": "add"}}
HINTS: list[tuple[Api, Json, str]] = [
    (CHAT, {"tools": [{"type": "web_search"}, {"type": "custom", "custom": {"name": "x"}}]},
     "tools[0].web_search, tools[1].custom"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"verbosity": "low", "store": True}, "verbosity, store"),
    (CHAT, {"service_tier": "priority", "prediction": {}, "web_search_options": {}},
     "service_tier, prediction, web_search_options"),
    (("/v1/completions", {"prompt": "Hi"}), {"store": True}, "store"),
    (RESPONSES, {"reasoning": {"effort": "high"}}, "reasoning.effort"),
    (RESPONSES, {"text": {"verbosity": "low"}, "store": True}, "store, text.verbosity"),
    (MESSAGE, {"output_config": {"effort": "high"}}, "output_config.effort"),
    (COUNT, {"output_config": {"effort": "high"}}, "output_config.effort"),
]  # fmt: skip


@each_row("api, fields, named", HINTS)
def test_a_hint_that_the_template_does_not_know_is_left_out_and_named(api: Api, fields: Json, named: str) -> None:
    with knowing("Hi") as (running, _):
        answer = post(running, api, fields)
        assert (answer.status_code, answer.headers.get("x-ignored-fields")) == (200, named), answer.text
    with knowing("Hi", strict_fields=True) as (running, _):
        answer = post(running, api, fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, named.split(", ")[0]), answer.text


def test_an_allowed_tool_that_is_no_function_refuses_no_chat() -> None:
    odd = {"type": "custom", "custom": {"name": "x"}}
    for tools, mode, answered in (
        ([FUNCTION, odd], "auto", "tools[1].custom, tool_choice.allowed_tools.tools[1].custom"),
        ([FUNCTION, odd], "required", "tool_choice.allowed_tools.tools[1].type"),
        ([odd], "auto", "tool_choice.allowed_tools.tools"),
    ):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
        with scripted() as (running, script):
            script.text = "Yes."
            answer = post(running, CHAT, {"tools": [FUNCTION, odd], "tool_choice": choice})
        if mode == "auto" and FUNCTION in tools:
            assert (answer.status_code, answer.headers.get("x-ignored-fields")) == (200, answered), answer.text
        else:
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, answered), answer.text


KNOWN: list[tuple[Api, Json]] = [
    (CHAT, {"reasoning_effort": "high", "verbosity": "low"}),
    (RESPONSES, {"reasoning": {"effort": "high"}, "text": {"verbosity": "low"}}),
    (MESSAGE, {"output_config": {"effort": "high"}, "chat_template_kwargs": {"verbosity": "low"}}),
]


@each_row("api, fields", KNOWN)
def test_a_hint_that_the_template_knows_reaches_it(api: Api, fields: Json) -> None:
    with knowing(KNOWS_BOTH, strict_fields=True) as (running, script):
        answer = post(running, api, fields)
        assert (answer.status_code, answer.headers.get("x-ignored-fields")) == (200, None), answer.text
        assert prompt(running, script) == "high low"


@each_row(
    "template, shown",
    [(KNOWS_BOTH, ("high", "low")), ("Hi", (None, None)), ("{{ verbosity }}", (None, "low"))],
)
def test_a_response_repeats_the_hints_that_are_obeyed(template: str, shown: tuple[str | None, str | None]) -> None:
    hints = {"reasoning": {"effort": "high"}, "text": {"verbosity": "low"}}
    with knowing(template) as (running, _):
        whole = post(running, RESPONSES, hints).json()
        assert (whole["reasoning"]["effort"], whole["text"].get("verbosity")) == shown
        stream = post(running, RESPONSES, {**hints, "stream": True}).text
        assert (f'"verbosity":"{shown[1]}"' in stream.replace(" ", "")) == (shown[1] is not None)
        assert ('"effort":"high"' in stream.replace(" ", "")) == (shown[0] is not None)


TOOL = {"tools": [FUNCTION]}
CALLED = {
    "messages": [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": FUNCTION["function"]}]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ]
}
OF_TOOLS: list[tuple[str, str, Json, str | None]] = [
    ("Hi", KNOWS_BOTH, {}, "verbosity"),
    ("Hi", KNOWS_BOTH, TOOL, None),
    ("Hi", KNOWS_BOTH, CALLED, None),
    ("Hi", KNOWS_BOTH, TOOL | {"tool_choice": "none"}, "verbosity"),
    ("Hi", KNOWS_BOTH, {"tools": [{"type": "web_search"}]}, "verbosity, tools[0].web_search"),
    (KNOWS_BOTH, "Hi", {}, None),
    (KNOWS_BOTH, "Hi", TOOL, "verbosity"),
    (KNOWS_BOTH, "Hi", CALLED, "verbosity"),
]
"""By both templates and fields of a chat: what is named as ignored."""


@each_row("template, with_tools, fields, named", OF_TOOLS)
def test_the_template_that_shows_the_chat_knows_the_hint(
    template: str, with_tools: str, fields: Json, named: str | None
) -> None:
    with knowing(template) as (running, script):
        app: Any = running.server.config.app
        both = ChatTemplate(template, {}, f"{with_tools}{{{{ tools }}}}")
        app.state.gateway = replace(app.state.gateway, chat_template=both)
        answer = post(running, CHAT, {"verbosity": "low", **fields})
        assert (answer.status_code, answer.headers.get("x-ignored-fields")) == (200, named), answer.text
        assert ("low" in prompt(running, script)) == (named is None)


def test_thinking_is_switched_in_the_template_that_shows_the_chat() -> None:
    thinks = "{{ enable_thinking }}"
    tools = {"tools": [{"name": "add", "input_schema": {"type": "object"}}]}
    for template, with_tools, fields, named in (
        ("Hi", thinks, {}, "thinking.type"),
        ("Hi", thinks, tools, None),
        (thinks, "Hi", tools, "thinking.type"),
    ):
        with knowing(template) as (running, _):
            app: Any = running.server.config.app
            both = ChatTemplate(template, {}, f"{with_tools}{{{{ tools }}}}")
            app.state.gateway = replace(app.state.gateway, chat_template=both)
            answer = post(running, MESSAGE, {"thinking": {"type": "disabled"}, **fields})
            assert (answer.status_code, answer.headers.get("x-ignored-fields")) == (200, named), answer.text


class Counting(ChatTemplate):
    """A template that counts what is rendered with it."""

    def render(self, messages: list[Message], options: Mapping[str, Any] | None = None) -> str:
        """Render, and count."""
        self.rendered = getattr(self, "rendered", 0) + 1
        return super().render(messages, options)


@each_row("api, fields", KNOWN)
def test_a_hint_is_tried_once(api: Api, fields: Json) -> None:
    with knowing(KNOWS_BOTH) as (running, _):
        app: Any = running.server.config.app
        plain, asked = (Counting(KNOWS_BOTH, {}) for _ in range(2))
        for template, more in ((plain, {}), (asked, fields)):
            app.state.gateway = replace(app.state.gateway, chat_template=template)
            assert post(running, api, more).status_code == 200
        hints = str(fields).count("effort") + ("text" in fields) + (api is CHAT)
        assert asked.rendered == plain.rendered + hints


@each_row("effort, named, said", [("low", None, "low so"), ("xhigh", "output_config.effort", " so")])
def test_a_level_that_the_template_refuses_is_left_out(effort: str, named: str | None, said: str) -> None:
    with knowing(KNOWS_LOW) as (running, script):
        answer = post(running, MESSAGE, {"output_config": {"effort": effort}})
        assert (answer.status_code, answer.headers.get("x-ignored-fields")) == (200, named), answer.text
        assert prompt(running, script) == said


def test_a_model_that_cannot_be_kept_from_thinking_answers_and_the_wish_is_named() -> None:
    with knowing("Hi") as (running, _):
        assert running.server.config.app.state.gateway.chat_format.has_reasoning  # type: ignore[union-attr]
        for api, fields, named in (
            (MESSAGE, {"thinking": {"type": "disabled"}}, "thinking.type"),
            (CHAT, {"reasoning_effort": "none"}, "reasoning_effort"),
        ):
            answer = post(running, api, fields)
            assert (answer.status_code, answer.headers.get("x-ignored-fields")) == (200, named), answer.text


def test_a_request_without_a_model_is_for_the_one_that_is_served() -> None:
    with knowing("Hi", model_name="mine", model_aliases=["other"]) as (running, _):
        for api in (CHAT, RESPONSES, MESSAGE, ("/v1/completions", {"prompt": "Hi"})):
            with running.client() as client:
                answer = client.post(api[0], json=api[1])
            assert (answer.status_code, answer.json().get("model")) == (200, "mine"), answer.text
            for given, told in ({"model": None}, "mine"), ({"model": "other"}, "other"):
                answer = post(running, api, given)
                assert (answer.status_code, answer.json().get("model")) == (200, told), answer.text
            assert post(running, api, {"model": "none"}).status_code == 404
