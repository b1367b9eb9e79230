"""Conversations of agents for chat templates that are strict: what they refuse is said by the user."""

from __future__ import annotations

from typing import Any

from inflight.gateway.messages.request import read_message_request
from inflight.gateway.responses.request import read_request
from inflight.gateway.turns import TurnRules
from inflight.text.chat import ChatTemplate
from inflight.text.messages import check_messages
from tests.gateway.test_responses_request import enforces
from tests.support.tables import each_row

Json = dict[str, Any]
LOOSE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
FIRST = """
{%- for message in messages %}
{%- if message.role == "system" and not loop.first %}{{ raise_exception("the system must be first") }}{% endif %}
{{- "[" + message.role + "]" + message.content }}
{%- endfor %}"""
DROPS = """
{%- for message in messages %}
{%- if message.role in ("user", "assistant") or loop.first %}{{ "[" + message.role + "]" + message.content }}{% endif %}
{%- endfor %}"""
ALTERNATES = """
{%- set said = messages[1:] if messages[0].role == "system" else messages %}
{%- if messages[0].role == "system" %}{{ "[system]" + messages[0].content }}{% endif %}
{%- for message in said %}
{%- if (message.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("roles must alternate") }}{% endif %}
{{- "[" + message.role + "]" + message.content }}
{%- endfor %}"""
RULES = [
    (LOOSE, TurnRules(late_system=True, users_in_a_row=True)),
    (FIRST, TurnRules(late_system=False, users_in_a_row=True)),
    (DROPS, TurnRules(late_system=False, users_in_a_row=True)),
    (ALTERNATES, TurnRules(late_system=False, users_in_a_row=False)),
]


@each_row("source, rules", RULES)
def test_a_template_tells_what_it_takes(source: str, rules: TurnRules) -> None:
    assert TurnRules.of(ChatTemplate(source, {})) == rules
    assert TurnRules.of(None) == TurnRules()


CLAUDE: Json = {
    "max_tokens": 5,
    "system": "Be brief.",
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": "It is Monday."},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Go"},
    ],
}
CODEX: Json = {
    "instructions": "Be brief.",
    "input": [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": "In /home."},
        {"role": "user", "content": "Hi"},
        {"role": "developer", "content": "It is Monday."},
    ],
}
STRICT = "[system]Be brief.[user]Hi\nIt is Monday.[assistant]Yes?[user]Go"
PROMPTS: list[tuple[str, str, str]] = [
    (LOOSE, "[system]Be brief.[user]Hi[system]It is Monday.[assistant]Yes?[user]Go",
     "[system]Be brief.\n\nUse tools.[user]In /home.[user]Hi[system]It is Monday."),
    (FIRST, STRICT, "[system]Be brief.\n\nUse tools.[user]In /home.[user]Hi[user]It is Monday."),
    (DROPS, STRICT, "[system]Be brief.\n\nUse tools.[user]In /home.[user]Hi[user]It is Monday."),
    (ALTERNATES, STRICT, "[system]Be brief.\n\nUse tools.[user]In /home.\nHi\nIt is Monday."),
]  # fmt: skip


@each_row("source, claude, codex", PROMPTS)
def test_what_a_template_refuses_or_drops_is_said_by_the_user(source: str, claude: str, codex: str) -> None:
    template = ChatTemplate(source, {})
    rules = TurnRules.of(template)
    for chat, prompt in (
        (read_message_request(CLAUDE, strict=True, rules=rules).chat, claude),
        (read_request(CODEX, strict=True, rules=rules, enforces=enforces()).chat, codex),
    ):
        assert template.render(check_messages(chat["messages"])) == prompt
