"""Whatever a model writes: no word of it is lost, complete calls are JSON, and cuts of the output change nothing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.text.output.find import find_chat_format
from inflight.text.output.format import ChatFormat
from inflight.text.output.markers import Piece
from inflight.text.output.tools import Tool
from inflight.text.tokenizer import Tokenizer
from tests.support.chat_formats import FAMILIES, Call, Read, pieces_of, read_tokens, tokenizer_of, whole

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "array"}}}
TOOLS = [Tool("f", "", SCHEMA), Tool("g")]
_JSON_BITS = '{ } [ ] " : , \\ \\u00e9 1e999 -0.5 12 True None null {"a": {"a":1} {"a":[1,] {"b":{"b":[ "x":'.split(" ")
_COMMON = ["\n", " ", "é", "😀", "f", "g(", *_JSON_BITS]
_TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "</function>", "</parameter>"]
_TAGS += ["<parameter=a>", "<parameter=b>", "<parameter=c>\n", "<param", "</func", '{"name": "f", "arguments": {']
_TAGS += ['{"name": "f", "arguments": ', '"arguments": {"b":1}, "name":"g"}']
BITS = {
    "hermes": _TAGS,
    "qwen_xml": _TAGS,
    "llama": [
        '{"name": "f", "parameters": {',
        "; ",
        "<|python_tag|>",
        "[f(",
        "a=1)",
        "[f(a='x'), g()]",
        "<|python_end|>",
    ],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", '[{"name": "f", "arguments": {', "[THINK]", "[/THINK]"],
    "deepseek": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "function",
        "\n```json\n",
        "```",
        "<think>",
        "</think>",
    ],
    "harmony": [
        "<|start|>assistant",
        "<|channel|>",
        "<|constrain|>json",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
    ],
    "gemma4": [
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
        "call:f",
        "a:",
        "<|channel>thought\n",
        "<channel|>",
        "call:f{a:",
    ],
    "gemma3": ["```tool_code", "```", "f(", "a=", ")", "[f(", "print(", "f(a=True, b={'x': [1, ]})"],
}
_TEXTS = st.lists(
    st.sampled_from(["<tool_call>", "</parameter", "<|call|>", "```", "[ARGS]", *"'\"\\{}\n\t;é😀"]), max_size=4
).map("".join)
_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([1, -0.5, None, True, "", []]) | _TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["k", "two words", "é"]), inner),
    max_leaves=4,
)
_ARGUMENTS = st.fixed_dictionaries(
    {}, optional={"a": _TEXTS, "b": st.integers(-9, 10**20), "c": st.lists(_VALUES, max_size=2)}
)


def _has_one_reading(call: Call) -> bool:
    """Return whether ``a`` can only be a text: ``g`` has no schema, and XML writes ``"{}"`` and ``{}`` alike."""
    name, arguments = call
    try:
        json.loads(arguments.get("a", "text"))
    except ValueError:
        return True
    return name == "f"


_CALLS = st.lists(st.tuples(st.sampled_from(["f", "g"]), _ARGUMENTS).filter(_has_one_reading), min_size=1, max_size=3)
_WORD = re.compile(r"q\d+z")
"""Halves of words that come to stand side by side make no other of the words."""
_HEADERS = re.compile(r"(?<=<\|start\|>|channel\|>|nstrain\|>)[^<]*(?=<\|)")
"""What stands in the headers of gpt-oss' messages, which are no text."""
INDICES = range(len(FAMILIES))
IDS = [f"{index}-{family.name}" for index, family in enumerate(FAMILIES)]


@st.composite
def _outputs(draw: st.DrawFn, name: str) -> str:
    """Draw an output of bits of a format, with words q0z, q1z … between them."""
    bits = draw(st.lists(st.sampled_from(BITS[name]) | st.sampled_from(_COMMON) | st.just("w"), max_size=16))
    return "".join(f"q{index}z" if bit == "w" else bit for index, bit in enumerate(bits))


def read(chat: ChatFormat, chunks: list[list[Piece]], opened: bool) -> tuple[Read, bool]:
    """Read an output in chunks of pieces; return what it consists of, and whether it ends inside a call."""
    parser = chat.parser(TOOLS, reasoning_open=opened)
    events = [event for chunk in chunks for event in parser.push(chunk)]
    return Read.of(events + parser.finish()), parser.has_open_call


