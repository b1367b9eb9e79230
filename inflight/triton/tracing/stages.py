"""The traces and log lines of requests, stage by stage.

The stage that ends a request ends its server span too: the tokenizer one that it refuses, the engine's stage one that
fails there or was sent to it directly, the detokenizer all others. The engine's stage writes a request's spans and its
line once the request is over.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from inflight.clock import now_ns
from inflight.engine.request import Output, RequestMetrics
from inflight.errors import InvalidRequest, as_told, readable
from inflight.inputs import client_named
from inflight.settings.deployment import Deployment
from inflight.text.postprocess import Postprocessor, StreamStates
from inflight.text.preprocess import Arrays, Preprocessor, RawRequest
from inflight.triton.request_reader import SubRequest
from inflight.triton.streams import Sender
from inflight.triton.tracing.record import TRACE_CONTEXT, TRACE_SPAN, RequestTrace, SpanEnd, failure, identity

if TYPE_CHECKING:
    from inflight.text.upstream_answers import UpstreamPostprocessor
    from inflight.triton.tracing.tracer import Tracer

log = logging.getLogger("inflight.requests")

Times = tuple[int, int]
"""Beginning and end, ``inflight.clock.now_ns()``."""


def make_tracer(deployment: Deployment) -> Tracer | None:
    """Return the tracer of this stage; None: the deployment has no traces, and OpenTelemetry is not loaded."""
    settings = deployment.observability
    if settings.trace_endpoint is None:
        return None
    from inflight.triton.tracing.tracer import Tracer

    return Tracer(settings.trace_endpoint, settings.trace_sample_ratio)


def _span_name(operation: str, deployment: Deployment) -> str:
    """Return the name of a server span, as OpenTelemetry's conventions for generative AI have it."""
    return f"{operation} {readable(deployment.model.name)}"


def _log_level(deployment: Deployment) -> int:
    """Return the level at which finished requests are logged; 0: they are not."""
    level = deployment.observability.log_requests
    return int(getattr(logging, level.upper())) if level else 0


def _read_trace(name: str, arrays: Mapping[str, np.ndarray], stage: str) -> tuple[RequestTrace, SpanEnd | None]:
    try:
        return RequestTrace.from_tensor(arrays[name])
    except ValueError:
        raise InvalidRequest(f"{name} is not what the {stage}'s stage sends; leave it out") from None


def _milliseconds(began_ns: int, ended_ns: int) -> float:
    return round((ended_ns - began_ns) / 1e6, 3)


class TracedPreprocessor:
    """A preprocessor that begins the requests' traces, and logs the requests that it refuses."""

    def __init__(self, preprocessor: Preprocessor, deployment: Deployment, tracer: Tracer | None) -> None:
        self._preprocessor = preprocessor
        self._deployment = deployment
        self._tracer = tracer
        self._level = _log_level(deployment)

    def preprocess(self, request: RawRequest) -> Arrays:
        """Return what the preprocessor returns, or raise what it raises, with the trace for the engine's stage."""
        if self._tracer is None and not self._level:
            return self._preprocessor.preprocess(request)
        began = now_ns()
        try:
            outputs = self._preprocessor.preprocess(request)
        except Exception as error:
            ended = now_ns()
            trace = self._trace(request, error, (began, ended))
            if self._level:
                fields = {
                    "request_id": request.request_id,
                    "client": client_named(request.parameters, self._deployment.vouches),
                    "trace_id": trace.trace_id if trace else "",
                    "outcome": as_told(error).label,
                    "total_ms": _milliseconds(began, ended),
                }
                log.log(self._level, "request finished", extra=fields)
            raise
        self._trace(request, outputs, (began, now_ns()))
        return outputs

    def _trace(self, request: RawRequest, result: Arrays | Exception, times: Times) -> RequestTrace | None:
        if self._tracer is None:
            return None
        operation = "chat" if "messages" in request.arrays else "text_completion"
        trace = self._tracer.begin(request.parameters, _span_name(operation, self._deployment), times[0])
        attributes: dict[str, object] = {}
        if isinstance(result, Exception):
            self._tracer.end(trace, failure(result, request.request_id), times[1])
        else:
            result[TRACE_CONTEXT] = trace.to_tensor(rows=len(result["input_ids"]))
            attributes["inflight.prompt_tokens"] = int(result["input_lengths"].sum())
        self._tracer.child(trace, "tokenize", *times, attributes)
        return trace


@dataclass(frozen=True, slots=True)
class _Ended:
    """A sequence that has ended."""

    subrequest: SubRequest
    output: Output
    at_ns: int


