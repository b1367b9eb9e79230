"""A checkpoint's ``response_template`` is read as transformers reads it, in any cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing import parse_response

from inflight.errors import DeploymentError, InvalidRequest
from inflight.text.checkpoint import TextConfig
from inflight.text.output.find import find_chat_format
from inflight.text.output.format import ChatFormat
from inflight.text.output.markers import Piece
from inflight.text.output.tools import Tool, ToolChoice
from inflight.text.tokenizer import Tokenizer
from tests.support.chat_formats import FAMILIES, Call, Read, grows_with_length, pieces_of, tokenizer_of, whole

REFERENCES = {types[0]: template for types, template in _RESPONSE_TEMPLATE_FALLBACKS.items()}
CASES = {
    "qwen2": (1, "<|im_start|>assistant\n"),
    "qwen3_5": (3, "<|im_start|>assistant\n"),
    "gemma4": (11, "<|turn>model\n"),
}
"""The family whose tokenizer and calls a description of transformers' own is for, and what its turns begin with."""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
}
TOOLS = [Tool("get_weather", "", SCHEMA), Tool("search", "", {"type": "object"})]


def chat_of(index: int, template: dict[str, Any]) -> tuple[ChatFormat, Tokenizer]:
    """Return the format of a checkpoint with this ``response_template``."""
    config = tokenizer_of(index).config
    backend = tokenizer_of(index)._backend
    made = TextConfig(config.vocab_size, config.end_ids, 0, {}, config.chat_template, response_template=template)
    tokenizer = Tokenizer(backend, made)
    return find_chat_format(tokenizer), tokenizer


def read(chat: ChatFormat, pieces: list[Piece], opened: bool = False) -> Read:
    """Read an output that comes in these pieces."""
    parser = chat.parser(TOOLS, reasoning_open=opened)
    events = [event for piece in pieces for event in parser.push([piece])]
    return Read.of(events + parser.finish())


_TEXT = st.text("ab <>_/{}\n", max_size=8).map(lambda text: f"x{text}y")


@pytest.mark.parametrize("model", CASES)
@given(data=st.data(), content=st.none() | _TEXT, reasoning=st.none() | _TEXT, prefilled=st.booleans())
def test_as_transformers_reads_it(
    model: str, data: st.DataObject, content: str | None, reasoning: str | None, prefilled: bool
) -> None:
    index, anchor = CASES[model]
    chat, tokenizer = chat_of(index, REFERENCES[model])
    assert (chat.name, chat.has_tools, chat.has_reasoning) == ("response_template", True, True)
    words = st.text("ab \né{}", max_size=6).map(lambda text: f"x{text}y")
    calls: list[Call] = data.draw(
        st.lists(
            st.tuples(st.just("get_weather"), st.fixed_dictionaries({"city": words, "days": st.integers(-9, 9)})),
            max_size=2,
        )
    )
    field = REFERENCES[model]["fields"]["reasoning_content"]
    text = "" if reasoning is None else f"{field['open']}{reasoning}{field['close']}"
    text += (content or "") + FAMILIES[index].render(calls)
    prompt = f"{anchor}old{anchor}"
    opened = prefilled and reasoning is not None
    if opened:
        prompt, text = prompt + field["open"], text.removeprefix(field["open"])
    assert chat.opens_reasoning(prompt) == opened
    listed = [tool.for_template() for tool in TOOLS]
    expected = parse_response(text, REFERENCES[model], prefix=prompt, tools=listed)
    pieces = pieces_of(chat, tokenizer, text)
    one = read(chat, whole(pieces), opened)
    assert one.values == [
        (call["function"]["name"], call["function"]["arguments"]) for call in expected.get("tool_calls", [])
    ]
    assert one.reasoning == expected.get("reasoning_content", "")
    assert one.content.strip() == expected.get("content", "")
    assert read(chat, pieces, opened) == one


@pytest.mark.parametrize("model", CASES)
def test_choices_are_enforced_as_the_family_writes_calls(model: str) -> None:
    index, _ = CASES[model]
    chat, _ = chat_of(index, REFERENCES[model])
    own = find_chat_format(tokenizer_of(index))
    for choice in (ToolChoice.required(), ToolChoice.named("search"), ToolChoice.auto()):
        assert chat.guide(TOOLS, choice, True) == own.guide(TOOLS, choice, True)
    assert chat.guide_start(tokenizer_of(index)) == own.guide_start(tokenizer_of(index))
    with pytest.raises(InvalidRequest, match="absent"):
        chat.guide(TOOLS, ToolChoice.named("absent"), True)


