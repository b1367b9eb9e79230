"""Triton backend ``detokenizer``: hands the engine's responses to ``inflight.text.assemble``.

It is also where a gone client is noticed: Triton tells this stage, never the engine's.
"""

from __future__ import annotations

from typing import Any

from inflight.text.assemble import TextAssembler
from inflight.text.tokenizer import Tokenizer
from inflight.triton import adapter


class TritonPythonModel:
    """The detokenizer stage: one instance, the default scheduler, so that a stream keeps its order."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint's tokenizer."""
        self._assembler = TextAssembler(Tokenizer.from_checkpoint(adapter.deployment().model))
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
            return adapter.response(self._assembler.assemble(adapter.read_arrays(request)) or {})
        except Exception as error:
            return adapter.error_response(error)

    def _answer(self, request: Any, sender: adapter.TritonSender) -> None:
        try:
            arrays = adapter.read_arrays(request)
            outputs = self._assembler.assemble(arrays)
            if request.is_cancelled() and "finish_reason" not in arrays:
                for key in self._assembler.stream_keys(arrays):
                    adapter.stop_stream(key)
        except Exception as error:
            sender.fail(error)
            return
        # A cancelled call is answered like any other: an error here would leave the ensemble's request in flight.
        if outputs is None:
            sender.end()
        else:
            sender.send(outputs, final=True)
