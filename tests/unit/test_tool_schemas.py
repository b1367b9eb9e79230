"""Schemas of tools: errors name the tool and the place inside, and references lead into the whole schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.engine.guided.lark_guide import checked_lark
from inflight.errors import InvalidRequest
from inflight.gateway.request_errors import request_error
from inflight.text.output.find import find_chat_format
from inflight.text.output.schemas import NotEnforceable, apart
from inflight.text.output.tools import Tool, ToolChoice
from tests.support.chat_formats import FAMILIES, grammar_tokens, tokenizer_of

INDICES = range(len(FAMILIES))
IDS = [f"{index}-{family.name}" for index, family in enumerate(FAMILIES)]
XML = next(index for index, family in enumerate(FAMILIES) if family.name == "qwen_xml")
GOOD = Tool(
    "good", "", {"type": "object", "properties": {"a": {"type": "integer"}}}, True, "tools[0].function.parameters"
)


def nothing_wrong(form: str) -> str | None:
    """Return that llguidance takes a schema."""
    return None


def refused(
    index: int, tool: Tool, choice: ToolChoice, error_of: Callable[[str], str | None] = nothing_wrong
) -> tuple[str, str | None]:
    """Return the message of the gateway's error, whoever has refused the schema, and the field that it names."""
    guide = None
    try:
        guide = find_chat_format(tokenizer_of(index)).guide([GOOD, tool], choice, True)
        assert guide is not None
        checked_lark(guide.text, error_of)
    except InvalidRequest as error:
        found = request_error(error, "messages", "tools", guide)
        return found.message, found.param
    raise AssertionError("nothing is refused")


@pytest.mark.parametrize("index", INDICES, ids=IDS)
@pytest.mark.parametrize("choice", [ToolChoice.required(), ToolChoice.named("bad"), ToolChoice.auto()])
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_tool_and_the_place(
    index: int, choice: ToolChoice
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "not": {"const": 1}}}}
    message, param = refused(index, Tool("bad", "", schema, True, "tools[2].function.parameters"), choice)
    path = "tools[2].function.parameters"
    within = re.fullmatch(rf"{re.escape(path)}(\.properties\.b)?", param or message)
    assert within, (message, param)
    assert message.startswith(param or path)
    assert re.search(r"\bnot'? at (the root|/properties/b)", message)
    assert ("the root" in message) == (within[1] is not None)
    assert "%json" not in message


@pytest.mark.parametrize("index", INDICES, ids=IDS)
def test_what_is_no_schema_at_all_is_refused_with_the_tool(index: int) -> None:
    tokens = grammar_tokens(tokenizer_of(index))

    def error_of(form: str) -> str | None:
        matcher = llguidance.LLMatcher(tokens, f"start: %json {form}")
        return str(matcher.get_error()) if matcher.is_error() else None

    schema = {"type": "object", "properties": {"a": {"type": "array", "minItems": "x"}}}
    tool = Tool("bad", "", schema, True, "tools[2].function.parameters")
    message, param = refused(index, tool, ToolChoice.required(), error_of)
    assert str(param).startswith(tool.path)
    assert message.startswith(tool.path)


