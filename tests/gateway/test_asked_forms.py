"""What a request's fields ask for: the form of an answer, and whether it is streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inflight.gateway.errors import ApiError
from inflight.gateway.fields import Fields
from inflight.gateway.guides import read_guide
from tests.gateway.support.gateways import inside
from tests.support.tables import each_row


@pytest.mark.parametrize(
    "body", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_a_json_object_is_an_object_and_no_other_value(body: dict[str, Any]) -> None:
    found = read_guide(Fields(body), 1000)
    assert found is not None
    assert found.guide.kind == "json_schema", "the kind `json` lets a number through"
    assert json.loads(found.guide.text) == {"type": "object"}


def test_the_schema_of_a_json_object_holds() -> None:
    found = read_guide(Fields({"response_format": {"type": "json_object", "schema": {"const": 42}}}), 1000)
    assert found is not None
    assert json.loads(found.guide.text) == {"const": 42}


def test_the_schema_of_a_json_object_is_checked() -> None:
    with pytest.raises(ApiError) as raised:
        read_guide(Fields({"response_format": {"type": "json_object", "schema": 123}}), 1000)
    assert raised.value.param == "response_format.schema"


@pytest.mark.parametrize(
    ("path", "asked"),
    [("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}), ("/v1/completions", {"prompt": "a"})],
)
def test_options_of_a_stream_need_a_stream(path: str, asked: dict[str, Any]) -> None:
    with inside(ready=True) as gateway, gateway.client() as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        answer = client.post(path, json={"model": model, "stream_options": {"include_usage": True}, **asked})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "stream_options"


@each_row(
    "fields, found",
    [
        ({"guided_regex": "é" * 40}, 80),
        ({"guided_choice": ["é" * 40]}, 84),
        ({"guided_json": {"const": "é" * 30}}, 73),
    ],
)
def test_the_size_of_a_guide_is_counted_in_bytes(fields: dict[str, Any], found: int) -> None:
    assert read_guide(Fields(fields), found) is not None
    with pytest.raises(ApiError, match=f"has {found} bytes; the limit is {found - 1}"):
        read_guide(Fields(fields), found - 1)
