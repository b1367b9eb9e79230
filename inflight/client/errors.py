"""Errors as a client meets them: the server's own, rebuilt from their text, and two that only a client can have.

The first word of every message of Inflight is the gRPC name of its status, so the text alone is enough; messages that
Triton itself wrote are known by a status code beside them, or by their words. Knows nothing of transports.
"""

from __future__ import annotations

import re

from inflight.errors import (
    DeadlineExceeded,
    EngineFailure,
    InflightError,
    InvalidRequest,
    NotFound,
    QueueFull,
    RequestCancelled,
    ShuttingDown,
    UnsupportedFeature,
)


class ServerUnreachable(InflightError):
    """No connection, a connection that broke, or a server that is not ready."""

    status, triton_code, label = "UNAVAILABLE", "UNAVAILABLE", "unreachable"

    def __init__(self, message: str, *, broke: bool = False) -> None:
        """``broke``: the server, or the connection to it, broke under the request, which may have been at work."""
        super().__init__(message)
        self.broke = broke


class ServerLoading(ServerUnreachable):
    """There is a server, and it is not ready yet."""


class RequestTimeout(InflightError):
    """A limit of the client's own passed; the request was cancelled. The message names the limit."""

    status, triton_code, label = "DEADLINE_EXCEEDED", "UNAVAILABLE", "timeout"


Retryable = ServerUnreachable | QueueFull | ShuttingDown
RETRYABLE = (ServerUnreachable, QueueFull, ShuttingDown)
"""What may be tried again, provided that nothing of the answer has arrived, or that it can be resumed."""

_CLASSES: dict[str, type[InflightError]] = {
    kind.status: kind
    for kind in (InvalidRequest, UnsupportedFeature, NotFound, RequestCancelled, DeadlineExceeded, EngineFailure)
}
_PREFIX = re.compile(rf"\b({'|'.join([*_CLASSES, QueueFull.status])}): ")
STAGE_DEAD = "is not healthy"
"""Triton's words about a stage that has died; over HTTP they come with 400, as if the request were at fault."""
_TRITONS_WORDS = {
    "unknown model": "NOT_FOUND",
    "not ready": "UNAVAILABLE",
    STAGE_DEAD: "UNAVAILABLE",
    "no available versions": "UNAVAILABLE",
    "queue size": "UNAVAILABLE",
    "unexpected inference": "INVALID_ARGUMENT",
    "unexpected shape": "INVALID_ARGUMENT",
    "timeout expired": "DEADLINE_EXCEEDED",
}
"""What tells the status of Triton's own errors on a gRPC stream, which come without one."""
_CUT_STREAM = re.compile(r"^Stream removed|RST_STREAM|GOAWAY|^Data frame with END_STREAM|^Internal error from Core")
"""gRPC's words about a stream that ended without a status. Where a proxy's server has gone, theirs is not UNAVAILABLE:
Envoy resets the stream, which is INTERNAL, and HAProxy ends it as if it were whole, which is UNKNOWN."""
_NO_CONNECTION = "failed to connect"
_TRANSPORTS_WORDS = re.compile(rf"\bipv[46]:|Socket closed|{_NO_CONNECTION}|{_CUT_STREAM.pattern}", re.IGNORECASE)
"""What tells that no server wrote a message but gRPC's library, which begins some of its own with a status, too."""
_PROXYS_WORDS = re.compile(
    "broke under this request|reset reason: (connection termination|remote reset)|header with status: 502"
)
"""What proxies say of a server whose connection broke under a request; of one that is away they say something else."""
STATUS_OF_HTTP = {
    400: "INVALID_ARGUMENT",
    404: "NOT_FOUND",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""The gRPC names of the statuses that HTTP's codes stand for; every other code is INTERNAL."""


def from_wire(message: str, status: str = "INTERNAL") -> InflightError:
    """Return the error that ``message`` describes.

    Triton may put its own words before a stage's message ("in ensemble 'ensemble', ..."), so the status name is looked
    for anywhere in it; what follows it is the stage's message.

    Args:
        message: as it came from the server or the transport.
        status: gRPC's name of the status that came with it; counts only if the message names none.
    """
    found, connected = _PREFIX.search(message), _NO_CONNECTION not in message
    if found:
        status, message = found[1], message[found.end() :]
    elif _CUT_STREAM.search(message):
        status = "UNAVAILABLE"
    elif status == "INTERNAL" or STAGE_DEAD in message:
        status = next((name for words, name in _TRITONS_WORDS.items() if words in message), status)
    if status == "RESOURCE_EXHAUSTED" and "larger than max" not in message:  # as it would be again
        return QueueFull(message)
    if status != "UNAVAILABLE":
        return _CLASSES.get(status, EngineFailure)(message)
    if _TRANSPORTS_WORDS.search(message):
        return ServerUnreachable(message, broke=connected)
    if _PROXYS_WORDS.search(message) or STAGE_DEAD in message:
        return ServerUnreachable(message, broke=True)
    if "queue size" in message or "rate_limited" in message:  # of Triton's queue or TensorRT-LLM's; of Envoy
        return QueueFull(message)
    if "stopping" in message or "shutting down" in message:
        return ShuttingDown(message)
    return QueueFull(message) if found else ServerUnreachable(message)


def seconds(retry_after: str | bytes | None) -> float | None:
    """Return the seconds that a ``Retry-After`` names; None: none, also where it names a date."""
    text = retry_after.decode("latin-1") if isinstance(retry_after, bytes) else retry_after or ""
    return float(text) if text.isascii() and text.isdigit() else None
