"""The table of attacks: each known way to end, fill or rule a server of this kind, by name."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import grpc
from tritonclient.grpc import service_pb2

from benchmarks.hostile import http2, slowness, values
from benchmarks.hostile.front import CHAT, GENERATE, SERVICE, STREAM, Front, tensors
from benchmarks.hostile.http_tricks import paths, smuggling
from benchmarks.hostile.openai_attacks import grammars, request_ids, templates
from benchmarks.hostile.over_grpc import GrpcAttack
from benchmarks.hostile.over_http import wire
from inflight.contract import STAGES

Attempts = Callable[[Front], Iterator[str]]


@dataclass(frozen=True)
class Attack:
    """One row of the table."""

    name: str
    run: Attempts
    """Sends it; yields how each request was answered."""
    times: int = 2
    """How often it is run: what the first time fills may stay filled, and the second time shows what grows."""


_BOMB = gzip.compress(b'{"text_input": "' + bytes(256 << 20) + b'"}', 9)
_HALF = 1 << 45, 1 << 62
_LONG = {"text_input": "Hello", "max_tokens": 100, "ignore_eos": True, "stream": True, "return_generation_logits": True}
"""Some 80 kB of JSON for a token: more than the kernel's buffers take."""


def _refused_streams(front: Front) -> Iterator[str]:
    for _ in range(50):
        wrong = tensors(temperature=("FP32", [1, 1], struct.pack("<f", -1)))
        yield front.rpc(wrong, metadata={"triton_grpc_error": "true"})


def _compressed_http(front: Front) -> Iterator[str]:
    for _ in range(3):
        yield front.triton(GENERATE, _BOMB, "Content-Encoding: gzip")
        yield front.triton("/v2/models/tokenizer/infer", _BOMB, "Content-Encoding: gzip")
        yield front.openai(_BOMB, "Content-Encoding: gzip")


def _compressed_grpc(front: Front) -> Iterator[str]:
    text = (200 << 20).to_bytes(4, "little") + bytes(200 << 20)
    bomb = tensors(text_input=("BYTES", [1, 1], text))
    for _ in range(2):
        yield front.rpc(bomb, compression=grpc.Compression.Gzip)


def _huge_grpc(front: Front) -> Iterator[str]:
    text = (200 << 20).to_bytes(4, "little") + bytes(200 << 20)
    for streams in (True, False):
        yield front.rpc(tensors(text_input=("BYTES", [1, 1], text)), streams=streams)


def _nested(front: Front) -> Iterator[str]:
    for levels in (10_000, 1_000_000):
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            nest = f"{opening * levels}1{closing * levels}"
            yield front.triton(GENERATE, f'{{"text_input":{nest}}}'.encode())
            yield front.triton("/v2/repository/index", nest.encode())
            yield front.openai(f'{{"model":"{front.model}","messages":{nest}}}'.encode())


def _chunks(front: Front) -> Iterator[str]:
    sound = b'{"text_input": "Hello", "max_tokens": 2, "model": "demo"}'
    for count in (100_000, 600_000):
        body = b"".join(b"1\r\n%c\r\n" % one for one in sound.ljust(count)) + b"0\r\n\r\n"
        for address, path in ((front.places.http, GENERATE), (front.gateway, CHAT)):
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            yield front.raw(address, f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + body)


def _shapes(front: Front) -> Iterator[str]:
    for size in _HALF:
        for model in ("tokenizer", "ensemble", "tensorrt_llm"):
            tensor = {"name": "max_tokens", "datatype": "INT32", "shape": [1, size], "data": [1]}
            yield front.triton(f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}).encode())
        for model in values.PUBLIC:
            name = "max_tokens" if model == "ensemble" else "request_output_len"
            for shape in ([1, size], [size, size], [size, 0]):
                yield front.rpc(tensors(model, **{name: ("INT32", shape, b"\2\0\0\0")}))


