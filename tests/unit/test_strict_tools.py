"""What the grammar of a strict tool lets a model write is arguments that its schema allows, in every notation."""

from __future__ import annotations

import functools
import json
from random import Random
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.engine.guided.lark_guide import checked_lark
from inflight.errors import InvalidRequest
from inflight.text.output.find import find_chat_format
from inflight.text.output.tools import Tool, ToolChoice
from tests.support.chat_formats import FAMILIES, grammar_tokens, read_tokens, tokenizer_of

INDICES = [next(i for i, one in enumerate(FAMILIES) if one.name == name) for name in ("qwen_xml", "gemma4", "gemma3")]
IDS = [FAMILIES[index].name for index in INDICES]
_LONGEST = 200
_VALUES = ["a", "", "5", "true", "null", "x\ny", 5, 1.5, True, None, ["a"], {"k": 1}]
_TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]
_DEFINITIONS = {
    "word": {"type": "string", "enum": ["a", "b"]},
    "short": {"type": "string", "maxLength": 2},
    "tree": {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}, "additionalProperties": False},
}
_LEAVES = st.one_of(
    st.fixed_dictionaries({"type": st.sampled_from(_TYPES)}),
    st.fixed_dictionaries({"type": st.lists(st.sampled_from(_TYPES), min_size=1, max_size=3, unique=True)}),
    st.fixed_dictionaries({"enum": st.lists(st.sampled_from(_VALUES), min_size=1, max_size=3)}),
    st.fixed_dictionaries({"const": st.sampled_from(_VALUES)}),
    st.sampled_from([{"$ref": f"#/$defs/{name}"} for name in _DEFINITIONS]),
    st.just({}),
)
_KEYWORDS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(_TYPES),
        "enum": st.lists(st.sampled_from(_VALUES), min_size=1, max_size=2),
        "minLength": st.integers(0, 3),
        "maxLength": st.integers(1, 4),
        "minItems": st.integers(0, 2),
        "required": st.just(["k"]),
        "description": st.just("x"),
        "$ref": st.just("#/$defs/short"),
        "minimum": st.just(3),
    },
)


def _compounds(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        several.map(lambda members: {"anyOf": members}),
        several.map(lambda members: {"oneOf": members}),
        several.map(lambda members: {"allOf": members}),
        inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2}),
        st.tuples(inner, st.booleans()).map(
            lambda drawn: {
                "type": "object",
                "properties": {"k": drawn[0], "m": {}},
                "required": ["k"],
                "additionalProperties": drawn[1],
            }
        ),
        st.tuples(inner, _KEYWORDS).map(lambda drawn: drawn[0] | drawn[1]),
    )


_SCHEMAS = st.recursive(_LEAVES | _KEYWORDS, _compounds, max_leaves=4)


@functools.cache
def matcher_tokens(index: int) -> llguidance.LLTokenizer:
    """Return llguidance's view of a family's tokenizer."""
    return grammar_tokens(tokenizer_of(index))


def walk(index: int, grammar: str, random: Random) -> list[int] | None:
    """Return tokens that the grammar allows, drawn one by one; None: they do not end soon, or it allows none."""
    matcher = llguidance.LLMatcher(matcher_tokens(index), grammar)
    size = tokenizer_of(index).config.vocab_size
    tokens: list[int] = []
    while not matcher.is_error() and len(tokens) < _LONGEST:
        if matcher.is_accepting():
            return tokens
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:size])
        if not len(allowed):
            return None
        tokens.append(int(random.choice(allowed)))
        matcher.consume_token(tokens[-1])
    return None


@pytest.mark.parametrize("index", INDICES, ids=IDS)
@given(schema=_SCHEMAS, top=_KEYWORDS | st.just({}), seed=st.integers(0, 2**32))
def test_all_that_is_allowed_follows_the_schema(
    index: int, schema: dict[str, Any], top: dict[str, Any], seed: int
) -> None:
    parameters = {"type": "object", "properties": {"k": schema}, "required": ["k"], "additionalProperties": False}
    parameters |= {"$defs": _DEFINITIONS} | top
    tools = [Tool("f", "", parameters, strict=True)]
    chat, tokenizer = find_chat_format(tokenizer_of(index)), tokenizer_of(index)
    try:
        guide = chat.guide(tools, ToolChoice.named("f"), True)
        assert guide is not None
        grammar = checked_lark(guide.text, lambda form: None)
    except InvalidRequest:
        return
    random = Random(seed)
    for _ in range(4):
        tokens = walk(index, grammar, random)
        if tokens is None:
            continue
        read = read_tokens(chat, tokenizer, tools, [tokens])
        [(_, arguments)] = read.calls
        assert read.content.strip() == ""
        jsonschema.Draft202012Validator(parameters).validate(json.loads(arguments))


@pytest.mark.parametrize("index", INDICES, ids=IDS)
@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#/$defs/short", "maxLength": 1}, "'\\$ref' beside 'maxLength'"),
        ({"anyOf": [{"type": "string"}, {"type": "object", "required": ["k"]}], "title": "x"}, "required|'required'"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "minLength": 1}, "'anyOf' beside 'minLength'"),
        ({"type": "string", "enum": [1, 2]}, "'enum' without a value of its type"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 1}]}, "'oneOf' of schemas"),
        ({"type": "string", "allOf": [{"maxLength": 1}]}, "'allOf' beside 'type'"),
    ],
)
def test_what_would_be_looser_than_the_schema_is_refused(index: int, schema: dict[str, Any], reason: str) -> None:
    parameters = {"type": "object", "properties": {"k": schema}, "$defs": _DEFINITIONS}
    chat = find_chat_format(tokenizer_of(index))
    with pytest.raises(InvalidRequest, match=reason):
        chat.guide([Tool("f", "", parameters, strict=True)], ToolChoice.required(), True)
    assert chat.guide([Tool("f", "", parameters | {"required": ["x"]})], ToolChoice.required(), True) is not None
