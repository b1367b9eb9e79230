"""Whether a guide leaves room for reasoning: only where the model may think, as its chat template has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from inflight.sampling import Guide
from inflight.text.chat import ChatTemplate
from tests.gateway.support.answers import MODEL
from tests.gateway.support.gateways import Inside
from tests.gateway.support.scripted import TEMPLATE, Script, scripted
from tests.support.tables import each_row

MESSAGES = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}<|assistant|>"
ON = "enable_thinking is defined and enable_thinking"
OPENS = MESSAGES + "{{ '<think>\n' if " + ON + " else '' }}"
MARKS = "{{ '<|think|>' if " + ON + " else '' }}" + MESSAGES
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"const": "42"}}}
OFF, THINKS = {"enable_thinking": False}, {"enable_thinking": True}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Inside, Script]]:
    with scripted(model_name=MODEL) as running:
        yield running


def guide_of(served: tuple[Inside, Script], template: str, variables: dict[str, Any]) -> Guide:
    """Return the guide of an answer in a form."""
    running, script = served
    app: Any = running.server.config.app
    app.state.gateway = replace(app.state.gateway, chat_template=ChatTemplate(template, {}))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "response_format": FORM}
    script.text = '"42"'
    with running.client() as client:
        answer = client.post("/v1/chat/completions", json={**body, "chat_template_kwargs": variables})
    assert answer.status_code == 200, answer.text
    assert script.request is not None
    assert script.request.guide is not None
    return script.request.guide


MAY_THINK = [(TEMPLATE, {}), (TEMPLATE, THINKS), (MESSAGES, {}), (MARKS, THINKS)]
IS_OFF = [(OPENS, {}), (OPENS, OFF), (MARKS, {}), (MARKS, OFF), (TEMPLATE, OFF)]


@each_row("row", MAY_THINK)
def test_where_the_model_may_think_the_guide_has_room_for_it(
    served: tuple[Inside, Script], row: tuple[str, dict[str, Any]]
) -> None:
    guide = guide_of(served, *row)
    assert guide.kind == "lark_grammar"
    assert "thought" in guide.text


@each_row("row", IS_OFF)
def test_where_thinking_is_off_the_form_holds_at_once(
    served: tuple[Inside, Script], row: tuple[str, dict[str, Any]]
) -> None:
    assert guide_of(served, *row).kind == "json_schema"
