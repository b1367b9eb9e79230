"""Triton backend ``detokenizer``: hands the engine's responses to ``inflight.text.postprocess``.

It is also where a gone client is noticed: Triton tells this stage, never the engine's.
"""

from __future__ import annotations

import time
from typing import Any

from inflight.contract import TENSORRTLLM
from inflight.shared_counters import SharedCounter, start_pulse
from inflight.text.postprocess import Postprocessor
from inflight.text.tokenizer import Tokenizer
from inflight.text.upstream_answers import UpstreamPostprocessor
from inflight.triton import adapter
from inflight.triton.metrics import StageMetrics
from inflight.triton.response_writer import FAILURE, Arrays
from inflight.triton.send_limiter import ANSWERED
from inflight.triton.tracing.stages import TracedPostprocessor, make_tracer


class TritonPythonModel:
    """The detokenizer stage: one instance, the default scheduler, so that a stream keeps its order."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint's tokenizer."""
        deployment = adapter.deployment()
        self._pulse = start_pulse(args["model_name"])
        kind = UpstreamPostprocessor if deployment.engine.kind == TENSORRTLLM else Postprocessor
        self._tracer = make_tracer(deployment)
        self._metrics = StageMetrics(deployment, args)
        with self._metrics.phase("tokenizer"):
            tokenizer = Tokenizer.from_checkpoint(deployment.model)
        max_length = deployment.max_sequence_length(tokenizer.config.max_length)
        self._postprocessor = kind(tokenizer, max_length)
        traced = TracedPostprocessor(self._postprocessor, self._tracer) if self._tracer is not None else None
        self._traced = traced or self._postprocessor
        self._decoupled = adapter.is_decoupled(args)
        self._answered: SharedCounter | None = None
        self._metrics.start()

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Answer each response of the engine with its text."""
        with self._pulse.in_call():
            return self._answer_all(requests)

    def _answer_all(self, requests: list[Any]) -> list[Any] | None:
        if not self._decoupled:
            return [self._answer_once(request) for request in requests]
        if self._answered is None:  # the engine's stage has made it by now
            self._answered = SharedCounter.open(ANSWERED)
        for request in requests:
            self._answer(request, adapter.TritonSender(request))
            if self._answered is not None:
                self._answered.add()
        return None

    def _answer_once(self, request: Any) -> Any:
        try:
            return adapter.response(self._postprocess(adapter.read_arrays(request), request) or {})
        except Exception as error:
            self._metrics.count_refusal(error)
            return adapter.error_response(error, adapter.id_to_log(request))

    def _answer(self, request: Any, sender: adapter.TritonSender) -> None:
        try:
            arrays = adapter.read_arrays(request)
            outputs = self._postprocess(arrays, request)
            gone = request.is_cancelled() and not self._postprocessor.is_final(arrays)
            if self._postprocessor.ends_engine(arrays) or gone:
                for stop in self._postprocessor.cancel_requests(arrays):
                    adapter.stop_stream(stop, adapter.read_id(request))
        except Exception as error:
            self._metrics.count_refusal(error)
            sender.fail(error)
            return
        # A cancelled call is answered like any other: an error here would leave the ensemble's request in flight.
        if FAILURE in arrays and not request.is_cancelled():
            sender.fail_as_told(arrays[FAILURE])
        elif outputs is None:
            sender.end()
        else:
            sender.send(outputs, final=True)

    def _postprocess(self, arrays: Arrays, request: Any) -> Arrays | None:
        began = time.perf_counter()
        outputs = self._traced.postprocess(arrays, adapter.read_id(request))
        if outputs is not None:  # else it was a heartbeat
            self._metrics.detokenizer.observe(time.perf_counter() - began)
        return outputs

    def finalize(self) -> None:
        """Stop exporting, and send the last spans."""
        self._pulse.close()
        self._metrics.close()
        if self._tracer is not None:
            self._tracer.close()
