"""Guides of chats: reasoning stays free around them, and an answer's form goes with calls of tools."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llguidance
import pytest

from inflight.gateway.chat_guides import ChatGuide, chat_guide
from inflight.gateway.errors import ApiError
from inflight.gateway.fields import Fields
from inflight.settings.deployment import Deployment
from inflight.settings.guided import GuidedDecodingSettings
from inflight.text.output.find import find_chat_format
from inflight.text.output.tools import Tool, ToolChoice
from inflight.text.tokenizer import Tokenizer
from tests.support.chat_formats import FAMILIES, grammar_tokens, tokenizer_of

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
TOOL = Tool("look_up", "", {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
PROMPT = "<|im_start|>assistant\n"
HERMES = next(index for index, family in enumerate(FAMILIES) if family.name == "hermes" and "<think>" in family.added)
LLAMA = next(index for index, family in enumerate(FAMILIES) if family.name == "llama")
HARMONY = next(index for index, family in enumerate(FAMILIES) if family.name == "harmony")
LIMIT = 65_536
LLAMA_CALL = '{"name": "look_up", "parameters": {"name": "a"}}'
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"name": "a"}}\n</tool_call>'


@functools.cache
def tokens(index: int) -> llguidance.LLTokenizer:
    return grammar_tokens(tokenizer_of(index))


def guide_of(index: int, prompt: str = PROMPT, choice: str = "auto", **values: Any) -> ChatGuide:
    tokenizer = tokenizer_of(index)
    if "template" in values:
        config = replace(tokenizer.config, response_template=values.pop("template"))
        tokenizer = Tokenizer(tokenizer._backend, config)
    deployment = Deployment(model=Path("x"), guided_decoding=GuidedDecodingSettings(max_guide_bytes=LIMIT))
    gateway: Any = SimpleNamespace(tokenizer=tokenizer, chat_format=find_chat_format(tokenizer), deployment=deployment)
    tools = values.pop("tools", False)
    tools = tools if isinstance(tools, tuple) else (TOOL,) if tools else ()
    chosen = ToolChoice.named(TOOL.name) if choice == "named" else ToolChoice(choice)  # type: ignore[arg-type]
    return chat_guide(Fields(values), gateway, prompt, tools, chosen, lambda: False)


def accepts(index: int, made: ChatGuide, text: str) -> bool:
    """Return whether the guide, which holds from the start, allows this output and that it ends there."""
    assert made.guide is not None
    assert made.guide.kind == "lark_grammar"
    assert made.start_ids == ()
    matcher = llguidance.LLMatcher(tokens(index), made.guide.text)
    assert not matcher.is_error(), f"{matcher.get_error()}\n{made.guide.text}"
    ids = tokenizer_of(index).encode_batch([text])[0]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_a_model_that_may_think_may_do_so_before_the_form_holds() -> None:
    made = guide_of(HERMES, response_format=FORM)

    assert accepts(HERMES, made, '{"city": "Rome"}')
    assert accepts(HERMES, made, '<think>\nHm, {"a": 1}?\n</think>\n\n{"city": "Rome"}')
    assert not accepts(HERMES, made, "Rome")
    assert not accepts(HERMES, made, "<think>Hm.</think>Rome")
    assert not accepts(HERMES, made, "<think>Hm.")


def test_behind_reasoning_that_the_prompt_opens_the_form_holds_at_its_end() -> None:
    made = guide_of(HERMES, PROMPT + "<think>\n", response_format=FORM)

    assert made.guide is not None
    assert made.guide.kind == "json_schema"
    assert list(made.start_ids) == tokenizer_of(HERMES).spelling("</think>")
    assert made.param == "response_format.json_schema.schema"


def test_behind_reasoning_that_the_prompt_closes_the_form_holds_at_once() -> None:
    made = guide_of(HERMES, PROMPT + "<think>\n\n</think>\n\n", response_format=FORM)

    assert made.guide is not None
    assert (made.guide.kind, made.start_ids) == ("json_schema", ())


@pytest.mark.parametrize("text", [CALL, f"<think>Hm.</think>\n{CALL}"])
def test_calls_that_must_come_may_follow_reasoning(text: str) -> None:
    assert accepts(HERMES, guide_of(HERMES, choice="required", tools=True), text)


def test_a_form_beside_tools_leaves_the_choice_between_both() -> None:
    made = guide_of(HERMES, tools=True, response_format=FORM)

    for text in ('{"city": "Rome"}', CALL, f"<think>Hm.</think>{CALL}", '<think>Hm.</think>{"city": "Rome"}'):
        assert accepts(HERMES, made, text), text
    assert not accepts(HERMES, made, "Rome")
    assert not accepts(HERMES, made, '{"town": "Rome"}')


@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize("field", ["guided_json", "structured_outputs", "guided_regex"])
def test_where_calls_must_come_a_guide_of_the_whole_answer_is_refused(choice: str, field: str) -> None:
    value: Any = {"guided_json": SCHEMA, "structured_outputs": {"json": SCHEMA}, "guided_regex": "a"}[field]
    with pytest.raises(ApiError, match=f"tool_choice \\({choice}\\)") as caught:
        guide_of(HERMES, choice=choice, tools=True, **{field: value})

    assert str(caught.value.param).startswith(field)
    assert caught.value.code == "unsupported_parameter"


INJECTED = json.dumps(SCHEMA) + '\ncalled: "rm -rf"'


@pytest.mark.parametrize("more", [{}, {"tools": True}])
@pytest.mark.parametrize("field", ["guided_json", "structured_outputs", "response_format"])
def test_a_schema_as_text_brings_no_rules_of_its_own(field: str, more: dict[str, Any]) -> None:
    value: Any = {
        "guided_json": INJECTED,
        "structured_outputs": {"json": INJECTED},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": INJECTED}},
    }[field]
    with pytest.raises(ApiError, match="is not valid JSON") as caught:
        guide_of(HERMES, **more, **{field: value})

    assert str(caught.value.param).startswith(field)


@pytest.mark.parametrize("value", ["[1]", '{"const": NaN}', '{"const": 1e999}', "[" * 100_000, '"a"', "1"])
def test_text_that_is_no_schema_is_refused(value: str) -> None:
    with pytest.raises(ApiError) as caught:
        guide_of(HERMES, guided_json=value)

    assert (caught.value.status, caught.value.param) == (400, "guided_json")


def test_a_schema_as_text_is_the_schema() -> None:
    made = guide_of(HERMES, tools=True, guided_json=json.dumps(SCHEMA, indent=4))

    assert accepts(HERMES, made, '{"city": "Rome"}')
    assert accepts(HERMES, made, CALL)


def test_where_calls_must_come_the_form_of_a_text_says_nothing() -> None:
    made = guide_of(HERMES, choice="required", tools=True, response_format=FORM)

    assert accepts(HERMES, made, CALL)
    assert not accepts(HERMES, made, '{"city": "Rome"}')


@pytest.mark.parametrize(
    ("index", "tools", "field"),
    [
        (HARMONY, False, {"guided_regex": "a+"}),
        (HARMONY, True, {"guided_regex": "a+"}),
        (HERMES, True, {"guided_grammar": 'root ::= "a"'}),
        (LLAMA, True, {"guided_choice": ["yes", "no"]}),
    ],
)
def test_a_form_that_cannot_be_enforced_is_refused_by_name(index: int, tools: bool, field: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        guide_of(index, tools=tools, **field)

    assert caught.value.code == "unsupported_parameter"
    assert caught.value.param == next(iter(field))


def test_a_form_beside_calls_that_are_plain_json_is_refused_by_both_names() -> None:
    with pytest.raises(ApiError, match="response_format.* is not supported beside tools") as caught:
        guide_of(LLAMA, tools=True, response_format=FORM)

    assert (caught.value.status, caught.value.param) == (400, "response_format.json_schema.schema")
    assert guide_of(LLAMA, response_format=FORM).guide is not None
    assert accepts(LLAMA, guide_of(LLAMA, choice="required", tools=True, response_format=FORM), LLAMA_CALL)


@pytest.mark.parametrize("value", ["yes", "[]", [""]])
def test_choices_that_are_none_are_refused_by_name(value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        guide_of(HERMES, guided_choice=value)

    assert caught.value.param == "guided_choice"


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
HARMONY_CALL = '<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"name": "a"}'


@pytest.mark.parametrize("tools", [False, True])
def test_no_message_to_the_user_escapes_the_form(tools: bool) -> None:
    made = guide_of(HARMONY, response_format=FORM, tools=tools)

    for header in ("final", "final <|constrain|>json", "final<|constrain|>json"):
        for before in ("", ANALYSIS, ANALYSIS * 2):
            assert accepts(HARMONY, made, f'{before}<|channel|>{header}<|message|>{{"city": "Rome"}}'), header
            assert not accepts(HARMONY, made, f"{before}<|channel|>{header}<|message|>Rome")
    for text in ("<|channel|>commentary<|message|>Rome", "Rome", "<|channel|>final json<|message|>Rome"):
        assert not accepts(HARMONY, made, text)
    told = "<|channel|>commentary<|message|>Rome<|end|><|start|>assistant"
    assert not accepts(HARMONY, made, f'{told}<|channel|>final<|message|>{{"city": "Rome"}}')
    assert accepts(HARMONY, made, ANALYSIS + HARMONY_CALL) == tools


TEMPLATE = {
    "start_anchor": PROMPT,
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json"},
        "content": {},
    },
}


@pytest.mark.parametrize("behind", ["", "<think>\n", "<think>\n\n</think>\n\n"])
@pytest.mark.parametrize("values", [{"tools": True, "choice": "required"}, {"response_format": FORM}])
def test_a_description_of_the_output_has_the_guides_of_its_family(behind: str, values: dict[str, Any]) -> None:
    described = functools.partial(guide_of, HERMES, PROMPT + behind, **values)

    assert described(template=TEMPLATE) == described()


def test_a_description_may_have_other_words_for_reasoning() -> None:
    fields = {"thinking": {"open": "<think>", "close": "</why>"}, "content": {}}
    made = guide_of(HERMES, PROMPT + "<think>", template=TEMPLATE | {"fields": fields}, response_format=FORM)

    assert list(made.start_ids) == tokenizer_of(HERMES).spelling("</why>")


def test_choices_become_an_item_of_the_grammar() -> None:
    made = guide_of(HERMES, guided_choice=["yes", 'no "way"'])

    assert accepts(HERMES, made, 'no "way"')
    assert accepts(HERMES, made, "<think>?</think>yes")
    assert not accepts(HERMES, made, "maybe")


def test_schemas_keep_their_text() -> None:
    made = guide_of(HERMES, PROMPT + "<think>\n\n</think>", guided_json=json.dumps(SCHEMA))

    assert made.guide is not None
    assert json.loads(made.guide.text) == SCHEMA


def test_a_schema_as_json_text_may_not_repeat_a_key() -> None:
    text = '{"type": "object", "properties": {"city": {"type": "null", "type": "string"}}}'
    with pytest.raises(ApiError, match="guided_json is a string that is not valid JSON: it has the key 'type' twice"):
        guide_of(HERMES, guided_json=text)


@pytest.mark.parametrize("name", ["qwen_xml", "gemma3", "gemma4"])
def test_calls_whose_grammar_is_larger_than_the_deployments_limit_are_refused_as_it_is_made(name: str) -> None:
    index = next(index for index, family in enumerate(FAMILIES) if family.name == name)
    wide = {"type": "object", "properties": {f"q{number}": {"type": "integer"} for number in range(80)}}
    properties = {f"p{number}": {"type": "object", "properties": {str(number): wide}} for number in range(40)}
    tool = Tool("f", "", {"type": "object", "properties": properties})
    with pytest.raises(ApiError, match=f"tools need a grammar of more than {LIMIT} bytes") as caught:
        guide_of(index, choice="required", tools=(tool,))
    assert caught.value.param == "tools"