class RequestTraces:
    """Makes the senders that trace and log the requests of one engine stage."""

    def __init__(self, deployment: Deployment, tracer: Tracer | None) -> None:
        self._deployment = deployment
        self._tracer = tracer
        self._level = _log_level(deployment)

    def sender(
        self, sender: Sender, arrays: Mapping[str, np.ndarray], parameters: Mapping[str, object], request_id: str
    ) -> Sender:
        """Return a sender that traces and logs around the given one; the given one if there is neither.

        Raises:
            InvalidRequest: the request's trace is not what the tokenizer's stage sends.
        """
        through_tokenizer, trace = TRACE_CONTEXT in arrays, None
        if self._tracer is None:
            if through_tokenizer:
                raise InvalidRequest("trace_context needs a deployment with observability.trace_endpoint")
            if not self._level:
                return sender
        elif through_tokenizer:
            trace, _ = _read_trace(TRACE_CONTEXT, arrays, "tokenizer")
        else:
            trace = self._tracer.begin(parameters, _span_name("text_completion", self._deployment), now_ns())
        client = client_named(parameters, self._deployment.vouches)
        return TracedSender(sender, request_id, client, trace, through_tokenizer, self._tracer, self._level)


@dataclass(slots=True)
class TracedSender:
    """The response side of a request that is traced or logged, around that of Triton."""

    _sender: Sender
    _request_id: str
    _client: str
    """Who asks, as the door or the gateway says; "": neither does."""
    _trace: RequestTrace | None
    _ends_in_detokenizer: bool
    """Whether the detokenizer ends the request's server span; the last response tells it how."""
    _tracer: Tracer | None
    _level: int
    """The level at which the request is logged; 0: it is not."""
    _ended: list[_Ended] = field(default_factory=list)
    _began_ns: int = field(default_factory=now_ns)

    def sequence_ended(self, subrequest: SubRequest, output: Output) -> None:
        """Take note of a sequence's end, in the engine's thread, before it is sent."""
        self._ended.append(_Ended(subrequest, output, now_ns()))

    def send(self, arrays: Arrays, final: bool) -> None:
        """Send a response; a sequence's last one carries the trace to the detokenizer."""
        end = self._end() if final else None
        trace = self._trace
        if self._ends_in_detokenizer and trace is not None and trace.sampled and "finish_reason" in arrays:
            arrays[TRACE_SPAN] = trace.to_tensor(rows=len(arrays["output_ids"]), end=end)
        self._sender.send(arrays, final)
        if end is not None:
            self._write(end)

    def fail(self, error: Exception, stream_key: int | None = None) -> None:
        """Send ``error`` as the last response; see ``Sender``."""
        self._sender.fail(error, stream_key)
        self._write(failure(error, self._request_id))

    def is_cancelled(self) -> bool:
        """Whether the client has gone."""
        return self._sender.is_cancelled()

    def _total(self, name: str) -> int:
        """Return the sum of a figure of ``RequestMetrics`` over the sequences."""
        return sum(getattr(ended.output.metrics, name) for ended in self._ended if ended.output.metrics is not None)

    def _end(self) -> SpanEnd:
        reasons = [ended.output.finish_reason.value for ended in self._ended if ended.output.finish_reason]
        sampling = [ended.subrequest.request.sampling for ended in self._ended]
        return SpanEnd(
            identity(self._request_id)
            | {
                "inflight.outcome": ",".join(dict.fromkeys(reasons)),  # each reason once
                "gen_ai.response.finish_reasons": reasons,
                "gen_ai.request.max_tokens": max((one.max_tokens for one in sampling), default=0),
                "gen_ai.usage.input_tokens": self._total("prompt_tokens"),
                "gen_ai.usage.cache_read.input_tokens": self._total("cached_tokens"),
                "gen_ai.usage.output_tokens": self._total("generated_tokens"),
            }
            | ({"inflight.resumed_tokens": resumed} if (resumed := self._total("resumed_tokens")) else {})
        )

    def _write(self, end: SpanEnd) -> None:
        """Write the spans and the log line of the ended request. An exception in this does not fail the request."""
        try:
            self._write_spans(end)
        except Exception:
            log.exception("a request could not be traced", extra={"request_id": self._request_id})
        try:
            if self._level:
                self._write_line(end)
        except Exception:
            log.exception("a request could not be logged", extra={"request_id": self._request_id})

    def _write_spans(self, end: SpanEnd) -> None:
        if self._tracer is None or self._trace is None:
            return
        for ended in self._ended:
            metrics = ended.output.metrics or RequestMetrics()
            attributes = _attributes(metrics)
            indices = {
                "inflight.batch_index": ended.subrequest.batch_index,
                "inflight.sequence_index": ended.subrequest.sequence_index,
            }
            which = {name: index for name, index in indices.items() if index}
            for name, times in phases(metrics, ended.at_ns).items():
                self._tracer.child(self._trace, name, *times, attributes[name] | which)
        if end.error or not self._ends_in_detokenizer:
            self._tracer.end(self._trace, end, now_ns())

    def _write_line(self, end: SpanEnd) -> None:
        """Log the request, with the sum of its sequences' tokens and the longest of their times."""
        spans = [phases(one.output.metrics, one.at_ns) for one in self._ended if one.output.metrics is not None]
        longest = {
            f"{name}_ms": max((_milliseconds(*times[name]) for times in spans if name in times), default=None)
            for name in ("queue", "prefill", "decode")
        }
        fields = {
            "request_id": self._request_id,
            "client": self._client,
            "trace_id": self._trace.trace_id if self._trace else "",
            "outcome": end.attributes["inflight.outcome"],
            **{name: self._total(name) for name in ("prompt_tokens", "cached_tokens", "generated_tokens")},
            **({"resumed_tokens": resumed} if (resumed := self._total("resumed_tokens")) else {}),
            **longest,
            "total_ms": _milliseconds(self._began_ns, now_ns()),
        }
        log.log(self._level, "request finished", extra=fields)


