"""Triton backend ``inflight_engine``: hands requests to the portable engine and its outputs to the response streams."""

from __future__ import annotations

from typing import Any

from inflight.contract import ENGINE_INPUTS
from inflight.engine.factory import make_engine
from inflight.engine.loop import EngineLoop
from inflight.engine.request import Output
from inflight.errors import EngineFailure, InflightError, InvalidRequest
from inflight.inputs import check_parameters
from inflight.text.tokenizer import Tokenizer
from inflight.triton import adapter
from inflight.triton.engine_inputs import read_request
from inflight.triton.metrics import EngineMetrics
from inflight.triton.streams import ResponseStreams

_KNOWN = [tensor.name for tensor in ENGINE_INPUTS]


class TritonPythonModel:
    """The engine stage."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint and run a first generation, so that readiness means readiness."""
        deployment = adapter.deployment()
        self._limits = deployment.limits
        self._decoupled = adapter.is_decoupled(args)
        tokenizer = Tokenizer.from_checkpoint(deployment.model)
        self._vocab_size = tokenizer.config.vocab_size
        engine = make_engine(deployment, tokenizer)
        metrics = self._metrics = EngineMetrics(args["model_name"], args["model_version"])
        self._loop = EngineLoop(
            engine,
            self._deliver,
            deployment.batching.max_queue_size,
            after_step=lambda: metrics.update(engine.stats, not engine.busy),
        )
        metrics.update(engine.stats, idle=True)
        self._streams = ResponseStreams(self._loop.cancel, self._decoupled)

    def execute(self, requests: list[Any]) -> None:
        """Hand each request over; the streams answer later."""
        for request in requests:
            sender = adapter.TritonSender(request)
            try:
                self._accept(request, sender)
            except Exception as error:
                self._metrics.outcome(error.label if isinstance(error, InflightError) else EngineFailure.label)
                sender.fail(error)

    def finalize(self) -> None:
        """Stop the engine; Triton has waited for running streams before."""
        self._loop.close()
        self._streams.close()

    def _deliver(self, output: Output) -> None:
        """Take one output, in the engine's thread."""
        self._streams.deliver(output)
        if output.finished:
            self._metrics.finished(output)

    def _accept(self, request: Any, sender: adapter.TritonSender) -> None:
        arrays = adapter.read_arrays(request)
        if "stop" in arrays and arrays["stop"].any():
            self._stop(arrays, request.request_id())
            sender.end(self._decoupled)
            return
        check_parameters(adapter.read_parameters(request), _KNOWN)
        delivery, parts = read_request(arrays, request.request_id(), self._limits, self._vocab_size, self._decoupled)
        self._streams.open(sender, delivery, parts)
        try:
            self._loop.submit(*(part.request for part in parts))
        except Exception:
            self._streams.forget(parts)
            raise

    def _stop(self, arrays: adapter.Arrays, request_id: str) -> None:
        if "stream_key" in arrays:
            keys = self._streams.keys_beside(arrays["stream_key"].reshape(-1).tolist())
        elif request_id:
            keys = self._streams.keys_of(request_id)
        else:
            raise InvalidRequest("stop: request ID is not provided; it says which requests to end")
        for key in keys:
            self._loop.cancel(key)