TEMPLATE: dict[str, Any] = {
    "start_anchor_pattern": r"<bot>\s*",
    "fields": {
        "thinking": {"open": ["<r>", "<reason>"], "close_pattern": "</r(eason)?>"},
        "tool_calls": {
            "open_pattern": r"<call (?P<name>\w+)>",
            "close": "</call>",
            "content": "kv-lines",
            "content_args": {"value_parser": {"name": "json", "args": {"allow_non_json": True}}},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}


def test_other_contents_and_transforms() -> None:
    chat, _ = chat_of(0, TEMPLATE)
    text = "<reason>why</reason>Hi. <call search>\nq: 1\nr: x y\n</call>"
    assert read(chat, list(text)) == Read("Hi.", "why", [("search", '{"q": 1, "r": "x y"}')])
    chat.has_reasoning = False
    assert read(chat, list(text)) == Read("<reason>why</reason>Hi.", "", [("search", '{"q": 1, "r": "x y"}')])
    assert not chat.opens_reasoning("<bot><reason>")
    listed = json.loads(json.dumps(TEMPLATE))
    listed["fields"]["tool_calls"] = {
        "open": "CALLS",
        "close": "END",
        "content": "json",
        "transform_each": True,
        "transform": {"function": {"name": "{name}", "arguments": "{parameters.all}"}},
    }
    chat, _ = chat_of(0, listed)
    text = (
        'CALLS[{"name": "search", "parameters": {"all": {"q": 1}}}, {"name": "search", "parameters": {"all": {}}}]END'
    )
    assert read(chat, list(text)) == Read(calls=[("search", '{"q": 1}'), ("search", "{}")])


@pytest.mark.parametrize(
    "text",
    [
        "<call other>\nq: 1\n</call>",
        "<call search>\nq: 1\n",
        "<call search",
        "a <call",
        "x\n\n",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    chat, _ = chat_of(0, TEMPLATE)
    assert read(chat, list(text)) == read(chat, [text]) == Read(content=text)


@pytest.mark.proof
@pytest.mark.sweep(most=2)
@pytest.mark.parametrize("unit", ["<call search>", "<call ", "<r>", " ", "<call search>\nq: 1\n</call>"])
def test_time_grows_with_the_length_alone(unit: str) -> None:
    chat, _ = chat_of(0, TEMPLATE)

    def read_units(size: int, step: int) -> None:
        text = unit * (size // len(unit))
        read(chat, [text[at : at + step] for at in range(0, len(text), step)])

    assert grows_with_length(lambda size: read_units(size, 7))
    assert grows_with_length(lambda size: read_units(size, size))


def test_what_models_get_wrong_in_json_is_corrected() -> None:
    fields = {"tool_calls": {"open": "<c>", "close": "</c>", "content": "json", "transform": {"function": "{content}"}}}
    chat, _ = chat_of(0, TEMPLATE | {"fields": fields | {"content": {}}})
    text = '<c>{"name": "search", "arguments": {"q": 1e999, "r": None,}}</c>'
    assert read(chat, [text]).calls == [("search", '{"q": 1.7976931348623157e+308, "r": null}')]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 2}, "version 2"),
        ({"start_anchor": "x"}, "both start_anchor and start_anchor_pattern"),
        ({"start_anchor_pattern": "("}, "bad start_anchor_pattern"),
        ({"fields": {}}, "no fields"),
        ({"fields": {"content": {}, "thinking": {}}}, "more than one field without open"),
        ({"fields": {"mood": {}}}, "the field 'mood'"),
        ({"fields": {"content": {"open": []}}}, r"open \[\] in 'content'"),
        ({"fields": {"content": {"colour": 1}}}, "colour"),
        ({"fields": {"content": {"content": "json"}}}, "only text is served"),
        ({"fields": {"tool_calls": {"content": "yaml"}}}, "'yaml'"),
        ({"fields": {"tool_calls": {"transform": {"a": "x{content}"}}}}, "beside other text"),
        ({"more": 1}, "more"),
    ],
)
def test_a_bad_description_stops_the_start(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(DeploymentError, match=f"response_template .*{reason}"):
        chat_of(0, TEMPLATE | change)
    without = {key: value for key, value in TEMPLATE.items() if not key.startswith("start")}
    with pytest.raises(DeploymentError, match="neither start_anchor"):
        chat_of(0, without)
