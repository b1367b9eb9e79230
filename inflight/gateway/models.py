"""``/health``, ``/metrics``, ``/v1/models`` and ``/v1/models/{id}``."""

from __future__ import annotations

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
    return JSONResponse({"object": "list", "data": [_model(gateway, name) for name in gateway.model_names]})


async def retrieve_model(request: Request) -> Response:
    """Answer with one model. Raises ApiError: 404 ``model_not_found``."""
    gateway = gateway_of(request)
    return JSONResponse(_model(gateway, gateway.check_model(request.path_params["id"])))


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": gateway.created,
        "owned_by": "inflight",
        "root": gateway.model_name,
        "parent": None if name == gateway.model_name else gateway.model_name,
        "max_model_len": gateway.max_model_len,
    }
