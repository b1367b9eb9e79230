"""What a format's grammar allows is what its parser reads back to the same calls, by llguidance's own matcher."""

from __future__ import annotations

import functools
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import llguidance
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from inflight.errors import InvalidRequest
from inflight.text.output.find import find_chat_format
from inflight.text.output.tools import Tool, ToolChoice
from inflight.text.tokenizer import Tokenizer
from tests.support.chat_formats import FAMILIES, Call, grammar_tokens, read_tokens, tokenizer_of

INDICES = range(len(FAMILIES))
IDS = [f"{index}-{family.name}" for index, family in enumerate(FAMILIES)]


@functools.cache
def matcher_tokenizer(index: int) -> llguidance.LLTokenizer:
    """Return llguidance's view of a family's tokenizer."""
    return grammar_tokens(tokenizer_of(index))


def accepted(index: int, grammar: str, text: str) -> bool:
    """Return whether the grammar allows this output, and that it ends there."""
    matcher = llguidance.LLMatcher(matcher_tokenizer(index), grammar)
    assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar}"
    tokens = tokenizer_of(index).encode_batch([text])[0]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


_NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True) | st.sampled_from(["from", "class", "None", "in"])
_WORDS = st.text("ab \n\"\\/{}[]<>'é😀_:,", max_size=12)


@st.composite
def _value(draw: st.DrawFn, depth: int = 0) -> tuple[dict[str, Any], Any]:
    """Draw a schema and a value of it."""
    kinds = ["string", "integer", "number", "boolean", "enum", "null"] + (["array", "object"] if depth < 2 else [])
    match draw(st.sampled_from(kinds)):
        case "string":
            return {"type": "string"}, draw(_WORDS)
        case "integer":
            return {"type": "integer"}, draw(st.integers(-1000, 1000))
        case "number":
            return {"type": "number"}, draw(st.sampled_from([0.5, -2.25, 3, 10.125]))
        case "boolean":
            return {"type": "boolean"}, draw(st.booleans())
        case "enum":
            values = ["red", "light green", "x"]
            return {"type": "string", "enum": values}, draw(st.sampled_from(values))
        case "null":
            return {"type": ["integer", "null"]}, draw(st.sampled_from([None, 7]))
        case "array":
            schema, one = draw(_value(depth + 1))
            return {"type": "array", "items": schema}, [one] * draw(st.integers(0, 2))
    schema, values = draw(_object(depth + 1))
    return schema, values


