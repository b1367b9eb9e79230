"""Triton backend ``detokenizer``: hands the engine's responses to ``inflight.text.assemble``.

It is also where a gone client is noticed: Triton tells this stage, never the engine's.
"""

from __future__ import annotations

import time
from typing import Any

from inflight.contract import TENSORRTLLM
from inflight.pulse import start_pulse
from inflight.text.assemble import TextAssembler
from inflight.text.tokenizer import Tokenizer
from inflight.text.upstream_answers import UpstreamAssembler
from inflight.triton import adapter
from inflight.triton.observed import make_tracer, traced_assembler
from inflight.triton.pace import ANSWERED
from inflight.triton.responses import FAILURE, Arrays
from inflight.triton.stage_metrics import StageMetrics
from inflight.triton.tally import Tally, take_tally


class TritonPythonModel:
    """The detokenizer stage: one instance, the default scheduler, so that a stream keeps its order."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint's tokenizer."""
        deployment = adapter.deployment()
        self._pulse = start_pulse(args["model_name"])
        assembler = UpstreamAssembler if deployment.engine.kind == TENSORRTLLM else TextAssembler
        self._tracer = make_tracer(deployment)
        self._metrics = StageMetrics(deployment, args)
        with self._metrics.phase("tokenizer"):
            tokenizer = Tokenizer.from_checkpoint(deployment.model)
        max_length = deployment.max_sequence_length(tokenizer.config.max_length)
        self._assembler = traced_assembler(assembler(tokenizer, max_length), self._tracer)
        self._decoupled = adapter.is_decoupled(args)
        self._answered: Tally | None = None
        self._metrics.start()

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Answer each response of the engine with its text."""
        with self._pulse.in_call():
            return self._answer_all(requests)

    def _answer_all(self, requests: list[Any]) -> list[Any] | None:
        if not self._decoupled:
            return [self._answer_once(request) for request in requests]
        if self._answered is None:  # the engine's stage has made it by now
            self._answered = take_tally(ANSWERED)
        for request in requests:
            self._answer(request, adapter.TritonSender(request))
            if self._answered is not None:
                self._answered.add()
        return None

    def _answer_once(self, request: Any) -> Any:
        try:
            return adapter.response(self._assemble(adapter.read_arrays(request), request) or {})
        except Exception as error:
            self._metrics.count_refusal(error)
            return adapter.error_response(error, adapter.id_to_log(request))

    def _answer(self, request: Any, sender: adapter.TritonSender) -> None:
        try:
            arrays = adapter.read_arrays(request)
            outputs = self._assemble(arrays, request)
            gone = request.is_cancelled() and not self._assembler.is_final(arrays)
            if self._assembler.ends_engine(arrays) or gone:
                for stop in self._assembler.stops(arrays):
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

    def _assemble(self, arrays: Arrays, request: Any) -> Arrays | None:
        began = time.perf_counter()
        outputs = self._assembler.assemble(arrays, adapter.read_id(request))
        if outputs is not None:  # else it was a heartbeat
            self._metrics.detokenizer.observe(time.perf_counter() - began)
        return outputs

    def finalize(self) -> None:
        """Stop exporting, and send the last spans."""
        self._pulse.close()
        self._metrics.close()
        if self._tracer is not None:
            self._tracer.close()
