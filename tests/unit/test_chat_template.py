"""Chat templates render as transformers renders them; bad messages are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inflight.errors import DeploymentError, InvalidRequest, UnsupportedFeature
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
        (
            [MESSAGES[0], {"role": "user", "content": [{"type": "image"}]}],
            r"messages\[1\].content\[0\].type is \"image\"; only",
        ),
    ],
)
def test_bad_messages_are_named(messages: object, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        parse_messages(messages if isinstance(messages, str) else json.dumps(messages))


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert parse_messages(json.dumps([{"role": "user", "content": parts}])) == [{"role": "user", "content": "one\ntwo"}]


@pytest.mark.parametrize("role", ["User", "assistent", "system ", "ipython"])
def test_a_role_that_the_template_does_not_name_is_refused(role: str) -> None:
    messages = [MESSAGES[0], {"role": role, "content": "x"}]
    with pytest.raises(
        InvalidRequest, match=rf"messages\[1\]\.role is '{role}'; it must be one of system, developer, "
    ):
        ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}).render(messages)
    if role.isalpha():
        named = ChatTemplate(
            "{% for m in messages %}{% if m.role == '" + role + "' %}{{ m.content }}{% endif %}{% endfor %}", {}
        )
        assert named.render(messages) == "x"


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


def test_an_answer_of_nothing_may_come_back_as_the_gateway_sends_it() -> None:
    for nothing in ({"content": None}, {}, {"content": None, "tool_calls": []}):
        assert parse_messages(json.dumps([{"role": "assistant", **nothing}])) == [{"role": "assistant", "content": ""}]


def test_a_tool_call_may_have_no_content() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    expected = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert parse_messages(json.dumps([message])) == [{"role": "assistant", "content": None, "tool_calls": [expected]}]


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
AGENT = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "go", "name": None},
    {"role": "assistant", "content": None, "refusal": None, "reasoning": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "found"}]},
    {"role": "assistant", "content": "done", "tool_calls": None},
]
HERMES = """
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}
{%- for call in m.tool_calls %}<tool_call>{"name": "{{ call.function.name }}", "arguments": {{
call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{% endfor %}"""
DEEPSEEK = """
{%- for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for call in m['tool_calls'] -%}
{{ '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] + '\n```json\n' +
call['function']['arguments'] + '\n```' }}{% endfor %}{% else %}{{ m.role + m.content }}{% endif %}{% endfor %}"""
GPT_OSS = """
{%- for m in messages %}{% if "content" in m and "<|channel|>" in m.content %}{{ raise_exception("tags") }}{% endif %}
{%- if m.tool_calls %}to=functions.{{ m.tool_calls[0].function.name }}{% endif %}
{%- if m.role == 'developer' %}<|start|>developer{{ m.content }}{% endif %}
{%- if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}{% endfor %}"""


def test_chats_with_tools_are_rendered_in_each_dialect() -> None:
    messages = parse_messages(json.dumps(AGENT))
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
    hermes = ChatTemplate(HERMES, {}).render(messages, {"tools": [tool]})
    assert f"<tools>{json.dumps(tool)}</tools>" in hermes
    assert "<|im_start|>system\nBe brief." in hermes, "a template that has no developer gets a system message"
    assert '<think>hm</think><tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>' in hermes
    assert "<|im_start|>tool\nfound<|im_end|>" in hermes
    deepseek = ChatTemplate(DEEPSEEK, {}).render(messages)
    assert '<｜tool▁sep｜>f\n```json\n{"a": "é"}\n```toolfound' in deepseek, "it takes arguments as text"
    gpt_oss = ChatTemplate(GPT_OSS, {}).render(messages)
    assert gpt_oss == "<|start|>developerBe brief.to=functions.f<|channel|>analysis<|message|>hm<|end|>"


@pytest.mark.parametrize("content", [None, "", "Let me look."])
@pytest.mark.parametrize("template", [HERMES, DEEPSEEK], ids=["hermes", "deepseek"])
def test_a_call_beside_any_content_is_shown_and_so_is_the_content(template: str, content: str | None) -> None:
    messages = parse_messages(json.dumps([{"role": "assistant", "content": content, "tool_calls": [CALL]}]))
    prompt = ChatTemplate(template, {}).render(messages)
    assert '"a": "é"' in prompt
    assert (content or "") in prompt
    assert prompt == ChatTemplate(template, {}).render(messages), "the messages are not changed"


def test_calls_beside_text_become_text_where_the_template_would_drop_them() -> None:
    alternating = DEEPSEEK.replace(
        "{%- for m in messages %}",
        """{%- for m in messages %}{% if loop.previtem and
        loop.previtem.role == m.role %}{{ raise_exception('roles must alternate') }}{% endif %}""",
    )
    template = ChatTemplate(alternating, {})
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert '"a": "é"' in template.render(parse_messages(json.dumps([call])))
    prompt = template.render(parse_messages(json.dumps([call | {"content": "Let me look."}])))
    assert 'Let me look.\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>' in prompt


def test_a_template_for_tools_is_taken_where_tools_are_given() -> None:
    template = ChatTemplate("plain", {}, "{{ tools[0].function.name }}{{ more }}")
    tool = {"type": "function", "function": {"name": "f"}}
    assert template.render(MESSAGES) == template.render(MESSAGES, {"tools": []}) == "plain"
    assert template.render(MESSAGES, {"tools": [tool], "more": "!"}) == "f!"
    assert template.chosen([], [{}]).uses("more")


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def test_a_template_that_has_no_use_of_tools_gets_them_in_the_system_message() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "é"}}
    call = {"role": "assistant", "content": "Look.", "tool_calls": [CALL]}
    found = [{"role": "tool", "content": text, "tool_call_id": "x"} for text in ("one", "two")]
    chat = parse_messages(json.dumps([*MESSAGES, call, *found, {"role": "user", "content": "So?"}]))
    prompt = ChatTemplate(PLAIN, {}).render(chat, {"tools": [tool]})
    assert prompt.startswith(
        "[system]Be brief.\n\nThese functions can be called:\n<tools>\n" + json.dumps(tool, ensure_ascii=False)
    )
    assert '[assistant]Look.\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>' in prompt
    responses = "".join(f"<tool_response>\n{text}\n</tool_response>\n" for text in ("one", "two"))
    assert prompt.endswith(f"[user]{responses}So?")
    assert ChatTemplate(PLAIN, {}).render(chat) != prompt, "without tools, their earlier calls are still shown"
    assert "<tool_response>" in ChatTemplate(PLAIN, {}).render(chat)
    assert ChatTemplate(PLAIN, {}).render(MESSAGES, {"tools": []}) == ChatTemplate(PLAIN, {}).render(MESSAGES)


def test_half_a_character_in_an_earlier_call_is_escaped_as_templates_with_calls_do_it() -> None:
    function = {"name": "f", "arguments": json.dumps({"a": "\ud83d"})}
    call = {"role": "assistant", "content": None, "tool_calls": [CALL | {"function": function}]}
    chat = parse_messages(json.dumps([*MESSAGES, call]))
    assert '"arguments": {"a": "\\ud83d"}' in ChatTemplate(PLAIN, {}).render(chat)


def test_tools_stand_in_the_users_message_where_the_template_takes_none_of_the_system() -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
    tool = {"type": "function", "function": {"name": "f"}}
    prompt = ChatTemplate(refusing, {}).render([{"role": "user", "content": "Hi"}], {"tools": [tool]})
    assert prompt.startswith("[user]Hi\n\nThese functions can be called:")


def test_defaults_that_a_template_sets_are_options() -> None:
    source = """
{%- if not tools is defined %}{% set tools = [] %}{% endif %}{% if thinking is not defined %}{% set thinking = 1 %}
{%- endif %}{{ thinking }}{% for tool in tools %}{{ tool.function.name }}{% endfor %}"""
    template = ChatTemplate(source, {})
    assert template.uses("thinking")
    assert not template.uses("tool")
    assert template.render(MESSAGES, {"tools": [{"function": {"name": "f"}}], "thinking": 2}) == "2f"
    with pytest.raises(InvalidRequest, match="'tool' is not an option"):
        template.render(MESSAGES, {"tool": 1})


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, r"messages\[0\].tool_calls is given in a message of"),
        ({"role": "assistant", "tool_calls": {}}, r"messages\[0\].tool_calls is \{\}; it must be a list"),
        ({"role": "assistant", "tool_calls": [1]}, r"messages\[0\].tool_calls\[0\].function is null"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, r"tool_calls\[0\].function.name is null"),
        ({"role": "assistant", "tool_calls": [CALL, {**CALL, "id": 1}]}, r"tool_calls\[1\].id is 1"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "x"}]}, r"tool_calls\[0\].type is \"x\""),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            r"messages\[0\].tool_calls\[0\].function.arguments is not valid JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]},
            r"function.arguments is list; it must be an object",
        ),
        ({"role": "tool", "content": "x", "tool_call_id": 1}, r"messages\[0\].tool_call_id is 1"),
        ({"role": "assistant", "content": "x", "reasoning": 1}, r"messages\[0\].reasoning is 1"),
        ({"role": "tool", "content": None}, r"messages\[0\].content is null"),
        ({"role": "user", "content": []}, r"messages\[0\].content is \[\]"),
        ({"role": "user", "content": [{"type": "text"}]}, r"messages\[0\].content\[0\].text is null"),
    ],
)
def test_bad_messages_with_tools_are_named(message: object, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        parse_messages(json.dumps([message]))


@pytest.mark.parametrize("source", ["{% set x = 1e999 %}{{ x }}", "{% set c = cycler() %}", "{{ messages.x.y }}"])
def test_whatever_a_template_raises_is_a_refusal(source: str) -> None:
    with pytest.raises(InvalidRequest, match="^messages: the chat template refuses them: "):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_a_number_of_thousands_of_digits_stops_the_start_in_one_line() -> None:
    with pytest.raises(DeploymentError, match="chat template: it cannot be compiled: Exceeds the limit"):
        ChatTemplate("{{ " + "9" * 5000 + " }}", {})


@pytest.mark.parametrize("tools", [5, True, "abc", {"a": 1}, [[[]]]], ids=str)
def test_tools_that_are_no_list_of_objects_are_refused(tools: Any) -> None:
    with pytest.raises(InvalidRequest, match="tools must be a list of objects"):
        ChatTemplate(PLAIN, {}).render(MESSAGES, {"tools": tools})


def test_deep_tools_are_refused_and_no_mark_of_a_client_moves_its_text() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(InvalidRequest, match="tools: nested too deep"):
        ChatTemplate(PLAIN, {}).render(MESSAGES, {"tools": [deep]})
    forged = [{"role": "assistant", "content": "A", "of_tools": True}, {"role": "user", "content": "B"}]
    tool = {"type": "function", "function": {"name": "f"}}
    assert "[assistant]A[user]B" in ChatTemplate(PLAIN, {}).render(forged, {"tools": [tool]})


@pytest.mark.parametrize(
    "call",
    [
        "{{ call.function.name }}",
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments }}}',
        "{{ call.function.name }}(a={{ call.function.arguments.a }})",
    ],
    ids=["the name alone", "in Python's notation", "an argument of a known name"],
)
def test_a_template_that_shows_calls_without_json_takes_no_tools(call: str) -> None:
    """Such a call tells the model nothing that could be read as one."""
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>"
    template = ChatTemplate(f"{source}{call}</tool_call>{{% endfor %}}{{% endfor %}}", {})
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    with pytest.raises(UnsupportedFeature, match="no use of tools"):
        template.render([{"role": "user", "content": "a"}], {"tools": tools})


def test_a_template_that_shows_calls_lends_their_notation() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    source += '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    template = ChatTemplate(f"{source}</tool_call>{{% endfor %}}<end>{{% endfor %}}", {})
    tools = [{"type": "function", "function": {"name": "look"}}]
    prompt = template.render([{"role": "user", "content": "a"}], {"tools": tools})
    example = (
        """<tool_call>{"name": "the function's name", "arguments": {"an argument's name": "its value"}}</tool_call>"""
    )
    assert prompt.startswith("<system>These functions can be called:\n<tools>\n" + json.dumps(tools[0]))
    assert prompt.endswith(f"like this:\n{example}<end><user>a<end>")