@st.composite
def _object(draw: st.DrawFn, depth: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    properties, values, required = {}, {}, []
    for key in draw(st.lists(_NAMES, unique=True, max_size=3)):
        properties[key], value = draw(_value(depth))
        if draw(st.booleans()):
            required.append(key)
            values[key] = value
        elif draw(st.booleans()):
            values[key] = value
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return schema, values


@st.composite
def _calls(draw: st.DrawFn) -> tuple[list[Tool], list[Call]]:
    """Draw tools and calls of them."""
    names = draw(st.lists(st.sampled_from(["f", "get_weather", "search-2", "g.h"]), unique=True, min_size=1))
    drawn = {name: draw(_object()) for name in names}
    tools = [Tool(name, "", schema, strict=True) for name, (schema, _) in drawn.items()]
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
    return tools, [(name, drawn[name][1]) for name in chosen]


@pytest.mark.sweep(most=5)
@pytest.mark.parametrize("index", INDICES, ids=IDS)
@given(drawn=_calls(), data=st.data())
def test_calls_that_are_rendered_are_allowed_and_read_back(
    index: int, drawn: tuple[list[Tool], list[Call]], data: st.DataObject
) -> None:
    family, tokenizer = FAMILIES[index], tokenizer_of(index)
    chat = find_chat_format(tokenizer)
    assert chat.name == family.name
    tools, calls = drawn[0], drawn[1][: family.most]
    text = family.render(calls)
    choice = data.draw(st.sampled_from([ToolChoice.auto(), ToolChoice.required()]))
    guide = chat.guide(tools, choice, parallel=True)
    assert guide is not None
    assert guide.kind == "lark_grammar"
    assert accepted(index, guide.text, text), f"{text!r}\n{guide.text}"
    tokens = tokenizer.encode_batch([text])[0]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    chunks = [tokens[start:end] for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
    for way in (chunks, [tokens], [[token] for token in tokens]):
        read = read_tokens(chat, tokenizer, tools, way)
        assert (read.content, read.reasoning) == ("", "")
        assert read.values == calls


@pytest.mark.parametrize("index", INDICES, ids=IDS)
def test_choices_are_enforced(index: int) -> None:
    family, chat = FAMILIES[index], find_chat_format(tokenizer_of(index))
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    loose, strict = Tool("loose", "", schema), Tool("strict", "", schema, strict=True)
    good, bad = {"a": 1}, {"b": "x"}

    def allows(tools: list[Tool], choice: ToolChoice, calls: list[Call] | str, parallel: bool = True) -> bool:
        guide = chat.guide(tools, choice, parallel)
        text = f"{family.answer}{calls}" if isinstance(calls, str) else family.render(calls)
        assert guide is not None
        return accepted(index, guide.text, text)

    both = [loose, strict]
    assert chat.guide(both, ToolChoice.none(), True) is None
    assert chat.guide([loose], ToolChoice.auto(), True) is None
    required, named, auto = ToolChoice.required(), ToolChoice.named("strict"), ToolChoice.auto()
    assert allows(both, required, [("loose", good)])
    assert allows(both, named, [("strict", good)])
    assert not allows(both, named, [("loose", good)])
    assert not allows(both, required, [("strict", bad)])
    assert not allows(both, required, "Just text.")
    for text in ("Just text.", "Text {with} [brackets] and\n\n1 < 2 <tool", "[a](b) { }", ""):
        assert allows(both, auto, text), text
    assert allows(both, auto, [("strict", good)])
    assert not allows(both, auto, [("strict", bad)])
    assert not allows(both, auto, [("other", good)])
    if family.most > 1:
        two: list[Call] = [("strict", good), ("loose", good)]
        assert allows(both, required, two)
        assert not allows(both, required, two, parallel=False)
        assert not allows(both, auto, two, parallel=False)
        assert not allows(both, named, [("strict", good)] * 2)
    assert allows([loose], auto, [("loose", good)], parallel=False)
    with pytest.raises(InvalidRequest, match="tool_choice"):
        chat.guide(both, ToolChoice.named("absent"), True)
    with pytest.raises(InvalidRequest, match="tools is empty"):
        chat.guide([], required, True)


_KEYWORDS = (
    "type properties required items enum const anyOf $ref minLength maxItems additionalProperties nullable a".split()
)
_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.sampled_from(["string", "object", "#", "#/properties/a", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYWORDS), inner, max_size=4),
)


@pytest.mark.parametrize("index", INDICES, ids=IDS)
@given(parameters=st.dictionaries(st.sampled_from(_KEYWORDS), _JUNK, max_size=4), strict=st.booleans())
def test_what_is_no_schema_is_refused(index: int, parameters: dict[str, Any], strict: bool) -> None:
    chat, tokenizer = find_chat_format(tokenizer_of(index)), tokenizer_of(index)
    tools = [Tool("f", "", parameters, strict)]
    with suppress(InvalidRequest):
        guide = chat.guide(tools, ToolChoice.required(), True)
        assert guide is not None
        llguidance.LLMatcher.validate_grammar(guide.text, matcher_tokenizer(index))  # says what is wrong, if anything
    text = FAMILIES[index].render([("f", {"a": "1", "b": [1]})])
    read = read_tokens(chat, tokenizer, tools, [tokenizer.encode_batch([text])[0]])
    assert [name for name, _ in read.values] == ["f"]


def test_references_that_run_in_circles_end() -> None:
    circle = {"anyOf": [{"$ref": "#/$defs/a"}] * 300}
    parameters = {"properties": {"a": circle}, "$defs": {"a": circle}}
    text = FAMILIES[3].render([("f", {"a": "x"})])
    tokens = tokenizer_of(3).encode_batch([text])[0]
    read = read_tokens(find_chat_format(tokenizer_of(3)), tokenizer_of(3), [Tool("f", "", parameters)], [tokens])
    assert read.values == [("f", {"a": "x"})]


@pytest.mark.parametrize(
    ("index", "schema", "reason"),
    [
        (3, {"properties": {"a": {"type": "string", "pattern": "x"}}}, "'pattern' at /properties/a"),
        (3, {"properties": {}, "minProperties": 1}, "'minProperties' at /"),
        (3, {"properties": {"a>": {}}}, "the property 'a>'"),
        (11, {"properties": {"a": {"type": "integer", "minimum": 1}}}, "'minimum' at /properties/a"),
        (11, {"properties": {"a:b": {}}}, "the property 'a:b'"),
        (12, {"properties": {"a-b": {}}}, "the property 'a-b'"),
        (12, {"properties": {}, "required": ["a"]}, "required 'a' without"),
        (12, {"properties": {"a": {"$ref": "#/x"}}}, "names nothing"),
        (
            12,
            {"properties": {"a": {"maxItems": "x", "type": "array"}}},
            "no JSON schema: 'maxItems' at /properties/a is not a count",
        ),
    ],
)
def test_what_a_notation_cannot_enforce_is_named(index: int, schema: dict[str, Any], reason: str) -> None:
    chat = find_chat_format(tokenizer_of(index))
    with pytest.raises(InvalidRequest, match=reason):
        chat.guide([Tool("f", "", schema, strict=True)], ToolChoice.required(), True)


@pytest.mark.parametrize("index", [index for index, family in enumerate(FAMILIES) if family.reasoning])
def test_a_model_may_think_before_a_call_that_must_come(index: int) -> None:
    family, tokenizer = FAMILIES[index], tokenizer_of(index)
    chat = find_chat_format(tokenizer)
    opening, closing = family.reasoning or ("", "")
    calls: list[Call] = [("f", {"a": 1})]
    text = family.render(calls)
    tools = [Tool("f", "", {"type": "object"})]
    guide = chat.guide(tools, ToolChoice.required(), True, reasoning=True)
    assert guide is not None
    assert accepted(index, guide.text, text)
    thought = f"{opening}Is it <so>? {{}}{closing}{text}"
    assert accepted(index, guide.text, thought)
    assert not accepted(index, guide.text, f"{opening}Is it so?{closing}{family.answer}Yes.")
    read = read_tokens(chat, tokenizer, tools, [tokenizer.encode_batch([thought])[0]])
    assert (read.reasoning, read.content, read.values) == ("Is it <so>? {}", "", calls)
    if chat.guide_start(tokenizer):
        plain = chat.guide(tools, ToolChoice.required(), True)
        assert plain is not None
        assert not accepted(index, plain.text, thought)
        ends = tokenizer.encode_batch([closing.strip()])[0]
        assert list(chat.guide_start(tokenizer)) == ends
        behind = thought.partition(closing.strip())[2]
        assert accepted(index, plain.text, behind)


STRICT = Tool(
    "f",
    "",
    {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False},
    strict=True,
)


@pytest.mark.parametrize("index", [index for index, family in enumerate(FAMILIES) if family.reasoning])
def test_thoughts_may_mention_calls_and_do_not_hide_them(index: int) -> None:
    family, tokenizer = FAMILIES[index], tokenizer_of(index)
    chat = find_chat_format(tokenizer)
    opening, closing = family.reasoning or ("", "")
    mentioned = [word for word in (chat.starts if family.name != "harmony" else ()) if word not in family.special]  # type: ignore[attr-defined]
    thought = f"{opening}I use {' '.join(mentioned)} now{closing}"
    for reasoning in (True, False):
        guide = chat.guide([STRICT], ToolChoice.auto(), True, reasoning=reasoning)
        assert guide is not None
        assert not accepted(index, guide.text, thought + family.render([("f", {"y": "bad"})]))
        if reasoning:
            assert accepted(index, guide.text, f"{thought}{family.answer}Yes.")
            assert accepted(index, guide.text, thought + family.render([("f", {"x": 1})]))


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "parameters": {"y": "bad"}}',
        '{"n\\u0061me": "f", "parameters": {"y": "bad"}}',
        '<think>a</think>{"name": "f", "parameters": {"y": "bad"}}',
        '<|python_tag|>{"name": "f", "parameters": {"y": "bad"}}',
        '[f(y="bad")]',
        ' [ f(y="bad")]',
    ],
)
@pytest.mark.parametrize("index", [4, 5])
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("reasoning", [False, True])
def test_no_spelling_of_a_call_escapes_the_strict_grammar_of_llama(
    index: int, text: str, thinks: bool, reasoning: bool
) -> None:
    tokenizer = tokenizer_of(index)
    chat = find_chat_format(tokenizer)
    chat.has_reasoning = thinks
    guide = chat.guide([STRICT], ToolChoice.auto(), True, reasoning=reasoning)
    assert guide is not None
    read = read_tokens(chat, tokenizer, [STRICT], [tokenizer.encode_batch([text])[0]])
    assert not (accepted(index, guide.text, text) and read.calls)


