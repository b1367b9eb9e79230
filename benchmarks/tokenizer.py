"""Measures the tokenizer stage beside the upstream ensemble's `preprocessing` model, rebuilt in loadtest/baseline.

Both are models of one real server; the same prompts go to both, over gRPC, in turns, so that whatever else the machine
does meets both alike.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import yaml
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from inflight.resources import MODEL_REPOSITORY, UPSTREAM_PREPROCESSING
from inflight.serve.server import TritonServer, free_ports
from inflight.settings.deployment import FILE_NAME, load_deployment

_SENTENCE = "In-flight batching lets a request join the running batch at any step, and leave it at any step. "
_ROUNDS = 5


@dataclass(frozen=True)
class TokenizerResult:
    """Requests per second of both models for prompts of one length."""

    prompt_words: int
    ours_per_second: int
    upstream_per_second: int
    ratio: float
    """Median of the rounds' ratios."""


def measure_tokenizers(model: Path, words: list[int], seconds: float, concurrency: int = 64) -> list[TokenizerResult]:
    """Serve both models and measure them with prompts of so many words; each round takes ``seconds`` per model."""
    http, port, metrics = free_ports(3)
    os.environ["BASELINE_TOKENIZER"] = str(model.resolve())
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as scratch:
        directory = Path(scratch)
        ports = {"http_port": http, "grpc_port": port, "metrics_port": metrics, "exit_timeout_s": 5}
        (directory / FILE_NAME).write_text(yaml.safe_dump({"model": str(model.resolve()), "server": ports}))
        repository = directory / "models"
        repository.mkdir()
        (repository / "tokenizer").symlink_to(MODEL_REPOSITORY / "tokenizer")
        (repository / "preprocessing").symlink_to(UPSTREAM_PREPROCESSING)
        with TritonServer(directory, load_deployment(directory), model_repository=repository) as server:
            server.wait_ready()
            return [_compare(f"127.0.0.1:{port}", count, seconds, concurrency) for count in words]


def _compare(url: str, words: int, seconds: float, concurrency: int) -> TokenizerResult:
    text = " ".join(itertools.islice(itertools.cycle(_SENTENCE.split()), words))
    requests = [
        _request("tokenizer", {"text_input": text, "max_tokens": 64}),
        _request("preprocessing", {"QUERY": text, "REQUEST_OUTPUT_LEN": 64}),
    ]
    for request in requests:
        asyncio.run(_rate(url, request, 0.5, concurrency))
    rounds = [[asyncio.run(_rate(url, one, seconds, concurrency)) for one in requests] for _ in range(_ROUNDS)]
    ours, upstream = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(mine / theirs for mine, theirs in rounds)
    return TokenizerResult(words, round(ours), round(upstream), round(ratio, 2))


def _request(model: str, values: dict[str, str | int]) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model)
    for name, value in values.items():
        raw = value.encode() if isinstance(value, str) else np.int32(value).tobytes()
        kind = "BYTES" if isinstance(value, str) else "INT32"
        request.inputs.add(name=name, datatype=kind, shape=[1, 1])
        request.raw_input_contents.append(len(raw).to_bytes(4, "little") + raw if kind == "BYTES" else raw)
    return request


async def _rate(url: str, request: pb.ModelInferRequest, seconds: float, concurrency: int) -> float:
    """Return requests per second with so many always under way."""
    deadline, done = time.monotonic() + seconds, 0

    async def work() -> None:
        nonlocal done
        while True:
            await stub.ModelInfer(request)
            done += 1
            if time.monotonic() >= deadline:
                return

    # The server is this process' own: no proxy stands between.
    async with grpc.aio.insecure_channel(url, [("grpc.enable_http_proxy", 0)]) as channel:
        stub = GRPCInferenceServiceStub(channel)
        started = time.monotonic()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        return done / (time.monotonic() - started)
