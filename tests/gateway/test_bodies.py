"""Bodies: what is no object of JSON is refused by 400, and no body brings a 500, a hang or a traceback."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.gateway.body import MOST_LEVELS, parse_object
from inflight.gateway.errors import ApiError
from tests.gateway.support.answers import refusal
from tests.gateway.support.gateways import Inside


def _deep(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


REFUSED = {
    "empty": (b"", "not valid JSON"),
    "not JSON": (b"{", "not valid JSON"),
    "an array": (b"[]", "a JSON array; it must be an object"),
    "a string": (b'"a"', "a JSON string"),
    "a number": (b"1", "a JSON number"),
    "null": (b"null", "a JSON null"),
    "a boolean": (b"true", "a JSON boolean"),
    "two values": (b"{}{}", "not valid JSON"),
    "a comment": (b"{} // a", "not valid JSON"),
    "NaN": (b'{"prompt": NaN}', "NaN is not a number"),
    "infinity": (b'{"prompt": [-Infinity]}', "-Infinity is not a number"),
    "an overflow": (b'{"prompt": 1e999}', "1e999, which is out of range"),
    "many digits": (b'{"prompt": ' + b"9" * 5000 + b"}", "5000 digits"),
    "a key twice": (b'{"prompt": "a", "prompt": "b"}', "the key 'prompt' twice"),
    "an inner key twice": (b'{"messages": [{"role": "a", "role": "b"}]}', "the key 'role' twice"),
    "too deep": (_deep(MOST_LEVELS + 1), "more than 100 levels deep"),
    "too deep for Python": (b"[" * 100_000 + b"]" * 100_000, "more than 100 levels deep"),
    "a lone surrogate": (b'{"prompt": "a\\ud83d"}', "prompt has a lone surrogate"),
    "an inner lone surrogate": (b'{"messages": [{"role": "\\uDC00"}]}', "messages[0].role has a lone surrogate"),
    "a key that is one": (b'{"\\ud83d": 1}', "a key has a lone surrogate"),
    "no UTF-8": (b'{"prompt": "\xff"}', "not UTF-8: byte 12"),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "not valid JSON"),
    "a control character": (b'{"prompt": "\x01"}', "not valid JSON"),
    "a null byte": (b"\x00", "not valid JSON"),
}


@pytest.mark.parametrize(("body", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_object_of_json_is_refused(alone: Inside, body: bytes, said: str) -> None:
    with alone.client() as client:
        reply = client.post("/tokenize", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert said in reply.json()["error"]["message"]


def test_what_is_just_within_the_limits_is_read() -> None:
    assert parse_object(_deep(MOST_LEVELS))
    assert parse_object(b'{"a": "\\ud83d\\ude42"}') == {"a": "🙂"}
    assert parse_object(b'{"a": [1e308, -0.0, 12345678901234567890]}')
    assert parse_object(b' \n{"a": "b"}\t') == {"a": "b"}


@pytest.mark.parametrize(
    "given_type",
    ["application/json", "application/json; charset=utf-8", 'Application/JSON; charset="UTF-8"', "application/x+json"],
)
def test_content_types_of_json_are_taken(alone: Inside, given_type: str) -> None:
    with alone.client() as client:
        reply = client.post("/tokenize", content=b'{"prompt": "a"}', headers={"content-type": given_type})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/json; charset=utf-16"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
    ids=json.dumps,
)
def test_other_content_types_are_refused(alone: Inside, headers: dict[str, str]) -> None:
    """A web page may send them anywhere without being asked."""
    with alone.client() as client:
        reply = client.post("/tokenize", content=b'{"prompt": "a"}', headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_media_type")


_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
_values = st.recursive(_scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


def _read(body: bytes) -> dict[str, Any] | ApiError:
    try:
        return parse_object(body)
    except ApiError as error:
        return error


@given(st.dictionaries(st.text(), _values))
def test_every_object_is_read_as_it_was_written(value: dict[str, Any]) -> None:
    found = _read(json.dumps(value).encode())
    if isinstance(found, ApiError):
        assert found.status == 400
        assert "lone surrogate" in found.message or "out of range" in found.message
    else:
        assert found == value


@given(st.binary() | st.text().map(str.encode))
def test_no_bytes_raise_anything_else(body: bytes) -> None:
    found = _read(body)
    assert isinstance(found, dict) or found.status == 400


_KEYS = ("model", "prompt", "messages", "tokens", "add_special_tokens", "return_token_strs", "chat_template_kwargs")
_MESSAGES = st.lists(st.dictionaries(st.sampled_from(("role", "content", "name", "tool_calls")), _values), max_size=4)
_BODIES = st.dictionaries(st.sampled_from(_KEYS) | st.text(), _values | _MESSAGES, max_size=6)


@pytest.mark.proof
@given(st.sampled_from(("/tokenize", "/detokenize")), _BODIES)
def test_no_body_brings_a_500(alone: Inside, path: str, body: dict[str, Any]) -> None:
    with alone.client() as client:
        reply = client.post(path, json=body)
    assert reply.status_code in (200, 400, 404), reply.text
    if reply.status_code != 200:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in reply.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": '{"enum":["\\ud800"]}'}, "guided_json"),
        ({"structured_outputs": {"json": '{"enum":["\\udfff"]}'}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": '{"a":"\\ud800"}'}}, "structured_outputs.structural_tag"),
    ],
)
def test_a_lone_surrogate_in_json_text_is_refused(alone: Inside, fields: dict[str, Any], param: str) -> None:
    """The body has but its escape, in a string: that is read once more."""
    with alone.client() as client:
        chat = [{"role": "user", "content": "a"}]
        for path, asked in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": chat})):
            error = refusal(client, path, **asked, **fields)
            assert error["param"] == param
            assert "lone surrogate" in error["message"]
