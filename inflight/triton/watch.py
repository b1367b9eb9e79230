"""What the engine's stage tells of each request: its spans, once it is over, and its log line."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inflight.deployment import Deployment
from inflight.engine.request import Output, RequestMetrics
from inflight.errors import InvalidRequest
from inflight.tracing.record import RequestTrace, SpanEnd
from inflight.triton.engine_inputs import Part
from inflight.triton.observed import (
    TRACE_CONTEXT,
    TRACE_SPAN,
    elements,
    failure,
    identity,
    log_level,
    milliseconds,
    span_name,
)
from inflight.triton.responses import Arrays
from inflight.triton.streams import Sender

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from inflight.tracing.tracer import Tracer

log = logging.getLogger("inflight.requests")

Times = tuple[int, int]
"""Beginning and end, ``time.time_ns()``."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """A sequence that has ended."""

    part: Part
    output: Output
    at_ns: int


class RequestWatch:
    """Watches the requests of one engine stage. With neither traces nor a log of requests, it watches none."""

    def __init__(self, deployment: Deployment, tracer: Tracer | None) -> None:
        self._deployment = deployment
        self._tracer = tracer
        self._level = log_level(deployment)
        self._watched: dict[int, tuple[WatchedSender, Part]] = {}

    def watch(
        self, sender: Sender, arrays: Mapping[str, np.ndarray], parameters: Mapping[str, object], request_id: str
    ) -> Sender:
        """Return the sender that a request is to be answered through: the given one, unless the request is watched.

        Raises:
            InvalidRequest: the request's trace is not what the tokenizer's stage sends.
        """
        if self._tracer is None:
            if TRACE_CONTEXT in arrays:
                raise InvalidRequest("trace_context needs a deployment with observability.trace_endpoint")
            return WatchedSender(sender, request_id, None, False, self) if self._level else sender
        if TRACE_CONTEXT not in arrays:
            name = span_name("text_completion", self._deployment)
            trace = self._tracer.begin(parameters, name, time.time_ns())
            return WatchedSender(sender, request_id, trace, False, self)
        try:
            trace, _ = RequestTrace.read(arrays[TRACE_CONTEXT].flat[0])
        except ValueError:
            raise InvalidRequest("trace_context is not what the tokenizer's stage sends; leave it out") from None
        return WatchedSender(sender, request_id, trace, True, self)

    def opened(self, sender: Sender, parts: list[Part]) -> None:
        """Note the sequences of a request before they are submitted to the engine."""
        if isinstance(sender, WatchedSender):
            self._watched |= {part.request.key: (sender, part) for part in parts}

    def finished(self, output: Output) -> None:
        """Take the last output of a sequence, in the engine's thread, before it is sent."""
        watched = self._watched.pop(output.key, None)
        if watched is not None:
            sender, part = watched
            sender.ended.append(_Ended(part, output, time.time_ns()))

    def forget(self, parts: list[Part]) -> None:
        """Drop sequences that the engine did not take."""
        for part in parts:
            self._watched.pop(part.request.key, None)

    def over(self, sender: WatchedSender, end: SpanEnd) -> None:
        """Write what is known of a request that has ended. A fault in this is not the request's."""
        try:
            self._trace(sender, end)
        except Exception:
            log.exception("a request could not be traced", extra={"request_id": sender.request_id})
        try:
            if self._level:
                log.log(self._level, "request finished", extra=_log_fields(sender, end))
        except Exception:
            log.exception("a request could not be logged", extra={"request_id": sender.request_id})

    def _trace(self, sender: WatchedSender, end: SpanEnd) -> None:
        if sender.trace is None or self._tracer is None:
            return
        for ended in sender.ended:
            self._write_phases(self._tracer, sender.trace, ended)
        if end.error or not sender.hands_on:
            self._tracer.end(sender.trace, end, time.time_ns())

    def _write_phases(self, tracer: Tracer, trace: RequestTrace, ended: _Ended) -> None:
        metrics = ended.output.metrics or RequestMetrics()
        attributes = _attributes(metrics)
        which = {"inflight.batch_index": ended.part.batch_index, "inflight.sequence_index": ended.part.sequence_index}
        which = {name: index for name, index in which.items() if index}
        for name, (began_ns, ended_ns) in phases(metrics, ended.at_ns).items():
            tracer.child(trace, name, began_ns, ended_ns, attributes[name] | which)


