"""Tools of the Responses API that are no plain functions: namespaces, custom tools, and tools of a server's own."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import llguidance
import llguidance.hf
import pytest
from transformers import PreTrainedTokenizerFast

from inflight.gateway.errors import ApiError
from inflight.gateway.responses.grammars import MOST_CHARACTERS, pattern_of_lark
from inflight.gateway.responses.tools import custom_arguments, custom_input
from inflight.resources import DEMO
from inflight.text.output.families import XmlFormat
from tests.engine.support.guiding import accepts
from tests.gateway.support.gateways import Inside
from tests.gateway.support.scripted import Script, scripted
from tests.gateway.test_agents_answers import events_of, post
from tests.gateway.test_responses_events import replay, without_ids
from tests.gateway.test_responses_request import TOOL, USER, read
from tests.support.tables import each_row

Json = dict[str, Any]
TOOL_NAMED = {"type": "function", "name": "add"}
SPACE = {"type": "namespace", "name": "math", "description": "Sums.", "tools": [TOOL, TOOL | {"name": "sub"}]}
NOTE = {"type": "custom", "name": "note", "description": "Takes notes."}
SEARCH = {"type": "web_search", "external_web_access": False}
PATCH = """
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Add File: " filename LF line+ | "*** Delete File: " filename LF -> gone
filename: /(.+)/
line: ("+" | "-" | " ") /(.*)/ LF  // of the file
%import common.LF
"""


def grammar(definition: str, syntax: str = "lark") -> Json:
    return NOTE | {"format": {"type": "grammar", "syntax": syntax, "definition": definition}}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Inside, Script]]:
    with scripted(model_name="model") as running:
        yield running


def test_a_namespace_is_its_functions() -> None:
    asked = read(strict=True, tools=[TOOL, SPACE])
    assert [tool["function"]["name"] for tool in asked.chat["tools"]] == ["add", "math__add", "math__sub"]
    shown = asked.shown["tools"][1]
    assert (shown["type"], [tool["name"] for tool in shown["tools"]]) == ("namespace", ["add", "sub"])
    assert asked.names.path("tools[2].function.parameters is odd") == "tools[1].tools[1].parameters is odd"


@each_row(
    "choice, named",
    [
        ({"type": "function", "name": "add", "namespace": "math"}, "math__add"),
        ({"type": "function", "name": "add"}, "add"),
        ({"type": "custom", "name": "note"}, "note"),
    ],
)
def test_a_choice_names_a_tool_as_calls_do(choice: Json, named: str) -> None:
    asked = read(tools=[TOOL, SPACE, NOTE], tool_choice=choice)
    assert asked.chat["tool_choice"] == {"type": "function", "function": {"name": named}}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [choice]}
    asked = read(tools=[TOOL, SPACE, NOTE], tool_choice=allowed)
    assert [tool["function"]["name"] for tool in asked.chat["tools"]] == [named]


def test_a_tool_of_a_server_is_left_out_and_named() -> None:
    asked = read(tools=[TOOL, SEARCH, {"type": "local_shell"}])
    assert asked.ignored == ("tools[1].web_search", "tools[2].local_shell")
    assert [tool["name"] for tool in asked.shown["tools"]] == ["add"]
    with pytest.raises(ApiError, match=r"tools\[1\].web_search has no effect"):
        read(strict=True, tools=[TOOL, SEARCH])


def test_calls_and_their_outputs_come_back_as_they_were_sent() -> None:
    calls = [
        {"type": "function_call", "call_id": "1", "name": "add", "namespace": "math", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "2", "name": "note", "input": 'Say "hi".\n'},
        {"type": "function_call_output", "call_id": "1", "output": "3"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "noted"},
    ]
    asked = read(strict=True, input=[USER, *calls], tools=[SPACE, NOTE])
    _, called, *outputs = asked.chat["messages"]
    functions = [call["function"] for call in called["tool_calls"]]
    assert [one["name"] for one in functions] == ["math__add", "note"]
    assert json.loads(functions[1]["arguments"]) == {"input": 'Say "hi".\n'}
    assert [(one["name"], one["content"]) for one in outputs] == [("math__add", "3"), ("note", "noted")]


CALLS: list[tuple[str, str, Json]] = [
    ("math__add", '{"a": 1}', {"type": "function_call", "name": "add", "namespace": "math", "arguments": '{"a": 1}'}),
    ("add", '{"a": 1}', {"type": "function_call", "name": "add", "arguments": '{"a": 1}'}),
    ("note", '{"input": "a\\n\\"b\\""}', {"type": "custom_tool_call", "name": "note", "input": 'a\n"b"'}),
    ("note", '{"patch": "a"}', {"type": "custom_tool_call", "name": "note", "input": '{"patch": "a"}'}),
]


@each_row("name, arguments, item", CALLS)
def test_a_call_names_its_tool_as_the_client_does(
    served: tuple[Inside, Script], name: str, arguments: str, item: Json
) -> None:
    running, script = served
    script.text = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    body = {"input": "Hi", "tools": [TOOL, SPACE, NOTE]}
    for script.pieces in (None, 3):
        whole = post(running, "/v1/responses", body).json()
        assert without_ids(whole["output"]) == [item | {"status": "completed"}]
        events = events_of(post(running, "/v1/responses", body | {"stream": True}))
        assert without_ids(replay(events)) == without_ids(whole["output"])
        dones = [event for event in events if event["type"].endswith(("arguments.done", "input.done"))]
        assert [one.get("input", one.get("arguments")) for one in dones] == [item.get("input", item.get("arguments"))]


def test_the_text_of_a_custom_tool_is_an_argument_and_back() -> None:
    for text in ("", "a", '{"input": "x"}', 'say "hi" \\ \n\t ü'):
        assert custom_input(custom_arguments(text)) == text
    for cut, text in ((9, ""), (11, ""), (12, "a"), (13, "a"), (14, "a\n"), (16, "a\n"), (25, "a\n"), (26, "a\n😀")):
        assert custom_input('{"input": "a\\n\\ud83d\\ude00"}'[:cut]) == (text if cut > 10 else '{"input":'), cut
    assert custom_input('{"input": 5}') == '{"input": 5}'


GOOD = '*** Begin Patch\n*** Add File: a.txt\n+say "hi" \\\n*** Delete File: b\n*** End Patch'
BAD = ("*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: a.txt\n*** End Patch", GOOD + "x", "")
GRAMMARS: list[tuple[str, list[str], list[str]]] = [
    (PATCH, [GOOD, GOOD + "\n"], [*BAD]),
    ('start: "aß+"i ("b" | /c./s)* ["d"]', ["aß+", "Aß+bc\nb", "Aß+d"], ["aß+B", "d", "aß+dd", "ass+"]),
    (r"start: /[.]\../s", ["..\n"], [".a\n", "a.."]),
    ("start: WORD~2..3 INT\n%import common.WORD\n%import common.INT", ["ab1"], ["a1b", "1"]),
    ('start: "1+1" /[a\\/]/', ["1+1a", "1+1/"], ["11a", "1+1"]),
]


@each_row("definition, good, bad", GRAMMARS)
def test_a_grammar_without_recursion_is_an_expression(definition: str, good: list[str], bad: list[str]) -> None:
    pattern = pattern_of_lark(definition)
    assert pattern is not None
    assert [text for text in good if not re.fullmatch(pattern, text)] == []
    assert [text for text in bad if re.fullmatch(pattern, text)] == []
    schema = {"type": "string", "pattern": f"^(?:{pattern})$"}
    for text in (*good, *bad):
        assert accepts("json_schema", schema, json.dumps(text, ensure_ascii=False)) is (text in good)


@each_row(
    "definition",
    [
        'start: "(" start ")" | "a"',
        'start: a\na: b\nb: a "x"',
        "start: missing",
        'start: "a"\n%ignore /x/',
        'start: "a" %json {}',
        'begin: "a"',
        'start: ("a"',
        'start: "a".."z"',
        "start: /a/x",
        "start: /a/i",
        "hello",
        "start: /(?=a)b/",
        r"start: /(a)\1/",
        "start: /a)|(b/",
        "start: /[b-a]/",
        r"start: /\p{None}/",
        "start: /a{2,1}/ | /*/",
        "start: /a$/ /b/",
        f"start: {'(' * 400}/a/{')' * 400}",
        f"start: {'(' * 90}/a/{')' * 90}",
        "start: a0\n" + "".join(f"a{index}: a{index + 1}\n" for index in range(300)) + 'a300: "x"',
        f'start: "{"a" * MOST_CHARACTERS}"',
        "".join(f"a{index}: a{index + 1} a{index + 1}\n" for index in range(40)) + 'a40: "x"\nstart: a0',
    ],
)
def test_another_grammar_has_no_expression_and_its_tool_is_left_out(definition: str) -> None:
    assert pattern_of_lark(definition) is None
    asked = read(tools=[TOOL, grammar(definition)])
    assert asked.ignored == ("tools[1].custom",)
    assert [tool["function"]["name"] for tool in asked.chat["tools"]] == ["add"]


@each_row("expression", ["(?=a)b", "(a", "a)", "a)|(b", r"(a)\1", r"\bfoo", "(?i:a)", "*", "a" * (MOST_CHARACTERS + 1)])
def test_a_custom_tool_whose_expression_the_engine_does_not_take_is_left_out(expression: str) -> None:
    asked = read(tools=[TOOL, grammar(expression, "regex")])
    assert (asked.ignored, len(asked.chat["tools"])) == (("tools[1].custom",), 1)


@each_row("more", ['a: "{}"', 'a: "{}"?', "a: /{}/", 'a: "{}" | "b"'])
@each_row("parts", ["a ", "| a ", "(a) "])
def test_a_grammar_is_given_up_before_its_expression_is_too_long(more: str, parts: str) -> None:
    length = MOST_CHARACTERS // 2
    definition = f"start: a {parts * (length // 4 - 8)}\n{more.format('x' * (length - 50))}"
    assert len(definition) < MOST_CHARACTERS
    tracemalloc.start()
    try:
        assert pattern_of_lark(definition) is None
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


OTHER = grammar("hello") | {"name": "odd"}
CHOICES: list[tuple[list[Json], list[str], list[str]]] = [
    ([TOOL_NAMED, {"type": "web_search"}], ["add"], ["tools[1].web_search"]),
    ([{"type": "mcp", "server_label": "x"}, {"type": "custom", "name": "note"}], ["note"], ["tools[0].mcp"]),
    ([TOOL_NAMED, {"type": "custom", "name": "odd"}], ["add"], ["tools[1].custom"]),
    ([{"type": "namespace", "name": "math"}], ["math__add", "math__sub"], []),
    ([TOOL_NAMED, {"type": "namespace", "name": "empty"}], ["add"], ["tools[1].namespace"]),
]


@each_row("allowed, named, left_out", CHOICES)
def test_an_allowed_tool_that_is_left_out_refuses_no_request(
    allowed: list[Json], named: list[str], left_out: list[str]
) -> None:
    empty = {"type": "namespace", "name": "empty", "tools": [OTHER]}
    tools = [TOOL, SPACE, NOTE, SEARCH, OTHER, empty]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    asked = read(tools=tools, tool_choice=choice)
    assert [tool["function"]["name"] for tool in asked.chat["tools"]] == named
    assert [path for path in asked.ignored if "choice" in path] == [f"tool_choice.{path}" for path in left_out]
    assert len(asked.shown["tool_choice"]["tools"]) == len(allowed) - len(left_out)
    for mode, given in (("required", allowed), ("auto", [one for one in allowed if one["type"] == "web_search"])):
        if left_out and given:
            with pytest.raises(ApiError, match=r"tool_choice\.tools") as raised:
                read(tools=tools, tool_choice=choice | {"mode": mode, "tools": given})
            assert raised.value.status == 400


REFUSED_CHOICES: list[tuple[Json, str, str]] = [
    ({"type": "web_search"}, "tool_choice.type", '"web_search", which is not supported'),
    ({"type": "custom", "name": "odd"}, "tool_choice.name", "its grammar cannot be enforced"),
    ({"type": "function", "name": "none"}, "tool_choice.name", "no function tool of this name"),
    ({"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice.tools", "at least one"),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "x"}]},
     "tool_choice.tools[0].name", "no namespace of this name"),
]  # fmt: skip


@each_row("choice, param, told", REFUSED_CHOICES)
def test_a_choice_of_a_tool_that_is_not_served_says_which(choice: Json, param: str, told: str) -> None:
    with pytest.raises(ApiError) as raised:
        read(tools=[TOOL, SEARCH, OTHER], tool_choice=choice)
    assert raised.value.param == param
    assert told in str(raised.value)


@each_row("tool", [grammar(PATCH), grammar(str(pattern_of_lark(PATCH)), "regex")])
def test_the_engine_holds_the_text_to_the_grammar(tool: Json) -> None:
    function = read(strict=True, tools=[tool]).chat["tools"][0]["function"]
    assert function["strict"] is True
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "model/tokenizer.json"))
    made = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(function["parameters"]))
    vocabulary = llguidance.hf.from_tokenizer(tokenizer)
    for text, good in ((GOOD, True), *((bad, False) for bad in BAD)):
        matcher = llguidance.LLMatcher(vocabulary, made)
        ids = tokenizer.encode(custom_arguments(text), add_special_tokens=False)
        assert (all(map(matcher.consume_token, ids)) and matcher.is_accepting()) is good, text


def test_a_format_that_cannot_hold_the_grammar_leaves_the_tool_out(served: tuple[Inside, Script]) -> None:
    running, script = served
    app: Any = running.server.config.app
    json_calls = app.state.gateway
    body = {"input": "Hi", "tools": [TOOL, grammar(PATCH)]}
    script.text = "Yes."
    assert "x-ignored-fields" not in post(running, "/v1/responses", body).headers
    app.state.gateway = replace(json_calls, chat_format=XmlFormat(json_calls.tokenizer))
    try:
        assert post(running, "/v1/responses", body).headers["x-ignored-fields"] == "tools[1].custom"
    finally:
        app.state.gateway = json_calls
