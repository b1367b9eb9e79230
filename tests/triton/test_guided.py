"""Guided decoding through a real server with the demo model, on `ensemble` and on `tensorrt_llm`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
import tritonclient.grpc as grpc

from inflight import errors
from inflight.client import Client, GenerateOptions
from inflight.resources import DEMO
from inflight.text.tokenizer import Tokenizer
from tests.triton.support.servers import Running, on_engine, run
from tests.triton.support.tensors import grpc_inputs

QUESTION = "What is a paged KV cache?"
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 40},
        "sure": {"type": "boolean"},
        "pages": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 99}, "maxItems": 4},
    },
    "required": ["answer", "sure", "pages"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def guided(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from run(on_engine("pytorch", tmp_path_factory.mktemp("guided")))


def _options(kind: str, guide: str | None = None, **more: Any) -> GenerateOptions:
    return GenerateOptions(
        **{"guided_decoding_guide_type": kind, "guided_decoding_guide": guide, "max_tokens": 200} | more
    )


@pytest.mark.proof
def test_schema_on_the_ensemble(guided: Running) -> None:
    with Client(guided.grpc) as client:
        for seed in range(4):
            options = _options("json_schema", json.dumps(SCHEMA), temperature=1.0, seed=seed)
            answer = client.generate(QUESTION, options)
            assert answer.finish_reason == "stop"
            jsonschema.validate(json.loads(answer.text), SCHEMA)
            streamed = "".join(piece.text for piece in client.stream(QUESTION, options))
            assert streamed == answer.text


@pytest.mark.parametrize(
    ("kind", "guide", "pattern"),
    [
        ("json", None, None),
        ("regex", "(yes|no), [0-9]{2}%", "(yes|no), [0-9]{2}%"),
        ("ebnf_grammar", 'root ::= list\nlist ::= "(" ([a-c] | list){1,3} ")"', r"\([a-c()]+\)"),
        ("lark_grammar", 'start: /[a-d]+/ "!"', "[a-d]+!"),
        ("choice", '["left", "right, then left"]', "left|right, then left"),
        (
            "structural_tag",
            json.dumps(
                {"structures": [{"begin": "<n>", "schema": {"type": "boolean"}, "end": "</n>"}], "triggers": ["<n"]}
            ),
            r"(?s:.*)",
        ),
    ],
    ids=lambda value: str(value)[:16],
)
def test_every_kind_on_the_ensemble(guided: Running, kind: str, guide: str | None, pattern: str | None) -> None:
    with Client(guided.grpc) as client:
        answer = client.generate(QUESTION, _options(kind, guide, temperature=1.0, seed=5, max_tokens=400))
    if answer.finish_reason == "length":
        assert kind in ("lark_grammar", "json", "structural_tag")
    elif pattern is None:
        json.loads(answer.text)
    else:
        assert re.fullmatch(pattern, answer.text)


def test_guide_on_the_engine_alone(guided: Running) -> None:
    tokenizer = Tokenizer.from_checkpoint(DEMO / "model")
    prompt = tokenizer.encode_batch([QUESTION])[0]
    guide = {"guided_decoding_guide_type": "choice", "guided_decoding_guide": '["A", "B"]'}
    values = {"input_ids": prompt, "request_output_len": 8, "end_ids": sorted(tokenizer.config.end_ids), **guide}
    responses: list[Any] = []
    client = grpc.InferenceServerClient(guided.grpc)
    client.start_stream(lambda result, error: responses.append((result, error)))
    client.async_stream_infer("tensorrt_llm", grpc_inputs("tensorrt_llm", values | {"exclude_input_in_output": True}))
    client.stop_stream()
    (result, error), *_ = responses
    assert error is None
    [[ids]] = result.as_numpy("output_ids").tolist()
    assert tokenizer.decode(ids) in ("A", "B")
    assert result.as_numpy("finish_reason").tolist() == [[b"stop"]]


def test_start_ids_leave_the_part_before_free(guided: Running) -> None:
    tokenizer = Tokenizer.from_checkpoint(DEMO / "model")
    with Client(guided.grpc) as client:
        free = client.generate(QUESTION, GenerateOptions(max_tokens=60)).text
        [ids] = tokenizer.encode_batch([free])
        held = client.generate(QUESTION, _options("choice", '["!yes!"]', guide_start_ids=ids[4:6]))
    assert held.text == tokenizer.decode(ids[:6]) + "!yes!"
    assert held.finish_reason == "stop"


@pytest.mark.parametrize(
    ("kind", "guide", "more", "error", "said"),
    [
        ("json_schema", '{"items": {"uniqueItems": true}}', {}, errors.InvalidRequest, "uniqueItems at /items: it"),
        ("json_schema", '{"items": {"type": "sting"}}', {}, errors.InvalidRequest, "type at /items: Invalid type"),
        ("regex", "(", {}, errors.InvalidRequest, "unclosed group"),
        ("ebnf_grammar", "root ::= other", {}, errors.InvalidRequest, "refers to 'other'"),
        ("choice", "[]", {}, errors.InvalidRequest, "a JSON list of texts"),
        ("json", None, {"beam_width": 2}, errors.UnsupportedFeature, "guided_decoding_guide_type"),
        ("regex", "abc", {"min_tokens": 100}, errors.InvalidRequest, "min_tokens is 100"),
        ("regex", "a" * 70_000, {}, errors.InvalidRequest, "70000 bytes; the limit is 65536"),
        ("json", None, {"guide_start_ids": [9999]}, errors.InvalidRequest, "guide_start_ids has token 9999"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused(
    guided: Running, kind: str, guide: str | None, more: dict[str, Any], error: type[Exception], said: str
) -> None:
    with Client(guided.grpc) as client, pytest.raises(error, match=re.escape(said)):
        client.generate(QUESTION, _options(kind, guide, **more))


@pytest.mark.parametrize(
    "options",
    [{"guide_start_ids": [1]}, {"guided_decoding_guide": "a"}, {"guided_decoding_guide_type": "xml"}],
    ids=["start ids", "guide", "kind"],
)
def test_half_a_guide_is_refused(guided: Running, options: dict[str, Any]) -> None:
    with Client(guided.grpc) as client, pytest.raises(errors.InvalidRequest, match="guided_decoding_guide_type"):
        client.generate(QUESTION, GenerateOptions(max_tokens=4, **options))


def test_rows_and_sequences_have_guides_of_their_own(guided: Running) -> None:
    with Client(guided.grpc) as client:
        several = client.generate(
            QUESTION, _options("regex", "[0-9]{4}", temperature=1.0, seed=1, num_return_sequences=4)
        )
        texts = [several.text, *(one.text for one in several.alternatives)]
    assert len(texts) == 4
    assert len(set(texts)) > 1
    assert all(re.fullmatch("[0-9]{4}", text) for text in texts)


def test_a_crowd_of_guided_and_free_requests(guided: Running) -> None:
    """A free request's tokens do not depend on guided ones beside it, and nothing stays behind."""
    with Client(guided.grpc) as client:
        alone = client.generate(QUESTION, GenerateOptions(max_tokens=40)).text

        def ask(place: int) -> str:
            if place % 2:
                return client.generate(QUESTION, GenerateOptions(max_tokens=40)).text
            pattern = f"<{place}>[a-z]{{5}}"
            return client.generate(QUESTION, _options("regex", pattern, temperature=1.0, seed=place)).text

        with ThreadPoolExecutor(16) as pool:
            texts = list(pool.map(ask, range(32)))
    assert all(text == alone for text in texts[1::2])
    assert all(re.fullmatch(f"<{2 * place}>[a-z]{{5}}", text) for place, text in enumerate(texts[::2]))
