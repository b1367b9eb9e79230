"""The routes: which request goes where, how often it is sent again, and what is refused without asking a server."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.serve.envoy.filters import CREDENTIALS, rate_limits
from inflight.serve.envoy.paths import GENERATE, GRPC_STREAM, INFER, OPEN_PATHS, READ, Served, served
from inflight.serve.envoy.values import (
    AUTH,
    BODY_NAME,
    BUFFER,
    GATEWAY,
    HTTP,
    RATE_LIMIT,
    ROUTES,
    SHOULD_RETRY,
    STATUS,
    TOKEN,
    VARIANT,
    VARIANT_HEADER,
    VARIANT_OF_SERVER,
    Config,
    seconds,
    typed,
)
from inflight.settings.door import DoorSettings

_UNSENT = "connect-failure,refused-stream,reset-before-request"
"""When a request is sent again to the only server: it has had no byte of it, so the request cannot have ended it."""
_RESENT_ELSEWHERE = f"{_UNSENT},reset,retriable-headers,unavailable"
"""When it is sent to another server: it has had no byte of an answer."""
_TRIES_ELSEWHERE = 2
"""New tries where there are several replicas: a request that ends its server ends three of them at most."""
_SHORTEST_S, _LONGEST_S = 0.25, 2.0
_OPEN_BODY_BYTES = 1024
"""The largest body of a request that needs no key; those that there are have none."""
_NO_SUCH = "there is no such path, or it takes another method"
_STREAMS = (
    "the models of this deployment stream: send `generate` or `generate_stream` over HTTP, or ModelStreamInfer over "
    "gRPC; `infer` is served where deployment.yaml has `decoupled: false`"
)
_COMPRESSED_MESSAGES = "compressed messages are not accepted"


def route_configuration(
    settings: DoorSettings,
    *,
    decoupled: bool,
    gateway: bool,
    replicas: int,
    status: bool,
    forwarded: bool,
    draining: bool = False,
) -> Config:
    """Return the table of routes.

    Args:
        settings: of the door.
        decoupled: whether models stream.
        gateway: whether OpenAI's API is served.
        replicas: how many servers of the same kind there are.
        status: whether a server answers for liveness and readiness; otherwise the door does.
        forwarded: whether the servers get the keys or tokens of clients too, as one asks for them itself.
        draining: whether requests are refused, but those for the status.
    """
    shown = list(served(decoupled, gateway))
    statuses = [_status_route(one, status) for one in shown if _has_status(one, status, draining)]
    routes = [*statuses, _draining()]
    if not draining:
        others = [route for one in shown if one.target != STATUS for route in _routes(one, settings, replicas)]
        explained = [_refused_infer()] if decoupled else []
        routes = [*_refused(), *statuses, *others, *explained, _refusal(404, _NO_SUCH)]
    return typed(
        "config.route.v3.RouteConfiguration",
        name=ROUTES,
        virtual_hosts=[
            {
                "name": "all",
                "domains": ["*"],
                "routes": [*routes, _refusal(404, _NO_SUCH, tunnel=True)],
                "request_body_buffer_limit": settings.max_body_bytes,
                "typed_per_filter_config": rate_limits(settings),
                "request_headers_to_remove": [] if forwarded or not settings.asks else list(CREDENTIALS),
            }
        ],
    )


def _has_status(one: Served, asked: bool, draining: bool) -> bool:
    """Return whether this is a path of the status that is served; ``asked``: by a server of its own."""
    if one.target != STATUS or asked:
        return one.target == STATUS
    return _is_open(one) and not (draining and one.path.endswith("/ready"))


def _is_open(one: Served) -> bool:
    return one.path in OPEN_PATHS


def _match(one: Served) -> Config:
    path: Config = {"safe_regex": {"regex": one.path}} if one.pattern else {"path": one.path}
    return {**path, "headers": [_methods(one.methods)]}


def _methods(methods: tuple[str, ...]) -> Config:
    return {"name": ":method", "string_match": {"safe_regex": {"regex": "|".join(methods)}}}


def _switched_off(*names: str) -> Config:
    return {name: typed("config.route.v3.FilterConfig", disabled=True) for name in names}


def _hardly_a_body() -> Config:
    """Return the limit of bodies where nobody is asked who they are: what Envoy keeps there, anybody could fill."""
    kind = "extensions.filters.http.buffer.v3.BufferPerRoute"
    return {BUFFER: typed(kind, buffer={"max_request_bytes": _OPEN_BODY_BYTES})}


def _status_route(one: Served, asked: bool) -> Config:
    """Return the route of one path of the status, which goes on while the server drains."""
    route: Config = {"match": _match(one)}
    if _is_open(one):
        route["typed_per_filter_config"] = _switched_off(AUTH, TOKEN, RATE_LIMIT) | _hardly_a_body()
    if asked:
        return {**route, "route": {"cluster": STATUS, "timeout": "10s"}}
    if one.path.endswith("/live"):
        return {**route, "direct_response": {"status": 200}}
    return {**route, "route": {"cluster": HTTP, "prefix_rewrite": "/v2/health/ready", "timeout": "10s"}}


def _refused() -> list[Config]:
    """Return the routes of what no server is to unpack, and of two hosts or a user before one (RFC 9112, 3.2)."""
    hosts: Config = {"name": ":authority", "string_match": {"safe_regex": {"regex": ".*[,@/].*"}}}
    packed: Config = {"name": "content-encoding", "present_match": True}
    message: Config = {"name": "grpc-encoding", "string_match": {"safe_regex": {"regex": ".*"}}}
    plain: Config = {"name": "grpc-encoding", "string_match": {"exact": "identity"}, "invert_match": True}
    return [
        _refusal(400, "", [hosts]),
        _refusal(415, "", [packed]),
        _refusal(404, _COMPRESSED_MESSAGES, [message, plain]),
    ]


def _refused_infer() -> Config:
    """Return the route of ``infer`` over HTTP where models stream."""
    return {**_refusal(404, _STREAMS), "match": _match(Served(HTTP, ("POST",), INFER, pattern=True))}


def _draining() -> Config:
    header = {"header": {"key": SHOULD_RETRY, "value": "true"}}
    return {**_refusal(503, ""), "response_headers_to_add": [header]}


def _refusal(status: int, text: str, headers: Sequence[Config] = (), *, tunnel: bool = False) -> Config:
    """Return a route that refuses at once, also a stream that has not ended yet, and does not ask who the client is.

    Args:
        headers: what requests have that are refused.
        tunnel: whether those of the method CONNECT are, which no other route is for.
    """
    answer: Config = {"status": status}
    if text:
        answer["body"] = {"inline_string": text}
    return {
        "match": {"prefix": "/", "headers": list(headers)} if not tunnel else {"connect_matcher": {}},
        "direct_response": answer,
        "typed_per_filter_config": _switched_off(AUTH, TOKEN, RATE_LIMIT, BUFFER),
    }


def _routes(one: Served, settings: DoorSettings, replicas: int) -> list[Config]:
    route: Config = {"match": _match(one), "route": _action(one, settings, replicas)}
    if one.path == GRPC_STREAM:
        route["typed_per_filter_config"] = _switched_off(BUFFER)
    if one.path.endswith(GENERATE):
        route["typed_per_filter_config"] = {BODY_NAME: typed("config.route.v3.FilterConfig", config={})}
    if one.target != GATEWAY or one.methods == READ:
        return [route]
    return [_preflight(one, settings, replicas), route]


def _preflight(one: Served, settings: DoorSettings, replicas: int) -> Config:
    """Return the route of a browser's question before a request, which brings no key (CORS)."""
    asked = Served(one.target, ("OPTIONS",), one.path, one.pattern)
    match = _match(asked)
    match["headers"].append({"name": "access-control-request-method", "present_match": True})
    return {
        "match": match,
        "route": _action(asked, settings, replicas),
        "typed_per_filter_config": _switched_off(AUTH, TOKEN) | _hardly_a_body(),
    }


