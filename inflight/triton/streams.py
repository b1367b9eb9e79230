"""Response streams: what the engine makes, sent as the responses of Triton requests; every stream ends exactly once.

Tokens are coalesced when streams are many: responses leave at a pace, the stream that has waited longest first, with
all the tokens that it has by then. A first token and a last one never wait. One thread sends, so that the engine's own
thread never does. This module knows Triton only as ``Sender``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from inflight.engine.request import Output
from inflight.errors import EngineFailure, InflightError, ShuttingDown
from inflight.triton import responses
from inflight.triton.engine_inputs import Delivery, Part
from inflight.triton.pace import RESPONSES_PER_SECOND, Pace
from inflight.triton.responses import Arrays

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
"""How often a request that has nothing to send tells the detokenizer that it lives."""
HEARTBEAT_SHARE = 8
"""Heartbeats take at most one response in so many."""
CANCEL_POLL_S = 0.05


class Sender(Protocol):
    """The response side of one Triton request."""

    def send(self, arrays: Arrays, final: bool) -> None:
        """Send a response, the last one with ``final``."""

    def fail(self, error: Exception, stream_key: int | None = None) -> None:
        """Send ``error`` as the last response; with a stream key, let the detokenizer tell it the client."""

    def is_cancelled(self) -> bool:
        """Whether the client has gone."""


@dataclass(slots=True)
class _Sequence:
    part: Part
    pending: Output | None = None
    context_logits: np.ndarray | None = None
    """Kept for the last response."""
    started: bool = False
    generated: int = 0
    cum_log_prob: float = 0.0


@dataclass(slots=True)
class _Request:
    """One Triton request: its sequences by stream key, and those that have not ended."""

    sender: Sender
    delivery: Delivery
    request_id: str
    sequences: dict[int, _Sequence]
    open: set[int] = field(default_factory=set)
    rows: dict[int, Arrays] = field(default_factory=dict)
    """Finished rows of a unary request, by batch index, until all are there."""
    last_sent: float = 0.0
    failed: bool = False
    """Whether a response could not be sent: its error was the last one, and nothing may follow."""


class ResponseStreams:
    """All running Triton requests of the engine stage."""

    def __init__(
        self,
        cancel: Callable[[int], object],
        decoupled: bool,
        on_sent: Callable[[], object] = lambda: None,
        on_unsent: Callable[[Exception], object] = lambda error: None,
        answered: Callable[[], int] | None = None,
    ) -> None:
        """
        Args:
            cancel: ends the sequence with this stream key; its last output still comes.
            decoupled: whether a request may have several responses.
            on_sent: called after each response but heartbeats and errors, in the thread that sends.
            on_unsent: called with what a request ends with of which a response could not be written, there too.
            answered: returns how many responses of requests with heartbeats the detokenizer has answered so far.
        """
        self._cancel = cancel
        self._decoupled = decoupled
        self._on_sent = on_sent
        self._on_unsent = on_unsent
        self._streams: dict[int, _Request] = {}
        self._due: dict[int, None] = {}
        """Keys with something to send, oldest first."""
        self._urgent: dict[int, None] = {}
        """Those of them that must not wait: first tokens and last ones."""
        self._pace = Pace(answered)
        self._beating: _Request | None = None
        """The request to which a heartbeat is being sent."""
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="responses", daemon=True)
        self._thread.start()

    def open(self, sender: Sender, delivery: Delivery, parts: list[Part]) -> None:
        """Register a request before its sequences are submitted to the engine."""
        sequences = {part.request.key: _Sequence(part) for part in parts}
        stream = _Request(
            sender, delivery, parts[0].request.request_id, sequences, set(sequences), last_sent=time.monotonic()
        )
        with self._changed:
            self._streams |= dict.fromkeys(sequences, stream)
            self._changed.notify()

    def deliver(self, output: Output) -> None:
        """Take one output of the engine; called from the engine's thread."""
        with self._changed:
            stream = self._streams.get(output.key)
            if stream is None:
                return
            sequence = stream.sequences[output.key]
            sequence.pending = responses.join(sequence.pending, output)
            if stream.delivery.streaming or sequence.pending.finished:
                self._due[output.key] = None
            if output.finished or (stream.delivery.streaming and not sequence.started):
                self._urgent[output.key] = None
                self._changed.notify()
            elif len(self._due) == 1:
                self._changed.notify()

    def forget(self, parts: list[Part]) -> None:
        """Drop a request that the engine did not take; nothing is sent any more, not even a heartbeat that has begun.

        Triton (2.51) frees what a request's responses need with the last one: one beside it would end the server.
        """
        with self._changed:
            for part in parts:
                stream = self._streams.pop(part.request.key, None)
                if stream is not None:
                    stream.open.discard(part.request.key)
                    while self._beating is stream:
                        self._changed.wait()

    def keys_beside(self, keys: list[int]) -> list[int]:
        """Return the stream keys of all running sequences of the requests that these belong to."""
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
        """Send what is there, end the thread, and fail what has not ended."""
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
                    self._changed.wait(self._patience())
                closing = self._closing
                # One failed sequence takes the others of its request out of the books.
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

    def _patience(self) -> float | None:
        """Seconds until there may be something to do; None: until something comes."""
        if self._due:
            return self._pace.wait_s
        return CANCEL_POLL_S if self._streams else None

    def _ready_keys(self) -> list[int]:
        """Return the keys to send now: all that are urgent, and the one that has waited longest if a slot is free."""
        keys, now = list(self._urgent), time.monotonic()
        if self._due and self._pace.is_free(now):
            keys.append(next(iter(self._due)))
        if keys:
            self._pace.leave(len(keys), now)
        return keys

    def _take(self, key: int) -> tuple[_Request, _Sequence, list[Output], bool]:
        """Take what a sequence has to send, and whether its request's last response is the last of it.

        A finished sequence leaves the books here, before anything is sent. Upstream's client stacks the scores of its
        sequences' last responses, so these have one token each, if the sequences have any.
        """
        stream = self._streams[key]
        sequence = stream.sequences[key]
        output, sequence.pending = sequence.pending, None
        assert output is not None
        del self._due[key]
        self._urgent.pop(key, None)
        sequence.started = True
        stream.last_sent = time.monotonic()
        kept = output.context_logits if sequence.context_logits is None else sequence.context_logits
        output.context_logits, sequence.context_logits = (kept, None) if output.finished else (None, kept)
        if output.finished:
            stream.open.discard(key)
            del self._streams[key]
        if output.error is not None:
            self._drop_rest(stream)
        outputs = [output]
        if stream.delivery.streaming and stream.delivery.sequences > 1 and sequence.part.has_scores:
            outputs = responses.split_last(output)
            if not output.finished:  # it may be the last token
                sequence.pending = outputs.pop()
        return stream, sequence, outputs, not stream.open

    def _drop_rest(self, stream: _Request) -> None:
        """One failed sequence fails its request: an error and the final flag go in one response."""
        for key in stream.open:
            del self._streams[key]
            self._due.pop(key, None)
            self._urgent.pop(key, None)
            self._cancel(key)
        stream.open.clear()

    def _send(self, stream: _Request, sequence: _Sequence, output: Output, final: bool) -> None:
        """Send one response. A fault here is this request's alone: the thread serves all of them."""
        if stream.failed:
            return
        try:
            self._write(stream, sequence, output, final)
        except Exception:
            log.exception("response of stream %d failed", output.key)
            stream.failed = True
            with self._changed:
                self._drop_rest(stream)
            failure = EngineFailure("the response could not be written; the server's log says why")
            self._on_unsent(failure)
            self._fail(stream, failure)

    def _fail(self, stream: _Request, error: InflightError) -> None:
        try:
            self._send_failure(stream, error)
        except Exception:  # its request has ended already
            log.exception("an error could not be sent")

    def _send_failure(self, stream: _Request, error: InflightError) -> None:
        if not (stream.delivery.heartbeat and self._decoupled):
            stream.sender.fail(error)
            return
        self._pace.sent()
        stream.sender.fail(error, next(iter(stream.sequences)))

    def _write(self, stream: _Request, sequence: _Sequence, output: Output, final: bool) -> None:
        if output.error is not None:
            self._send_failure(stream, output.error)
            return
        sequence.generated += output.num_tokens
        sequence.cum_log_prob += sum(output.log_probs or ())
        part = sequence.part
        arrays = responses.write(output, part, stream.delivery, sequence.generated, sequence.cum_log_prob)
        if not self._decoupled:
            stream.rows[part.batch_index] = arrays
            if not final:
                return
            arrays = responses.stack([stream.rows[row] for row in sorted(stream.rows)], stream.delivery.pad_id)
        self._send_on(stream, arrays, final)
        self._on_sent()

    def _send_on(self, stream: _Request, arrays: Arrays, final: bool) -> None:
        if stream.delivery.heartbeat:  # its responses go to the detokenizer
            self._pace.sent()
        stream.sender.send(arrays, final)

    def _poll(self, now: float) -> None:
        """Look for clients that have gone, and let silent requests show that they live."""
        with self._changed:
            requests = {id(request): (key, request) for key, request in self._streams.items()}
        # Heartbeats take the stages' time too: many silent requests beat more slowly.
        interval = max(HEARTBEAT_S, HEARTBEAT_SHARE * len(requests) / RESPONSES_PER_SECOND)
        for key, request in requests.values():
            try:
                self._poll_one(key, request, now, interval)
            except Exception:
                log.exception("request of stream %d could not be polled", key)

    def _poll_one(self, key: int, request: _Request, now: float, interval: float) -> None:
        if not request.delivery.heartbeat:
            if request.sender.is_cancelled():
                for one in self.keys_beside([key]):
                    self._cancel(one)
        elif self._decoupled and now - request.last_sent >= interval:
            request.last_sent = now
            with self._changed:
                if key not in request.open:  # the engine has refused it, and Triton's thread says so
                    return
                self._beating = request
            try:
                self._send_on(request, responses.heartbeat(key), final=False)
            finally:
                with self._changed:
                    self._beating = None
                    self._changed.notify_all()