def _zero_rows(front: Front) -> Iterator[str]:
    for model in values.MODELS:
        request = service_pb2.ModelInferRequest(model_name=model)
        for tensor in STAGES[model][0]:
            dims = [0, *(max(dim, 1) for dim in tensor.dims)]
            request.inputs.add(name=tensor.name, datatype=tensor.dtype, shape=dims)
            request.raw_input_contents.append(b"")
        yield front.rpc(request)
        yield front.rpc(request, streams=False)


def _large(front: Front) -> Iterator[str]:
    text = "x" * (26 << 20)
    for _ in range(4):
        yield front.triton(GENERATE, json.dumps({"text_input": text, "max_tokens": 1}).encode())
        yield front.openai(json.dumps({"model": front.model, "messages": text}).encode())
        yield front.rpc(tensors(text_input=("BYTES", [1, 1], len(text).to_bytes(4, "little") + text.encode())))


def _names(front: Front) -> Iterator[str]:
    names = ",".join(f'"key{number}":{number}' for number in range(200_000))
    yield front.triton(GENERATE, f'{{"text_input":"Hello",{names}}}'.encode())
    yield front.openai(f'{{"model":"{front.model}",{names}}}'.encode())


def _mixed(front: Front) -> Iterator[str]:
    for _ in range(20):
        requests = [tensors(model) for model in ("ensemble", "tokenizer", "nothing", "ensemble") * 3]
        yield front.rpc(*requests)


