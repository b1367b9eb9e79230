"""What passes the door: the paths and methods that are served, and of a request only what the servers are to see."""

from __future__ import annotations

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from inflight.client import Client
from tests.door.support.doors import Door
from tests.support.fake_server import PIECES

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


@pytest.mark.parametrize(
    ("method", "path", "server"),
    [
        ("GET", "/live", "status"),
        ("HEAD", "/ready", "status"),
        ("GET", "/v2/health/live", "status"),
        ("GET", "/v2/health/ready", "status"),
        ("GET", "/status", "status"),
        ("GET", "/metrics", "status"),
        ("GET", "/health", "gateway"),
        ("GET", "/v1/models", "gateway"),
        ("GET", "/v1/models/org/name?x=1", "gateway"),
        ("GET", "/v1/models/..a/.b/c..d/e%20f", "gateway"),
        ("POST", "/v1/chat/completions", "gateway"),
        ("POST", "/v2/rerank", "gateway"),
        ("GET", "/v2", "http"),
        ("GET", "/v2/models/ensemble", "http"),
        ("GET", "/v2/models/tensorrt_llm/ready", "http"),
        ("GET", "/v2/models/ensemble/config", "http"),
        ("GET", "/v2/models/ensemble/stats", "http"),
        ("GET", "/v2/models/stats", "http"),
        ("GET", "/v2/models/ensemble/versions/1", "http"),
        ("GET", "/v2/models/ensemble/versions/1/ready", "http"),
        ("POST", "/v2/models/ensemble/versions/1/generate", "http"),
        ("POST", "/v2/models/ensemble/generate", "http"),
        ("POST", "/v2/models/ensemble/generate_stream", "http"),
    ],
)
def test_what_is_served_reaches_its_server_on_every_port(plain: Door, method: str, path: str, server: str) -> None:
    for port in plain.ports:
        answer = plain.ask(method, path, "content-type: application/json", port=port)
        assert answer.status == 200
        got = getattr(plain, server).requests[-1]
        assert (got["method"], got["path"], got["server"]) == (method, path, server)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/v1"),
        ("DELETE", "/v1/models/x"),
        ("PUT", "/v1/chat/completions"),
        ("GET", "/v1/chat/completions"),
        ("POST", "/v2/models/tokenizer/generate"),
        ("GET", "/v2/models/detokenizer"),
        ("GET", "/v2/models/ensemble/infer"),
        ("POST", "/v2/models/tokenizer/infer"),
        ("POST", "/v2/models/tokenizer/versions/1/generate"),
        ("GET", "/v2/models/ensemble/versions/x"),
        ("POST", "/v2/models/stats"),
        ("GET", "/v1/models/../../metrics"),
        ("GET", "/v1/models/%2e%2E/metrics"),
        ("GET", "/v1/models/.%2e/metrics"),
        ("GET", "/v1/models/a/."),
        ("GET", "/v1/models/a/.."),
        ("GET", "/v1/models//x"),
        ("GET", "/v1/models/x/"),
        ("POST", "/v2/repository/index"),
        ("POST", "/v2/repository/models/ensemble/unload"),
        ("POST", "/v2/systemsharedmemory/region/x/register"),
        ("GET", "/v2/cudasharedmemory/status"),
        ("POST", "/v2/models/ensemble/trace/setting"),
        ("POST", "/v2/trace/setting"),
        ("POST", "/v2/logging"),
        ("POST", "/invocations"),
        ("GET", "//v2"),
        ("GET", "/v2/"),
        ("GET", "/v2/./models/ensemble"),
        ("GET", "/v2/models/../models/ensemble"),
        ("GET", "/V2"),
        ("GET", "/%762"),
        ("GET", "http://door/v2"),
        ("OPTIONS", "*"),
        ("TRACE", "/v2"),
        ("POST", "/inference.GRPCInferenceService/SystemSharedMemoryRegister"),
        ("POST", "/inference.GRPCInferenceService/RepositoryIndex"),
    ],
)
def test_all_else_is_refused_by_the_door_itself(plain: Door, method: str, path: str) -> None:
    before = [len(server.requests) for server in (plain.http, plain.gateway, plain.status)]
    answer = plain.ask(method, path)
    assert answer.status == 404
    assert "no such path" in answer.body.decode()
    assert [len(server.requests) for server in (plain.http, plain.gateway, plain.status)] == before


@pytest.mark.parametrize("path", ["/v2/models/ensemble/infer", "/v2/models/tensorrt_llm/versions/1/infer"])
def test_infer_over_http_is_refused_with_what_is_served_instead(plain: Door, path: str) -> None:
    before = len(plain.http.requests)
    answer = plain.ask("POST", path)
    assert answer.status == 404
    words = answer.json["error"]
    assert "the models of this deployment stream" in words
    assert "`generate_stream`" in words
    assert "`decoupled: false`" in words
    assert len(plain.http.requests) == before


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /v2/%2Fx HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"GET /v2%5cx HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"GET /v2#x HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nhost: user@a\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nhost: a\r\nbad header: b\r\n\r\n", 400),
        (
            b"POST /score HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"POST /v1/messages HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n", 501),
        (b"POST /v1/messages HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd", 400),
        (b"POST /v1/messages HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n\r\n", 400),
        (b"CONNECT door:80 HTTP/1.1\r\nhost: door:80\r\nconnection: close\r\n\r\n", 403),
        (b"nonsense\r\n\r\n", 400),
    ],
)
def test_requests_that_others_might_read_otherwise_are_refused(plain: Door, request_bytes: bytes, status: int) -> None:
    before = len(plain.http.requests) + len(plain.gateway.requests)
    assert plain.send(request_bytes).status == status
    assert len(plain.http.requests) + len(plain.gateway.requests) == before