def check(found: Read, is_open: bool, output: str) -> None:
    """Check that no word of an output is lost, and that all of its calls are complete or the last has been cut."""
    said = found.content + found.reasoning + "".join(name + arguments for name, arguments in found.calls)
    written, headers = _WORD.findall(output), set(_WORD.findall("".join(_HEADERS.findall(output))))
    shown = [word for word in _WORD.findall(said) if word in written]
    assert len(shown) == len(set(shown))
    assert set(written) - headers <= set(shown)
    broken = 0
    for _, arguments in found.calls:
        try:
            assert isinstance(json.loads(arguments, parse_constant=pytest.fail), dict)
            assert "Infinity" not in json.dumps(json.loads(arguments))
        except ValueError:
            broken += 1
    assert is_open == (broken > 0)


@pytest.mark.sweep
@pytest.mark.parametrize("index", INDICES, ids=IDS)
@given(data=st.data(), opened=st.booleans())
def test_nothing_is_lost_and_no_cut_matters(index: int, data: st.DataObject, opened: bool) -> None:
    name, tokenizer = FAMILIES[index].name, tokenizer_of(index)
    chat = find_chat_format(tokenizer)
    output = data.draw(_outputs(name))
    pieces = pieces_of(chat, tokenizer, output)
    found, is_open = read(chat, [whole(pieces)], opened)
    check(found, is_open, output)
    assert read(chat, [[piece] for piece in pieces], opened) == (found, is_open)
    size = data.draw(st.integers(2, 7))
    cut = [whole(pieces[at : at + size]) for at in range(0, len(pieces), size)]
    assert read(chat, cut, opened) == (found, is_open)
    tokens = tokenizer.encode_batch([output])[0]
    assert read_tokens(chat, tokenizer, TOOLS, [[token] for token in tokens], opened) == read_tokens(
        chat, tokenizer, TOOLS, [tokens], opened
    )


def written(index: int, calls: list[Call]) -> list[Piece]:
    """Return calls as a family writes them; delimiters inside of arguments are characters, and no special tokens."""

    def apart(value: Any) -> Any:
        if isinstance(value, str):
            return re.sub(r"([<\[])", "\\1\ue000", value)
        if isinstance(value, list):
            return [apart(one) for one in value]
        return {key: apart(one) for key, one in value.items()} if isinstance(value, dict) else value

    tokenizer = tokenizer_of(index)
    text = FAMILIES[index].render([(name, apart(arguments)) for name, arguments in calls[: FAMILIES[index].most]])
    return [piece for piece in pieces_of(find_chat_format(tokenizer), tokenizer, text) if piece != "\ue000"]


