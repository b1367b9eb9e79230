"""The engine stage, whichever engine it has: requests to the engine's thread, its outputs to the response streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from inflight.contract import ENGINE_INPUTS
from inflight.deployment import Deployment
from inflight.engine.loop import EngineLoop, SteppedEngine
from inflight.engine.request import Output
from inflight.engine.stats import EngineStats
from inflight.errors import EngineFailure, InflightError, InvalidRequest
from inflight.inputs import check_parameters
from inflight.text.tokenizer import Tokenizer
from inflight.triton import adapter
from inflight.triton.engine_inputs import read_request
from inflight.triton.metrics import EngineMetrics
from inflight.triton.responses import Arrays
from inflight.triton.streams import ResponseStreams

_KNOWN = [tensor.name for tensor in ENGINE_INPUTS]


class StageEngine(SteppedEngine, Protocol):
    """What the stage needs of an engine, beside what its loop does."""

    @property
    def stats(self) -> EngineStats:
        """What the engine does and has done."""


class EngineStage:
    """A Triton Python model; a backend's class is this with ``make_engine``."""

    make_engine: Callable[[Deployment, Tokenizer], Any]
    """Returns a ``StageEngine``, loaded and warmed up, so that readiness means readiness."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint and run a first generation."""
        self._deployment = adapter.deployment()
        self._decoupled = adapter.is_decoupled(args)
        tokenizer = Tokenizer.from_checkpoint(self._deployment.model)
        self._vocab_size = tokenizer.config.vocab_size
        engine: StageEngine = self.make_engine(self._deployment, tokenizer)
        metrics = self._metrics = EngineMetrics(args["model_name"], args["model_version"])
        self._loop = EngineLoop(
            engine,
            self._deliver,
            self._deployment.batching.max_queue_size,
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
        limits, kind = self._deployment.limits, self._deployment.engine.kind
        delivery, parts = read_request(
            arrays, request.request_id(), limits, self._vocab_size, self._decoupled, engine=kind
        )
        self._streams.open(sender, delivery, parts)
        try:
            self._loop.submit(*(part.request for part in parts))
        except Exception:
            self._streams.forget(parts)
            raise

    def _stop(self, arrays: Arrays, request_id: str) -> None:
        if "stream_key" in arrays:
            keys = self._streams.keys_beside(arrays["stream_key"].reshape(-1).tolist())
        elif request_id:
            keys = self._streams.keys_of(request_id)
        else:
            raise InvalidRequest("stop: request ID is not provided; it says which requests to end")
        for key in keys:
            self._loop.cancel(key)
