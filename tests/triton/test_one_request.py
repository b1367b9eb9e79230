"""One request does not end the server, nor rule it: bodies beyond all limits, and the operators' APIs, are refused."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import grpc as grpc_api
import httpx
import psutil
import pytest
import tritonclient.grpc as grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from benchmarks.hostile.http_tricks import PATHS
from benchmarks.hostile.slowness import answers_of
from inflight.client import Client, GenerateOptions
from inflight.client.transport import Address
from inflight.errors import InvalidRequest
from inflight.resources import DEMO
from inflight.serve import shields
from inflight.settings.deployment import load_deployment
from tests.triton.support.servers import Running
from tests.triton.support.tensors import grpc_inputs

pytestmark = pytest.mark.parametrize("engine", ["pytorch"], indirect=True, scope="session")
"""What is tested is before the engine."""

GENERATE = "/v2/models/ensemble/generate"
LEGAL_BYTES = load_deployment(DEMO).limits.max_prompt_bytes
CLOSED = {"error": "This API is restricted, expecting header 'see-server.open_apis-in-deployment.yaml'"}


def _post(server: Running, body: bytes | Iterable[bytes]) -> tuple[int, str]:
    """Send a body, an iterable chunk by chunk; return the status and the error."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=300)
    connection.request("POST", GENERATE, body, encode_chunked=not isinstance(body, bytes))
    response = connection.getresponse()
    return response.status, json.loads(response.read()).get("error", "")


def _still_serves(server: Running) -> None:
    assert server.server.process.poll() is None
    with Client(server.grpc) as client:
        assert client.generate("Hello", GenerateOptions(max_tokens=2)).text


@pytest.mark.parametrize("opening", ["[", '{"a":'], ids=["lists", "objects"])
@pytest.mark.parametrize("levels", [50_000, 1_000_000])
def test_deeply_nested_json_is_refused(server: Running, opening: str, levels: int) -> None:
    closing = {"[": "]", '{"a":': "}"}[opening]
    nested = opening * levels + ("1" if closing == "}" else "") + closing * levels
    status, _ = _post(server, f'{{"text_input":{nested},"max_tokens":1}}'.encode())
    assert status >= 400
    _still_serves(server)


@pytest.mark.proof
def test_more_chunks_than_a_small_stack_has_room_for_are_taken(server: Running) -> None:
    text = json.dumps({"text_input": "Hello", "max_tokens": 2}).encode()
    status, error = _post(server, _chunks(text + b" " * 600_000))
    assert (status, error) == (200, "")


def _chunks(text: bytes) -> Iterator[bytes]:
    yield from (text[index : index + 1] for index in range(len(text)))


