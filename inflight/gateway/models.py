"""``/health``, ``/metrics``, ``/v1/models`` and ``/v1/models/{id}``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inflight.gateway.context import Gateway, gateway_of
from inflight.gateway.errors import STOPPING, away
from inflight.gateway.metrics import CONTENT_TYPE


async def health(request: Request) -> Response:
    """Answer 200 while requests can be served, and 503 with ``Retry-After`` otherwise."""
    gateway = gateway_of(request)
    if gateway.load.draining:
        raise away(STOPPING)
    gateway.readiness.check()
    return JSONResponse({"status": "ok"})


async def metrics(request: Request) -> Response:
    """Answer with the page of Prometheus."""
    return Response(gateway_of(request).metrics.page(), media_type=CONTENT_TYPE)


async def list_models(request: Request) -> Response:
    """Answer with all names of the model."""
    gateway = gateway_of(request)
    names = gateway.model_names
    pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return JSONResponse({"object": "list", "data": [_model(gateway, name) for name in names], **pages})


async def retrieve_model(request: Request) -> Response:
    """Answer with one model. Raises ApiError: 404 ``model_not_found``."""
    gateway = gateway_of(request)
    return JSONResponse(_model(gateway, gateway.check_model(request.path_params["id"])))


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    """Return a model as OpenAI, vLLM and Anthropic describe one."""
    return {
        "id": name,
        "object": "model",
        "created": gateway.created,
        "owned_by": "inflight",
        "root": gateway.model_name,
        "parent": None if name == gateway.model_name else gateway.model_name,
        "max_model_len": gateway.max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(gateway.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": gateway.max_model_len,
        "max_tokens": gateway.max_model_len,
    }
