"""The gateway's application: the table of routes, what surrounds them, and the life of what they share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from inflight.gateway.chat import chat_completions
from inflight.gateway.completions import completions
from inflight.gateway.context import Gateway
from inflight.gateway.cors import Cors
from inflight.gateway.embeddings import embeddings
from inflight.gateway.errors import ApiError
from inflight.gateway.messages.endpoint import count_tokens, create_message
from inflight.gateway.metrics import OTHER
from inflight.gateway.middleware import HEALTH, METRICS, Admission, BodyLimit, Keys, Requests
from inflight.gateway.models import health, list_models, metrics, retrieve_model
from inflight.gateway.rerank import rerank
from inflight.gateway.responses.endpoint import create_response
from inflight.gateway.scores import generative_scoring, score
from inflight.gateway.tokenize import detokenize, tokenize, tokenizer_info

Endpoint = Callable[[Request], Awaitable[Response]]


class Served(NamedTuple):
    """One row of the table of routes."""

    method: str
    path: str
    endpoint: Endpoint


ROUTES: tuple[Served, ...] = (
    Served("GET", HEALTH, health),
    Served("GET", METRICS, metrics),
    Served("GET", "/v1/models", list_models),
    Served("GET", "/v1/models/{id:path}", retrieve_model),
    Served("POST", "/v1/chat/completions", chat_completions),
    Served("POST", "/v1/responses", create_response),
    Served("POST", "/v1/messages", create_message),
    Served("POST", "/v1/messages/count_tokens", count_tokens),
    Served("POST", "/v1/completions", completions),
    Served("POST", "/v1/embeddings", embeddings),
    *(Served("POST", path, score) for path in ("/v1/score", "/score")),
    Served("POST", "/generative_scoring", generative_scoring),
    *(Served("POST", path, rerank) for path in ("/v1/rerank", "/rerank", "/v2/rerank")),
    Served("POST", "/tokenize", tokenize),
    Served("POST", "/detokenize", detokenize),
    Served("GET", "/tokenizer_info", tokenizer_info),
)
"""All that the gateway serves."""
_CODES = {404: "not_found", 405: "method_not_allowed"}


def make_app(gateway: Gateway, routes: tuple[Served, ...] = ROUTES) -> Starlette:
    """Return the application that serves ``routes`` for ``gateway``, which starts and stops with it."""
    shown = [one for one in routes if one.path != METRICS or gateway.deployment.observability.metrics]
    gateway.metrics.expect({*(one.path for one in shown), OTHER})
    settings = gateway.settings
    app = Starlette(
        routes=[Route(one.path, one.endpoint, methods=[one.method]) for one in shown],
        middleware=[
            Middleware(Cors, settings.cors_origins),
            Middleware(Requests, gateway.metrics, _labels(shown), settings.client_timeout_s),
            Middleware(Keys, gateway.keys, gateway.deployment.door.enabled),
            Middleware(Admission, gateway.load),
            Middleware(BodyLimit, settings.max_body_bytes, settings.client_timeout_s),
        ],
        exception_handlers={HTTPException: _no_route},
        lifespan=_lifespan,
    )
    app.router.redirect_slashes = False  # a redirected POST loses its body
    app.state.gateway = gateway
    return app


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    gateway: Gateway = app.state.gateway
    await gateway.readiness.start()
    if gateway.quality is not None:
        gateway.quality.start()
    try:
        yield
    finally:
        if gateway.quality is not None:
            await gateway.quality.stop()
        await gateway.readiness.stop()
        await gateway.engine.close()


def _labels(routes: list[Served]) -> Callable[[str], str]:
    """Return what makes a path the label of metrics: a path of the table, or ``other``."""
    whole = {one.path for one in routes if "{" not in one.path}
    beginnings = {one.path.partition("{")[0]: one.path for one in routes if "{" in one.path}

    def label(path: str) -> str:
        if path in whole:
            return path
        return next((known for beginning, known in beginnings.items() if path.startswith(beginning)), OTHER)

    return label


def _no_route(request: Request, error: Exception) -> NoReturn:
    """Raise the ApiError of a path or a method that the table does not have."""
    assert isinstance(error, HTTPException), "it is the handler of these alone"
    message = f"there is no {request.method} {request.url.path[:200]}{_meant(request)}"
    if allowed := (error.headers or {}).get("Allow"):
        message += f"; it takes {allowed}"
    code = _CODES.get(error.status_code)
    raise ApiError(error.status_code, message, code=code, headers=error.headers)


def _meant(request: Request) -> str:
    """Return a hint to the route that a path means which lacks ``/v1``, or has it twice; empty: it is none."""
    path = request.url.path
    for other in (f"/v1{path}", path.removeprefix("/v1")):
        for route in request.app.routes:
            if other != path and route.matches({**request.scope, "path": other})[0] is Match.FULL:
                return f"; {other} is meant: base URLs of OpenAI's clients end with /v1, those of Anthropic's do not"
    return ""