@pytest.mark.proof
def test_the_longest_prompt_that_limits_allow_is_served_over_each_protocol(server: Running) -> None:
    """In JSON it is twice as long; the stages read it all, and judge its length in tokens."""
    line = "\u4f60\u597d\uff0c\u8bf7\u95ee\u3002\n"
    prompt = line * (LEGAL_BYTES // len(line.encode()))
    said = [_post(server, json.dumps({"text_input": prompt, "max_tokens": 1}).encode())[1]]
    with Client(server.grpc) as client, pytest.raises(InvalidRequest) as refusal:
        client.generate(prompt, GenerateOptions(max_tokens=1))
    for error in (*said, str(refusal.value)):
        assert "the prompt length" in error
    _still_serves(server)


@pytest.mark.parametrize(
    "path",
    [
        "systemsharedmemory/region/x/register",
        "systemsharedmemory/unregister",
        "cudasharedmemory/region/x/register",
        "cudasharedmemory/unregister",
        "logging",
        "trace/setting",
        "models/ensemble/trace/setting",
    ],
)
def test_operators_apis_are_closed_over_http(server: Running, path: str) -> None:
    body = {"key": "/x", "offset": 0, "byte_size": 64}
    reply = httpx.post(f"{server.http}/v2/{path}", json=body, timeout=30)
    assert (reply.status_code, reply.json()) == (403, CLOSED)


def test_operators_apis_are_closed_over_grpc(server: Running) -> None:
    with grpc.InferenceServerClient(server.grpc) as client:
        calls = [
            lambda: client.register_system_shared_memory("x", "/x", 64),
            lambda: client.register_cuda_shared_memory("x", b"x" * 64, 0, 64),
            client.get_system_shared_memory_status,
            client.get_log_settings,
            lambda: client.update_log_settings({"log_verbose_level": 9}),
            client.get_trace_settings,
            lambda: client.update_trace_settings(settings={"trace_level": ["TENSORS"]}),
        ]
        for call in calls:
            with pytest.raises(InferenceServerException, match="This protocol is restricted"):
                call()
        assert client.get_inference_statistics().model_stats
        assert client.get_model_repository_index().models


@pytest.mark.parametrize("call", ["load", "unload"])
def test_no_model_is_loaded_or_unloaded(server: Running, call: str) -> None:
    reply = httpx.post(f"{server.http}/v2/repository/models/ensemble/{call}", json={}, timeout=30)
    assert reply.status_code == 503
    assert "explicit model load / unload is not allowed" in reply.json()["error"]
    with (
        grpc.InferenceServerClient(server.grpc) as client,
        pytest.raises(InferenceServerException, match="not allowed"),
    ):
        getattr(client, f"{call}_model")("ensemble")
    _still_serves(server)


def test_tricks_in_paths_reach_no_closed_api(server: Running) -> None:
    body = '{"key": "/x", "offset": 0, "byte_size": 64}'
    address = Address("http", "127.0.0.1", server.http_port)
    tricks = [path for path in PATHS if "register" in path]
    assert len(tricks) > 10
    for path in tricks:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        assert answers_of(address, (head + body).encode()) in ("400", "403", "404", "closed"), path


def test_the_server_listens_where_it_says(server: Running) -> None:
    process = psutil.Process(server.server.process.pid)
    listening = {
        (one.laddr.ip.removeprefix("::ffff:"), one.laddr.port)
        for member in (process, *process.children(recursive=True))
        for one in member.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    }
    assert listening == {("127.0.0.1", port) for port in (server.http_port, server.grpc_port, server.metrics_port)}


def test_the_memory_that_a_stage_shares_with_its_server_has_no_name(server: Running) -> None:
    """What Triton's errors tell of it opens nothing."""
    [*regions] = [stage.cmdline()[2] for stage in psutil.Process(server.server.process.pid).children()]
    assert len(regions) == 3
    for region in regions:
        assert region.startswith("triton_python_backend_shm_region_")
        assert not (Path("/dev/shm") / region).exists()


def test_the_header_that_crashes_the_server_is_not_known_to_it(server: Running) -> None:
    """Without the shield it crashes within 20 such errors."""
    with grpc_api.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for model in ("ensemble", "tensorrt_llm"):
            request = service_pb2.ModelInferRequest(model_name=model)
            request.inputs.add(name="temperature", datatype="FP32", shape=[1, 1])
            request.raw_input_contents.append(b"\0\0\0\0")
            for _ in range(40):
                [answer] = stub.ModelStreamInfer(iter([request]), metadata=(("triton_grpc_error", "true"),), timeout=60)
                assert answer.error_message.startswith("INVALID_ARGUMENT") or "in ensemble" in answer.error_message
    _still_serves(server)


def test_one_stream_may_name_every_model(server: Running) -> None:
    """Each request gets its own answers, and all of them; without the shield two are written at once, and it aborts."""
    kinds = ["ensemble", "tokenizer", "nothing", "ensemble", "tokenizer"] * 5
    values = {"text_input": "Tell me", "max_tokens": 6}
    requests = [service_pb2.ModelInferRequest(model_name=model, id=f"{model} {n}") for n, model in enumerate(kinds)]
    for request in requests:
        streams = {"ignore_eos": True, "stream": True} if request.model_name == "ensemble" else {}
        for tensor in grpc_inputs("ensemble", values | streams):
            request.inputs.append(tensor._get_tensor())
            request.raw_input_contents.append(tensor._get_content())
    with Client(server.grpc) as client:
        text = client.generate("Tell me", GenerateOptions(max_tokens=6, ignore_eos=True)).text
    with grpc_api.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(30):
            answers: dict[str, list[service_pb2.ModelStreamInferResponse]] = {one.id: [] for one in requests}
            for answer in stub.ModelStreamInfer(iter(requests), timeout=60):
                answers[answer.infer_response.id].append(answer)
            for name, of_one in answers.items():
                errors = {one.error_message for one in of_one}
                if name.startswith("nothing"):
                    assert errors == {"Request for unknown model: 'nothing' is not found"}
                else:
                    assert errors == {""}
                if name.startswith("ensemble"):
                    assert b"".join(_output(one.infer_response, "text_output") for one in of_one).decode() == text
                else:
                    assert len(of_one) == 1
    _still_serves(server)


def _output(response: service_pb2.ModelInferResponse, name: str) -> bytes:
    """Return the string in an output of a response."""
    [place] = [place for place, output in enumerate(response.outputs) if output.name == name]
    return bytes(response.raw_output_contents[place][4:])  # behind its length


def test_a_shape_that_no_memory_has_room_for_is_not_taken(server: Running) -> None:
    """Without the shield the server aborts: it makes room for what the shape says."""
    tensor = {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1 << 45], "data": [1]}
    for model in ("tokenizer", "ensemble"):
        reply = httpx.post(f"{server.http}/v2/models/{model}/infer", json={"inputs": [tensor]}, timeout=60)
        assert (reply.status_code, reply.json()) == (404, {"error": "Not Found"})
    _still_serves(server)


def test_the_server_keeps_every_batch_that_has_run(server: Running) -> None:
    maps = Path(f"/proc/{server.server.process.pid}/maps").read_text()
    [library] = {line.split()[-1] for line in maps.splitlines() if "libtritonserver" in line}
    some, every = shields._BATCHES_KEPT
    code = Path(library).read_bytes()
    assert (code.count(some), code.count(every)) == (0, 1)