class WatchedSender:
    """The response side of a request that is traced or logged."""

    def __init__(
        self, sender: Sender, request_id: str, trace: RequestTrace | None, hands_on: bool, watch: RequestWatch
    ) -> None:
        """
        Args:
            sender: does the sending.
            request_id: the client's.
            trace: the request's, if it has one.
            hands_on: whether the detokenizer ends the request's server span, and is told with the last response.
            watch: is told when the request is over.
        """
        self._sender = sender
        self._watch = watch
        self._over = False
        self.request_id = request_id
        self.trace = trace
        self.hands_on = hands_on
        self.ended: list[_Ended] = []
        self.began_ns = time.time_ns()

    def send(self, arrays: Arrays, final: bool) -> None:
        """Send a response; a sequence's last one tells the detokenizer of the trace."""
        end = self._end() if final else None
        if self.hands_on and self.trace is not None and self.trace.sampled and "finish_reason" in arrays:
            arrays[TRACE_SPAN] = elements(self.trace.write(end), len(arrays["output_ids"]))
        self._sender.send(arrays, final)
        if end is not None:
            self._is_over(end)

    def fail(self, error: Exception, stream_key: int | None = None) -> None:
        """Send ``error`` as the last response; see ``Sender``."""
        self._sender.fail(error, stream_key)
        self._is_over(failure(error, self.request_id))

    def is_cancelled(self) -> bool:
        """Whether the client has gone."""
        return self._sender.is_cancelled()

    def _is_over(self, end: SpanEnd) -> None:
        if not self._over:
            self._over = True
            self._watch.over(self, end)

    def _end(self) -> SpanEnd:
        reasons = [ended.output.finish_reason.value for ended in self.ended if ended.output.finish_reason]
        sampling = [ended.part.request.sampling for ended in self.ended]
        return SpanEnd(
            identity(self.request_id)
            | {
                "inflight.outcome": _outcome(reasons),
                "gen_ai.response.finish_reasons": reasons,
                "gen_ai.request.max_tokens": max((one.max_tokens for one in sampling), default=0),
                "gen_ai.usage.input_tokens": _sum(self.ended, "prompt_tokens"),
                "gen_ai.usage.cache_read.input_tokens": _sum(self.ended, "cached_tokens"),
                "gen_ai.usage.output_tokens": _sum(self.ended, "generated_tokens"),
            }
        )


def phases(metrics: RequestMetrics, ended_ns: int) -> dict[str, Times]:
    """Return when a sequence waited, computed its prompt and decoded; what it did not reach is left out.

    Args:
        metrics: of the sequence.
        ended_ns: when it ended; where a phase was cut short, its end.
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
    prefill, decode = metrics.prefill_steps, metrics.steps - metrics.prefill_steps
    attributes: dict[str, dict[str, object]] = {
        "queue": {},
        "prefill": {"inflight.prompt_tokens": metrics.prompt_tokens, "inflight.cached_tokens": metrics.cached_tokens},
        "decode": {"inflight.generated_tokens": metrics.generated_tokens, "inflight.preemptions": metrics.preemptions},
    }
    if metrics.steps:
        attributes["prefill"]["inflight.steps"] = prefill
        attributes["decode"]["inflight.steps"] = decode
    return attributes


def _log_fields(sender: WatchedSender, end: SpanEnd) -> dict[str, object]:
    """Return the fields of a request's line; of several sequences, tokens are summed and the longest times taken."""
    spans = [phases(one.output.metrics, one.at_ns) for one in sender.ended if one.output.metrics is not None]
    longest = {
        f"{name}_ms": max((milliseconds(*times[name]) for times in spans if name in times), default=None)
        for name in ("queue", "prefill", "decode")
    }
    return {
        "request_id": sender.request_id,
        "trace_id": sender.trace.trace_id if sender.trace else "",
        "outcome": end.attributes["inflight.outcome"],
        "prompt_tokens": _sum(sender.ended, "prompt_tokens"),
        "cached_tokens": _sum(sender.ended, "cached_tokens"),
        "generated_tokens": _sum(sender.ended, "generated_tokens"),
        **longest,
        "total_ms": milliseconds(sender.began_ns, time.time_ns()),
    }


def _sum(sequences: list[_Ended], name: str) -> int:
    return sum(getattr(ended.output.metrics, name) for ended in sequences if ended.output.metrics is not None)


def _outcome(reasons: list[str]) -> str:
    """Return how the request ended: as its sequences did, each way named once."""
    return ",".join(dict.fromkeys(reasons))
