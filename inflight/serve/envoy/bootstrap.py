"""The whole of Envoy's configuration: what it starts with, and the files that it reads again when they change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inflight.addresses import in_url
from inflight.serve.envoy.clusters import clusters
from inflight.serve.envoy.listener import listener
from inflight.serve.envoy.routes import route_configuration
from inflight.serve.envoy.values import Config, Upstreams, extension, typed
from inflight.settings.deployment import Deployment
from inflight.settings.door import DoorSettings

_CONNECTIONS = "envoy.resource_monitors.global_downstream_max_connections"
_HEAP = "envoy.resource_monitors.fixed_heap"
_SHORT_OF_MEMORY_IDLE_S = 10
"""A request in which nothing moves for so long is ended where memory is short: it may hold much of it."""


def bootstrap(
    deployment: Deployment, replicas: Sequence[Upstreams], addresses: Sequence[str], folder: Path, administration: Path
) -> Config:
    """Return what Envoy starts with.

    Args:
        deployment: whose ``door`` it is.
        replicas: the servers that take the requests.
        addresses: where clients are served, ``host:port`` each.
        folder: where Envoy finds ``files``.
        administration: where Envoy puts the socket of its administration.
    """
    settings = deployment.door
    return {
        "node": {"id": "door", "cluster": "inflight"},
        "admin": {"address": {"pipe": {"path": str(administration), "mode": 0o600}}},
        "static_resources": {
            "listeners": [listener(settings, addresses, folder)],
            "clusters": clusters(settings, replicas),
        },
        "overload_manager": _overload(settings),
    }


def public_addresses(deployment: Deployment, address: str) -> list[str]:
    """Return the public addresses of a deployment, each once; ``address`` is that of ``server.host`` by its number."""
    server, gateway = deployment.server, deployment.gateway
    ports = [server.http_port, server.grpc_port]
    ports += [server.metrics_port] if deployment.observability.metrics else []
    ports += [gateway.port] if gateway.enabled else []
    return [f"{in_url(address)}:{port}" for port in dict.fromkeys(ports)]


def routes(deployment: Deployment, replicas: Sequence[Upstreams], draining: bool = False) -> Config:
    """Return the table of routes; ``draining``: nothing but the status is served."""
    door = deployment.door
    if door.behind_a_door:
        door = door.model_copy(update={"retries": 0})
    doors = door.ab.address is not None or any(one.is_a_door for one in replicas)
    return route_configuration(
        door,
        decoupled=deployment.decoupled,
        gateway=any(one.gateway for one in replicas),
        replicas=len(replicas),
        status=any(one.status for one in replicas),
        forwarded=doors or deployment.gateway.api_keys_file is not None,
        draining=draining,
    )


def discovered(resource: Config) -> Config:
    """Return the content of a file from which Envoy reads one resource."""
    return {"resources": [resource]}


def _overload(settings: DoorSettings) -> Config:
    """Return what happens where connections or memory run short."""
    connections = extension(
        _CONNECTIONS,
        "extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
        max_active_downstream_connections=settings.max_connections,
    )
    heap = extension(
        _HEAP,
        "extensions.resource_monitors.fixed_heap.v3.FixedHeapConfig",
        max_heap_size_bytes=settings.max_memory_bytes,
    )

    def action(name: str, **trigger: Config) -> Config:
        return {"name": f"envoy.overload_actions.{name}", "triggers": [{"name": _HEAP, **trigger}]}

    near_its_end = {"scaling_threshold": 0.92, "saturation_threshold": 1.0}
    shorter = typed(
        "config.overload.v3.ScaleTimersOverloadActionConfig",
        timer_scale_factors=[{"timer": "HTTP_DOWNSTREAM_STREAM_IDLE", "min_timeout": f"{_SHORT_OF_MEMORY_IDLE_S}s"}],
    )

    return {
        "refresh_interval": "0.25s",
        "resource_monitors": [connections, heap],
        "buffer_factory_config": {"minimum_account_to_track_power_of_two": 20},
        "actions": [
            action("stop_accepting_requests", threshold={"value": 0.9}),
            action("shrink_heap", threshold={"value": 0.8}),
            action("reset_high_memory_stream", scaled=near_its_end),
            {**action("reduce_timeouts", scaled=near_its_end), "typed_config": shorter},
        ],
        # The largest streams are found over HTTP/2 only. Over HTTP/1 each request ends of which more comes, and each in
        # which nothing moves any more.
        "loadshed_points": [
            {
                "name": "envoy.load_shed_points.http1_server_abort_dispatch",
                "triggers": [{"name": _HEAP, "threshold": {"value": 0.95}}],
            }
        ],
    }