def phases(metrics: RequestMetrics, ended_ns: int) -> dict[str, Times]:
    """Return when a sequence waited, prefilled and decoded; phases that it did not reach are left out.

    A phase that was cut short ends at ``ended_ns``, with the sequence.
    """
    scheduled, first, last = metrics.first_scheduled_ns, metrics.first_token_ns, metrics.last_token_ns
    times: dict[str, Times] = {}
    if metrics.arrival_ns and (scheduled or not first):
        times["queue"] = metrics.arrival_ns, scheduled or ended_ns
    if scheduled:
        times["prefill"] = scheduled, first or ended_ns
    if last > first:
        times["decode"] = first, last
    return times


def _attributes(metrics: RequestMetrics) -> dict[str, dict[str, object]]:
    """Return the attributes of each phase's span; steps only from engines that count them."""
    attributes: dict[str, dict[str, object]] = {
        "queue": {},
        "prefill": {"inflight.prompt_tokens": metrics.prompt_tokens, "inflight.cached_tokens": metrics.cached_tokens},
        "decode": {"inflight.generated_tokens": metrics.generated_tokens, "inflight.preemptions": metrics.preemptions},
    }
    if metrics.steps:
        attributes["prefill"]["inflight.steps"] = metrics.prefill_steps
        attributes["decode"]["inflight.steps"] = metrics.steps - metrics.prefill_steps
    return attributes


@dataclass(slots=True)
class _Work:
    """The detokenizer's work for one stream so far."""

    began_ns: int
    busy_ns: int = 0
    calls: int = 0


class TracedPostprocessor:
    """A postprocessor that times its work and ends the server spans of the requests that end in this stage."""

    def __init__(self, postprocessor: Postprocessor | UpstreamPostprocessor, tracer: Tracer) -> None:
        self._postprocessor = postprocessor
        self._tracer = tracer
        self._work: StreamStates[_Work] = StreamStates()

    def postprocess(self, arrays: Mapping[str, np.ndarray], request_id: str = "") -> Arrays | None:
        """Return what the postprocessor returns.

        Raises:
            InvalidRequest: the trace is not what the engine's stage sends.
        """
        began = now_ns()
        try:
            outputs = self._postprocessor.postprocess(arrays, request_id)
        except Exception as error:
            if "stream_key" in arrays:
                self._record_work(arrays, began, failure(error, request_id))
            raise
        if outputs is not None:  # else it was a heartbeat
            self._record_work(arrays, began)
        return outputs

    def _record_work(self, arrays: Mapping[str, np.ndarray], began: int, failed: SpanEnd | None = None) -> None:
        key, ended = int(arrays["stream_key"].flat[0]), now_ns()
        work = self._work.pop(key, None) or _Work(began)
        work.busy_ns += ended - began
        work.calls += 1
        if not self._postprocessor.is_final(arrays):
            self._work.keep(key, work)
        elif TRACE_SPAN in arrays:
            trace, end = _read_trace(TRACE_SPAN, arrays, "engine")
            attributes = {"inflight.calls": work.calls, "inflight.busy_ms": work.busy_ns / 1e6}
            self._tracer.child(trace, "detokenize", work.began_ns, ended, attributes)
            if (last := failed or end) is not None:
                self._tracer.end(trace, last, ended)
