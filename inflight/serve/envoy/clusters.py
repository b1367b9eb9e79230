"""The clusters: the servers that the door sends requests to."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from inflight.serve.envoy.values import (
    GATEWAY,
    GRPC,
    HTTP,
    STATUS,
    VARIANT,
    VARIANT_METADATA,
    Config,
    Upstreams,
    seconds,
    socket_address,
    typed,
)
from inflight.settings.door import DoorSettings

_CONNECT_S = 1.0
_IDLE_S = {HTTP: 60.0, GATEWAY: 4.0, STATUS: 4.0}
"""After so long without a request a connection of HTTP/1 is closed, a little before its server does that."""
_WINDOW_BYTES = 1 << 20
_UNLIMITED = 1_000_000
"""Requests, connections and tries at once of one server: those of clients are bounded before."""
_STATUS_CONNECTIONS = 64
"""The most connections to what tells the status, which closes those beyond a few hundred: in a flood of requests, which
need no key, others wait their turn here, and are not told that the server is not live or not ready."""
_BUFFER_BYTES = 256 << 10
"""The most bytes that a connection keeps for a slow reader; no more is read meanwhile."""


def clusters(settings: DoorSettings, replicas: Sequence[Upstreams]) -> list[Config]:
    """Return the servers of all replicas by what they take, and those of a second deployment."""
    targets: dict[str, list[str]] = {
        HTTP: [one.http for one in replicas],
        GRPC: [one.grpc for one in replicas],
        GATEWAY: [one.gateway for one in replicas if one.gateway],
        STATUS: [one.status for one in replicas if one.status],
    }
    asked = [one.http if len(replicas) > 1 else None for one in replicas]
    found = []
    for name, addresses in targets.items():
        own = [_endpoint(*pair, "a") for pair in zip(addresses, asked, strict=True)] if addresses else []
        found += [_cluster(name, [own], checked=len(replicas) > 1)] if own else []
        if own and name != STATUS and (other := settings.ab.address) is not None:
            # What comes second takes all while what comes first is not ready.
            found.append(_cluster(f"{VARIANT}{name}", [[_endpoint(other, other, settings.ab.name)], own], checked=True))
    return found


def _cluster(name: str, endpoints: Sequence[Sequence[Config]], *, checked: bool) -> Config:
    """Return one cluster.

    Args:
        name: of the cluster.
        endpoints: the servers; those of a later group get something only while none of an earlier one is ready.
        checked: whether servers are asked whether they are ready.
    """
    hosts = [one["endpoint"]["address"]["socket_address"]["address"] for group in endpoints for one in group]
    groups = [{"priority": number, "lb_endpoints": group} for number, group in enumerate(endpoints)]
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests", "max_retries"), _UNLIMITED)
    limits |= {"max_connections": _STATUS_CONNECTIONS} if name == STATUS else {}
    cluster: Config = {
        "name": name,
        "type": "STATIC" if all(map(_is_number, hosts)) else "STRICT_DNS",
        "connect_timeout": seconds(_CONNECT_S),
        "per_connection_buffer_limit_bytes": _BUFFER_BYTES,
        "load_assignment": {"cluster_name": name, "endpoints": groups},
        "circuit_breakers": {"thresholds": [limits]},
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": _protocol(name)},
    }
    if checked:
        cluster |= {"health_checks": [_health_check()], "common_lb_config": {"healthy_panic_threshold": {"value": 0}}}
    return cluster


def _endpoint(address: str, asked: str | None, variant: str) -> Config:
    """Return one server: its address, the one that says whether it is ready (None: it always is), its deployment."""
    check = {"disable_active_health_check": True} if asked is None else {"port_value": int(asked.rpartition(":")[2])}
    return {
        "endpoint": {"address": socket_address(address), "health_check_config": check},
        "metadata": {"filter_metadata": {VARIANT_METADATA[0]: {VARIANT_METADATA[1]: variant}}},
    }


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _protocol(name: str) -> Config:
    if name.endswith(GRPC):
        spoken: Config = {
            "http2_protocol_options": {
                "initial_stream_window_size": _WINDOW_BYTES,
                "initial_connection_window_size": 16 * _WINDOW_BYTES,
            }
        }
        idle_s = None
    else:
        spoken, idle_s = {"http_protocol_options": {}}, _IDLE_S[name.removeprefix(VARIANT)]
    options: Config = {"explicit_http_config": spoken}
    if idle_s is not None:
        options["common_http_protocol_options"] = {"idle_timeout": seconds(idle_s)}
    return typed("extensions.upstreams.http.v3.HttpProtocolOptions", **options)


def _health_check() -> Config:
    """Return how often a replica is asked whether it is ready, and when it is believed."""
    return {
        "timeout": "2s",
        "interval": "1s",
        "no_traffic_interval": "1s",
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        "http_health_check": {"path": "/v2/health/ready"},
    }
