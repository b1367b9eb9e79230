"""Triton backend ``tokenizer``: hands each dynamic batch to ``inflight.text.prepare``."""

from __future__ import annotations

import time
from typing import Any

from inflight.contract import TENSORRTLLM
from inflight.text.prepare import PromptPreparer, RawRequest
from inflight.text.tokenizer import Tokenizer
from inflight.text.upstream import UpstreamPreparer
from inflight.triton import adapter
from inflight.triton.observed import make_tracer, observed_preparer
from inflight.triton.stage_metrics import StageMetrics


class TritonPythonModel:
    """The tokenizer stage."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint's tokenizer."""
        deployment = adapter.deployment()
        preparer = UpstreamPreparer if deployment.engine.kind == TENSORRTLLM else PromptPreparer
        self._tracer = make_tracer(deployment)
        self._metrics = StageMetrics(deployment, args)
        with self._metrics.phase("tokenizer"):
            tokenizer = Tokenizer.from_checkpoint(deployment.model)
        self._preparer = observed_preparer(preparer(tokenizer, deployment.limits), deployment, self._tracer)
        self._metrics.start()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer a dynamic batch; each request succeeds or fails alone."""
        began = time.perf_counter()
        raw = [
            RawRequest(adapter.read_arrays(request), adapter.read_parameters(request), request.request_id())
            for request in requests
        ]
        results = self._preparer.prepare(raw)
        self._metrics.tokenizer.observe(time.perf_counter() - began)
        for result in results:
            if isinstance(result, Exception):
                self._metrics.count_refusal(result)
        return [
            adapter.error_response(result, request.request_id)
            if isinstance(result, Exception)
            else adapter.response(result)
            for request, result in zip(raw, results, strict=True)
        ]

    def finalize(self) -> None:
        """Stop exporting, and send the last spans."""
        self._metrics.close()
        if self._tracer is not None:
            self._tracer.close()