@given(st.text("ab<>_tol/cuni={}[]\"'\n`", max_size=40))
def test_free_text_that_the_grammar_allows_has_no_call_that_it_does_not(text: str) -> None:
    index = 0
    chat, tokenizer = find_chat_format(tokenizer_of(index)), tokenizer_of(index)
    tools = [
        Tool("a", "", {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}, strict=True)
    ]
    guide = chat.guide(tools, ToolChoice.auto(), True)
    assert guide is not None
    assume(accepted(index, guide.text, text))
    read = read_tokens(chat, tokenizer, tools, [tokenizer.encode_batch([text])[0]])
    assert all(isinstance(values["b"], int) for _, values in read.values)
    assert read.calls or read.content == text


def test_the_demo_knows_the_grammar() -> None:
    """The tokens of the demo's real tokenizer spell what the grammar of Hermes' format says."""
    tokenizer = Tokenizer.from_checkpoint(Path(__file__).parents[2] / "deployments/demo/model")
    chat = find_chat_format(tokenizer, "hermes")
    tools = [Tool("f", "", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})]
    guide = chat.guide(tools, ToolChoice.required(), True)
    assert guide is not None
    matcher = llguidance.LLMatcher(grammar_tokens(tokenizer), guide.text)
    tokens = tokenizer.encode_batch([FAMILIES[0].render([("f", {"a": 12})])])[0]
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()
    assert read_tokens(chat, tokenizer, tools, [tokens]).values == [("f", json.loads('{"a": 12}'))]
