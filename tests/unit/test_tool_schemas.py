"""Schemas of tools: errors name the tool and the place inside, and references lead into the whole schema."""

from __future__ import annotations

import json
import re
import sys
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
from inflight.text.output.schemas import NotEnforceable, apart, resolve
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


def test_a_reference_is_a_json_pointer() -> None:
    """These are examples of RFC 6901, section 6; ``o~1p`` is a name that only looks escaped."""
    root = {"foo": ["bar", "baz"], "": 0, "a/b": 1, "c%d": 2, "e^f": 3, 'k"l': 6, " ": 7, "m~n": 8, "o~1p": 9}
    found = {reference: resolve(reference, root) for reference in ("#", "#/foo/0", "#/foo/2", "#/foo/x", "#/", "/foo")}
    assert found == {"#": root, "#/foo/0": "bar", "#/foo/2": None, "#/foo/x": None, "#/": 0, "/foo": None}
    escaped = ("#/a~1b", "#/c%25d", "#/e%5Ef", "#/k%22l", "#/%20", "#/m~0n", "#/o~01p")
    assert [resolve(reference, root) for reference in escaped] == [1, 2, 3, 6, 7, 8, 9]


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


def guide(name: str, parameters: dict[str, Any], strict: bool = True) -> str:
    index = next(index for index, family in enumerate(FAMILIES) if family.name == name)
    tool = Tool("f", "", parameters, strict, "tools[0].function.parameters")
    made = find_chat_format(tokenizer_of(index)).guide([tool], ToolChoice.required(), True)
    assert made is not None
    return made.text


SPELLED = ["gemma3", "gemma4"]
OWN = ["qwen_xml", *SPELLED]


def test_a_union_that_leads_to_one_schema_in_many_ways_is_that_schema() -> None:
    definitions: dict[str, Any] = {
        f"d{number}": {"anyOf": [{"$ref": f"#/$defs/d{number + 1}"} for _ in range(3)]} for number in range(30)
    }
    definitions["d30"] = {"type": "string", "maxLength": 3}
    made = [
        guide("qwen_xml", {"properties": {"a": schema}, "required": ["a"], "$defs": definitions})
        for schema in ({"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d30"})
    ]
    assert made[0] == made[1]


def test_a_circle_of_references_alone_is_left_out_unless_the_tool_is_strict() -> None:
    members = [{"$ref": "#/properties/a"}, {"$ref": "#/properties/b"}]
    properties: dict[str, Any] = {"a": {"type": "string", "anyOf": members}, "b": {"anyOf": members}}
    assert guide("qwen_xml", {"properties": properties}, strict=False)


def test_equal_schemas_between_tags_are_one_rule() -> None:
    properties = {f"p{number}": {"$ref": "#/$defs/d"} for number in range(9)} | {"q": {"type": "integer"}}
    assert guide("qwen_xml", {"properties": properties, "$defs": {"d": {"type": "array"}}}).count("%json") == 2


