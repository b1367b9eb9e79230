"""Triton backend ``tokenizer``: hands each dynamic batch to ``inflight.text.prepare``."""

from __future__ import annotations

from typing import Any

from inflight.contract import TENSORRTLLM
from inflight.text.prepare import PromptPreparer, RawRequest
from inflight.text.tokenizer import Tokenizer
from inflight.text.upstream import UpstreamPreparer
from inflight.triton import adapter


class TritonPythonModel:
    """The tokenizer stage."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint's tokenizer."""
        deployment = adapter.deployment()
        preparer = UpstreamPreparer if deployment.engine.kind == TENSORRTLLM else PromptPreparer
        self._preparer = preparer(Tokenizer.from_checkpoint(deployment.model), deployment.limits)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer a dynamic batch; each request succeeds or fails alone."""
        raw = [
            RawRequest(adapter.read_arrays(request), adapter.read_parameters(request), request.request_id())
            for request in requests
        ]
        results = self._preparer.prepare(raw)
        return [adapter.error_response(r) if isinstance(r, Exception) else adapter.response(r) for r in results]
