"""The engine stage, whichever engine it has: requests to the engine's thread, its outputs to the response streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from inflight.contract import ENGINE_INPUTS
from inflight.deployment import Deployment
from inflight.engine.loop import EngineLoop, SteppedEngine
from inflight.engine.request import Output, new_stream_key
from inflight.engine.snapshot import Snapshot
from inflight.engine.stats import EngineStats
from inflight.errors import InvalidRequest
from inflight.inputs import check_parameters
from inflight.pulse import start_pulse
from inflight.text.tokenizer import Tokenizer
from inflight.triton import adapter
from inflight.triton.engine_inputs import Delivery, Part, read_request
from inflight.triton.inspection import INSPECT, Inspection
from inflight.triton.observed import make_tracer
from inflight.triton.pace import ANSWERED
from inflight.triton.responses import Arrays
from inflight.triton.stage_metrics import StageMetrics
from inflight.triton.streams import ResponseStreams, Sender
from inflight.triton.tally import make_tally, remove_tally
from inflight.triton.watch import RequestWatch

_KNOWN = [tensor.name for tensor in ENGINE_INPUTS]


class StageEngine(SteppedEngine, Protocol):
    """What the stage needs of an engine, beside what its loop does."""

    @property
    def stats(self) -> EngineStats:
        """What the engine does and has done."""

    @property
    def max_sequence_length(self) -> int | None:
        """Most tokens of a prompt and its output together; None: it has no limit."""

    def snapshot(self) -> Snapshot:
        """Return what it is doing; called by its own thread, between two steps."""


class EngineStage:
    """A Triton Python model; a backend's class is this with ``make_engine``."""

    make_engine: Callable[[Deployment, Tokenizer], Any]
    """Returns a ``StageEngine``, loaded and warmed up, so that readiness means readiness."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint and run a first generation."""
        self._deployment = adapter.deployment()
        self._decoupled = adapter.is_decoupled(args)
        metrics = self._metrics = StageMetrics(self._deployment, args)
        with metrics.phase("tokenizer"):
            tokenizer = Tokenizer.from_checkpoint(self._deployment.model)
        self._vocab_size = tokenizer.config.vocab_size
        engine: StageEngine = self.make_engine(self._deployment, tokenizer)
        metrics.startup |= engine.stats.start_phases
        metrics.start(lambda: [engine.stats])
        self._pulse = start_pulse(args["model_name"])
        queue = self._deployment.batching.max_queue_size
        self._loop = EngineLoop(engine, self._deliver, queue, self._pulse.in_call)
        answered = make_tally(ANSWERED)
        self._streams = ResponseStreams(
            self._loop.cancel, self._decoupled, metrics.count_response, metrics.count_refusal, lambda: answered.count
        )
        self._inspection = Inspection(
            self._deployment, engine.snapshot, engine.max_sequence_length, self._loop.between_steps
        )
        self._tracer = make_tracer(self._deployment)
        self._watch = RequestWatch(self._deployment, self._tracer)

    def execute(self, requests: list[Any]) -> None:
        """Hand each request over; the streams answer later."""
        for request in requests:
            responder = adapter.TritonSender(request)
            sender: Sender = responder
            arrays: Arrays = {}
            parts: list[Part] = []
            try:
                arrays = adapter.read_arrays(request)
                if self._control(request, arrays, responder):
                    continue
                parameters = adapter.read_parameters(request)
                sender = self._watch.watch(sender, arrays, parameters, adapter.read_id(request))
                check_parameters(parameters, _KNOWN)
                delivery, parts = self._read(arrays, adapter.read_id(request))
                self._accept(sender, delivery, parts)
            except Exception as error:
                self._metrics.count_refusal(error, max(1, len(parts)))
                sender.fail(error, self._key_to_refuse(arrays))

    def _key_to_refuse(self, arrays: Arrays) -> int | None:
        """Return a stream key where the detokenizer is to tell the refusal, as it does for what asks for heartbeats."""
        through_detokenizer = self._decoupled and "heartbeat" in arrays and arrays["heartbeat"].any()
        return new_stream_key() if through_detokenizer else None

    def _control(self, request: Any, arrays: Arrays, responder: adapter.TritonSender) -> bool:
        """Answer a request that generates nothing, and is not counted as one; return whether it was such."""
        stops, inspects = (name in arrays and arrays[name].any() for name in ("stop", INSPECT))
        try:
            if stops:
                self._stop(arrays, adapter.read_id(request))
                responder.end(self._decoupled)
            elif inspects:
                self._inspection.answer(arrays, responder)
        except Exception as error:
            responder.fail(error)
        return bool(stops or inspects)

    def finalize(self) -> None:
        """Stop the engine; Triton has waited for running streams before."""
        remove_tally(ANSWERED)
        self._loop.close()
        self._pulse.close()
        self._inspection.close()
        self._streams.close()
        self._metrics.close()
        if self._tracer is not None:
            self._tracer.close()

    def _deliver(self, output: Output) -> None:
        """Take one output, in the engine's thread."""
        if output.finished:  # before it is delivered: who sees the end sees it counted
            self._watch.finished(output)
            self._metrics.count_end(output)
        self._streams.deliver(output)

    def _read(self, arrays: Arrays, request_id: str) -> tuple[Delivery, list[Part]]:
        limits, kind = self._deployment.limits, self._deployment.engine.kind
        return read_request(arrays, request_id, limits, self._vocab_size, self._decoupled, engine=kind)

    def _accept(self, sender: Sender, delivery: Delivery, parts: list[Part]) -> None:
        self._watch.opened(sender, parts)
        self._streams.open(sender, delivery, parts)
        try:
            self._loop.submit(*(part.request for part in parts))
        except Exception:
            self._streams.forget(parts)
            self._watch.forget(parts)
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