def _action(one: Served, settings: DoorSettings, replicas: int) -> Config:
    """Return what is done with a request that passes."""
    return {
        **_destination(one.target, settings),
        "timeout": "0s",
        "idle_timeout": seconds(settings.stream_idle_timeout_s),
        "retry_policy": _retries(settings, replicas),
    }


def _destination(target: str, settings: DoorSettings) -> Config:
    variant = settings.ab
    if variant.address is None:
        return {"cluster": target}
    # Not the share says who has answered: the first deployment takes that of the second one while it is away.
    header = {"key": VARIANT_HEADER, "value": VARIANT_OF_SERVER}
    said = {"response_headers_to_add": [{"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}]}
    shares = ((target, 100 - variant.percent), (f"{VARIANT}{target}", variant.percent))
    clusters = [{"name": name, "weight": weight, **said} for name, weight in shares]
    destination: Config = {"weighted_clusters": {"clusters": clusters}}
    if variant.sticky_header is not None:
        destination["hash_policy"] = [{"header": {"header_name": variant.sticky_header}}]
        destination["weighted_clusters"]["use_hash_policy"] = True
    return destination


def _retries(settings: DoorSettings, replicas: int) -> Config:
    """Return when a request is sent again; never once a byte of its answer has come.

    Envoy counts tries, whether or not the server was there. Were requests that a server has got sent to it again, one
    that ends its server would do so many times.
    """
    policy: Config = {
        "retry_on": _UNSENT,
        "num_retries": settings.retries,
        "retry_back_off": {"base_interval": seconds(_SHORTEST_S), "max_interval": seconds(_LONGEST_S)},
    }
    if replicas == 1:
        return policy
    return policy | {
        "retry_on": _RESENT_ELSEWHERE,
        "num_retries": min(settings.retries, _TRIES_ELSEWHERE),
        "retriable_headers": [{"name": SHOULD_RETRY, "string_match": {"exact": "true"}}],
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": typed("extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"),
            }
        ],
        "host_selection_retry_max_attempts": 5,
    }
