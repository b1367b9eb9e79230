"""A server that speaks Triton's gRPC and HTTP for a decoupled `ensemble`: a scripted answer, and faults on demand."""

from __future__ import annotations

import itertools
import json
import random
import struct
import sys
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server

from tests.support.scripted import Script, ServerError
from tests.support.waiting import wait_until

PIECES = ("Hel", "lo ", "wörld\u2028", "🙂 {x}\x85", "!\n")
TYPES = {
    "BOOL": np.bool_,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP32": np.float32,
}
OUTPUT_TYPES = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "snapshot": "BYTES",
    "cum_log_probs": "FP32",
    "output_log_probs": "FP32",
    "prompt_log_probs": "FP32",
    "top_log_probs": "FP32",
    "used_seed": "UINT64",
}
_LISTS = ("_words", "_weights", "resumed_ids", "resumed_log_probs")
"""How the names of inputs of any length end."""
SERVED_MODEL = {"name": "tiny", "max_sequence_length": 2048, "default_max_tokens": 256}
HTTP_CODES = {"INVALID_ARGUMENT": 400, "UNIMPLEMENTED": 501, "NOT_FOUND": 404, "UNAVAILABLE": 503}


class InBandError(ServerError):
    """An error as Triton sends it over gRPC: inside a response, without a status."""


class Hangup(Exception):
    """The connection breaks."""


@dataclass(frozen=True)
class Break:
    """How one request ends before its time."""

    after: int
    """So many of its chunks arrive."""
    error: str = ""
    """The error that it ends with; empty: the connection breaks."""
    silent: bool = False
    """It ends as if it were whole."""
    away: int = 0
    """So many requests after it are answered as by a proxy whose server is away, with ``Faults.retry_after``."""

    def happen(self) -> Iterator[dict[str, list[Any]]]:
        """End the request so."""
        if not self.silent:
            raise InBandError(self.error) if self.error else Hangup
        yield from ()


@dataclass
class Faults:
    """What goes wrong; nothing by default."""

    refuse: int = 0
    """So many requests are answered UNAVAILABLE before one is served."""
    error: str = ""
    """The error that ends the stream, after ``after`` chunks."""
    refuse_messages: str = ""
    """The error of every request that has chat messages."""
    in_band: bool = False
    """gRPC errors come inside a response, without a status."""
    hangup: bool = False
    """The connection breaks after ``after`` chunks."""
    truncate: bool = False
    """The stream ends without its last chunks, after ``after`` of them."""
    lose: int | None = None
    """The chunk of this number never arrives."""
    after: int = 0
    first_delay: float = 0.0
    delay: float = 0.0
    """Seconds before the first chunk, and before each other."""
    together: int = 1
    """Nobody is answered before so many requests run at once."""
    hold_end: threading.Event | None = None
    """A call over gRPC that has had its last response does not end before it is set."""
    holds: list[threading.Event] = field(default_factory=list)
    """The next requests, each by the first that is left, stand still after ``after`` chunks until it is set."""
    breaks: list[Break] = field(default_factory=list)
    """How the next requests end, each by the first that is left."""
    away: int = 0
    retry_after: str = ""
    """The ``Retry-After`` of each refusal."""
    no_token_ids: str = ""
    """The error of every request that wants token ids."""
    forget: bool = False
    """What is resumed begins anew."""