def chunks_of(data: st.DataObject, pieces: list[Piece]) -> list[list[Piece]]:
    """Draw a way to cut an output into chunks."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(pieces)), max_size=6)))
    return [whole(pieces[start:end]) for start, end in zip([0, *cuts], [*cuts, len(pieces)], strict=True)]


@pytest.mark.sweep
@pytest.mark.parametrize("index", INDICES, ids=IDS)
@given(calls=_CALLS, data=st.data(), text=st.sampled_from(["", "Hello {there}. "]))
def test_delimiters_and_escapes_inside_of_arguments_are_read_back(
    index: int, calls: list[Call], data: st.DataObject, text: str
) -> None:
    family, chat = FAMILIES[index], find_chat_format(tokenizer_of(index))
    text = "" if family.name in ("llama", "harmony") else text  # whose calls stand at the beginning, or behind a header
    pieces = [*text, *written(index, calls)]
    for chunks in ([whole(pieces)], [[piece] for piece in pieces], chunks_of(data, pieces)):
        found, is_open = read(chat, chunks, False)
        assert (found.content.strip(), found.values) == (text.strip(), calls[: family.most])
        assert not is_open


@pytest.mark.sweep
@pytest.mark.parametrize("index", INDICES, ids=IDS)
@given(calls=_CALLS, data=st.data(), opened=st.booleans())
def test_what_a_model_gets_wrong_in_calls_loses_nothing(
    index: int, calls: list[Call], data: st.DataObject, opened: bool
) -> None:
    """Calls, with text between them, of which pieces are left out, and others put in."""
    name, tokenizer = FAMILIES[index].name, tokenizer_of(index)
    chat = find_chat_format(tokenizer)
    pieces: list[Piece] = []
    for number, call in enumerate(calls):
        pieces += [*f" q{number}z ", *written(index, [(call[0], call[1] | {"a": f"x q{number + 10}z"})])]
    for number in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, len(pieces)))
        bit = data.draw(st.sampled_from([*BITS[name], *_COMMON, f"q{number + 20}z"]))
        pieces[start : start + data.draw(st.integers(0, 8))] = pieces_of(chat, tokenizer, bit)
    output = "".join(piece if isinstance(piece, str) else piece.text for piece in pieces)
    texts = "".join(piece for piece in pieces if isinstance(piece, str))
    found, is_open = read(chat, [whole(pieces)], opened)
    if _WORD.findall(output) == _WORD.findall(texts):  # no delimiter inside of a word, nor a word inside of one
        check(found, is_open, output)
    for chunks in ([[piece] for piece in pieces], chunks_of(data, pieces)):
        assert read(chat, chunks, opened) == (found, is_open)


TAGS = (
    "<tool_call><function=f></function></tool_call>[TOOL_CALLS]f[ARGS]{}```tool_codef()```<function=g></function>"
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><think>a</think>"
)
BESIDE_CALLS = [index for index, family in enumerate(FAMILIES) if family.name != "llama"]
"""The families that take a form beside calls."""


def check_with_form(
    chat: ChatFormat, pieces: list[Piece], expected: tuple[str, list[Call]], data: st.DataObject
) -> None:
    """Check what is read of an output that is calls or an answer of a form."""
    for chunks in ([whole(pieces)], [[piece] for piece in pieces], chunks_of(data, pieces)):
        parser = chat.parser(TOOLS, reasoning_open=False, has_form=True)
        events = [event for chunk in chunks for event in parser.push(chunk)]
        found = Read.of(events + parser.finish())
        assert (found.content.strip(), found.values) == expected


@pytest.mark.sweep
@pytest.mark.parametrize("index", BESIDE_CALLS, ids=[IDS[index] for index in BESIDE_CALLS])
@given(calls=_CALLS, space=st.sampled_from(["", "\n"]), data=st.data())
def test_an_answer_that_has_a_form_has_no_calls_in_it(
    index: int, calls: list[Call], space: str, data: st.DataObject
) -> None:
    family, tokenizer = FAMILIES[index], tokenizer_of(index)
    chat = find_chat_format(tokenizer)
    answer = json.dumps({"text": TAGS + family.render(calls[: family.most])}, ensure_ascii=False)
    header = pieces_of(chat, tokenizer, space + family.answer)
    check_with_form(chat, [*header, *answer], (answer, []), data)
    check_with_form(chat, [*space, *written(index, calls)], ("", calls[: family.most]), data)


@given(calls=_CALLS, space=st.sampled_from(["", "\n"]), data=st.data())
def test_an_answer_that_has_a_form_has_no_calls_in_it_by_a_description(
    calls: list[Call], space: str, data: st.DataObject
) -> None:
    written_as = {"open": "<tool_call>", "close": "</tool_call>", "content": "json"}
    fields = {"tool_calls": written_as | {"transform": {"function": "{content}"}}, "content": {}}
    config = replace(tokenizer_of(0).config, response_template={"start_anchor": "x", "fields": fields})
    chat = find_chat_format(Tokenizer(tokenizer_of(0)._backend, config))
    answer = json.dumps({"text": TAGS + FAMILIES[0].render([("f", {})]).replace('"', "'")})
    check_with_form(chat, list(space + answer), (answer, []), data)
    check_with_form(chat, list(space + FAMILIES[0].render(calls)), ("", calls), data)


def _read_text(index: int, text: str) -> tuple[str, list[tuple[str, str]], bool]:
    """Return the content and the calls of an output, and whether it ends inside a call."""
    tokenizer = tokenizer_of(index)
    chat = find_chat_format(tokenizer)
    found, is_open = read(chat, [whole(pieces_of(chat, tokenizer, text))], False)
    return found.content, found.calls, is_open


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1,}', '{"a": 1}'),
        ('{"c": [1, 2, ]}', '{"c": [1, 2 ]}'),
        ('{"a": True, "b": None, "c": [False]}', '{"a": true, "b": null, "c": [false]}'),
        ('{"a": 1e999, "b": -1.5e999}', '{"a": 1.7976931348623157e+308, "b": -1.7976931348623157e+308}'),
        ('{"a": 123456789012345678901234567890}', '{"a": 123456789012345678901234567890}'),
        ("null", "{}"),
        ('"{\\"a\\": \\"x\\"}"', '{"a": "x"}'),
    ],
)
def test_what_models_get_wrong_in_json_is_corrected(arguments: str, expected: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert _read_text(0, text) == ("", [("f", expected)], False)


@pytest.mark.parametrize(
    ("index", "text", "content", "arguments"),
    [
        (0, '<tool_call>{"name": "f", "arguments": {"a": , "b": 1}</tool_call>Ok', ', "b": 1}</tool_call>Ok', '{"a": '),
        (0, '<tool_call>{"name": "f", "arguments": {"a": 1e}}</tool_call>', "}}</tool_call>", '{"a": 1e'),
        (3, "<function=f><parameter=a>\nx\n</parameter>\n<par", "", '{"a": "x"'),
        (3, "<tool_call><function=f><parameter=b>\n12", "", '{"b": 12'),
        (3, "<tool_call><function=f><parameter=b>\nno", "", '{"b": "no'),
        (11, '<|tool_call>call:f{a:<|"|>x<|"|>,b:{key', "", '{"a":"x","b":{"key'),
    ],
)
def test_a_call_that_breaks_off_stays_open(index: int, text: str, content: str, arguments: str) -> None:
    assert _read_text(index, text) == (content, [("f", arguments)], True)


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ("<parameter=a>\nx\n</function>\n</tool_call>\nBye", "Bye", '{"a": "x"}'),
        ("<parameter=a>\nx</function> y\n</parameter>\n</function>\n</tool_call>", "", '{"a": "x</function> y"}'),
        ("<parameter=a>\nx\n</parameter>\n</tool_call>\nBye", "Bye", '{"a": "x"}'),
        ("<parameter=a>\nx\n</parameter>\nBye", "Bye", '{"a": "x"}'),
        ('<parameter=c>\n["</parameter>"]\n</parameter>\n</function></tool_call>', "", '{"c": ["</parameter>"]}'),
        ('<parameter=c>\n["x\n</parameter>\n</function></tool_call>', "", '{"c": "[\\"x"}'),
        ("<parameter=c>\n[1, True,]\n</parameter>\n</function></tool_call>", "", '{"c": [1, true]}'),
        ("<parameter=b>\n5.0\n</parameter>\n</function></tool_call>", "", '{"b": 5}'),
    ],
)
def test_values_between_tags_end_where_they_should(text: str, content: str, arguments: str) -> None:
    found = _read_text(3, f"<tool_call>\n<function=f>\n{text}")
    assert (found[0].strip(), *found[1:]) == (content, [("f", arguments)], False)


@pytest.mark.parametrize("fence", [False, True])
def test_what_stands_behind_a_call_of_deepseek_and_is_none_is_content(fence: bool) -> None:
    index = next(
        i for i, family in enumerate(FAMILIES) if family.name == "deepseek" and bool(family.reasoning) != fence
    )
    text = FAMILIES[index].render([("f", {"b": 1}), ("nobody", {"b": 2})])
    content, calls, is_open = _read_text(index, text)
    assert "nobody" in content
    assert '{"b": 2}' in content
    assert (calls, is_open) == ([("f", '{"b": 1}')], False)


def test_gpt_oss_text_before_its_first_header_is_content() -> None:
    index = next(index for index, family in enumerate(FAMILIES) if family.name == "harmony")
    content, _, _ = _read_text(index, "Hello <|channel|>final<|message|>there")
    assert re.findall("Hello|there", content) == ["Hello", "there"]
