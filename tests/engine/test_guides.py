"""Guides of every kind as grammars: what they accept, and what is refused, by which keyword and where."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.engine.guided.masks import forbidden_tokens, next_masks
from inflight.engine.guided.refusals import refusal
from inflight.engine.guided.vocabulary import clear_bit, has_bit, set_bit
from inflight.errors import InvalidRequest
from inflight.text.patterns import BadPattern, rust_pattern
from tests.engine.support.checkpoints import VOCAB
from tests.engine.support.guiding import accepts, byte_tokenizer, end_id, grammar, guide_state, vocabulary
from tests.support.properties import examples
from tests.support.tables import each_row

FOO = {"begin": "<f=foo>", "schema": {"type": "object", "required": ["x"]}, "end": "</f>"}
LEGACY = {"structures": [FOO], "triggers": ["<f="]}
THINK = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
YES_OR_NO = {"type": "or", "elements": [{"type": "const_string", "value": "yes"}, {"type": "regex", "pattern": "n+o"}]}
NUMBER = {"type": "tag", "begin": "<n>", "content": {"type": "grammar", "grammar": "root ::= [0-9]+"}, "end": "</n>"}
ONE_NUMBER = {"type": "triggered_tags", "triggers": ["<n"], "tags": [NUMBER], "stop_after_first": True}
LISTED = {"type": "tags_with_separator", "tags": [NUMBER], "separator": ", ", "at_least_one": True}


A, ONE_OF = {"type": "integer"}, {"oneOf": [{"type": "integer"}, {"minimum": 2}]}


def _format(tree: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": tree})


def _const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _ebnf(text: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": text}


def _tag(content: dict[str, Any], begin: str = "<a>", end: str = "</a>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _sequence(*elements: dict[str, Any]) -> str:
    return _format({"type": "sequence", "elements": list(elements)})


TWO_TRIGGERS = {
    "type": "triggered_tags",
    "triggers": ["<no", "<n"],
    "tags": [NUMBER, _tag(_const("k"), "<no>", "</no>")],
}
ANY_JSON, DIGITS = {"type": "json_schema", "json_schema": True}, {"type": "regex", "pattern": "[0-9]+"}
GOES_ON = "has a part that could go on in what follows it"


@each_row(
    ("kind", "guide", "good", "bad"),
    [
        ("json", "", ['{"a": [1, null]}', "5", '"x"'], ["[", "{'a': 1}", ""]),
        (
            "json_schema",
            {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
            ['{"a":1}'],
            ["{}", '{"a":"x"}'],
        ),
        ("json_schema", True, ["1"], ["1 2"]),
        ("json_schema", {"type": "array"}, ["[1,\n    2]"], ["[1,\n\n\n2]", f"[1,{' ' * 9}2]"]),
        ("json_schema", {"format": "date"}, ['"2024-02-29"', "7"], ['"2023-02-29"', '"2024-13-01"', '"2024-04-31"']),
        ("json_schema", {"format": "time"}, ['"22:59:59Z"'], ['"22:59:60Z"', '"24:00:00Z"']),
        ("json_schema", {"format": "date-time"}, ['"2024-02-29T00:00:00+01:00"'], ['"2024-02-29 00:00:00Z"']),
        ("json_schema", {"patternProperties": {"^a.$": {"type": "null"}}}, ['{"ab": null}', '{"b": 1}'], ['{"ab": 1}']),
        ("json_schema", {"uniqueItems": False, "type": "array"}, ["[1,1]"], ["1"]),
        ("json_schema", {"$ref": "#/x/y", "x": {"y": {"type": "null"}}}, ["null"], ["1"]),
        ("regex", r"[a-z]+/\d", ["ab/1"], ["ab", "xab/1 "]),
        ("choice", ["a", "ab", 'b"c', "é/#\n"], ["a", "ab", 'b"c', "é/#\n"], ["", "b", "abb"]),
        (
            "ebnf_grammar",
            'root ::= a b # note\na ::= [a-z]+\n\nb ::=\n  "x" | "y"',
            ["abx", "xx", "axyy"],
            ["x", "aXx"],
        ),
        ("ebnf_grammar", 'root ::= e\ne ::= t ("+" t)*\nt ::= [0-9]+ | "(" e ")"', ["1+2", "((1)+20)"], ["1+", "()"]),
        ("ebnf_grammar", r'root ::= "\x41\u00e9\n\"" [^\]a-c\\-] . ', ['Aé\n"d]'], ['Aé\n"ad', 'Aé\n"]d', 'Aé\n"-d']),
        ("ebnf_grammar", 'root ::= "" | "a" root', ["", "aaa"], ["b"]),
        ("ebnf_grammar", 'root ::= "a"{2} ("b" | "c"){0,2} "d"{1,}', ["aad", "aabcd", "aabbdd"], ["ad", "aabcbd"]),
        ("lark_grammar", 'start: x "!"\nx: %json {"type": "integer"}', ["12!"], ["12", "x!"]),
        ("lark_grammar", 'start: "a]temperature=" // stop=\n', ["a]temperature="], ["a"]),
        ("structural_tag", LEGACY, ["hi", 'a<f=foo>{"x": 1}</f>b'], ["<f=bar>", "<f=foo>{}</f>", '<f=foo>{"x": 1}']),
        (
            "structural_tag",
            _format({"type": "sequence", "elements": [THINK, YES_OR_NO]}),
            ["<think>a\n</think>nno"],
            ["no"],
        ),
        ("structural_tag", _format(ONE_NUMBER), ["x<n>12</n>", "x"], ["x<n>a", "x<n>1</n>y"]),
        ("structural_tag", _format(ONE_NUMBER | {"at_least_one": True}), ["x<n>12</n>"], ["x"]),
        ("structural_tag", _format(LISTED), ["<n>1</n>", "<n>1</n>, <n>2</n>"], ["", "<n>1</n>,"]),
        ("structural_tag", _format({"type": "star", "content": YES_OR_NO}), ["", "yesnoyes"], ["maybe"]),
        ("structural_tag", _format(_tag({"type": "regex", "pattern": ".*"})), ["<a>x</a>", "<a></a></a>"], ["<a>x"]),
        ("structural_tag", _format(_tag(_ebnf('root ::= [^x]* "<"?'))), ["<a>y</a>", "<a><</a>"], ["<a>x</a>"]),
        (
            "structural_tag",
            _sequence({"type": "regex", "pattern": "[a-z]+"}, _const("end")),
            ["abend", "endend"],
            ["ab", "end"],
        ),
        ("structural_tag", _format(TWO_TRIGGERS), ["<no>k</no>", "a<n>1</n>b"], ["<nx"]),
        ("structural_tag", _format({"type": "tag", "begin": "", "content": _const(""), "end": ""}), [""], ["x"]),
        (
            "structural_tag",
            _format(
                {"type": "or", "elements": [_tag({"type": "any_text"}), {"type": "json_schema", "json_schema": A}]}
            ),
            ["<a>1</a>", "12"],
            ["<a>", "x"],
        ),
    ],
)
def test_what_guides_accept(kind: str, guide: Any, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(kind, guide, text)] == []
    assert [text for text in bad if accepts(kind, guide, text)] == []


@each_row(
    ("schema", "said"),
    [
        *(
            (
                {"properties": {"a": {"items": {keyword: value}}}},
                f"{keyword} at /properties/a/items: it cannot be enforced",
            )
            for keyword, value in {
                "not": {},
                "if": {},
                "then": {},
                "else": {},
                "dependentRequired": {"a": ["b"]},
                "dependentSchemas": {"a": {}, "b": A},
                "dependencies": {"a": ["b"]},
                "contains": {},
                "minContains": 1,
                "maxContains": 2,
                "uniqueItems": True,
                "propertyNames": {"pattern": "a"},
                "unevaluatedItems": False,
                "unevaluatedProperties": False,
                "$dynamicRef": "#a",
                "$recursiveRef": "#",
                "disallow": "any",
                "divisibleBy": 2,
                "extends": {},
            }.items()
        ),
        (
            {"anyOf": [A, {"properties": {"x/y~": {"pattern": "(?=a)"}}}]},
            "pattern at /anyOf/1/properties/x~1y~0: '(?=a'",
        ),
        ({"properties": {"a": ONE_OF}}, "oneOf at /properties/a: oneOf constraints are not supported"),
        (
            {"$defs": {"d": {"format": "idn-email"}}, "$ref": "#/$defs/d"},
            "format at /$defs/d: Unknown format: idn-email",
        ),
        ({"properties": {"a": {"format": "x"}, "b": {}, "c": {"format": "x"}}}, "format at /properties/c: Unknown"),
        ({"items": {"type": "strin"}}, "type at /items: Invalid type: strin"),
        ({"items": {"minLength": -1}}, "minLength at /items: Expected positive integer"),
        ({"patternProperties": {"^a.*": A, "^ab": {}}}, "patternProperties at the root"),
        ({"$ref": "#/nowhere"}, "$ref at the root: it refers to #/nowhere, which the schema does not have"),
        ({"items": {"$ref": "http://example.com/a"}}, "$ref at /items"),
        ({"$ref": "#/x", "x": {"not": {}}}, "not at /x"),
        ({"properties": {"a": {"$id": "http://a/b"}}}, "$id at /properties/a"),
        ({"minProperties": 3, "required": ["a"]}, "minProperties at the root: it can be enforced up to 2"),
        ({"items": [A], "additionalItems": A, "allOf": [{}]}, "additionalItems at the root"),
        ({"items": {"maximum": 2**53 + 1}}, "maximum at /items: 9007199254740993 has too many digits"),
        ({"const": -(2**63)}, "const at the root: -9223372036854775808 has too many digits"),
        ({"items": {"enum": [0, {"a": [2**53 + 1]}]}}, "enum at /items: 9007199254740993 has too many digits"),
        ({"minimum": float("inf")}, "it is not valid JSON: Infinity is no JSON"),
        ({"x-guidance": {"lenient": True}}, "x-guidance at the root"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "$schema at the root: draft 3"),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "contentEncoding": "base64"},
            "contentEncoding at the root",
        ),
        ({"enum": []}, "enum at the root: Unsatisfiable"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable schema: minimum (5) is greater"),
        (functools.reduce(lambda inner, _: {"items": inner}, range(110), {}), "it lies more than 100 steps deep"),
        (False, "Unsatisfiable"),
        (5, "a JSON object, true or false is expected"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_keyword_and_place(schema: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        grammar("json_schema", json.dumps(schema))


@each_row(
    ("kind", "text", "said"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("choice", "[]", "a JSON list of texts"),
        ("choice", '["a", ""]', "a JSON list of texts"),
        ("ebnf_grammar", 'start ::= "a"', "no rule 'root'"),
        ("ebnf_grammar", "root ::= other", "rule 'root' refers to 'other'"),
        ("ebnf_grammar", 'root ::= "a"\nroot ::= "b"', "line 2 has a second rule 'root'"),
        ("ebnf_grammar", 'root ::= "a"\n  (= "b")', "line 2 has a look-ahead"),
        ("ebnf_grammar", 'root ::= ("a"', "a parenthesis that is not closed"),
        ("ebnf_grammar", 'root ::= "a" | *', "'*' with nothing before it"),
        ("ebnf_grammar", 'root ::= "a"{3,1}', "the numbers must rise"),
        ("ebnf_grammar", 'root ::= "\\q"', "the escape \\q"),
        ("ebnf_grammar", "root ::= @", "line 1 has '@'"),
        ("ebnf_grammar", f"root ::= {'(' * 70}", "parentheses inside of each other"),
        ("lark_grammar", 'begin: "a"', "no start rule"),
        ("lark_grammar", '\nstart[temperature=0.5]: "a"', "the option temperature in line 2"),
        ("lark_grammar", "start[max_tokens=5]: /a*/", "the option max_tokens in line 1"),
        ("lark_grammar", '%llguidance {"no_forcing": false}\nstart: "a"', "%llguidance in line 1 sets options"),
        ("lark_grammar", 'start: %lark { start: "a" }', "the directive %lark in line 1"),
        ("lark_grammar", 'start: x\nx: %json {"not": {}}', "not at the root: it cannot be enforced"),
        ("lark_grammar", "start: %json {", "%json in line 1 is not valid JSON"),
        ("structural_tag", "[]", "it must be a JSON object"),
        ("structural_tag", "{}", "it.structures must be a list"),
        ("structural_tag", json.dumps(LEGACY | {"triggers": ["<g"]}), "structures.tags[0].begin must begin with one"),
        ("structural_tag", json.dumps(LEGACY | {"extra": 1}), "it has 'extra', which is not supported"),
        ("structural_tag", _format({"type": "qwen_xml_parameter"}), "has the type 'qwen_xml_parameter'; supported are"),
        ("structural_tag", _format({"type": "any_text", "excludes": ["a"]}), "format has 'excludes'"),
        ("structural_tag", _format({"type": "json_schema", "json_schema": {"not": {}}}), "format.json_schema: not at"),
        ("structural_tag", _format(NUMBER | {"end": ["a", "b"]}), "format.end must be one text"),
        (
            "structural_tag",
            _format({"type": "sequence", "elements": [{"type": "any_text"}, YES_OR_NO]}),
            "format.elements[0] is any_text, which must be the last",
        ),
        (
            "structural_tag",
            _sequence({"type": "or", "elements": [{"type": "any_text"}, YES_OR_NO]}, YES_OR_NO),
            "format.elements[0].elements[0] is any_text, which must be the last",
        ),
        ("structural_tag", _sequence(DIGITS, ANY_JSON), f"format {GOES_ON}"),
        ("structural_tag", _sequence(ANY_JSON, DIGITS), f"format {GOES_ON}"),
        ("structural_tag", _format({"type": "plus", "content": ANY_JSON}), f"format {GOES_ON}"),
        (
            "structural_tag",
            _format(
                ONE_NUMBER | {"tags": [_tag({"type": "regex", "pattern": ".*"}, "<n>")], "stop_after_first": False}
            ),
            f"format.tags[0] {GOES_ON}",
        ),
        (
            "structural_tag",
            _format(_tag(ONE_NUMBER, end="x<n>")),
            "format.content.triggers or the end has 'x<n>', of which",
        ),
        ("structural_tag", _format(ONE_NUMBER | {"triggers": ["<n", "<n"]}), "format.triggers must be texts that"),
        ("structural_tag", _format({"type": []}), "format has the type []; supported are"),
        ("structural_tag", _format({"type": "regex", "pattern": "a\\"}), "format.pattern is refused: it ends within"),
        (
            "structural_tag",
            json.dumps(LEGACY | {"structures": [FOO | {"schema": "no JSON"}]}),
            "structures[0].schema is not valid JSON",
        ),
    ],
)
def test_what_guides_of_other_kinds_are_refused_for(kind: str, text: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        grammar(kind, text)


def test_a_refusal_names_the_guide_and_the_pointer() -> None:
    said = str(refusal(("properties", "a/b~", 0), "not", "why"))
    assert said == "guided_decoding_guide: not at /properties/a~1b~0/0: why"


PIECES = st.sampled_from(
    [
        "a",
        "b",
        "x",
        "1",
        "_",
        "-",
        "é",
        "\\d",
        "\\w",
        "\\s",
        "\\S",
        "\\D",
        "\\W",
        ".",
        "[a-c]",
        "[^a]",
        "[\\s-]",
        "[&&b]",
        "[[x]",
        "\\.",
        "\\/",
        "\\u0061",
        "\\x62",
        "\\n",
        "(?:ab)",
        "(a|b)",
        "\\-",
        "{",
        "}",
        "[\\]x]",
        "\\t",
        "\\u00e9",
    ]
)
PATTERNS = st.lists(st.tuples(PIECES, st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,3}"])), min_size=1, max_size=4)
TEXTS = st.text(st.sampled_from("abx1_-é.&[]{} \n\r\t\u2028\ufeff/"), max_size=6)


@given(PATTERNS, TEXTS, st.booleans())
@settings(max_examples=examples(10), deadline=None)
def test_patterns_match_what_ecma_262_says(pieces: list[tuple[str, str]], text: str, whole: bool) -> None:
    """Python's expressions serve as the reference, with ECMA-262's classes written out."""
    pattern = "".join(map("".join, pieces))
    pattern = f"^{pattern}$" if whole else pattern
    space = r"\t\n\x0b\x0c\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
    python = pattern.replace("[\\s-]", f"[{space}-]").replace("[[x]", r"[\[x]").replace("[&&b]", "[&b]")
    python = python.replace("\\s", f"[{space}]").replace("\\S", f"[^{space}]").replace("\\/", "/")
    python = re.sub(r"(?<!\\)\.", r"[^\\n\\r\\u2028\\u2029]", python)
    python = re.sub(r"\{(?!\d)|(?<![\d])\}", r"\\\g<0>", python)
    if whole:
        python = python[:-1] + r"\Z"
    expected = re.search(python, text, re.ASCII) is not None
    assert (
        accepts("json_schema", {"type": "string", "pattern": pattern}, json.dumps(text, ensure_ascii=False)) == expected
    )


UNSERVED = ["(?=a)", "(?i)a", "\\b", "\\1", "[a", "a\\", "\\k<n>", "[a--b]"]
NONE = ["(a", "a)", "a)|(b", "*a", "a|*", "(+a)", "{2}", "a{2,1}", f"a{{{'9' * 5000}}}", "[b-a]", "[a-\\d]", "[\\s-a]"]
NONE += ["a^b", "a$b", "(a$|b)c", "(a|b)^", "\\p{None}", "\\ud800", "\\u{110000}", "(" * 61 + "a" + ")" * 61]


@each_row("pattern", UNSERVED + NONE)
def test_patterns_that_cannot_be_enforced_are_refused(pattern: str) -> None:
    with pytest.raises(BadPattern):
        rust_pattern(pattern)


PARTS = [*"ab.()()|*+?^${}-", "\\d", "\\s", "\\S", "\\t", "\\)", "\\x41", "\\p{L}", "(?:", "{2}", "{3,2}", "{2,}"]
PARTS += ["[a-c]", "[c-a]", "[\\d-a]", "[a-\\d]", "[\\t-a]", "[\\--a]", "[^a]", "[\\S-a]", "[a-]", "[\\x41-B]"]


@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=8))
@settings(max_examples=examples(30), deadline=None)
def test_llguidance_takes_every_pattern_that_is_not_refused(parts: list[str]) -> None:
    pattern = "".join(parts)
    with contextlib.suppress(BadPattern):
        rust_pattern(pattern)
        grammar("json_schema", json.dumps({"anyOf": [{"type": "string", "pattern": pattern}, {"type": "null"}]}))


@given(st.lists(st.integers(0, VOCAB - 1), max_size=20))
@settings(max_examples=examples(3), deadline=None)
def test_bits_of_masks(tokens: list[int]) -> None:
    mask = vocabulary().everything()
    for token in tokens:
        clear_bit(mask, token)
    assert [token for token in range(VOCAB) if not has_bit(mask, token)] == sorted(set(tokens))
    for token in tokens:
        set_bit(mask, token)
    assert (mask == vocabulary().everything()).all()


def test_masks_on_a_device_forbid_what_they_forbid_on_a_cpu() -> None:
    states = [guide_state("regex", text) for text in ("[ab]+", "", "x|yz", "(?s:.)*", "é", "1{9}")]
    masks = next_masks(states)
    forbidden = forbidden_tokens(torch.from_numpy(masks), VOCAB)
    expected = [[not has_bit(mask, token) for token in range(VOCAB)] for mask in masks]
    assert forbidden.tolist() == expected


def test_a_state_ahead_leaves_the_state_as_it_is() -> None:
    state, [a, b] = guide_state("regex", "ab+"), _ids("a", "b")
    before = next_masks([state])
    ahead = state.ahead([a, b])
    assert has_bit(next_masks([ahead])[0], end_id())
    assert (next_masks([state]) == before).all()
    assert state.allowed_prefix([a, b, b, a, b]) == 3
    assert (next_masks([state]) == before).all()


def _ids(*pieces: str) -> list[int]:
    return [byte_tokenizer().spelling(piece)[0] for piece in pieces]