def _slow_readers(front: Front) -> Iterator[str]:
    yield from slowness.slow_readers(front.places.http, wire(STREAM, json.dumps(_LONG).encode()), front.neighbour)
    fields = {"model": front.model, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    fields |= {"max_tokens": 400, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    long = wire(CHAT, json.dumps(fields).encode(), json=True)
    yield from slowness.slow_readers(front.gateway, long, front.neighbour)


def _slow_writers(front: Front) -> Iterator[str]:
    for address, path in ((front.places.http, GENERATE), (front.gateway, CHAT)):
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n"
        yield from slowness.slow_writers(address, f"{head}\r\n".encode(), front.neighbour)
        yield from slowness.slow_writers(address, f"{head}X-Slow: ".encode(), front.neighbour)


def _connections(front: Front) -> Iterator[str]:
    for address in (front.places.http, front.places.grpc, front.gateway):
        yield from slowness.idle_connections(address, front.neighbour)


def _operators_http(front: Front) -> Iterator[str]:
    register = json.dumps({"key": "/x", "offset": 0, "byte_size": 64}).encode()
    cuda = json.dumps({"raw_handle": {"b64": "eA=="}, "device_id": 0, "byte_size": 64}).encode()
    yield front.triton("/v2/systemsharedmemory/region/x/register", register)
    yield front.triton("/v2/cudasharedmemory/region/x/register", cuda)
    for path in ("systemsharedmemory", "cudasharedmemory"):
        yield front.triton(f"/v2/{path}/unregister", b"")
        yield front.triton(f"/v2/{path}/status", b"", method="GET")
    for path in ("repository/models/ensemble/load", "repository/models/ensemble/unload", "logging", "trace/setting"):
        yield front.triton(f"/v2/{path}", b"{}")
    yield front.triton("/v2/models/ensemble/trace/setting", b'{"trace_level":["TENSORS"]}')


def _operators_grpc(front: Front) -> Iterator[str]:
    calls = {
        "SystemSharedMemoryRegister": service_pb2.SystemSharedMemoryRegisterRequest(name="x", key="/x", byte_size=64),
        "SystemSharedMemoryStatus": service_pb2.SystemSharedMemoryStatusRequest(),
        "CudaSharedMemoryRegister": service_pb2.CudaSharedMemoryRegisterRequest(name="x", raw_handle=b"x" * 64),
        "RepositoryModelLoad": service_pb2.RepositoryModelLoadRequest(model_name="ensemble"),
        "RepositoryModelUnload": service_pb2.RepositoryModelUnloadRequest(model_name="ensemble"),
        "TraceSetting": service_pb2.TraceSettingRequest(model_name="ensemble"),
        "LogSettings": service_pb2.LogSettingsRequest(),
    }
    for method, message in calls.items():
        yield front.call(GrpcAttack("", SERVICE + method, (message.SerializeToString(),), streams=False))


def _frames(front: Front) -> Iterator[str]:
    for kind in http2.FLOODS:
        yield http2.flood(front.places.grpc, kind)


def _forged_stages(front: Front) -> Iterator[str]:
    random = Random("forged stages")
    for _ in range(300):
        model = random.choice(["tokenizer", "detokenizer"])
        request = service_pb2.ModelInferRequest(model_name=model)
        for name, datatype, shape, content in (values.forged(random, model) for _ in range(random.randint(1, 8))):
            request.inputs.add(name=name, datatype=datatype, shape=shape)
            request.raw_input_contents.append(content)
        yield front.rpc(request, streams=random.random() < 0.5)


def _resumed(front: Front) -> Iterator[str]:
    """Tokens of an earlier run that nobody has generated, and log-probs that do not belong to them."""

    def ids(*numbers: int) -> tuple[str, list[int], bytes]:
        return "INT32", [1, len(numbers)], struct.pack(f"<{len(numbers)}i", *numbers)

    def log_probs(*numbers: float) -> tuple[str, list[int], bytes]:
        return "FP32", [1, len(numbers)], struct.pack(f"<{len(numbers)}f", *numbers)

    yes, two = ("BOOL", [1, 1], b"\1"), ids(2)
    several = {"num_return_sequences": two}, {"beam_width": two}, {"return_context_logits": yes}
    for more in (
        {"resumed_ids": ids(*range(300, 310))},
        {"resumed_ids": ids(-1)},
        {"resumed_ids": ids(2**31 - 1)},
        {"resumed_ids": ids(0, 1, 2, 3)},
        {"resumed_ids": ids(*[5] * 1_000_000)},
        {"resumed_ids": ("INT32", [1, 1 << 45], b"\5\0\0\0")},
        {"resumed_log_probs": log_probs(-0.5)},
        {"resumed_ids": ids(5), "resumed_log_probs": log_probs(-0.5)},
        {"resumed_ids": ids(5), "resumed_log_probs": log_probs(float("nan"), 1e30), "return_log_probs": yes},
        {"resumed_ids": ids(5), "return_log_probs": yes},
        *({"resumed_ids": ids(5)} | one for one in several),
    ):
        for model in values.PUBLIC:
            limit = "max_tokens" if model == "ensemble" else "request_output_len"
            yield front.rpc(tensors(model, **({limit: ids(8)} | more)))


ATTACKS = (
    Attack("header `triton_grpc_error`, 50 refused streams", _refused_streams),
    Attack("compressed bodies of 256 MiB over HTTP", _compressed_http),
    Attack("compressed messages of 200 MiB over gRPC", _compressed_grpc),
    Attack("messages of 200 MiB over gRPC", _huge_grpc),
    Attack("JSON, 10,000 and 1,000,000 levels deep", _nested),
    Attack("100,000 and 600,000 chunks of one byte", _chunks),
    Attack("shapes of 2^45 and 2^62 elements", _shapes),
    Attack("batches of zero rows", _zero_rows),
    Attack("bodies and messages of 26 MB", _large),
    Attack("64 clients that read a byte per second", _slow_readers),
    Attack("64 clients that write a byte per second", _slow_writers),
    Attack("2,000 connections that say nothing", _connections),
    Attack("shared memory, repository, logs, traces over HTTP", _operators_http),
    Attack("shared memory, repository, logs, traces over gRPC", _operators_grpc),
    Attack("tricks in paths", paths),
    Attack("request smuggling", smuggling),
    Attack("floods of 20,000 HTTP/2 frames", _frames),
    Attack("chats and tools that are much work for a template", templates),
    Attack("grammars, schemas and expressions that explode", grammars),
    Attack("forged calls to `tokenizer` and `detokenizer`", _forged_stages),
    Attack("forged tokens and log-probs of a resumed request", _resumed),
    Attack("odd `x-request-id`", request_ids),
    Attack("200,000 names in one object", _names, times=1),
    Attack("several models on one gRPC stream", _mixed),
)
