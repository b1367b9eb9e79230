"""What a format's grammar allows is what its parser reads back to the same calls, by llguidance's own matcher."""

from __future__ import annotations

import functools
import json
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


_NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: name not in _RESERVED)
_RESERVED = {"if", "in", "is", "or", "as", "do", "and", "not", "for", "def", "del", "try", "none", "lambda", "from"}
_RESERVED |= {"while", "with", "pass", "else", "elif", "class", "break", "raise", "yield", "async", "await", "global"}
_RESERVED |= {"return", "except", "import", "assert", "finally", "continue", "nonlocal"}
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
