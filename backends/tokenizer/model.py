"""Triton backend ``tokenizer``: hands each dynamic batch to ``inflight.text.preprocess``."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

from inflight.compiled_engine import read_engine
from inflight.contract import TENSORRTLLM
from inflight.settings.deployment import Deployment
from inflight.shared_counters import start_pulse
from inflight.text.preprocess import Preprocessor, RawRequest
from inflight.text.tokenizer import Tokenizer
from inflight.text.upstream import UpstreamPreprocessor
from inflight.triton import adapter
from inflight.triton.long_requests import LONG_BYTES, LongRequests
from inflight.triton.metrics import StageMetrics
from inflight.triton.response_writer import Arrays
from inflight.triton.tracing.stages import TracedPreprocessor, make_tracer


class TritonPythonModel:
    """The tokenizer stage."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint's tokenizer."""
        deployment = adapter.deployment()
        self._pulse = start_pulse(args["model_name"])
        self._tracer = make_tracer(deployment)
        self._metrics = StageMetrics(deployment, args)
        with self._metrics.phase("tokenizer"):
            tokenizer = Tokenizer.from_checkpoint(deployment.model)
        self._preprocessor = TracedPreprocessor(_preprocessor(tokenizer, deployment), deployment, self._tracer)
        self._counting = threading.Lock()
        self._long = LongRequests()
        self._metrics.start()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer a dynamic batch, long requests later; each request succeeds or fails alone."""
        raw = [self._read(request) for request in requests]
        short = [index for index, one in enumerate(raw) if one.text_bytes <= LONG_BYTES]
        for one, request in zip(raw, requests, strict=True):
            if one.text_bytes > LONG_BYTES:
                self._long.put(one.text_bytes, partial(self._answer, one, adapter.TritonSender(request)))
        answers: list[Any] = [None for _ in raw]
        with self._pulse.in_call():
            results = self._preprocess([raw[index] for index in short])
        for index, result in zip(short, results, strict=True):
            answers[index] = (
                adapter.error_response(result, raw[index].request_id)
                if isinstance(result, Exception)
                else adapter.response(result)
            )
        return answers

    def _read(self, request: Any) -> RawRequest:
        try:
            arrays, parameters = adapter.read_arrays(request), adapter.read_parameters(request)
            return RawRequest(arrays, parameters, adapter.read_id(request))
        except Exception as error:  # this request's alone: raised here, it would be that of the whole batch
            return RawRequest({}, {}, error=error)

    def _answer(self, raw: RawRequest, sender: adapter.TritonSender) -> None:
        """Answer a long request, in a thread of its own."""
        try:
            [result] = self._preprocess([raw])
            if isinstance(result, Exception):
                raise result
            sender.send(result, final=True)
        except Exception as error:
            sender.fail(error)

    def _preprocess(self, raw: list[RawRequest]) -> list[Arrays | Exception]:
        began = time.perf_counter()
        results = self._preprocessor.preprocess(raw)
        if raw:
            with self._counting:
                self._metrics.tokenizer.observe(time.perf_counter() - began)
        for result in results:
            if isinstance(result, Exception):
                self._metrics.count_refusal(result)
        return results

    def finalize(self) -> None:
        """End the threads, stop exporting, and send the last spans."""
        self._pulse.close()
        self._long.close()
        self._metrics.close()
        if self._tracer is not None:
            self._tracer.close()


def _preprocessor(tokenizer: Tokenizer, deployment: Deployment) -> Preprocessor:
    if deployment.engine.kind != TENSORRTLLM:
        return Preprocessor(tokenizer, deployment.limits)
    length = read_engine(deployment).max_sequence_length
    return UpstreamPreprocessor(tokenizer, deployment.limits, adapter.announce, length, deployment.decoupled)