@pytest.mark.parametrize(("path", "host"), [("/v2/health/ready", b""), ("/v1/models", b"host: a\r\n")])
def test_load_balancers_may_ask_in_the_old_version_of_http(plain: Door, path: str, host: bytes) -> None:
    answer = plain.send(b"GET " + path.encode() + b" HTTP/1.0\r\n" + host + b"\r\n")
    assert (answer.status, answer.json["path"]) == (200, path)
    assert "transfer-encoding" not in answer.headers


def test_compressed_bodies_are_refused(plain: Door) -> None:
    answer = plain.ask("POST", "/v1/chat/completions", "content-encoding: gzip", body=b"x")
    assert (answer.status, answer.json["error"]["message"]) == (415, "compressed bodies are not accepted")
    answer = plain.ask("POST", "/v2/models/ensemble/generate", "content-encoding: identity", body=b"x")
    assert answer.status == 415


def test_headers_that_are_the_servers_own_are_dropped(plain: Door) -> None:
    sent = (
        "triton_grpc_error: true",
        "x_under: 1",
        "x-envoy-retry-on: 5xx",
        "x-envoy-expected-rq-timeout-ms: 1",
        "x-envoy-original-path: /x",
        "x-inflight-internal: 1",
        "x-inflight-client: somebody",
        "x-request-id: mine",
        "traceparent: 00-1-2-01",
        "origin: https://chat.example.org",
    )
    plain.ask("POST", "/v1/chat/completions", *sent, body=b"{}")
    headers = plain.gateway.requests[-1]["headers"]
    assert headers["x-inflight-client"] == "127.0.0.1"
    assert (headers["x-request-id"], headers["traceparent"]) == ("mine", "00-1-2-01")
    assert headers["origin"] == "https://chat.example.org"
    own = {name for name in headers if "_" in name or name.startswith(("x-envoy-", "x-inflight-"))}
    assert own <= {"x-inflight-client", "x-envoy-external-address"}


def test_a_body_in_chunks_arrives_with_its_length(plain: Door) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"text_input": "x"}') + b"0\r\n\r\n"
    head = b"POST /v2/models/ensemble/generate HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
    head += b"transfer-encoding: chunked\r\n\r\n"
    assert plain.send(head + chunks).status == 200
    got = plain.http.requests[-1]
    assert (got["chunked"], got["body"]) == (False, '{"x-inflight-client":"127.0.0.1","text_input": "x"}')


def test_errors_have_the_shape_of_their_protocol(plain: Door) -> None:
    openai = plain.ask("GET", "/v1/nothing")
    assert openai.headers["content-type"] == "application/json"
    assert openai.json == {
        "error": {
            "message": "there is no such path, or it takes another method",
            "type": "not_found_error",
            "param": None,
            "code": None,
        }
    }
    assert plain.ask("GET", "/v2/models/none").json == {"error": "there is no such path, or it takes another method"}
    assert "error" in plain.ask("POST", "/v2/rerank", "content-encoding: x").json["error"]["type"]


def test_grpc_serves_streams_and_drops_the_header_that_kills(plain: Door) -> None:
    with Client(f"127.0.0.1:{plain.port}") as client:
        assert client.generate("hello").text == "".join(PIECES)
    with grpc.insecure_channel(f"127.0.0.1:{plain.ports[1]}") as channel:
        stub = GRPCInferenceServiceStub(channel)
        sent = (("triton_grpc_error", "true"), ("x-kept", "1"))
        list(stub.ModelStreamInfer(iter([]), metadata=sent))
        assert "triton_grpc_error" not in plain.grpc.metadata[-1]
        assert plain.grpc.metadata[-1]["x-kept"] == "1"
        assert stub.ServerReady(pb.ServerReadyRequest()).ready


@pytest.mark.parametrize(
    "call",
    [
        "SystemSharedMemoryRegister",
        "CudaSharedMemoryStatus",
        "RepositoryIndex",
        "RepositoryModelUnload",
        "TraceSetting",
        "LogSettings",
    ],
)
def test_grpc_methods_of_operators_are_not_there(plain: Door, call: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{plain.port}") as channel:
        method = channel.unary_unary(f"/inference.GRPCInferenceService/{call}")
        with pytest.raises(grpc.RpcError) as raised:
            method(b"")
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert raised.value.details() == "there is no such path, or it takes another method"


def test_compressed_messages_of_grpc_are_refused_before_the_stream_ends(plain: Door) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{plain.port}") as channel:
        stub = GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            stub.ServerReady(pb.ServerReadyRequest(), compression=grpc.Compression.Gzip)
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert raised.value.details() == "compressed messages are not accepted"


def test_the_table_of_paths_is_the_gateways() -> None:
    from inflight.gateway.app import ROUTES
    from inflight.serve.envoy.paths import GATEWAY_READS, GATEWAY_WRITES, MODEL_BY_NAME

    known = {("GET", path) for path in GATEWAY_READS} | {("POST", path) for path in GATEWAY_WRITES}
    assert MODEL_BY_NAME.startswith("/v1/models(/")
    known |= {("GET", "/v1/models/{id:path}"), ("GET", "/metrics")}
    assert {(one.method, one.path) for one in ROUTES} == known


def test_answers_stream_without_being_held_back(plain: Door) -> None:
    import socket

    with socket.create_connection(("127.0.0.1", plain.port), 30) as connection:
        connection.sendall(b"POST /v1/completions?events=3 HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n")
        data = b""
        for number in range(3):
            plain.gateway.more.release()
            while b"data: %d" % number not in data:  # the next one is sent only after this one was read
                data += connection.recv(4096)
