"""Hostile requests over HTTP, as the bytes that go over the wire: what a well-kept client would not let anyone send."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.hostile import values
from inflight.contract import ENGINE

LARGEST_BYTES = 26 << 20
"""Of a body: more than the longest prompt that the limits allow takes in JSON where every character is escaped."""
_MOST_CHUNKS = 100_000
_MOST_LEVELS = 1_000_000
_BOMB_BYTES = 64 << 20


@dataclass(frozen=True)
class HttpAttack:
    """One request."""

    kind: str
    wire: bytes
    """All of it; nothing comes after."""
    answered: bool = True
    """Whether it is whole, so that an answer is due."""


def _path(random: Random) -> str:
    model = random.choice(values.MODELS) if random.random() < 0.5 else "ensemble"
    return f"/v2/models/{model}/{random.choice(['generate', 'generate', 'generate_stream', 'infer'])}"


def _any_path(random: Random) -> str:
    operators = "repository/index repository/models/ensemble/load repository/models/ensemble/unload logging "
    operators += "trace/setting models/ensemble/trace/setting systemsharedmemory/region/x/register "
    operators += "cudasharedmemory/region/x/register models/ensemble/config models/stats"
    return _path(random) if random.random() < 0.7 else f"/v2/{random.choice(operators.split())}"


def wire(path: str, body: bytes, *headers: str, method: str = "POST", json: bool = False) -> bytes:
    """Return a request with a body and its length; ``json``: and with JSON's content type."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    lines += ["Content-Type: application/json"] if json else []
    return "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n\r\n" + body


def _json(fields: object) -> bytes:
    return json.dumps(fields).encode()


def _sound(random: Random) -> bytes:
    return _json({"text_input": "Hello", "max_tokens": random.randint(1, 4), "id": str(random.random())})


def _long(random: Random) -> bytes:
    # Half are longer than any prompt may be: those that are not are read by the tokenizer, as slowly as it does.
    most = LARGEST_BYTES if random.random() < 0.5 else 100_000
    field = random.choice(["text_input", "id", "messages", "stop_words", "nothing", "max_tokens"])
    long = "x" * max(values.size(random, most), most // 5)
    if random.random() < 0.2:
        return wire(_any_path(random), _json({long: 1, "text_input": "Hello", "max_tokens": 1}))
    return wire(_any_path(random), _json({"text_input": "Hello", "max_tokens": 1, field: long}))


def _nested(random: Random) -> bytes:
    nest = values.nested(random, _MOST_LEVELS)
    field = random.choice(["text_input", "parameters", "inputs", "outputs", "messages", "id", "nothing"])
    body = nest if random.random() < 0.3 else f'{{"{field}":{nest}}}'
    return wire(_any_path(random), body.encode())


def _chunked(random: Random) -> bytes:
    body = _sound(random).ljust(values.size(random, _MOST_CHUNKS))
    head = f"POST {_any_path(random)} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"


def _mangled(random: Random) -> bytes:
    body = bytearray(_json({"text_input": "Hello", "max_tokens": 3, "stop_words": ["x"], "temperature": 0.5}))
    for _ in range(random.randint(1, 8)):
        place = random.randrange(len(body))
        body[place : place + random.randint(0, 2)] = random.choice(
            [b"", b"[", b"{", b'"', b"\\u", b",", b"\xff", b"-", b"1e999"]
        )
    return wire(_path(random), bytes(body))


def _wrong_values(random: Random) -> bytes:
    fields = {"text_input": "Hello", "max_tokens": 2}
    fields |= {values.name(random)[:9999]: values.value(random) for _ in range(random.randint(1, 6))}
    return wire(_path(random), _json(fields))


def _wild(random: Random) -> bytes:
    """A request that is sound but for some declared inputs, whose values are wild, or of another type."""
    model = random.choice(values.PUBLIC)
    fields: dict[str, object] = {"text_input": "Hello", "max_tokens": 4}
    if model == ENGINE:
        fields = {"input_ids": [5, 6, 7], "request_output_len": 4}
    for tensor in values.wild_inputs(random, model):
        numbers: list[Any] = list(values.wild_numbers(random, random.choice([0, 1, 1, 1, 2, 5])))
        if tensor.dtype == "BOOL":
            numbers = [number > 100 for number in numbers]
        elif tensor.dtype == "BYTES":
            numbers = [values.text(random, 300) for _ in numbers]
        kept = random.random() < 0.9
        fields[tensor.name] = numbers[0] if len(numbers) == 1 and kept else numbers if kept else values.value(random)
    return wire(f"/v2/models/{model}/{random.choice(['generate', 'generate_stream'])}", _json(fields))


def _many_keys(random: Random) -> bytes:
    count = values.size(random, 20_000)
    same = random.random() < 0.5
    keys = ",".join(f'"{"max_tokens" if same else f"key{index}"}":{index}' for index in range(count))
    return wire(_path(random), f'{{"text_input":"Hello",{keys}}}'.encode())


def _tensors(random: Random) -> bytes:
    def tensor() -> dict[str, object]:
        data = [values.value(random, 1) for _ in range(values.size(random, 30))]
        made: dict[str, object] = {
            "name": values.name(random),
            "datatype": random.choice(values.TYPES),
            "shape": values.shape(random, most=129),  # a unary server makes room for all of it (SECURITY.md)
            "data": data,
        }
        made["parameters"] = {
            random.choice(["binary_data_size", "shared_memory_region", "shared_memory_byte_size", "x"]): values.value(
                random, 1
            )
        }
        for left_out in random.sample(sorted(made), random.choice([0, 1, 1, 2])):
            del made[left_out]
        return made

    fields: dict[str, object] = {"inputs": [tensor() for _ in range(values.size(random, 300))]}
    if random.random() < 0.3:
        parameters = [{"classification": values.value(random, 0)}, {"binary_data": True}, values.value(random)]
        outputs = [
            {"name": values.name(random), "parameters": random.choice(parameters)}
            for _ in range(values.size(random, 999))
        ]
        fields["outputs"] = outputs
    fields["parameters"] = {
        key: values.value(random, 1)
        for key in ("priority", "timeout", "sequence_id", "sequence_start")
        if random.random() < 0.3
    }
    return wire(f"/v2/models/{random.choice(values.MODELS)}/infer", _json(fields))


def _binary(random: Random) -> bytes:
    model = random.choice(values.MODELS)
    tensors = [values.forged(random, model) for _ in range(random.randint(1, 4))]
    inputs = []
    for name, datatype, shape, content in tensors:
        told = len(content) if random.random() < 0.7 else random.choice([0, -1, 2**31, 2**63, len(content) + 1])
        inputs.append({"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": told}})
    head = _json({"inputs": inputs})
    odd = [-1, 0, 1, 2**31, 2**32, 2**63, 2**64, 10**30, len(head) - 1, len(head) + 1, "x", "", "0x10", " 1"]
    length = len(head) if random.random() < 0.6 else random.choice(odd)
    body = head + b"".join(content for *_, content in tensors)
    return wire(f"/v2/models/{model}/infer", body, f"Inference-Header-Content-Length: {length}")


