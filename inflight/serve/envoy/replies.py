"""What the door itself answers: in OpenAI's shape, in KServe's, or as a status of gRPC, each in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inflight.serve.envoy.paths import GENERATE, INFER, MODEL_PATH
from inflight.serve.envoy.scripts import REFUSED
from inflight.serve.envoy.values import SHOULD_RETRY, Config

RETRY_AFTER_S = 2
"""Seconds that a client which is refused for now is told to wait."""
_LATER = (429, 503)
_ROUTE_SAYS = "%LOCAL_REPLY_BODY%"
"""Stands for the text of what refuses: a route with 404, of gRPC's methods and ``infer``, or a script with 400, which
reads a body of ``generate`` or a token's ``sub``."""
_WORDS = {
    400: "the request is not valid HTTP",
    401: "an API key or a token is needed, as `Authorization: Bearer ...`",
    403: "this is not allowed",
    404: "there is no such path, or it takes another method",
    408: "the request took too long to arrive, or nothing moved for too long",
    413: "the request's body is too large",
    415: "compressed bodies are not accepted",
    429: "this client sends too many requests; send the next one later",
    431: "the request's headers are too large, or too many",
    503: "the server starts again, stops, or has too much to do; send the request again later",
    504: "the server has not answered for too long",
}
_BROKE = "the server broke under this request; send it again later"
"""The answer to a request that a server had got when its connection ended: `inflight.client` knows these words."""
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
"""OpenAI's types of errors that are not of a whole hundred of statuses."""
_GRPC_STATUS = dict.fromkeys((400, 413, 415, 431), "3")
"""The status of gRPC, here INVALID_ARGUMENT, where Envoy's own for that of HTTP would say INTERNAL or UNKNOWN."""
_GRPC = {"header_filter": {"header": {"name": "content-type", "string_match": {"prefix": "application/grpc"}}}}
_KSERVE_PATHS = {"safe_regex": {"regex": r"/v2([?/](health|models).*)?(\?.*)?"}}
_KSERVE = {"header_filter": {"header": {"name": ":path", "string_match": _KSERVE_PATHS}}}
_REFUSED = {"header_filter": {"header": {"name": REFUSED, "present_match": True}}}
"""A script has refused the request, and says why."""


def _at(path: str) -> Config:
    """Return the filter of requests to a path, with a query or without."""
    match = {"safe_regex": {"regex": rf"{path}(\?.*)?"}}
    return {"header_filter": {"header": {"name": ":path", "string_match": match}}}


def local_replies(elsewhere: bool) -> Config:
    """Return the texts and shapes of all that the door answers by itself. The first one that fits counts.

    Args:
        elsewhere: whether a door before this one is told to send elsewhere what this one answers with 503.
    """
    said = _as_json({"error": _ROUTE_SAYS})
    own = [_mapper(404, [_at(INFER)], said, {}), _mapper(400, [_at(f"{MODEL_PATH}{GENERATE}")], said, {})]
    own += _of_status(400, _ROUTE_SAYS, elsewhere, _REFUSED)
    broke = _of_status(503, _BROKE, elsewhere, {"response_flag_filter": {"flags": ["UC", "UR"]}})
    others = (one for status, words in _WORDS.items() for one in _of_status(status, words, elsewhere))
    return {"mappers": [*own, *broke, *others]}


def _of_status(status: int, words: str, elsewhere: bool, *filters: Config) -> list[Config]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    said = _ROUTE_SAYS if status == 404 else words
    openai = {"error": {"message": words, "type": kind, "param": None, "code": None}}
    text: Config = {"text_format_source": {"inline_string": said}}
    added = {"retry-after": str(RETRY_AFTER_S)} if status in _LATER else {}
    added |= {SHOULD_RETRY: "true"} if elsewhere and status == 503 else {}
    of_grpc = {"grpc-status": _GRPC_STATUS[status]} if status in _GRPC_STATUS else {}
    return [
        _mapper(status, [*filters, _GRPC], text, added | of_grpc),
        _mapper(status, [*filters, _KSERVE], _as_json({"error": words}), added),
        _mapper(status, filters, _as_json(openai), added),
    ]


def _as_json(body: dict[str, Any]) -> Config:
    return {"json_format": body, "content_type": "application/json"}


def _mapper(status: int, others: Sequence[Config], body: Config, added: dict[str, str]) -> Config:
    comparison = {"op": "EQ", "value": {"default_value": status, "runtime_key": f"door.reply_{status}"}}
    filters: list[Config] = [{"status_code_filter": {"comparison": comparison}}, *others]
    return {
        "filter": {"and_filter": {"filters": filters}} if len(filters) > 1 else filters[0],
        "body_format_override": body,
        "headers_to_add": [
            {"header": {"key": name, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
            for name, value in added.items()
        ],
    }
