"""Errors in the shape of Anthropic's API, which its clients read on all of its paths."""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.responses import Response

from inflight.gateway.errors import ApiError

PATH = "/v1/messages"
OVERLOADED = 529
"""Anthropic's status of a server that takes no more for now; its clients send the request again."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


_COUNTS = re.compile(r"maximum context length is (\d+) tokens\. However, you requested (\d+) tokens")
"""The tokens in the error of a prompt that is too long, which Anthropic's clients look for in Anthropic's own words."""


def message_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return the body of an error. It names the field at fault beside what Anthropic's has."""
    kind = _TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if error.code == "context_length_exceeded" and (counts := _COUNTS.search(message)):
        most = int(counts[1]) - 1  # an answer has a token
        message = f"prompt is too long: {counts[2]} tokens > {most} maximum. {message}"
    told: dict[str, Any] = {"type": kind, "message": message}
    if error.param is not None:
        told["param"] = error.param
    return {"type": "error", "error": told, "request_id": request_id}


def message_error_response(error: ApiError, request_id: str) -> Response:
    """Return the whole response of an error."""
    status = OVERLOADED if error.status == 503 else error.status
    body = json.dumps(message_error(error, request_id))
    return Response(body, status, {**error.headers, "request-id": request_id}, "application/json")