def _compressed(random: Random) -> bytes:
    encoding = random.choice(["gzip", "deflate", "br", "identity", "gzip, gzip"])
    content = random.choice(
        [_sound(random), b"[" * values.size(random, _MOST_LEVELS), bytes(values.size(random, _BOMB_BYTES))]
    )
    body = gzip.compress(content, 1) if encoding != "deflate" else zlib.compress(content, 1)
    if random.random() < 0.3:
        body = body[: random.randrange(len(body))] + random.randbytes(random.randint(0, 9))
    return wire(_path(random), body, f"Content-Encoding: {encoding}", f"Accept-Encoding: {encoding}")


def _headers(random: Random) -> bytes:
    count = values.size(random, 3000)
    odd = [
        "Expect: 100-continue",
        "Connection: close",
        "Content-Length: -1",
        "Transfer-Encoding: gzip",
        "X: " + "y" * 70_000,
    ]
    odd += ["Inference-Header-Content-Length: 3", "traceparent: 00-zz", "triton_grpc_error: true", "Range: bytes=0-"]
    extra = [f"X-{index}: {random.choice(['', 'a', 'b' * 500])}" for index in range(count)] + random.sample(odd, 2)
    return wire(_path(random), _sound(random), *extra)


def _paths(random: Random) -> bytes:
    tricks = [
        "../../etc/passwd",
        "%2e%2e%2f",
        "%00",
        "ensemble/versions/-1",
        "ensemble/versions/99999999999999999999",
        "//",
    ]
    tricks += [
        "ensemble/versions/1",
        "\N{GRINNING FACE}",
        "x" * values.size(random, 60_000),
        "ensemble?a=" + "&b" * 2000,
    ]
    rest = random.choice(["generate", "infer", "ready", "config", "stats", "", "trace/setting", "x"])
    method = random.choice(["POST", "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
    return wire(f"/v2/models/{random.choice(tricks)}/{rest}", _sound(random), method=method)


def _unfinished(random: Random) -> bytes:
    wire = random.choice([_sound_wire, _binary, _chunked, _headers])(random)
    return wire[: random.randrange(1, len(wire))]


def _noise(random: Random) -> bytes:
    wire = bytearray(_sound_wire(random))
    for _ in range(random.randint(1, 30)):
        wire[random.randrange(len(wire))] = random.randrange(256)
    return bytes(wire) if random.random() < 0.6 else random.randbytes(values.size(random, 9999))


def _sound_wire(random: Random) -> bytes:
    return wire(_path(random), _sound(random))


_WHOLE: dict[str, Callable[[Random], bytes]] = {
    "long bodies, strings and keys": _long,
    "nesting": _nested,
    "chunks of one byte": _chunked,
    "broken JSON": _mangled,
    "wrong values": _wrong_values,
    "declared fields, wild values": _wild,
    "many and repeated keys": _many_keys,
    "JSON tensors: names, types, shapes, data": _tensors,
    "binary tensors: header length, sizes, lengths of strings": _binary,
    "compressed bodies": _compressed,
    "headers": _headers,
    "paths, versions, methods": _paths,
}
_BROKEN: dict[str, Callable[[Random], bytes]] = {"requests that break off": _unfinished, "noise": _noise}
KINDS = (*_WHOLE, *_BROKEN)


def http_attack(random: Random) -> HttpAttack:
    """Return a request of a random kind."""
    kind = random.choice(KINDS)
    if kind in _WHOLE:
        return HttpAttack(kind, _WHOLE[kind](random))
    return HttpAttack(kind, _BROKEN[kind](random), answered=False)
