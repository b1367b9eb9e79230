"""Attacks on what the gateway computes for a request: templates, grammars, tools, ids of requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.hostile.front import GENERATE, Front

_USER = {"role": "user", "content": "Hello"}


def _deep_schema(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def _tool(schema: Any, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def templates(front: Front) -> Iterator[str]:
    """Send chats with very many, very deep and very odd parts."""
    yield front.chat(messages=[{"role": "user", "content": "a"}] * 100_000)
    yield front.chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 100_000}])
    yield front.chat(tools=[_tool(_deep_schema(60))])
    yield front.chat(tools=[_tool(_deep_schema(10), f"f{number}") for number in range(4096)])
    yield front.chat(messages=[{"role": "user", "content": "{{ [0] * 10**9 }}{% for a in range(10**9) %}{% endfor %}"}])
    yield front.chat(messages=[{"role": "{{ 7 * 7 }}", "content": "a"}])
    yield front.chat(chat_template="{% for a in range(999999999) %}a{% endfor %}")
    yield front.chat(chat_template_kwargs={"messages": [_USER] * 10_000, "x" * 10_000: 1})
    yield front.chat(documents=[{"text": "a" * 1000}] * 4096)
    yield front.chat(stop=["a" * 5000] * 4096)
    yield front.chat(logit_bias={str(number): 1 for number in range(4096)})
    yield front.chat(n=128, max_completion_tokens=1900)


def grammars(front: Front) -> Iterator[str]:
    """Send guides that are short to write and long to build, or to follow."""
    nested = "".join(f"a{number}: a{number + 1} a{number + 1}\n" for number in range(60))
    for regex in ("(a{1,9999}){1,9999}", "((a|b)*c){999}" * 9, "(x+x+)+y", "(" * 5000 + "a" + ")" * 5000, "[" * 999):
        yield front.chat(guided_regex=regex)
    for grammar in (
        f"start: a0\n{nested}a60: /a/",
        "start: start start | /a/",
        f"start: {'(' * 9999}",
        "start: /a{9999999}/",
    ):
        yield front.chat(guided_grammar=grammar)
    several = {f"a{number}": {"enum": [str(one) for one in range(300)]} for number in range(300)}
    for schema in (
        _deep_schema(60),
        {"type": "object", "properties": several},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}},
        {"type": "array", "minItems": 10**9},
        {"type": "string", "pattern": "(a{1,999}){1,999}"},
        {"type": "string", "minLength": 10**12},
        {"allOf": [{"anyOf": [{"const": one} for one in range(100)]}] * 50},
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"$ref": "file:///etc/passwd"},
    ):
        yield front.chat(guided_json=schema)
    yield front.chat(guided_choice=["a" * 9999 + str(number) for number in range(300)])


def request_ids(front: Front) -> Iterator[str]:
    """Send ids that could write lines of their own into a log or a header, or name something to fetch."""
    body = json.dumps({"model": front.model, "messages": [_USER], "max_completion_tokens": 2}).encode()
    for odd in ("a\rINJECTED", "a\tb", "a\x1b[2J", "a" * 100_000, "%s%n{0}", "http://127.0.0.1:9/", "", "\xff", "a\0b"):
        yield front.openai(body, f"X-Request-Id: {odd}")
        yield front.triton(GENERATE, b'{"text_input": "a", "max_tokens": 1}', f"X-Request-Id: {odd}")
    for odd in ("a\nINJECTED", "\ud800", "a" * 100_000, "\x1b[2J"):
        yield front.triton(GENERATE, json.dumps({"text_input": "a", "max_tokens": 1, "id": odd}).encode())
