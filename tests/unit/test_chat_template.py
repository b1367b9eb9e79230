"""Chat templates render as transformers renders them; bad messages are refused by name."""

from __future__ import annotations

import json

import pytest

from inflight.errors import DeploymentError, InvalidRequest
from inflight.text.chat import ChatTemplate, parse_messages

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hé <b> & 'x'?"},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": [{"type": "text", "text": "go on"}]},
]
TEMPLATES = {
    "loops and whitespace": """
{%- for m in messages %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
    {{- bos_token if loop.first }}[{{ m['role'] }}] {{ m['content'] | string | trim }}
{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}""",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "options": "{{ enable_thinking | default(true) }} {{ tools is none }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    [expected], _ = render_jinja_template(
        [MESSAGES], chat_template=TEMPLATES[name], add_generation_prompt=True, **special
    )
    assert ChatTemplate(TEMPLATES[name], special).render(MESSAGES) == expected


def test_options_reach_the_template() -> None:
    assert ChatTemplate("{{ enable_thinking }}", {}).render(MESSAGES, {"enable_thinking": False}) == "False"
    assert ChatTemplate("{{ add_generation_prompt }}", {}).render(MESSAGES, {"add_generation_prompt": False}) == "False"


@pytest.mark.parametrize(
    ("template", "options", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", {}, "roles must alternate"),
        ("{{ messages[9].role }}", {}, "messages"),
        ("{{ ''.__class__.__mro__ }}", {}, "unsafe"),
        ("{{ range(10000000) | list }}", {}, "Range too big"),
        ("{{ 1 / 0 }}", {}, "division"),
        ("{{ messages }}", {"messages": []}, "'messages' is not an option of this chat template"),
        ("{{ bos_token }}", {"bos_token": "y"}, "'bos_token' is not an option of this chat template"),
    ],
)
def test_what_a_template_refuses_is_the_requests_fault(template: str, options: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        ChatTemplate(template, {}).render(MESSAGES, options)


def test_a_broken_template_stops_the_start() -> None:
    with pytest.raises(DeploymentError, match="chat template, line 1"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("[", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("{}", "must be a JSON list"),
        ("[]", "at least one message"),
        ([1], r"messages\[0\] is int"),
        ([{"content": "x"}], r"messages\[0\].role is None"),
        ([{"role": "user"}], r"messages\[0\].content is null"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content is 5"),
        ([MESSAGES[0], {"role": "user", "content": [{"type": "image"}]}], r"messages\[1\].content has a part"),
    ],
)
def test_bad_messages_are_named(messages: object, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        parse_messages(messages if isinstance(messages, str) else json.dumps(messages))


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert parse_messages(json.dumps([{"role": "user", "content": parts}])) == [{"role": "user", "content": "one\ntwo"}]


def test_errors_can_always_be_sent() -> None:
    template = ChatTemplate("{{ raise_exception('role ' + messages[0].role) }}", {})
    with pytest.raises(InvalidRequest) as caught:
        template.render([{"role": "\ud800", "content": "x"}])
    assert caught.value.wire_message().encode()


def test_half_a_character_is_refused_wherever_it_comes_from() -> None:
    half = "\ud83d"
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": half}])
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        ChatTemplate("{{ mood }}", {}).render(MESSAGES, {"mood": half})
    assert ChatTemplate("{{ messages[0].role }}", {}).render([{"role": "user", "content": half}]) == "user"


def test_a_tool_call_may_have_no_content() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert parse_messages(json.dumps([message])) == [message]
