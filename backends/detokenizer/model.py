"""Triton backend ``detokenizer``: hands the engine's responses to ``inflight.text.assemble``.

It is also where a gone client is noticed: Triton tells this stage, never the engine's.
"""

from __future__ import annotations

from typing import Any

from inflight.contract import TENSORRTLLM
from inflight.text.assemble import TextAssembler
from inflight.text.tokenizer import Tokenizer
from inflight.text.upstream import UpstreamAssembler
from inflight.triton import adapter


class TritonPythonModel:
    """The detokenizer stage: one instance, the default scheduler, so that a stream keeps its order."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint's tokenizer."""
        deployment = adapter.deployment()
        assembler = UpstreamAssembler if deployment.engine.kind == TENSORRTLLM else TextAssembler
        self._assembler = assembler(Tokenizer.from_checkpoint(deployment.model))
        self._decoupled = adapter.is_decoupled(args)

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Answer each response of the engine with its text."""
        if not self._decoupled:
            return [self._answer_once(request) for request in requests]
        for request in requests:
            self._answer(request, adapter.TritonSender(request))
        return None

    def _answer_once(self, request: Any) -> Any:
        try:
            outputs = self._assembler.assemble(adapter.read_arrays(request), request.request_id())
            return adapter.response(outputs or {})
        except Exception as error:
            return adapter.error_response(error)

    def _answer(self, request: Any, sender: adapter.TritonSender) -> None:
        try:
            arrays = adapter.read_arrays(request)
            outputs = self._assembler.assemble(arrays, request.request_id())
            if request.is_cancelled() and not self._assembler.is_final(arrays):
                for stop in self._assembler.stops(arrays):
                    adapter.stop_stream(stop, request.request_id())
        except Exception as error:
            sender.fail(error)
            return
        # A cancelled call is answered like any other: an error here would leave the ensemble's request in flight.
        if outputs is None:
            sender.end()
        else:
            sender.send(outputs, final=True)
