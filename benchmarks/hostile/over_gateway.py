"""Hostile requests to the gateway: bodies that no client should send, half of them sound but for a field or two.

Values are wild, of the wrong type, missing, repeated, and contradictory, by the tables of the endpoints' own fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from random import Random
from typing import Any

from benchmarks.hostile.over_http import HttpAttack, wire
from benchmarks.hostile.values import ODD_NUMBERS, ODD_TEXTS, nested, text, value
from inflight.gateway.errors import ApiError
from inflight.gateway.field_tables import CHAT, COMPLETIONS
from inflight.gateway.fields import Field, Table

_CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is Triton?"}]},
    {"role": "assistant", "content": "A server."},
    {"role": "user", "content": "Why?"},
]
_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
_TOOL = {"type": "function", "function": {"name": "f", "description": "It looks up.", "parameters": _SCHEMA}}
_SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 3,
    "stop": ["\n"],
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "logit_bias": {"5": -1},
    "user": "ann",
    "stream": False,
    "stream_options": None,
}
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": _CHAT,
        "max_completion_tokens": 2,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}},
        "tools": [_TOOL],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        **_SAMPLING,
    },
    "/v1/completions": {
        "prompt": [[5, 6, 7], [8]],
        "max_tokens": 2,
        "echo": True,
        "logprobs": 2,
        "n": 2,
        **_SAMPLING,
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Why?"}]}],
        "instructions": "Be brief.",
        "max_output_tokens": 16,
        "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA, "strict": True}],
        "tool_choice": "none",
        "text": {"format": {"type": "text"}},
        "reasoning": None,
        "metadata": {"a": "b"},
        "stream": False,
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}],
        "system": "Be brief.",
        "max_tokens": 2,
        "tools": [{"name": "f", "input_schema": _SCHEMA}],
        "tool_choice": {"type": "none"},
        "stop_sequences": ["\n"],
        "stream": False,
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Why?"}], "system": "Be brief."},
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "float", "dimensions": None},
    "/v1/score": {"query": "a", "items": ["b", "c"], "label_token_ids": [5, 6], "apply_softmax": True},
    "/v1/rerank": {"query": "a", "documents": ["b", "c"], "top_n": 1},
    "/tokenize": {"prompt": "Why?", "add_special_tokens": True},
    "/detokenize": {"tokens": [5, 6, 7]},
}
"""A body that each path serves, without its model."""
_TABLES: dict[str, Table] = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETIONS}
_HEADERS = (
    "X-Request-Id: {odd}",
    "Authorization: Bearer {odd}",
    "Content-Encoding: gzip",
    "Content-Type: text/plain",
    "Transfer-Encoding: identity",
    "Expect: {odd}",
    "traceparent: 00-{odd}",
)


def gateway_attack(random: Random, model: str) -> HttpAttack:
    """Return a request of a random kind: a changed body, fields by the tables, or mutated bytes of the request."""
    kind = random.choice(["bodies to the gateway", "fields of the gateway", "bytes to the gateway"])
    path, body = by_tables(random, model) if kind.startswith("fields") else forged(random, model)
    headers = [random.choice(_HEADERS).format(odd=_header(random))] if random.random() < 0.1 else []
    request = wire(path, body, *headers, json="Content-Type" not in "".join(headers))
    if not kind.startswith("bytes"):
        return HttpAttack(kind, request)
    mutated = bytearray(request)
    for _ in range(random.randint(1, 12)):
        mutated[random.randrange(len(mutated))] = random.randrange(256)
    return HttpAttack(kind, bytes(mutated), answered=False)


def _header(random: Random) -> str:
    odd = random.choice([*ODD_TEXTS, "x" * 9000, "a\rb", "a\tb", "{0}", "%(x)s", "\x1b[31m"])
    return odd.replace("\n", "").encode("latin-1", "replace").decode("latin-1")


def by_tables(random: Random, model: str) -> tuple[str, bytes]:
    """Return a path, and a sound body with fields of its table more: any value, a near one, the same field twice."""
    path = random.choice(list(_TABLES))
    body = deepcopy(VALID[path]) | {"model": model}
    names = random.sample(sorted(_TABLES[path]), random.randint(1, 4))
    for name in names:
        near = name in body and random.random() < 0.5
        body[name] = _near(random, body[name]) if near else _for_field(random, _TABLES[path][name])
    written = _written(body)
    if random.random() < 0.1:
        written = written[:-1] + b"," + _written({names[0]: value(random, 1)})[1:]
    return path, written


def _for_field(random: Random, field: Field) -> Any:
    """Return a value for a field: mostly the strangest that its table lets through, so that what comes after is met."""
    odd: list[Any] = [*ODD_NUMBERS, *ODD_TEXTS, True, False, None, [], {}, [0], ["a"], 0.5, 3, [5, 6], {"5": 3}]
    random.shuffle(odd)
    if random.random() < 0.2:
        return odd[0]
    if field.state == "refused":
        return random.choice(field.neutral or (None,))
    for one in odd:
        with suppress(ApiError):
            field.kind.read(one, field.name)
            return one
    return None


def forged(random: Random, model: str) -> tuple[str, bytes]:
    """Return a path, and a body that its endpoint has to refuse or to serve."""
    path = random.choice(list(VALID))
    body = deepcopy(VALID[path]) | {"model": model}
    if random.random() < 0.15:
        return path, _no_json(random, body)
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        _change(random, body)
    if "stream" in body and random.random() < 0.3:
        body["stream"] = True
    return path, _written(body)


def _written(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _no_json(random: Random, body: Any) -> bytes:
    """Return bytes that are no JSON object, or hardly one."""
    whole = _written(body)
    ways: list[Callable[[], bytes]] = [
        lambda: whole[: random.randrange(len(whole))],
        lambda: whole + whole,
        lambda: nested(random, 20_000).encode(),
        lambda: _written(value(random)),
        lambda: random.randbytes(random.randrange(2000)),
        lambda: whole.replace(b"2", b"NaN", 1),
        lambda: whole.replace(b'"', b"\xff", 3),
        lambda: whole[:-1] + b', "model": "' + text(random, 5000).encode("utf-8", "surrogatepass") + b'"}',
        lambda: whole.decode().encode("utf-16"),
        lambda: b"",
    ]
    return random.choice(ways)()


def _change(random: Random, body: Any) -> None:
    """Change one value at a random depth: put another in its place, leave it out, or add one."""
    places = list(_places(body))
    if not places:  # all has been left out
        return
    container, key = random.choice(places)
    way = random.random()
    if way < 0.6:
        container[key] = _near(random, container[key]) if random.random() < 0.5 else value(random)
    elif way < 0.75:
        del container[key]
    elif isinstance(container, dict):
        container[text(random, 200)] = value(random)
    else:
        container.insert(key, value(random))


def _places(part: Any) -> Any:
    """Yield each container in a body with each of its keys."""
    keys = list(part) if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else []
    for key in keys:
        yield part, key
        yield from _places(part[key])


def _near(random: Random, old: Any) -> Any:
    """Return a value that is much like the old one."""
    if isinstance(old, bool):
        return random.choice([not old, int(old), "true", None])
    if isinstance(old, int | float):
        return random.choice([-old, old + 1, old * 1000, float(old), str(old), [old], True, 10**30])
    if isinstance(old, str):
        return random.choice([old * 500, "", old.upper(), [old], {"type": old}, text(random, 20_000)])
    return random.choice([[old], {"a": old}, str(old), [], {}, None])
