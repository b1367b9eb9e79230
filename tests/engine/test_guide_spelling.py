"""What guides must not let pass, however it is spelled, and what they refuse because they could not help it.

Each row was accepted once, or ended in another error than a refusal.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.errors import InvalidRequest
from tests.engine.support.guiding import accepts, allowed, byte_tokenizer, end_id, grammar, guide_state
from tests.support.properties import examples
from tests.support.tables import each_row

A_IS_INTEGER = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}


@each_row(
    ("schema", "good", "bad"),
    [
        (A_IS_INTEGER, ['{"a":1}', '{"a":1, "b":"x"}'], [r'{"a":1,"\u0061":"x"}', r'{"\u0061":1}']),
        ({"properties": {"a": False}}, [r'{"\n":1}'], [r'{"\u0061":1}']),
        ({"properties": {"a/b": {"type": "null"}}}, ['{"a/b":null}'], [r'{"a\/b":1}']),
        ({"properties": {"\n": {"type": "null"}}}, [r'{"\n":null}'], [r'{"\n":1}', r'{"\u000a":1}', r'{"\u000A":1}']),
        (
            {"properties": {"\x7f": {"type": "null"}}},
            ['{"\x7f":null}'],
            ['{"\x7f":1}', r'{"\u007f":1}', r'{"\u007F":1}'],
        ),
        ({"properties": {"\x1b": {"type": "null"}}}, [r'{"\u001b":null}'], [r'{"\u001b":1}', r'{"\u001B":1}']),
        (
            {"properties": {"größe": {"type": "null"}}},
            ['{"größe":null}'],
            [r'{"gr\u00f6ße":1}', r'{"gr\u00F6\u00dfe":1}'],
        ),
        ({"properties": {"😀": {"type": "null"}}}, ['{"😀":null}'], [r'{"\ud83d\ude00":1}', r'{"\uD83D\uDE00":1}']),
        ({"patternProperties": {"^b": {"type": "null"}}}, ['{"b":null}', '{"a":1}'], [r'{"\u0062":1}']),
        ({"patternProperties": {r"^\s$": {"type": "null"}}}, [r'{"\n":null}'], [r'{"\u000a":1}', r'{"\n":1}']),
        (
            {"properties": {"\n": {"type": "null"}}, "patternProperties": {r"^\s$": {"type": ["null", "string"]}}},
            [r'{"\n":null}'],
            [r'{"\u000a":"x"}'],
        ),
        ({"additionalProperties": {"type": "null"}, "minProperties": 1}, ['{"a":null}'], [r'{"\ud83d":null}', "{}"]),
        ({"type": "string", "maxLength": 1}, ['"😀"', r'"\n"'], [r'"\u0061"', r'"\ud83d\ude00"']),
    ],
)
def test_a_name_is_written_in_one_way(schema: Any, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts("json_schema", schema, text)] == []
    assert [text for text in bad if accepts("json_schema", schema, text)] == []


@pytest.mark.proof
@given(st.text(st.characters(codec="utf-8"), max_size=3), st.data())
@settings(max_examples=examples(1), deadline=None)
def test_no_escape_spells_a_listed_name(name: str, data: st.DataObject) -> None:
    """Each character of the name may be written by its number, in either case; one at least is."""
    schema = {"properties": {name: {"type": "null"}}}
    ways = [data.draw(st.sampled_from(["as it is", "x", "X"])) for _ in name]
    spelled = "".join(
        json.dumps(one, ensure_ascii=False)[1:-1]
        if way == "as it is"
        else "".join(f"\\u{unit:04{way}}" for unit in _units(one))
        for one, way in zip(name, ways, strict=True)
    )
    assert json.loads(f'"{spelled}"') == name
    assert not accepts("json_schema", schema, f'{{"{spelled}":1}}')


def _units(character: str) -> list[int]:
    encoded = character.encode("utf-16-be")
    return [int.from_bytes(encoded[place : place + 2]) for place in range(0, len(encoded), 2)]


@each_row(
    ("schema", "good", "bad"),
    [
        ({"exclusiveMinimum": 0.1}, ["0.11", "1"], ["0.1", "0.1000000000000000001"]),
        ({"exclusiveMinimum": 0}, ["0.0000001", "1"], ["0", f"0.{'0' * 400}1"]),
        ({"exclusiveMaximum": 0}, ["-0.5"], ["0", "-0.0", f"-0.{'0' * 400}1"]),
        ({"exclusiveMaximum": 1}, ["0.9", "0.99", "0.95", "-1"], ["1", f"0.{'9' * 30}"]),
        ({"type": "integer", "exclusiveMinimum": 5}, ["6"], ["5"]),
        (
            {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 0.1, "exclusiveMinimum": True},
            ["0.2"],
            ["0.1", "0.1000000000000000001"],
        ),
        ({"enum": [2**53 - 1, 1.0]}, ["9007199254740991", "1"], ["9007199254740992"]),
        ({"type": "integer", "minimum": 2**53 - 1}, ["9007199254740991", "9" * 30], ["9007199254740990"]),
        ({"allOf": [{"multipleOf": 0.01}, {"multipleOf": 5}]}, ["5", "-10"], ["0.01", "7"]),
    ],
)
def test_numbers_are_valid_as_they_are_read(schema: Any, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts("json_schema", schema, text)] == []
    assert [text for text in bad if accepts("json_schema", schema, text)] == []


@each_row(
    ("schema", "said"),
    [
        ({"const": 1.5e300}, "const at the root: 1.5e+300 has too many digits"),
        ({"items": {"enum": [1e23]}}, "enum at /items: 1e+23 has too many digits"),
        ({"maximum": math.nextafter(1, 0)}, "maximum at the root: 0.9999999999999999 has too many digits"),
        ({"minimum": 5e-324}, "minimum at the root: 5e-324 has too many digits"),
        ({"type": "integer", "minimum": 1e19}, "minimum at the root: 1e+19 has too many digits"),
        ({"minimum": -(2**63)}, "minimum at the root: -9223372036854775808 has too many digits"),
        ({"type": "integer", "exclusiveMaximum": -(2**53)}, "exclusiveMaximum at the root: -9007199254740992 has"),
        ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "multipleOf at /allOf/0: beside the others"),
        ({"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"multipleOf": 1e5}}}, "/$defs/a"),
        ({"const": "a\x1b"}, "const at the root: the control character U+001B cannot be written"),
        ({"items": {"enum": [{"a": ["\x7f"]}]}}, "enum at /items: the control character U+007F"),
        ({"required": ["a", "a"], "minProperties": 3}, "minProperties at the root: it can be enforced up to 2"),
        ({"prefixItems": [{"type": "null"}], "additionalItems": True}, "prefixItems at the root"),
        ({"prefixItems": [{"type": "null"}], "items": [{}]}, "prefixItems at the root"),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "items": {"$schema": "http://json-schema.org/draft-07/schema#"},
            },
            "$schema at /items: a newer draft",
        ),
        ({"properties": {"uniqueItems": False, "x": {"$ref": "#/properties"}}}, "$ref at /properties/x: it refers to"),
        ({"$ref": "#/enum/0", "enum": [{"uniqueItems": False}]}, "$ref at the root: it refers to #/enum/0, where no"),
        ({"$ref": "#/x/properties", "x": {"properties": {"a": {}}}, "allOf": [{"$ref": "#/x"}]}, "where no schema"),
        ({"$ref": "#/allOf/²", "allOf": [True]}, "$ref at the root: it refers to #/allOf/²"),
        (
            {"patternProperties": {"a.c": {"x": {}}}, "items": {"$ref": "#/patternProperties/a.c/x"}},
            "$ref at /items: #/patternProperties/a.c/x leads into patternProperties",
        ),
        ({"$id": "http://a/b", "$ref": "b#/x", "x": {}}, "$ref at the root: b#/x leads out of the schema"),
        ({"$ref": "#a", "contentSchema": {"$anchor": "a"}}, "$ref at the root: it refers to the anchor 'a'"),
    ],
)
def test_what_would_be_taken_for_something_else_is_refused(schema: Any, said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        grammar("json_schema", json.dumps(schema))
    assert said in str(raised.value)


@each_row(
    ("schema", "good", "bad"),
    [
        ({"$ref": "#a", "$defs": {"x": {"$anchor": "a", "pattern": "^.$"}}}, ['"x"'], ['"\u2028"']),
        ({"$ref": "#/x/y", "allOf": [{"$ref": "#/x"}], "x": {"y": {"pattern": "^.$"}}}, ['"x"'], ['"\u2028"']),
        ({"items": {"$ref": "#/c/s/A"}, "c": {"s": {"A": {"format": "date"}}}}, ['["2024-02-29"]'], ['["2023-02-29"]']),
        ({"$id": "http://a/b", "$ref": "http://a/b#/$defs/n", "$defs": {"n": {"type": "null"}}}, ["null"], ["1"]),
        ({"format": "hostname"}, ['"a-b.c1"'], ['"xn--X"', f'"{".".join(["a" * 60] * 5)}"']),
        ({"pattern": "^a{\u0663}$"}, ['"a{\u0663}"'], ['"aaa"']),
    ],
)
def test_references_and_formats_hold(schema: Any, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts("json_schema", schema, text)] == []
    assert [text for text in bad if accepts("json_schema", schema, text)] == []


@each_row(
    ("kind", "text", "said"),
    [
        ("json_schema", f'{{"const":{"[" * 3000}{"]" * 3000}}}', "it is not valid JSON: maximum recursion depth"),
        ("json_schema", f'{{"const":{"[" * 300}{"]" * 300}}}', "it has lists and objects more than 200 levels deep"),
        (
            "json_schema",
            f'{{"const":{"[" * 150}{"]" * 150}}}',
            'const at the root: failed to parse "%json": recursion limit exceeded',
        ),
        ("json_schema", '{"const": NaN}', "it is not valid JSON: NaN is no JSON"),
        ("json_schema", '{"const": 1e999}', "it is not valid JSON: 1e999 is too large a number"),
        ("json_schema", "{} {}", "it is not valid JSON: more follows behind character 2"),
        ("json_schema", '{"items": {"type": "null", "type": "string"}}', "it has the key 'type' twice in one object"),
        ("structural_tag", '{"format": {}, "format": {}}', "it has the key 'format' twice in one object"),
        ("lark_grammar", 'start: %json {"const": 1, "const": 2}', "it has the key 'const' twice in one object"),
        (
            "structural_tag",
            json.dumps({"structures": [{"begin": "<", "schema": '{"const": 1, "const": 2}', "end": ">"}]}),
            "structures[0].schema is not valid JSON: it has the key 'const' twice in one object",
        ),
        ("choice", r'["\ud800"]', "it has one half of a surrogate pair"),
        ("regex", "a\ud800", "guided_decoding_guide: character 1 is one half of a surrogate pair"),
        ("regex", "a\\", "it ends within an escape"),
        ("ebnf_grammar", f'root ::= "a"{{{"9" * 5000}}}', "the numbers must rise"),
        ("lark_grammar", 'start: %json {"const": NaN}', "%json in line 1 is not valid JSON: NaN is no JSON"),
    ],
)
def test_odd_guides_are_refused_as_others(kind: str, text: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        grammar(kind, text)
    assert said in str(raised.value)


@each_row(
    ("kind", "text", "good", "bad"),
    [
        ("regex", "(?x)a #c\nb", ["ab"], ["a"]),
        ("regex", "a/b|a\\/c", ["a/b", "a/c"], ["a"]),
        ("ebnf_grammar", 'root ::= "b" ("a" | root){0} "c"{0,0} "d"{02, }', ["bdd", "bddd"], ["bd", "badd"]),
    ],
)
def test_expressions_mean_what_they_say(kind: str, text: str, good: list[str], bad: list[str]) -> None:
    assert [text_ for text_ in good if not accepts(kind, text, text_)] == []
    assert [text_ for text_ in bad if accepts(kind, text, text_)] == []


JSON_VALUES = st.recursive(
    st.sampled_from(
        [
            *(
                None,
                True,
                False,
                0,
                -1,
                1.5,
                2**63,
                -(2**63),
                1e300,
                "",
                "a",
                "^a$",
                "(",
                "\\",
                "\ud800",
                "#",
                "#/",
                "#a",
            ),
            *(
                "#/$defs/a",
                "#/properties",
                "#/allOf/0",
                "http://x/y",
                "http://json-schema.org/draft-07/schema#",
                "date",
            ),
            *("object", "integer", [], {}, ["a", 1]),
        ]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                "type const enum required format pattern minLength maxItems minProperties minimum exclusiveMaximum "
                "multipleOf $ref $id $schema $anchor $defs properties patternProperties additionalProperties items "
                "prefixItems additionalItems allOf anyOf oneOf not contentSchema x-guidance x a ^a".split()
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@given(st.sampled_from(["json_schema", "structural_tag", "choice"]), JSON_VALUES)
@settings(max_examples=examples(3), deadline=None)
def test_every_guide_is_taken_or_refused(kind: str, value: Any) -> None:
    """No other error, and none of llguidance's panics, which are no ``Exception``."""
    try:
        guide_state(kind, json.dumps({"format": value} if kind == "structural_tag" else value))
    except InvalidRequest as error:
        said = str(error)
        assert said.startswith("guided_decoding_guide")
        assert kind != "json_schema" or " at " in said or "surrogate" in said


END_BRACE = byte_tokenizer().spelling("}")[0]


def test_an_end_id_with_a_text_ends_only_what_is_complete_without_it() -> None:
    """The token that ends a sequence is no part of it, so its text would be missing."""
    digits = {token for digit in "0123456789" for token in byte_tokenizer().spelling(digit)}
    seven = byte_tokenizer().spelling("7")[0]
    state = guide_state("regex", "[0-9]{3}", end_ids=frozenset({seven}))
    assert seven not in allowed(state)
    for _ in range(2):
        state.push(min(digits - {seven}))
    assert digits.intersection(allowed(state)) == digits - {seven}
    assert state.allowed_prefix([seven]) == 0
    more = guide_state("regex", "[0-9]+", end_ids=frozenset({seven}))
    more.push(min(digits - {seven}))
    assert seven in allowed(more)


def test_a_grammar_cannot_end_a_text_that_is_not_complete() -> None:
    """Behind the model's tokens stands one for the end, which a range of tokens takes in."""
    state = guide_state("lark_grammar", 'start: "a" <[*]> "b"')
    state.push(byte_tokenizer().spelling("a")[0])
    assert end_id() not in allowed(state)
