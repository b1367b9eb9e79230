"""Output of models is read the same however it is cut, and nothing of it is lost."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import DeploymentError
from inflight.text.checkpoint import TextConfig
from inflight.text.output.events import ContentDelta, OutputEvent
from inflight.text.output.find import FORMATS, find_chat_format
from inflight.text.output.format import ChatFormat
from inflight.text.output.markers import Marker, Piece
from inflight.text.output.scanner import join_events
from inflight.text.output.tools import Tool
from inflight.text.tokenizer import Tokenizer
from tests.support.chat_formats import (
    FAMILIES,
    Call,
    Read,
    grows_with_length,
    pieces_of,
    read_tokens,
    tokenizer_of,
    whole,
)
from tests.support.tokenizers import make_tokenizer

INDICES = range(len(FAMILIES))
IDS = [f"{index}-{family.name}" for index, family in enumerate(FAMILIES)]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
}
TOOLS = [Tool("get_weather", "", WEATHER), Tool("search", "", {"type": "object"})]
CALLS: list[Call] = [
    ("get_weather", {"city": 'Paris\n"<x>"', "days": 3, "tags": ["a", {"b": None, "c": [1.5, True]}]}),
    ("search", {"query": "é😀"}),
    ("get_weather", {}),
]


def read(
    chat: ChatFormat,
    pieces: list[Piece],
    tools: list[Tool] | None = None,
    opened: bool = False,
    cut: bool = False,
) -> Read:
    """Read an output that comes in these pieces."""
    parser = chat.parser(TOOLS if tools is None else tools, reasoning_open=opened)
    events: list[OutputEvent] = []
    for piece in pieces:
        events += parser.push([piece])
    return Read.of(events + parser.finish(cut))


@pytest.mark.parametrize("index", INDICES, ids=IDS)
def test_calls_and_reasoning_are_read(index: int) -> None:
    family, tokenizer = FAMILIES[index], tokenizer_of(index)
    chat = find_chat_format(tokenizer)
    assert (chat.name, chat.has_tools, chat.has_reasoning) == (family.name, True, family.reasoning is not None)
    calls = CALLS[: family.most]
    opening, closing = family.reasoning or ("", "")
    text = f"{opening}Let me see.{closing}" if family.reasoning else ""
    output = text + family.render(calls)
    for tokens in (tokenizer.encode_batch([output])[0],):
        for chunks in ([tokens], [[token] for token in tokens]):
            found = read_tokens(chat, tokenizer, TOOLS, chunks)
            assert found.values == calls
            assert (found.content, found.reasoning) == ("", "Let me see." if family.reasoning else "")
    assert read_tokens(chat, tokenizer, [], [tokenizer.encode_batch([output])[0]]).calls == []
    if family.reasoning and chat.name != "harmony":
        without = find_chat_format(tokenizer)
        without.has_reasoning = False
        assert read_tokens(without, tokenizer, TOOLS, [tokenizer.encode_batch([output])[0]]).reasoning == ""
    if family.reasoning:
        assert chat.opens_reasoning(f"<|user|>hello<|assistant|>{opening}")
        assert not chat.opens_reasoning(f"<|user|>what does {opening} mean?<|assistant|>")
        inside = tokenizer.encode_batch([output.removeprefix(opening)])[0]
        assert read_tokens(chat, tokenizer, TOOLS, [inside], reasoning_open=True) == found


@pytest.mark.parametrize("index", INDICES, ids=IDS)
@pytest.mark.parametrize("text", ["Hello", " \n x \n", "a < b {c} [d] ```e``` <tool", "{}", "[1]", '{"name": 1}', ""])
def test_text_without_calls_is_the_content(index: int, text: str) -> None:
    tokenizer = tokenizer_of(index)
    chat = find_chat_format(tokenizer)
    answer = FAMILIES[index].answer
    found = read(chat, pieces_of(chat, tokenizer, answer + text))
    expected = text.lstrip() if answer else text  # white space behind a delimiter is the format's
    assert found == Read(content=expected)


@pytest.mark.parametrize("index", INDICES, ids=IDS)
def test_what_only_looks_like_a_call_is_content(index: int) -> None:
    family, tokenizer = FAMILIES[index], tokenizer_of(index)
    chat = find_chat_format(tokenizer)
    special = tuple(tokenizer.special_tokens)

    def plain(text: str) -> str:
        for token in special:
            text = text.replace(token, "")
        return text

    unknown = family.render([("other", {"a": 1})])
    assert read(chat, pieces_of(chat, tokenizer, unknown)) == Read(content=plain(unknown))
    good = family.render([CALLS[1]])
    start = good.index("search")
    for end in range(1, start + len("search")):
        found = read(chat, pieces_of(chat, tokenizer, good[:end]))
        assert not found.calls
        assert found.content.strip() == plain(good[:end]).strip()


@pytest.mark.parametrize("index", INDICES, ids=IDS)
def test_a_call_that_breaks_off_keeps_what_has_come(index: int) -> None:
    family, tokenizer = FAMILIES[index], tokenizer_of(index)
    chat = find_chat_format(tokenizer)
    pieces = pieces_of(chat, tokenizer, family.render(CALLS[:1]))
    complete = read(chat, pieces).calls[0][1]
    for end in range(len(pieces)):
        found = read(chat, pieces[:end])
        assert len(found.calls) <= 1
        if found.calls:
            assert complete.startswith(found.calls[0][1])
            assert found.content == ""


@pytest.mark.parametrize("index", INDICES, ids=IDS)
def test_a_call_that_is_cut_leaves_no_notation_in_the_content(index: int) -> None:
    """From the delimiter on there is a call or nothing; a name is told once it is known, in one piece or in many."""
    family, tokenizer = FAMILIES[index], tokenizer_of(index)
    chat = find_chat_format(tokenizer)
    whole_call = pieces_of(chat, tokenizer, family.render(CALLS[:1]))
    letters: list[Piece] = [one for piece in whole_call for one in (piece if isinstance(piece, str) else [piece])]
    complete = read(chat, whole_call).calls[0][1]
    shown = ["" if isinstance(one, Marker) else one for one in letters]
    for end in range(1, len(letters)):
        found = read(chat, letters[:end], cut=True)
        text = "".join(shown[:end])
        assert read(chat, [text] if text and len(text) == end else letters[:end], cut=True) == found
        assert [name for name, _ in found.calls] in ([], ["get_weather"])
        assert all(complete.startswith(arguments) for _, arguments in found.calls)
        if "get_weather" in text[:-1]:
            assert found.content == ""
        if "get_weather" in "".join(shown[: max(0, end - 12)]):
            assert found.calls


_PARTS = (
    '<tool_call> </tool_call> <function=search> <parameter=q> </parameter> </function> search { } " : , [ ] ( ) \\ '
    "arguments parameters name [TOOL_CALLS] [ARGS] ```tool_code ``` call: <think> </think> é 1 null q= commentary "
    'final <|tool_call> <tool_call|> <|"|> <|channel|> <|message|> <|end|> to=functions.search thought <|python_tag|> '
    "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <|start|> analysis"
).split()
_PARTS += ["\n", " ", '{"name": "search", "arguments": {"q": ', '{"name": "search", "parameters": {']


def letters(text: str) -> str:
    """Return what of a text must never be lost."""
    return "".join(re.findall(r"\w", text))


@pytest.mark.sweep
@pytest.mark.parametrize("index", INDICES, ids=IDS)
@given(parts=st.lists(st.sampled_from(_PARTS), max_size=14), data=st.data(), opened=st.booleans())
def test_any_cut_reads_the_same(index: int, parts: list[str], data: st.DataObject, opened: bool) -> None:
    tokenizer = tokenizer_of(index)
    chat = find_chat_format(tokenizer)
    text = "".join(parts)
    characters = pieces_of(chat, tokenizer, text)
    one = read(chat, whole(characters), opened=opened)
    assert read(chat, characters, opened=opened) == one
    parser, events = chat.parser(TOOLS, reasoning_open=opened), []
    place = 0
    while place < len(characters):
        size = data.draw(st.integers(1, 6))
        events += parser.push(characters[place : place + size])
        place += size
    assert Read.of(events + parser.finish()) == one
    without = Read(content="".join(piece for piece in characters if isinstance(piece, str)))
    plain = read(chat, characters, tools=[])
    if chat.name != "harmony":  # whose headers are words
        words = re.compile("think|thought")  # of delimiters
        assert words.sub("", letters(plain.reasoning + plain.content)) == words.sub("", letters(without.content))


@pytest.mark.parametrize("index", INDICES, ids=IDS)
@given(text=st.text(max_size=30))
def test_any_text_is_content(index: int, text: str) -> None:
    tokenizer = tokenizer_of(index)
    chat = find_chat_format(tokenizer)
    assert read(chat, list(text)) == Read(content=text)


@pytest.mark.sweep(most=13)
@pytest.mark.parametrize("index", INDICES, ids=IDS)
@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>",
        '{"a":',
        '<tool_call>{"name": "search", "arguments": {"q": "',
        "\n ",
        "[search(",
        "<function=",
        "[",
        "`",
    ],
)
def test_time_grows_with_the_length_alone(index: int, unit: str) -> None:
    """Of what may become a call, a few characters at a time."""
    tokenizer = tokenizer_of(index)
    chat = find_chat_format(tokenizer)
    start = FAMILIES[index].render([("search", {"q": "x"})]).split("search")[0]

    def read_units(size: int) -> Read:
        text = unit * (size // len(unit))
        return read(chat, [*pieces_of(chat, tokenizer, start), *(text[at : at + 7] for at in range(0, len(text), 7))])

    found = read_units(1000)
    assert letters(unit) == "" or found.content or found.calls
    assert grows_with_length(read_units)


def test_formats_are_found_and_named() -> None:
    tokenizer = make_tokenizer("byte level")
    assert find_chat_format(tokenizer).name == "plain"
    for name in FORMATS:
        assert find_chat_format(tokenizer, name).name in (name, "plain")
    assert find_chat_format(tokenizer_of(0), "auto").name == "hermes"
    with pytest.raises(DeploymentError, match=r"tool_parser is 'hermess'; .* auto, none, .*did you mean 'hermes'"):
        find_chat_format(tokenizer, "hermess")


def test_stop_tokens_are_those_of_the_format() -> None:
    llama, harmony = (tokenizer_of(index) for index in (4, 10))
    assert find_chat_format(llama).stop_token_ids == {llama.special_tokens["<|eom_id|>"]}
    expected = {harmony.special_tokens[name] for name in ("<|return|>", "<|call|>")}
    assert find_chat_format(harmony).stop_token_ids == expected


def test_spellings_that_models_have_besides_their_own() -> None:
    def calls(index: int, text: str) -> Any:
        tokenizer = tokenizer_of(index)
        chat = find_chat_format(tokenizer)
        found = read(chat, pieces_of(chat, tokenizer, text))
        assert found.content == ""
        return found.values

    search = ("search", {"q": 1})
    assert calls(0, '<tool_call>{"arguments": {"q": 1}, "name": "search"}</tool_call>') == [search]
    assert calls(0, '<tool_call>{"name": "search", "arguments": "{\\"q\\": 1}"}</tool_call>') == [search]
    assert calls(0, '<tool_call>{"name": "search"}') == [("search", {})]
    broken = '<tool_call>{"name": "search", "arguments": {"q": "a\nb"}}</tool_call>'
    assert calls(0, broken) == [("search", {"q": "a\nb"})]
    assert calls(3, "<function=search>\n<parameter=q>\n1\n</parameter>\n</function>") == [search]
    tags = "<tool_call>\n<function=get_weather>\n<parameter=tags>\n['a', {'b': None}]\n</parameter>\n</function>"
    assert calls(3, tags) == [("get_weather", {"tags": ["a", {"b": None}]})]
    assert calls(4, "<|python_tag|>[search(q=1), search(q='a', r=[True, {'b': None}])]") == [
        search,
        ("search", {"q": "a", "r": [True, {"b": None}]}),
    ]
    assert calls(4, '{"type": "function", "function": "search", "parameters": {"q": 1}}') == [search]
    assert calls(7, '[TOOL_CALLS]search[CALL_ID]abc123XYZ[ARGS]{"q": 1}') == [search]
    assert calls(8, '<｜tool▁call▁begin｜>search<｜tool▁sep｜>{"q": 1}<｜tool▁call▁end｜>') == [search]
    header = "<|start|>assistant to=functions.search<|channel|>commentary json<|message|>"
    assert calls(10, f'{header}{{"q": 1}}<|call|>') == [search]
    assert calls(12, "```tool_code\nprint(search(q=1))\n```") == [search]


def test_channels_of_one_kind_are_joined_by_a_line_break() -> None:
    tokenizer = tokenizer_of(10)
    chat = find_chat_format(tokenizer)
    text = "<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>final<|message|>Then.<|return|>"
    assert read(chat, pieces_of(chat, tokenizer, text)) == Read(content="First.\nThen.")


def test_neighbouring_deltas_are_joined() -> None:
    assert join_events([ContentDelta("a"), ContentDelta("b")]) == [ContentDelta("ab")]


def test_the_response_template_of_a_checkpoint_is_read(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "deployments/demo/model"
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["response_template"] = {"start_anchor": "x", "fields": {"content": {}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    chat = find_chat_format(Tokenizer.from_checkpoint(tmp_path))
    assert chat.name == "response_template"
    assert not chat.has_tools
    settings["response_template"] = []
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DeploymentError, match="response_template"):
        Tokenizer.from_checkpoint(tmp_path)


def test_a_text_config_needs_no_response_template() -> None:
    assert TextConfig(1, frozenset(), None, {}, None).response_template is None