@dataclass
class FakeServer:
    """Use as a context manager; ``grpc_port`` and ``http_port`` are free ones."""

    pieces: tuple[str, ...] = PIECES
    faults: Faults = field(default_factory=Faults)
    ready: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)
    """The inputs of each request: name to value, or to list for inputs of any length; ``""`` holds the request id."""
    metadata: list[dict[str, Any]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    running: int = 0
    most_running: int = 0
    grpc_port: int = 0
    http_port: int = 0

    def __enter__(self) -> FakeServer:
        self._lock = threading.Lock()
        self._grpc = grpc.server(ThreadPoolExecutor(32))
        add_GRPCInferenceServiceServicer_to_server(_Servicer(self), self._grpc)
        self.grpc_port = self._grpc.add_insecure_port("127.0.0.1:0")
        self._grpc.start()
        handler = type("Handler", (_Handler,), {"fake": self})
        self._http = _HttpServer(("127.0.0.1", 0), handler)
        self.http_port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._grpc.stop(None).wait()
        self._http.shutdown()
        self._http.server_close()

    def answer(self, inputs: dict[str, Any]) -> Generator[dict[str, list[Any]]]:
        """Yield the outputs of each response to one request."""
        if inputs.get("inspect"):
            yield {"snapshot": [json.dumps({"model": SERVED_MODEL})]}
            return
        with self._lock:
            self.requests.append(inputs)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            yield from self._misbehave(self._responses(inputs))
        finally:
            with self._lock:
                self.running -= 1

    def _misbehave(self, responses: Iterator[dict[str, list[Any]]]) -> Iterator[dict[str, list[Any]]]:
        faults = self.faults
        wait_until(lambda: self.most_running >= faults.together, 60)
        self._refuse(self.requests[-1])
        if faults.error and faults.after == 0:
            time.sleep(faults.first_delay)
            raise ServerError(faults.error)
        with self._lock:
            end = faults.breaks.pop(0) if faults.breaks else None
            faults.away = end.away if end else 0
            hold = faults.holds.pop(0) if faults.holds else None
        number = -1
        for number, response in enumerate(responses):
            time.sleep(faults.delay if number else faults.first_delay)
            if number == faults.after:
                if hold is not None:
                    hold.wait(60)
                if faults.error:
                    raise ServerError(faults.error)
                if faults.hangup:
                    raise Hangup
                if faults.truncate:
                    return
            if end is not None and number == end.after:
                yield from end.happen()
                return
            if number != faults.lose:
                yield response
        if end is not None and number + 1 == end.after:  # behind the last response
            yield from end.happen()

    def _refuse(self, inputs: dict[str, Any]) -> None:
        faults = self.faults
        with self._lock:
            refused, away = faults.refuse > 0, faults.away > 0
            faults.refuse -= refused
            faults.away -= away
        if away:
            raise ServerError("UNAVAILABLE")
        if refused:
            raise ServerError("UNAVAILABLE: Exceeds maximum queue size")
        if faults.refuse_messages and "messages" in inputs:
            raise ServerError(faults.refuse_messages)
        if faults.no_token_ids and "return_token_ids" in inputs:
            raise ServerError(faults.no_token_ids)

    def _responses(self, inputs: dict[str, Any]) -> Iterator[dict[str, list[Any]]]:
        count = inputs.get("num_return_sequences", 1)
        sampled = "temperature" in inputs or "seed" in inputs
        first = inputs.get("seed", random.getrandbits(64) if sampled else 0)
        sequences = [Script(self.pieces, inputs, (first + index) % 2**64) for index in range(count)]
        if self.faults.forget:
            inputs.pop("resumed_ids", None)
        for turn in itertools.zip_longest(*(script.responses() for script in sequences)):
            for index, response in enumerate(turn):
                if index:
                    response.pop("prompt_log_probs", None)
                yield response | ({"sequence_index": [index]} if count > 1 else {})


class _Servicer(GRPCInferenceServiceServicer):
    def __init__(self, fake: FakeServer) -> None:
        self.fake = fake

    def ModelReady(self, request: pb.ModelReadyRequest, context: grpc.ServicerContext) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self.fake.ready and request.name == "ensemble")

    def ServerReady(self, request: pb.ServerReadyRequest, context: grpc.ServicerContext) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self.fake.ready)

    def ModelStreamInfer(
        self, requests: Iterator[pb.ModelInferRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ModelStreamInferResponse]:
        over = threading.Event()
        context.add_callback(lambda: None if over.is_set() else self.fake.cancelled.set())
        self.fake.metadata.append(dict(context.invocation_metadata()))
        for request in requests:
            try:
                inputs = _decode(request)
                for outputs in self.fake.answer(inputs):
                    message = _encode(outputs)
                    if inputs.get("num_return_sequences", 1) == 1:
                        message.parameters["triton_final_response"].bool_param = "finish_reason" in outputs
                    yield pb.ModelStreamInferResponse(infer_response=message)
                yield pb.ModelStreamInferResponse(infer_response=pb.ModelInferResponse())  # the empty final response
                if self.fake.faults.hold_end is not None:
                    self.fake.faults.hold_end.wait(60)
            except ServerError as error:
                if isinstance(error, InBandError):
                    yield pb.ModelStreamInferResponse(error_message=str(error))
                elif self.fake.faults.in_band:
                    yield pb.ModelStreamInferResponse(error_message=f"in ensemble 'ensemble', {error}")
                else:
                    over.set()
                    status = grpc.StatusCode[str(error).partition(":")[0]]
                    if self.fake.faults.retry_after:
                        context.set_trailing_metadata((("retry-after", self.fake.faults.retry_after),))
                    context.abort(status, f"in ensemble 'ensemble', {error}")
            except Hangup:
                over.set()
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        over.set()


def _decode(request: pb.ModelInferRequest) -> dict[str, Any]:
    inputs: dict[str, Any] = {"": request.id}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        assert tensor.shape[0] == 1
        if tensor.datatype == "BYTES":
            values = []
            while raw:
                (length,) = struct.unpack_from("<I", raw)
                values.append(raw[4 : 4 + length].decode())
                raw = raw[4 + length :]
        else:
            values = np.frombuffer(raw, TYPES[tensor.datatype]).tolist()
        assert tensor.shape[1] == len(values)
        inputs[tensor.name] = values if tensor.name.endswith(_LISTS) else values[0]
    return inputs


def _encode(outputs: dict[str, list[Any]]) -> pb.ModelInferResponse:
    message = pb.ModelInferResponse(model_name="ensemble")
    for name, values in outputs.items():
        dtype = OUTPUT_TYPES.get(name, "INT32")
        message.outputs.add(name=name, datatype=dtype, shape=[1, len(values)])
        if dtype == "BYTES":
            raw = b"".join(struct.pack("<I", len(value.encode())) + value.encode() for value in values)
        else:
            raw = np.array(values, TYPES[dtype]).tobytes()
        message.raw_output_contents.append(raw)
    return message


class _HttpServer(ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Keep quiet about clients that have gone, which is what many tests make them do; tell all else."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeServer

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        ready = self.fake.ready and self.path in ("/v2/models/ensemble/ready", "/v2/health/ready")
        self._whole(200 if ready or self.path == "/v2/health/live" else 400, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        model = "tensorrt_llm" if "inspect" in body else "ensemble"
        assert self.path == f"/v2/models/{model}/generate_stream"
        answer = self.fake.answer({"": body.pop("id", ""), **body})
        begun = False
        try:
            for outputs in answer:
                if not begun:
                    self.send_response(200)
                    self.send_header("Content-Type", "text/event-stream; charset=utf-8")
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                begun = True
                single = {name: values[0] if len(values) == 1 else values for name, values in outputs.items()}
                self._event({"model_name": "ensemble", **single})
        except ServerError as error:
            if not begun:
                self._whole(HTTP_CODES.get(str(error).partition(":")[0], 500), {"error": str(error)})
                return
            self._event({"error": str(error)})
        except Hangup:
            self.close_connection = True
            return
        except OSError:
            self.fake.cancelled.set()
            self.close_connection = True
            return
        finally:
            answer.close()
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, event: dict[str, Any]) -> None:
        """Send one event cut in two: a client may not take a read for an event."""
        data = b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"
        for part in (data[:9], data[9:]):
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.flush()

    def _whole(self, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        if code == HTTP_CODES["UNAVAILABLE"] and self.fake.faults.retry_after:
            self.send_header("Retry-After", self.fake.faults.retry_after)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