_NAMES = ["a", "b", "$ref", "enum", "x/y", "p~q", "ü %"]
_REFERENCES = ["#", "#/$defs/d", "#/definitions/e", *("#/properties/" + name for name in ("a", "b", "$ref", "enum"))]
_REFERENCES += ["#/properties/x~1y", "#/properties/p~0q", "#/properties/%C3%BC%20%25"]
_PARTS = st.recursive(
    st.sampled_from([{"type": "integer"}, {"type": "null"}, {"enum": [{"$ref": "#"}, 1]}, True, {}])
    | st.sampled_from(_REFERENCES).map(lambda reference: {"$ref": reference}),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(_NAMES), inner, max_size=2).map(lambda named: {"properties": named}),
        st.lists(inner, min_size=1, max_size=2).map(lambda several: {"anyOf": several}),
        inner.map(lambda one: {"type": "array", "items": one}),
    ),
    max_leaves=3,
)
_INSTANCES = st.recursive(
    st.sampled_from([None, 1, "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(_NAMES), inner, max_size=2),
    max_leaves=6,
)


@given(
    properties=st.fixed_dictionaries(dict.fromkeys(_NAMES, _PARTS)),
    definitions=st.tuples(_PARTS, _PARTS),
    key=st.sampled_from(_NAMES),
    instances=st.lists(_INSTANCES, min_size=1, max_size=8),
)
def test_a_schema_taken_out_of_its_root_allows_the_same(
    properties: dict[str, Any], definitions: tuple[Any, Any], key: str, instances: list[Any]
) -> None:
    root = {"properties": properties, "$defs": {"d": definitions[0]}, "definitions": {"e": definitions[1]}}
    alone = jsonschema.Draft202012Validator(apart(properties[key], root))
    whole = jsonschema.Draft202012Validator(root)
    for instance in instances:
        try:
            expected = whole.is_valid({key: instance})
        except RecursionError:  # a circle of references, which says nothing
            return
        assert alone.is_valid(instance) == expected, json.dumps([apart(properties[key], root), instance])


def test_a_schema_taken_out_keeps_its_draft() -> None:
    root: dict[str, Any] = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "x",
        "properties": {"a": {"$ref": "#"}},
    }
    made = apart({"type": "array"}, root)
    assert made == {"$schema": root["$schema"], "type": "array"}
    assert "$id" not in json.dumps(apart(root["properties"]["a"], root))
    for bad in ({"$id": "y"}, {"items": {"$schema": "z"}}, {"$ref": "#/properties/b"}, {"$ref": "x#"}):
        with pytest.raises(NotEnforceable):
            apart(bad, root)


def allowed(grammar: str, text: str) -> bool:
    tokenizer = tokenizer_of(XML)
    matcher = llguidance.LLMatcher(grammar_tokens(tokenizer), checked_lark(grammar, nothing_wrong))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.encode_batch([text])[0]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def xml_guide(parameters: dict[str, Any], strict: bool = True) -> str:
    guide = find_chat_format(tokenizer_of(XML)).guide([Tool("f", "", parameters, strict)], ToolChoice.required(), True)
    assert guide is not None
    return guide.text


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "items": {"$ref": "#/properties/n"}}, [[1]], [["x"]]),
        (
            {"type": "object", "properties": {"n": {"$ref": "#"}}, "additionalProperties": False},
            [{}],
            [{"n": {"n": 1.5}}],
        ),
        ({"$ref": "#/properties/n"}, [5], ["x", [1]]),
        ({"type": ["array", "null"], "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {}}}, [[1], None], [["x"]]),
    ],
)
def test_references_between_tags_lead_into_the_whole_schema(
    schema: dict[str, Any], good: list[Any], bad: list[Any]
) -> None:
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "v": schema},
        "required": ["v"],
        "additionalProperties": False,
        "$defs": {"n": {"type": "integer"}},
    }
    grammar = xml_guide(parameters)
    for value in good:
        assert allowed(grammar, FAMILIES[XML].render([("f", {"v": value})])), value
    for value in bad:
        assert not allowed(grammar, FAMILIES[XML].render([("f", {"v": value})])), value


def test_a_strict_tool_between_tags_has_no_parameters_but_its_own() -> None:
    one, two = (FAMILIES[XML].render([("f", {"x": "y"})]), FAMILIES[XML].render([("f", {})]))
    for parameters in ({"type": "object"}, {"type": "object", "properties": {}}, {"additionalProperties": False}):
        grammar = xml_guide(parameters)
        assert allowed(grammar, two)
        assert not allowed(grammar, one)
        assert allowed(xml_guide(parameters, strict=False), one) == ("additionalProperties" not in parameters)
    for free in (True, {"type": "integer"}, {}):
        with pytest.raises(InvalidRequest, match="'additionalProperties' without 'properties' at /"):
            xml_guide({"type": "object", "additionalProperties": free})
