"""The engine stage of every engine kind: passes requests to the engine's thread, and its outputs to the streams."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from inflight.contract import ENGINE_INPUTS
from inflight.engine.loop import EngineLoop, SteppedEngine
from inflight.engine.request import new_stream_key
from inflight.errors import InvalidRequest
from inflight.inputs import check_parameters, client_named
from inflight.settings.deployment import Deployment
from inflight.shared_counters import SharedCounter, start_pulse
from inflight.text.tokenizer import Tokenizer
from inflight.triton import adapter
from inflight.triton.debug_snapshot import INSPECT, DebugSnapshots
from inflight.triton.metrics import StageMetrics
from inflight.triton.request_reader import OutputOptions, SubRequest, read_request
from inflight.triton.response_writer import Arrays
from inflight.triton.send_limiter import ANSWERED, SendLimiter
from inflight.triton.streams import ResponseStreams, Sender
from inflight.triton.tracing.stages import RequestTraces, make_tracer

log = logging.getLogger(__name__)

_KNOWN = [tensor.name for tensor in ENGINE_INPUTS]


class EngineStage:
    """A Triton Python model; each engine backend subclasses it and defines ``make_engine``."""

    make_engine: Callable[[Deployment, Tokenizer], Any]
    """Returns a ``SteppedEngine`` that is loaded and warmed up: the model is ready once this returns."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint and run a first generation."""
        self._deployment = adapter.deployment()
        self._decoupled = adapter.is_decoupled(args)
        metrics = self._metrics = StageMetrics(self._deployment, args)
        with metrics.phase("tokenizer"):
            tokenizer = Tokenizer.from_checkpoint(self._deployment.model)
        self._vocab_size = tokenizer.config.vocab_size
        if defaults := tokenizer.config.sampling_defaults:
            named = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
            log.info(
                "chats that do not say how to sample: %s, by the checkpoint; requests over KServe are greedy", named
            )
        engine: SteppedEngine = self.make_engine(self._deployment, tokenizer)
        metrics.startup |= engine.stats.start_phases
        self._streams = ResponseStreams(metrics, self._decoupled)
        metrics.start(engine=engine.stats, streams=self._streams)
        self._pulse = start_pulse(args["model_name"])
        queue = self._deployment.batching.max_queue_size
        self._loop = EngineLoop(engine, self._streams.deliver, queue, self._pulse.in_call)
        self._answered = SharedCounter.create(ANSWERED)
        self._streams.start(self._loop, SendLimiter(self._answered))
        self._snapshots = DebugSnapshots(self._deployment, engine, self._loop, tokenizer.config.sampling_defaults)
        self._tracer = make_tracer(self._deployment)
        self._traces = RequestTraces(self._deployment, self._tracer)

    def execute(self, requests: list[Any]) -> None:
        """Hand each request to the engine; the streams answer it later."""
        for request in requests:
            untraced = adapter.TritonSender(request)
            sender: Sender = untraced  # the tracing sender around it, once the request is read
            arrays: Arrays = {}
            subrequests: list[SubRequest] = []
            try:
                arrays = adapter.read_arrays(request)
                if self._control(request, arrays, untraced):
                    continue
                parameters, request_id = adapter.read_parameters(request), adapter.read_id(request)
                sender = self._traces.sender(sender, arrays, parameters, request_id)
                settings = self._deployment
                check_parameters(parameters, _KNOWN, settings.vouches)
                options, subrequests = read_request(
                    arrays, request_id, settings.limits, self._vocab_size, self._decoupled,
                    engine=settings.engine.kind, max_sequences=settings.batching.max_queue_size,
                    client=client_named(parameters, settings.vouches), by_client=settings.batching.fairness == "client",
                    most_guide_bytes=settings.most_guide_bytes,
                )  # fmt: skip
                self._accept(sender, options, subrequests)
            except Exception as error:
                self._metrics.count_refusal(error, max(1, len(subrequests)))
                # A request with heartbeats is answered by the detokenizer, which sends this error by the stream key.
                through_detokenizer = self._decoupled and "heartbeat" in arrays and arrays["heartbeat"].any()
                sender.fail(error, new_stream_key() if through_detokenizer else None)

    def _control(self, request: Any, arrays: Arrays, sender: adapter.TritonSender) -> bool:
        """Answer a stop or an inspection, which is not counted as a request; return whether it was one."""
        stops, inspects = (name in arrays and bool(arrays[name].any()) for name in ("stop", INSPECT))
        try:
            if stops:
                self._stop(arrays, adapter.read_id(request))
                sender.end(self._decoupled)
            elif inspects:
                self._snapshots.answer(arrays, sender)
        except Exception as error:
            sender.fail(error)
        return stops or inspects

    def finalize(self) -> None:
        """Stop the engine; Triton has waited for running streams before."""
        self._loop.close()
        self._answered.remove_name()
        self._pulse.close()
        self._snapshots.close()
        self._streams.close()
        self._metrics.close()
        if self._tracer is not None:
            self._tracer.close()

    def _accept(self, sender: Sender, options: OutputOptions, subrequests: list[SubRequest]) -> None:
        self._streams.open(sender, options, subrequests)
        try:
            self._loop.submit(*(subrequest.request for subrequest in subrequests))
        except Exception:
            self._streams.forget(subrequests)
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