@pytest.mark.parametrize("name", OWN)
def test_the_work_grows_as_the_number_of_properties(name: str) -> None:
    def calls(properties: int) -> int:
        """Return how many functions and generators are called or gone on with."""
        count = 0

        def profile(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(profile)
        try:
            guide(name, {"properties": {f"p{number}": {"type": "object"} for number in range(properties)}})
        finally:
            sys.setprofile(None)
        return count

    few = calls(100)
    assert calls(200) - few < 1.5 * (few - calls(1))


@pytest.mark.parametrize("index", INDICES, ids=IDS)
def test_a_property_with_the_name_of_an_input_of_the_engine_keeps_it(index: int) -> None:
    schema = {"properties": {"input_ids": {"type": "integer", "not": {}}}}
    message, param = refused(
        index, Tool("bad", "", schema, True, "tools[2].function.parameters"), ToolChoice.required()
    )
    assert "input_ids" in f"{message} {param}"
    assert "/tools" not in message


def test_a_definition_keeps_its_name() -> None:
    definitions = {"A": {"items": {"$ref": "#/definitions/A"}}}
    root: dict[str, Any] = {
        "$defs": definitions,
        "definitions": {"A": {"type": "null"}},
        "properties": {"a": {"$ref": "#/$defs/A"}},
    }
    made = apart(root["properties"]["a"], root)
    assert made == {"$ref": "#/$defs/A"} | {key: root[key] for key in ("$defs", "definitions")}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize(
    ("bounds", "fault"),
    [
        ({"minLength": 5, "maxLength": 2}, "'minLength' above 'maxLength'"),
        ({"minLength": 10**30}, "'minLength' that is no count"),
        ({"maxLength": 1.5}, "'maxLength' that is no count"),
    ],
)
def test_bounds_that_no_text_keeps_are_refused_with_their_place(name: str, bounds: dict[str, Any], fault: str) -> None:
    parameters = {"properties": {"a": {"type": "string"} | bounds}}
    with pytest.raises(InvalidRequest, match=rf"^tools\[0\].function.parameters has {fault}.* at /properties/a,"):
        guide(name, parameters)
    assert guide(name, parameters, strict=False) == guide(name, {"properties": {"a": {"type": "string"}}}, strict=False)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize(
    "schema",
    [{"enum": 5}, {"type": [["a"]]}, {"anyOf": 5}, {"anyOf": []}, {"$ref": 5}, {"type": {}}, {"maxLength": "x"}],
)
def test_what_is_no_schema_is_said_in_a_sentence_with_its_place(name: str, schema: dict[str, Any]) -> None:
    [key] = schema
    for parameters in ({"properties": {"a": schema}}, {"properties": {"b": {"items": {}}}, "$defs": {"x": schema}}):
        place = "/properties/a" if "$defs" not in parameters else "/$defs/x"
        wanted = rf"parameters is no JSON schema: '{re.escape(key)}' at {re.escape(place)} is not a "
        with pytest.raises(InvalidRequest, match=wanted):
            guide(name, parameters, strict=False)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("parameters", [{"required": 5}, {"properties": {"a": {"enum": [1]}}, "required": [[]]}])
def test_no_words_of_python_are_shown(name: str, parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="is no JSON schema: a keyword has a value of a wrong type$"):
        guide(name, parameters)


def test_a_schema_that_nests_too_deep_is_refused_in_a_sentence() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    for name in SPELLED:
        with pytest.raises(InvalidRequest, match="parameters is a schema that nests too deep"):
            guide(name, {"properties": {"a": schema}})


def test_a_value_that_cannot_be_written_is_refused_with_its_place() -> None:
    parameters = {"properties": {"a": {"type": "array", "items": {"enum": [{"k ": 1}]}}}}
    with pytest.raises(InvalidRequest, match="the property 'k ' at /properties/a/items,"):
        guide("gemma4", parameters)


@pytest.mark.parametrize("key", ["a>b", "a\nb"])
def test_a_property_that_tags_cannot_carry_is_left_out_unless_the_tool_is_strict(key: str) -> None:
    properties = {"a": {"type": "integer"}}
    parameters = {"properties": properties | {key: {"type": "integer"}}, "required": [key]}
    assert guide("qwen_xml", parameters, strict=False) == guide("qwen_xml", {"properties": properties}, strict=False)
    with pytest.raises(InvalidRequest, match="the property .* at /properties,"):
        guide("qwen_xml", parameters)


def test_unions_of_too_many_schemas_in_all_are_refused() -> None:
    wide = {"anyOf": [{"type": ["string", "null"]} for _ in range(300)]}
    properties = {f"p{number}": {"$ref": "#/$defs/wide"} for number in range(40)}
    with pytest.raises(InvalidRequest, match="unions of too many schemas at /properties/p34,"):
        guide("qwen_xml", {"properties": properties, "$defs": {"wide": wide}})
    assert guide("qwen_xml", {"properties": properties, "$defs": {"wide": wide}}, strict=False)
