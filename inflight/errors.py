"""The errors of Inflight: each is one way for a request to fail, with one gRPC status and one metric label.

Triton's status codes are fewer than gRPC's, so every message begins with the gRPC name of its status: a client that
gets only the text (gRPC streams without the ``triton_grpc_error`` header) can still tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar

_LONGEST = 2000
"""Characters of an error that stops a start, at most."""


class InflightError(Exception):
    """Base of all errors that a request or a deployment can end with."""

    status: ClassVar[str] = "INTERNAL"
    """gRPC's name of the status; the first word of the message on the wire."""
    triton_code: ClassVar[str] = "INTERNAL"
    """Name of the member of ``pb_utils.TritonError`` that carries it."""
    label: ClassVar[str] = "internal"
    """Value of the metric label ``outcome``."""
    retry_after_s: float | None = None
    """The seconds after which an answer of HTTP or a trailer of gRPC asks to try again, as a client reads it."""

    def wire_message(self) -> str:
        """Return the message as clients see it: ``"<STATUS>: <message>"``, without a traceback."""
        return readable(f"{self.status}: {self}")


class InvalidRequest(InflightError):
    """A bad value in a request, which is its own fault. The message names the field, the value and the limit."""

    status, triton_code, label = "INVALID_ARGUMENT", "INVALID_ARG", "invalid"


class UnsupportedFeature(InflightError):
    """A tensor or option that the contract declares and this engine does not serve."""

    status, triton_code, label = "UNIMPLEMENTED", "UNSUPPORTED", "unsupported"


class QueueFull(InflightError):
    """The bounded queue is full; the request was not admitted, and may be sent again later."""

    status, triton_code, label = "UNAVAILABLE", "UNAVAILABLE", "queue_full"


class ShuttingDown(InflightError):
    """The server is stopping and takes no more requests."""

    status, triton_code, label = "UNAVAILABLE", "UNAVAILABLE", "shutting_down"


class NotFound(InflightError):
    """A request names something that does not exist in this deployment, e.g. a model.

    Raised by the clients alone, for an answer of Triton's own: no stage has names to look up.
    """

    status, triton_code, label = "NOT_FOUND", "NOT_FOUND", "not_found"


class RequestCancelled(InflightError):
    """The call was cancelled under way, by the client or the transport.

    Raised by the clients alone: to the stages a cancelled or stopped request is no error, it ends with what there is
    and the finish reason ``cancelled``.
    """

    status, triton_code, label = "CANCELLED", "CANCELLED", "cancelled"


class DeadlineExceeded(InflightError):
    """The request's deadline passed before its first token; later, it ends with the finish reason ``deadline``."""

    status, triton_code, label = "DEADLINE_EXCEEDED", "UNAVAILABLE", "deadline"


class EngineFailure(InflightError):
    """A fault of ours while serving the request; ``fault``, what went wrong, is logged, and no client is told."""

    def __init__(self, message: str, fault: Exception | None = None) -> None:
        super().__init__(message)
        if fault is not None:
            self.__cause__ = fault.with_traceback(None)  # whose frames would keep alive all that the step had


class DeploymentError(InflightError):
    """A deployment or a checkpoint that cannot be served. It stops the start, with one line for the operator."""

    status, triton_code, label = "FAILED_PRECONDITION", "INTERNAL", "deployment"

    def __init__(self, message: str) -> None:
        super().__init__(one_line(readable(message)))


def as_told(error: Exception) -> InflightError:
    """Return the error that a request ends with, as it is told, logged and counted: a fault of ours without details."""
    if isinstance(error, InflightError):
        return error
    return EngineFailure("the server failed to serve this request; its log says why")


def readable(text: str) -> str:
    """Return a text that may hold file names: the bytes that Python could not decode in them are shown as UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # a lone surrogate that no file name has; as a client may send one
        return text.encode("utf-8", "backslashreplace").decode()


def one_line(text: str) -> str:
    """Return a text that may quote a file of a stranger's: printable, and no longer than a person reads.

    What a terminal obeys, and ends of lines, are shown as in a Python string. Of a long text the middle is left out:
    what is wrong stands at its beginning, and what is allowed at its end.
    """
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST * 3 // 4]} ... {text[-_LONGEST // 4 :]}"
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the known name nearest to ``name``, or ``""`` when none is near."""
    matches = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
