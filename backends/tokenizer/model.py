"""Triton backend ``tokenizer``: hands each dynamic batch to ``inflight.text.prepare``."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

from inflight.compiled_engine import read_engine
from inflight.contract import TENSORRTLLM
from inflight.deployment import Deployment
from inflight.pulse import start_pulse
from inflight.text.prepare import PromptPreparer, RawRequest
from inflight.text.tokenizer import Tokenizer
from inflight.text.upstream import UpstreamPreparer
from inflight.triton import adapter
from inflight.triton.long_requests import LONG_BYTES, LongRequests
from inflight.triton.observed import make_tracer, observed_preparer
from inflight.triton.responses import Arrays
from inflight.triton.stage_metrics import StageMetrics


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
        self._preparer = observed_preparer(_preparer(tokenizer, deployment), deployment, self._tracer)
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
            results = self._prepare([raw[index] for index in short])
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
            [result] = self._prepare([raw])
            if isinstance(result, Exception):
                raise result
            sender.send(result, final=True)
        except Exception as error:
            sender.fail(error)

    def _prepare(self, raw: list[RawRequest]) -> list[Arrays | Exception]:
        began = time.perf_counter()
        results = self._preparer.prepare(raw)
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


def _preparer(tokenizer: Tokenizer, deployment: Deployment) -> PromptPreparer:
    if deployment.engine.kind != TENSORRTLLM:
        return PromptPreparer(tokenizer, deployment.limits)
    sizes = read_engine(deployment).build
    length, drafts = sizes["max_seq_len"], sizes.get("max_draft_len") or 0
    return UpstreamPreparer(
        tokenizer, deployment.limits, adapter.announce, length, drafts, decoupled=deployment.decoupled
    )
