"""Triton backend ``tokenizer``: hands each request to ``inflight.text.preprocess``."""

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
from inflight.text.template_budget import TakesLonger, at_once
from inflight.text.tokenizer import Tokenizer
from inflight.text.upstream import UpstreamPreprocessor
from inflight.triton import adapter
from inflight.triton.long_requests import LONG_BYTES, LONGEST_BYTES, LongRequests
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
        """Answer short requests now, and long ones later, in other threads."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        """Return the answer of a request, or None if a thread for long requests sends it."""
        raw = self._read(request)
        if raw.text_bytes > LONG_BYTES:
            self._long.put(raw.text_bytes, partial(self._answer_long, raw, adapter.TritonSender(request)))
            return None
        with self._pulse.in_call():
            try:
                with at_once():
                    return adapter.response(self._preprocess(raw))
            except TakesLonger:  # its chat template does
                self._long.put(LONGEST_BYTES, partial(self._answer_long, raw, adapter.TritonSender(request)))
                return None
            except Exception as error:
                return adapter.error_response(error, raw.request_id)

    def _read(self, request: Any) -> RawRequest:
        try:
            arrays, parameters = adapter.read_arrays(request), adapter.read_parameters(request)
            return RawRequest(arrays, parameters, adapter.read_id(request))
        except Exception as error:  # it is traced and logged as one that the preprocessor refuses
            return RawRequest({}, {}, error=error)

    def _answer_long(self, raw: RawRequest, sender: adapter.TritonSender) -> None:
        try:
            sender.send(self._preprocess(raw), final=True)
        except Exception as error:
            sender.fail(error)

    def _preprocess(self, raw: RawRequest) -> Arrays:
        began = time.perf_counter()
        try:
            return self._preprocessor.preprocess(raw)
        except Exception as error:
            self._metrics.count_refusal(error)
            raise
        finally:
            with self._counting:  # the histogram is observed by the threads for long requests too
                self._metrics.tokenizer.observe(time.perf_counter() - began)

    def finalize(self) -> None:
        """End the threads, stop exporting, and send the last spans."""
        self._pulse.close()
        self._long.close()
        self._metrics.close()
        if self._tracer is not None:
            self._tracer.close()


def _preprocessor(tokenizer: Tokenizer, deployment: Deployment) -> Preprocessor:
    if deployment.engine.kind != TENSORRTLLM:
        longest = deployment.max_sequence_length(tokenizer.config.max_length)
        return Preprocessor(tokenizer, deployment.limits, longest, deployment.vouches)
    length = read_engine(deployment).max_sequence_length
    return UpstreamPreprocessor(
        tokenizer, deployment.limits, adapter.announce, length, deployment.decoupled, deployment.vouches
    )
