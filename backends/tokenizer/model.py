"""Triton backend ``tokenizer``: hands each dynamic batch to ``inflight.text.prepare``."""

from __future__ import annotations

from typing import Any

from inflight.text.prepare import PromptPreparer, RawRequest
from inflight.text.tokenizer import Tokenizer
from inflight.triton import adapter


class TritonPythonModel:
    """The tokenizer stage."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint's tokenizer."""
        deployment = adapter.deployment()
        self._preparer = PromptPreparer(Tokenizer.from_checkpoint(deployment.model), deployment.limits)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer a dynamic batch; each request succeeds or fails alone."""
        raw = [RawRequest(adapter.read_arrays(request), adapter.read_parameters(request)) for request in requests]
        results = self._preparer.prepare(raw)
        return [adapter.error_response(r) if isinstance(r, Exception) else adapter.response(r) for r in results]
