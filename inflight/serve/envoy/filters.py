"""The filters of HTTP: who asks, how often, how large a body may be, and what is written down of a request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from inflight.contract import CLIENT
from inflight.serve.envoy.scripts import NAME_IN_BODY, TOKEN_FORM, TOKEN_METADATA, TOKEN_NAME, keys_script
from inflight.serve.envoy.values import (
    AUTH,
    BODY_NAME,
    BUFFER,
    KEYS,
    RATE_LIMIT,
    TOKEN,
    Config,
    extension,
    from_file,
    seconds,
    typed,
)
from inflight.settings.api_keys import client_of
from inflight.settings.door import STANDARD_OUTPUT, DoorSettings

_LUA = "extensions.filters.http.lua.v3.Lua"
_JWT = "extensions.filters.http.jwt_authn.v3.JwtAuthentication"
_HEADER_MUTATION = "extensions.filters.http.header_mutation.v3.HeaderMutation"
_EARLY_MUTATION = "extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation"
_RATE_LIMIT = "extensions.filters.http.local_ratelimit.v3.LocalRateLimit"
_CLIENTS = "clients"
CREDENTIALS = ("authorization", "x-api-key")
"""The headers that say who the client is."""
_DROPPED = ("x-envoy-", "x-inflight-")
"""The beginnings of headers that are the servers' own: what clients send of them is dropped."""
_LOGGED = {
    "time": "%START_TIME%",
    "client": f"%REQ({CLIENT})%",
    "address": "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%",
    "method": "%REQ(:METHOD)%",
    "path": "%PATH(NQ)%",
    "protocol": "%PROTOCOL%",
    "status": "%RESPONSE_CODE%",
    "grpc_status": "%GRPC_STATUS%",
    "flags": "%RESPONSE_FLAGS%",
    "bytes_received": "%BYTES_RECEIVED%",
    "bytes_sent": "%BYTES_SENT%",
    "duration_ms": "%DURATION%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "server": "%UPSTREAM_CLUSTER%",
    "request_id": "%REQ(X-REQUEST-ID)%",
}


def early_mutations() -> list[Config]:
    """Return what is done to a request's headers before anything reads them."""
    dropped = [{"remove_on_match": {"key_matcher": {"prefix": prefix}}} for prefix in _DROPPED]
    return [extension("envoy.http.early_header_mutation.header_mutation", _EARLY_MUTATION, mutations=dropped)]


def http_filters(settings: DoorSettings, folder: Path) -> list[Config]:
    """Return the filters in the order in which a request passes them; ``folder`` has the files of ``door``."""
    filters: list[Config] = []
    by_token = settings.jwt.jwks_file is not None
    if settings.asks:
        source = from_file(str(folder / f"{KEYS}.json"))
        kind = _JWT if by_token else _LUA
        discovery = {"config_source": source, "type_urls": [f"type.googleapis.com/envoy.{kind}"]}
        filters.append({"name": AUTH, "config_discovery": discovery})
    if by_token:
        filters = [_lua(TOKEN, TOKEN_FORM), *filters, _lua("token_name", TOKEN_NAME)]
    filters.append(_name_client(settings))
    if settings.rate_limit.requests is not None:
        filters.append(extension(RATE_LIMIT, _RATE_LIMIT, stat_prefix=_CLIENTS))
    filters += [
        extension(BUFFER, "extensions.filters.http.buffer.v3.Buffer", max_request_bytes=settings.max_body_bytes),
        {**_lua(BODY_NAME, NAME_IN_BODY), "disabled": True},
        extension("router", "extensions.filters.http.router.v3.Router", suppress_envoy_headers=True),
    ]
    return filters


def _lua(name: str, script: str) -> Config:
    return extension(name, _LUA, default_source_code={"inline_string": script})


def _name_client(settings: DoorSettings) -> Config:
    """Return the filter that names the client by its certificate or address, where no key and no token has named it.

    A token need not have a ``sub``, and a client without a name would have no limit.
    """
    value = "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%"
    if settings.tls.client_ca is not None:
        value = "%DOWNSTREAM_PEER_FINGERPRINT_256%"
    header = {"header": {"key": CLIENT, "value": value}, "append_action": "ADD_IF_ABSENT"}
    return extension("name_client", _HEADER_MUTATION, mutations={"request_mutations": [{"append": header}]})


def rate_limits(settings: DoorSettings) -> Config:
    """Return the limit of each client, for the routes: those of both versions of HTTP then count together.

    The limit of all clients together, which the filter wants too, is never reached.
    """
    limit = settings.rate_limit
    if limit.requests is None:
        return {}
    bucket = {
        "max_tokens": limit.burst or limit.requests,
        "tokens_per_fill": limit.requests,
        "fill_interval": seconds(limit.interval_s),
    }
    always = {"numerator": 100, "denominator": "HUNDRED"}
    rule = typed(
        _RATE_LIMIT,
        stat_prefix=_CLIENTS,
        token_bucket={"max_tokens": 4_000_000_000, "tokens_per_fill": 4_000_000_000, "fill_interval": "1s"},
        filter_enabled={"default_value": always},
        filter_enforced={"default_value": always},
        descriptors=[{"entries": [{"key": "client"}], "token_bucket": bucket}],
        max_dynamic_descriptors=limit.max_clients,
        rate_limits=[{"actions": [{"request_headers": {"header_name": CLIENT, "descriptor_key": "client"}}]}],
        rate_limited_as_resource_exhausted=True,
    )
    return {RATE_LIMIT: rule}


def api_keys(keys: Sequence[str]) -> Config:
    """Return the filter's settings that ask for one of these keys."""
    script = keys_script({key: client_of(key) for key in keys})
    return typed(_LUA, default_source_code={"inline_string": script})  # the routes drop the key


def tokens(settings: DoorSettings, jwks: str) -> Config:
    """Return the filter's settings that ask for a token signed by one of the keys of ``jwks``, JSON's text."""
    provider: Config = {
        "local_jwks": {"inline_string": json.dumps(json.loads(jwks))},
        "from_headers": [{"name": "authorization", "value_prefix": "Bearer "}],
        "forward": True,  # the routes drop it
        "payload_in_metadata": TOKEN_METADATA[1],
        "require_expiration": True,  # without it a token that has no `exp` would be good for ever
    }
    if settings.jwt.issuer is not None:
        provider["issuer"] = settings.jwt.issuer
    if settings.jwt.audiences:
        provider["audiences"] = list(settings.jwt.audiences)
    return typed(
        _JWT,
        providers={"issuer": provider},
        rules=[{"match": {"prefix": "/"}, "requires": {"provider_name": "issuer"}}],
    )


def access_logs(settings: DoorSettings) -> list[Config]:
    """Return what writes a line for each request, if anything does."""
    if settings.access_log is None:
        return []
    path = "/dev/stdout" if str(settings.access_log) == STANDARD_OUTPUT else str(settings.access_log)
    kind = "extensions.access_loggers.file.v3.FileAccessLog"
    return [extension("access_log", kind, path=path, log_format={"json_format": _LOGGED})]
