"""Response streams: what the engine makes, sent as the responses of Triton requests; every stream ends exactly once.

With many streams tokens are coalesced: responses leave at a limited rate, and each carries all the tokens that its
stream has by then. The stream that has waited longest is next; first and last tokens never wait. One thread sends, so
that the engine's own thread never waits for Triton. This module knows Triton only as ``Sender``.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from inflight.engine.loop import EngineLoop
from inflight.engine.request import Output
from inflight.errors import EngineFailure, InflightError, ShuttingDown
from inflight.triton import response_writer
from inflight.triton.request_reader import OutputOptions, SubRequest
from inflight.triton.response_writer import Arrays
from inflight.triton.send_limiter import RESPONSES_PER_SECOND, SendLimiter

if TYPE_CHECKING:
    from inflight.triton.metrics import StageMetrics

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
"""The time between heartbeats, by which the detokenizer learns that a request without output still runs."""
HEARTBEAT_SHARE = 16
"""Heartbeats are at most one in this many of ``RESPONSES_PER_SECOND``."""
CANCEL_POLL_S = 0.05


class Sender(Protocol):
    """The response side of one Triton request."""

    def send(self, arrays: Arrays, final: bool) -> None:
        """Send a response, the last one with ``final``."""

    def fail(self, error: Exception, stream_key: int | None = None) -> None:
        """Send ``error`` as the last response; with a stream key, let the detokenizer tell it the client."""

    def is_cancelled(self) -> bool:
        """Whether the client has gone."""

    def sequence_ended(self, subrequest: SubRequest, output: Output) -> None:
        """Take note of a sequence's last output, in the engine's thread, before it is sent."""


@dataclass(slots=True)
class _SequenceStream:
    """One sequence of a Triton request, with its output that has not been sent."""

    subrequest: SubRequest
    pending: Output | None = None
    context_logits: np.ndarray | None = None
    """Kept until the last response, which carries them."""
    begun: bool = False
    """Whether it has sent a response."""
    generated: int = field(init=False)
    """Tokens sent so far, by an earlier run too."""
    cum_log_prob: float = field(init=False)

    def __post_init__(self) -> None:
        request = self.subrequest.request
        self.generated, self.cum_log_prob = len(request.resumed_ids), request.resumed_log_prob


@dataclass(slots=True)
class _RequestStream:
    """One Triton request: its sequences by stream key, and those that have not ended."""

    sender: Sender
    options: OutputOptions
    request_id: str
    sequences: dict[int, _SequenceStream]
    open: set[int] = field(default_factory=set)
    rows: dict[int, Arrays] = field(default_factory=dict)
    """Finished rows of a unary request, by batch index, until all are there."""
    last_sent: float = 0.0
    failed: bool = False
    """Whether a response could not be sent. The error that says so was its last response: none may follow."""


class ResponseStreams:
    """All running Triton requests of the engine stage."""

    def __init__(self, metrics: StageMetrics, decoupled: bool) -> None:
        """``metrics`` count how sequences end; ``decoupled``: whether a request may have several responses."""
        self._metrics = metrics
        self._decoupled = decoupled
        self.responses = 0
        """Responses sent so far, without heartbeats and errors."""
        self._streams: dict[int, _RequestStream] = {}
        self._due: dict[int, None] = {}
        """Keys with something to send, oldest first."""
        self._urgent: dict[int, None] = {}
        """The keys among them that must not wait: those of first tokens and last ones."""
        self._started: set[int] = set()
        """The keys of streams that have sent their first tokens, and not their last ones."""
        self._polled: _RequestStream | None = None
        """The request that is asked whether its client has gone, or that gets a heartbeat."""
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="responses", daemon=True)

    def start(self, loop: EngineLoop, limiter: SendLimiter) -> None:
        """Begin to send outputs as ``limiter`` allows; cancel in ``loop`` the requests of clients that have gone."""
        self._loop = loop
        self._limiter = limiter
        self._thread.start()

    def open(self, sender: Sender, options: OutputOptions, subrequests: list[SubRequest]) -> None:
        """Register a request before its sequences are submitted to the engine."""
        sequences = {subrequest.request.key: _SequenceStream(subrequest) for subrequest in subrequests}
        stream = _RequestStream(
            sender, options, subrequests[0].request.request_id, sequences, set(sequences), last_sent=time.monotonic()
        )
        with self._changed:
            self._streams |= dict.fromkeys(sequences, stream)
            self._changed.notify()

    def deliver(self, output: Output) -> None:
        """Take one output of the engine; called from the engine's thread."""
        if output.finished:  # counted before its client can see the end
            self._metrics.count_end(output)
        with self._changed:
            stream = self._streams.get(output.key)
            if stream is None:
                return
            sequence = stream.sequences[output.key]
            if output.finished:
                stream.sender.sequence_ended(sequence.subrequest, output)
            if sequence.pending is None:
                sequence.pending = output
            else:
                sequence.pending.extend(output)
            if stream.options.streaming or sequence.pending.finished:
                self._due[output.key] = None
            if output.finished or (stream.options.streaming and output.key not in self._started):
                self._urgent[output.key] = None
                self._changed.notify()
            elif len(self._due) == 1:
                self._changed.notify()

    def forget(self, subrequests: list[SubRequest]) -> None:
        """Drop a request that the engine refused, and wait until it is not polled any more.

        Triton (2.51) frees a request's response objects with the last response: a heartbeat sent beside it ends the
        server, and a question whether the client has gone reads freed memory.
        """
        with self._changed:
            for subrequest in subrequests:
                stream = self._streams.pop(subrequest.request.key, None)
                if stream is not None:
                    stream.open.discard(subrequest.request.key)
                    while self._polled is stream:
                        self._changed.wait()

    def keys_beside(self, keys: list[int]) -> list[int]:
        """Return the stream keys of all running sequences of the requests that have these keys."""
        with self._changed:
            streams = [self._streams[key] for key in keys if key in self._streams]
            return [key for stream in streams for key in stream.open]

    def keys_of(self, request_id: str) -> list[int]:
        """Return the stream keys of every running request with this id."""
        with self._changed:
            return [key for key, stream in self._streams.items() if stream.request_id == request_id]

    def __len__(self) -> int:
        return len(self._streams)

    def close(self) -> None:
        """Send the outputs that wait, end the thread, and fail the requests that have not ended."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        for stream in {id(stream): stream for stream in self._streams.values()}.values():
            self._fail(stream, ShuttingDown("the server is stopping"))
        self._streams.clear()

    def _run(self) -> None:
        next_poll = 0.0
        while True:
            with self._changed:
                if not self._urgent and not self._closing:
                    without_due_s = CANCEL_POLL_S if self._streams else None  # None: wait until an output comes
                    self._changed.wait(self._limiter.wait_s if self._due else without_due_s)
                closing = self._closing
                # _take of a failed sequence also removes the other sequences of its request.
                keys = list(self._due) if closing else self._ready_keys()
                ready = [self._take(key) for key in keys if key in self._due]
            for stream, sequence, outputs, final in ready:
                for output in outputs:
                    self._send(stream, sequence, output, final and output is outputs[-1])
            if closing:
                return
            now = time.monotonic()
            if now >= next_poll:
                next_poll = now + CANCEL_POLL_S
                self._poll(now)

    def _ready_keys(self) -> list[int]:
        """Return the keys to send now: all that are urgent, and the one that has waited longest if it may leave."""
        urgent, now = list(self._urgent), time.monotonic()
        oldest = next((key for key in self._due if key not in self._urgent), None)
        waited = [oldest] if oldest is not None and self._limiter.may_send(now) else []
        if urgent or waited:
            self._limiter.reserve(len(urgent), len(waited), now, len(self._started))
        return urgent + waited

    def _take(self, key: int) -> tuple[_RequestStream, _SequenceStream, list[Output], bool]:
        """Take what a sequence has to send, and whether its request's last response is the last of it.

        A finished sequence is removed here, before anything is sent. Upstream's client stacks the scores of its
        sequences' last responses, so that each of these must have one token, if the sequence has any.
        """
        stream = self._streams[key]
        sequence = stream.sequences[key]
        output, sequence.pending = sequence.pending, None
        assert output is not None
        del self._due[key]
        self._urgent.pop(key, None)
        self._started.add(key)
        stream.last_sent = time.monotonic()
        kept = output.context_logits if sequence.context_logits is None else sequence.context_logits
        output.context_logits, sequence.context_logits = (kept, None) if output.finished else (None, kept)
        if output.finished:
            stream.open.discard(key)
            self._started.discard(key)
            del self._streams[key]
        if output.error is not None:
            self._drop_rest(stream)
        outputs, sampling = [output], sequence.subrequest.request.sampling
        has_scores = sampling.log_probs or sampling.generation_logits
        if stream.options.streaming and stream.options.sequences > 1 and has_scores:
            outputs = response_writer.split_last(output)
            if not output.finished:  # keep the newest token back: it may be the last one
                sequence.pending = outputs.pop()
        return stream, sequence, outputs, not stream.open

    def _drop_rest(self, stream: _RequestStream) -> None:
        """Remove a failed request's other sequences: the response with its error is its last one."""
        for key in stream.open:
            del self._streams[key]
            self._due.pop(key, None)
            self._urgent.pop(key, None)
            self._started.discard(key)
            self._loop.cancel(key)
        stream.open.clear()

    def _send(self, stream: _RequestStream, sequence: _SequenceStream, output: Output, final: bool) -> None:
        """Send one response. An exception fails this request alone, since the thread serves all of them."""
        if stream.failed:
            return
        try:
            self._send_output(stream, sequence, output, final)
        except Exception:
            log.exception("response of stream %d failed", output.key)
            stream.failed = True
            with self._changed:
                self._drop_rest(stream)
            failure = EngineFailure("the response could not be written; the server's log says why")
            self._metrics.count_refusal(failure)
            self._fail(stream, failure)

    def _fail(self, stream: _RequestStream, error: InflightError) -> None:
        """End a request with an error, through the detokenizer if its other responses go there."""
        through_detokenizer = stream.options.heartbeat and self._decoupled
        try:
            if through_detokenizer:
                self._limiter.sent()
            stream.sender.fail(error, next(iter(stream.sequences)) if through_detokenizer else None)
        except Exception:  # its request has ended already
            log.exception("an error could not be sent")

    def _send_output(self, stream: _RequestStream, sequence: _SequenceStream, output: Output, final: bool) -> None:
        if output.error is not None:
            self._fail(stream, output.error)
            return
        sequence.generated += output.num_tokens
        sequence.cum_log_prob += sum(output.log_probs or ())
        subrequest, generated, cum_log_prob = sequence.subrequest, sequence.generated, sequence.cum_log_prob
        arrays = response_writer.to_arrays(output, subrequest, stream.options, generated, cum_log_prob)
        if not sequence.begun:
            sequence.begun = True
            arrays |= response_writer.opening(subrequest.request, stream.options)
        if not self._decoupled:
            stream.rows[subrequest.batch_index] = arrays
            if not final:
                return
            arrays = response_writer.stack([stream.rows[row] for row in sorted(stream.rows)], stream.options.pad_id)
        self._send_arrays(stream, arrays, final)
        self.responses += 1

    def _send_arrays(self, stream: _RequestStream, arrays: Arrays, final: bool) -> None:
        if stream.options.heartbeat:  # its responses go to the detokenizer
            self._limiter.sent()
        stream.sender.send(arrays, final)

    def _poll(self, now: float) -> None:
        """Cancel the requests of clients that have gone, and send heartbeats for those without output."""
        with self._changed:
            requests = {id(request): (key, request) for key, request in self._streams.items()}
        # Heartbeats cost the stages time, so that each of many requests sends fewer.
        interval = max(HEARTBEAT_S, HEARTBEAT_SHARE * len(requests) / RESPONSES_PER_SECOND)
        for key, request in requests.values():
            try:
                self._poll_one(key, request, now, interval)
            except Exception:
                log.exception("request of stream %d could not be polled", key)

    def _poll_one(self, key: int, request: _RequestStream, now: float, interval: float) -> None:
        beats = request.options.heartbeat
        if beats and not (self._decoupled and now - request.last_sent >= interval):
            return
        with self._changed:
            if key not in request.open:  # the engine refused it, and Triton's thread answers it with the error
                return
            self._polled = request
        try:
            if beats:
                request.last_sent = now
                self._send_arrays(request, response_writer.heartbeat_arrays(key), final=False)
            elif request.sender.is_cancelled():
                for one in self.keys_beside([key]):
                    self._loop.cancel(one)
        finally:
            with self._changed:
                self._polled = None
                self._changed.notify_all()
