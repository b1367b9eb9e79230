"""A call that a chat template writes is read back as the same call, in every notation, for any arguments."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.text.chat import ChatTemplate
from inflight.text.messages import check_messages
from inflight.text.output.find import find_chat_format
from inflight.text.output.tools import Tool
from tests.support.chat_formats import FAMILIES, Call, read_tokens, tokenizer_of

_CALLS = "{% for message in messages %}{% for call in message.tool_calls or [] %}{% set function = call.function %}"
_END = "{% endfor %}{% endfor %}"
_XML = """<tool_call>
<function={{ function.name }}>
{% for name, value in function.arguments | items %}
<parameter={{ name }}>
{{ (value | tojson if value is mapping or (value is sequence and value is not string) else value | string) + "\n" -}}
</parameter>
{% endfor %}
</function>
</tool_call>"""
_NOTATION = """{% macro shown(value) %}
{% if value is string %}{{ '<|"|>' + value + '<|"|>' }}
{%- elif value is boolean %}{{ value | lower }}
{%- elif value is mapping %}{{ "{" }}
{%- for key, one in value | dictsort %}{{ "," if not loop.first }}{{ key }}:{{ shown(one) }}{% endfor %}{{ "}" }}
{%- elif value is sequence %}[
{%- for one in value %}{{ "," if not loop.first }}{{ shown(one) }}{% endfor %}]
{%- else %}{{ value }}
{%- endif %}{% endmacro %}"""
_PYTHON = """{% macro python(value) %}
{% if value is string %}{{ value | tojson }}
{%- elif value is mapping %}{{ "{" }}
{%- for key, one in value.items() %}{{ ", " if not loop.first }}{{ key | tojson }}: {{ python(one) }}{% endfor %}
{{- "}" }}
{%- elif value is sequence %}[
{%- for one in value %}{{ ", " if not loop.first }}{{ python(one) }}{% endfor %}]
{%- else %}{{ value }}
{%- endif %}{% endmacro %}"""
TEMPLATES = {
    0: """<tool_call>\n{"name": "{{ function.name }}", "arguments": {{ function.arguments | tojson }}}\n</tool_call>""",
    3: _XML,
    4: """{{ "; " if not loop.first -}}
{"name": "{{ function.name }}", "parameters": {{ function.arguments | tojson }}}""",
    6: """{{ "[TOOL_CALLS][" if loop.first else ", " }}
{{- {"name": function.name, "arguments": function.arguments, "id": call.id} | tojson }}{{ "]" if loop.last }}""",
    7: "[TOOL_CALLS]{{ function.name }}[ARGS]{{ function.arguments | tojson }}",
    8: """{{ "<｜tool▁calls▁begin｜>" if loop.first }}<｜tool▁call▁begin｜>{{ function.name }}<｜tool▁sep｜>
{{- function.arguments | tojson }}<｜tool▁call▁end｜>{{ "<｜tool▁calls▁end｜>" if loop.last }}""",
    9: """{{ "<｜tool▁calls▁begin｜>" if loop.first else "\n" }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>
{{- function.name }}\n```json\n{{ function.arguments | tojson(indent=2) }}\n```<｜tool▁call▁end｜>
{{- "<｜tool▁calls▁end｜>" if loop.last }}""",
    10: """<|start|>assistant to=functions.{{ function.name }}<|channel|>commentary json<|message|>
{{- function.arguments | tojson }}<|call|>""",
    11: "<|tool_call>call:{{ function.name }}{{ shown(function.arguments) }}<tool_call|>",
    12: """{{ "```tool_code" if loop.first }}\n{{ function.name }}(
{%- for name, value in function.arguments.items() %}{{ ", " if not loop.first }}{{ name }}={{ python(value) }}
{%- endfor %}){{ "\n```" if loop.last }}""",
}
"""How the calls of families are written, by their place in ``FAMILIES``."""
_BEFORE = {11: _NOTATION, 12: _PYTHON}
INDICES = sorted(TEMPLATES)
_SCALARS = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
_TEXTS = st.text(max_size=12) | st.sampled_from(
    ["", "\n", "\n\n", "(from=1", "True", "null", "5", "</parameter>", "<|x|>", "{}"]
)
_KEYS = {11: st.from_regex(r"[\w.$@/-]([\w .$@/-]{0,6}[\w.$@/-])?", fullmatch=True)}
_NAMES = st.from_regex(r"[a-z]{1,4}_[0-9]", fullmatch=True) | st.sampled_from(["from", "class", "True"])


def _values(index: int) -> st.SearchStrategy[Any]:
    """Return any JSON, as far as the notation can write it."""
    return st.recursive(
        _SCALARS | _TEXTS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS.get(index, _TEXTS), inner, max_size=3),
        max_leaves=8,
    )


@functools.cache
def _template(index: int) -> ChatTemplate:
    return ChatTemplate(_BEFORE.get(index, "") + _CALLS + TEMPLATES[index] + _END, {})


def _type_of(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _schema(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a schema of these arguments: tags need to know which types there are."""
    types: dict[str, set[str]] = {}
    for arguments in calls:
        for key, value in arguments.items():
            types.setdefault(key, set()).add(_type_of(value))
    return {"type": "object", "properties": {key: {"type": sorted(one)} for key, one in types.items()}}


@pytest.mark.sweep(most=4)
@pytest.mark.parametrize("index", INDICES, ids=[f"{index}-{FAMILIES[index].name}" for index in INDICES])
@given(data=st.data())
def test_what_a_template_writes_is_read_back(index: int, data: st.DataObject) -> None:
    values = _values(index)
    if FAMILIES[index].name == "qwen_xml":  # a text ends where its tag does
        values = values.filter(lambda value: not isinstance(value, str) or "</parameter>" not in value)
    drawn = data.draw(st.lists(st.dictionaries(_NAMES, values, max_size=4), min_size=1, max_size=FAMILIES[index].most))
    calls: list[Call] = [(f"tool_{place}", arguments) for place, arguments in enumerate(drawn)]
    given_calls = [
        {"id": "a12345678", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for name, arguments in calls
    ]
    text = _template(index).render(check_messages([{"role": "assistant", "content": None, "tool_calls": given_calls}]))
    tools = [Tool(name, "", _schema([arguments])) for name, arguments in calls]
    tokenizer = tokenizer_of(index)
    tokens = tokenizer.encode_batch([text])[0]
    found = read_tokens(find_chat_format(tokenizer), tokenizer, tools, [[token] for token in tokens])
    assert (found.values, found.content) == (calls, ""), text
