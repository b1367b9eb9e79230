"""SmolLM2 behind Triton and the gateway: guided answers, reused prefixes, many streams, speculation, tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from benchmarks.environments import Home
from benchmarks.gateway.served import serve
from benchmarks.published.fetched import model_path
from benchmarks.published.texts import decisions
from tests.published.support.asking import CHAT, COMPLETIONS, Answer, Asking
from tests.published.support.schemas import schemas
from tests.published.support.tokenizers import load_tokenizer

pytestmark = [pytest.mark.published, pytest.mark.timeout(900)]

CONTEXT = 8_192
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Count from one to ten.",
    "Explain what a KV cache is.",
    "Translate 'good morning' into German and Greek.",
    "Name three fruits, one per line.",
    "Write a function in Python that adds two numbers.",
    "Tell me a story of a fox.",
)
EDIT = "Repeat this text, with 'stage' for 'process':\n\n" + decisions()[:900]


def _chat(question: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "max_tokens": 40, "temperature": 0, **more}


def _settings(home: Home, reuse: bool = True) -> dict[str, Any]:
    return {
        "model": str(model_path(home, "smollm2")),
        "engine": {"dtype": "float32"},
        "batching": {"max_batch_size": 32},
        "kv_cache": {"tokens": 32_768, "prefix_reuse": reuse},
    }


@pytest.fixture(scope="module")
def asking(home: Home) -> Iterator[Asking]:
    """A server as most are."""
    with serve(_settings(home)) as served:
        yield Asking(served.url)


@pytest.fixture(scope="module")
def drafting(home: Home) -> Iterator[Asking]:
    """A server that speculates by prompt lookup, and reuses no prefix."""
    speculation = {"method": "ngram", "max_draft_tokens": 6}
    with serve(_settings(home, reuse=False) | {"speculation": speculation}) as served:
        yield Asking(served.url)


def _guided(schema: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a question; every second answer is drawn at random, as models are mostly used."""
    form = {"type": "json_schema", "json_schema": {"name": "made", "schema": schema, "strict": True}}
    drawn = {"temperature": 1, "seed": number} if number % 2 else {}
    return _chat(QUESTIONS[number % len(QUESTIONS)], response_format=form, max_tokens=600, **drawn)


def test_answers_to_schemas_validate(asking: Asking) -> None:
    asked = schemas(60)
    answers = [
        answer
        for begin in range(0, len(asked), 20)
        for answer in asking.stream_at_once(_guided(asked[n], n) for n in range(begin, begin + 20))
    ]
    assert {answer.finish_reason for answer in answers} == {"stop"}
    for schema, answer in zip(asked, answers, strict=True):
        jsonschema.validate(json.loads(answer.text), schema, format_checker=jsonschema.FormatChecker())


def test_a_prefix_is_reused(asking: Asking, drafting: Asking, home: Home) -> None:
    """To the token: of an equal prompt all but the last, which is computed again; of others what they begin with."""
    [ids] = load_tokenizer(home, "smollm2").encode_batch([decisions()[4_000:7_000]])
    tail = list(range(500, 540))
    prompts = [ids, ids, ids + tail, ids[:333] + tail, tail + ids]
    reused, computed = (
        [server.ask({"prompt": prompt, "max_tokens": 24, "temperature": 0}) for prompt in prompts]
        for server in (asking, drafting)
    )
    assert [answer.cached for answer in reused] == [0, len(ids) - 1, len(ids), 333, 0]
    assert not any(answer.cached for answer in computed)
    assert [answer.text for answer in reused] == [answer.text for answer in computed]


def _mixed() -> list[dict[str, Any]]:
    """Return 32 requests, each unlike its neighbours."""
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 1, "seed": 3},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 4, "max_tokens": 70},
        {"frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"stop": ["\n", "the "]},
        {"response_format": {"type": "json_object"}, "max_tokens": 60},
        {"logit_bias": {"253": 2.0, "28": -100}, "max_tokens": 25},
        {"max_tokens": 1},
    )
    return [
        _chat(QUESTIONS[(n + n // 8) % 8] + " " * (n // 16) + decisions()[: 300 * (n % 3)], **kinds[n % 8])
        for n in range(32)
    ]


def _same(one: Answer, other: Answer) -> bool:
    return (one.text or "", one.finish_reason, one.usage["completion_tokens"]) == (
        other.text or "",
        other.finish_reason,
        other.usage["completion_tokens"],
    )


def test_streams_beside_others_are_those_alone(asking: Asking) -> None:
    requests = _mixed()
    together = asking.stream_at_once(requests)
    alone = [asking.ask(request) for request in requests]
    assert not [rows for rows in zip(requests, alone, together, strict=True) if not _same(rows[1], rows[2])]


def test_speculation_changes_no_answer(asking: Asking, drafting: Asking) -> None:
    requests = [_chat(EDIT, max_tokens=160), *_mixed()[:8]]
    drafted = drafting.stream_at_once(requests)
    plain = [asking.ask(request) for request in requests]
    assert not [rows for rows in zip(requests, plain, drafted, strict=True) if not _same(rows[1], rows[2])]


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop")],
    ids=["required", "named"],
)
def test_a_demanded_call_validates(asking: Asking, choice: Any, reason: str) -> None:
    """The template of SmolLM2 knows no tools."""
    city = {"type": "string", "maxLength": 30}
    schema = {
        "type": "object",
        "properties": {"city": city, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": schema}}]
    answer = asking.ask(_chat("Weather in Rome for 3 days?", tools=tools, tool_choice=choice, max_tokens=200))
    [call] = answer.message["tool_calls"]
    assert (answer.finish_reason, call["function"]["name"]) == (reason, "weather")
    jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


@pytest.mark.release
def test_the_end_of_the_context(asking: Asking) -> None:
    words = {"prompt": [1 + n % 40_000 for n in range(100, 100 + CONTEXT - 12)], "temperature": 0}
    fitting = asking.ask({**words, "max_tokens": 12})
    assert (fitting.finish_reason, fitting.usage["total_tokens"]) == ("length", CONTEXT)
    assert asking.stream({**words, "max_tokens": 12}).text == fitting.text
    refused = asking.post(COMPLETIONS, {**words, "max_tokens": 13})
    assert refused.status_code == 400
    assert f"{CONTEXT:,}" in refused.text or str(CONTEXT) in refused.text
    chat = asking.post(CHAT, _chat(decisions() + decisions()))
    assert chat.status_code == 400
