"""Errors as OpenAI's clients read them: a status, and a body ``{"error": {"message", "type", "param", "code"}}``.

OpenAI's SDKs send a request again at 408, 409, 429 and every status from 500 on, so what would fail again has another
status or says ``x-should-retry: false``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from inflight.client.errors import ServerUnreachable
from inflight.errors import (
    DeadlineExceeded,
    InflightError,
    InvalidRequest,
    NotFound,
    QueueFull,
    RequestCancelled,
    ShuttingDown,
    UnsupportedFeature,
    readable,
)

INVALID, SERVER, OVERLOADED = "invalid_request_error", "server_error", "overloaded_error"
"""Values of ``type``."""
RETRY_AFTER_S = 1
"""Seconds after which a client may try again what was refused for now."""
_FAULT = "the server failed to serve this request; its log says why"
STOPPING = "the server is stopping"
_AWAY = "the engine is not ready; it starts, restarts or stops"
_CRASHED = "the engine has crashed each time that it served this request; do not send it again"
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: OVERLOADED}


class ApiError(Exception):
    """One way for a request to fail, as its client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            status: of HTTP.
            message: a sentence that names the field, the value and the limit.
            code: a word for programs, such as ``model_not_found``.
            param: the path of the field at fault, such as ``messages[0].role``.
            type: the kind of error; by default it follows from the status.
            headers: more headers of the response.
        """
        super().__init__(status, message)  # with which it is made again in another process
        self.status = status
        self.message = readable(message)
        self.code = code
        self.param = None if param is None else readable(param)
        self.type = type or _TYPES.get(status) or (INVALID if status < 500 else SERVER)
        self.headers = dict(headers or {})

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """Return the body of the response: ``{"error": {…}}``."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the whole response."""
        return Response(json.dumps(self.body()), self.status, self.headers, "application/json")


def invalid(message: str, param: str | None = None, code: str | None = INVALID) -> ApiError:
    """Return the error of a bad value: 400; ``param`` is the field's path."""
    return ApiError(400, message, code=code, param=param)


def away(message: str = _AWAY) -> ApiError:
    """Return the error of a server that cannot take a request now: 503 with ``Retry-After``; another may take it."""
    headers = {"retry-after": str(RETRY_AFTER_S), "x-should-retry": "true"}
    return ApiError(503, message, code="server_unavailable", headers=headers)


def internal() -> ApiError:
    """Return the error of a fault of ours, without details: 500."""
    return ApiError(500, _FAULT, code="internal_error")


def crashed() -> ApiError:
    """Return the error of a request that has met too many crashes of the engine, and may be their cause: 500."""
    return ApiError(500, _CRASHED, code="engine_crashed", headers={"x-should-retry": "false"})


def from_inflight(error: InflightError, param: str | None = None) -> ApiError:
    """Return an error of the engine or of the libraries as the client is told.

    NotFound, which only Triton's own answers bring, means that the engine's model is not loaded: the gateway looks the
    client's ``model`` up itself.

    Args:
        error: the error.
        param: the path of the field at fault, where the caller knows it.
    """
    message = str(error)
    match error:
        case InvalidRequest():
            return invalid(message, param)
        case UnsupportedFeature():
            return invalid(message, param, "unsupported_parameter")
        case QueueFull():
            return ApiError(503, message, code="queue_full", headers={"retry-after": str(RETRY_AFTER_S)})
        case ShuttingDown() | ServerUnreachable() | NotFound() | RequestCancelled():
            return away()
        case DeadlineExceeded():
            return ApiError(504, message, code="deadline_exceeded", headers={"x-should-retry": "false"})
    return internal()


def as_api_error(error: BaseException) -> ApiError:
    """Return any error as the client is told; what is no error of Inflight's is a fault of ours, without details."""
    if isinstance(error, ApiError):
        return error
    return from_inflight(error) if isinstance(error, InflightError) else internal()
