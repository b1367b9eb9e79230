"""What the parts of Envoy's configuration share: their type, where requests go, and the spelling of a few values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]
"""A message of Envoy's API (v3), as its JSON has it."""
VARIANT_HEADER = "x-inflight-variant"
"""Names in an answer the deployment of an A/B comparison that gave it."""
SHOULD_RETRY = "x-should-retry"
"""Tells in an answer, as `true`, that the request may be sent to another server."""
AUTH, TOKEN, RATE_LIMIT, BUFFER = "auth", "token", "rate_limit", "buffer"
"""The names of filters that single routes switch off."""
BODY_NAME = "body_name"
"""The name of a filter that single routes switch on."""
ROUTES, KEYS, CERTIFICATE, CLIENT_CA = "routes", "keys", "certificate", "client_ca"
"""The names of what Envoy reads from files of its own, and reads again when they change."""
VARIANT_METADATA = "inflight", "variant"
VARIANT_OF_SERVER = f"%UPSTREAM_METADATA({':'.join(VARIANT_METADATA)})%"
"""Where each server's deployment stands in Envoy's configuration, and the value of a header that says it."""
VARIANT = "variant_"
"""Begins the names of the clusters that ask a second deployment (A/B) first."""
HTTP, GRPC, GATEWAY, STATUS = "http", "grpc", "gateway", "status"
"""The names of what takes the requests, and of the clusters of the same names."""


@dataclass(frozen=True)
class Upstreams:
    """Where one deployment takes requests: ``host:port`` each."""

    http: str
    """KServe's protocol over HTTP/1.1."""
    grpc: str
    """The same over gRPC, HTTP/2 without TLS."""
    gateway: str | None
    """OpenAI's API; None: it is not served."""
    status: str | None
    """Liveness, readiness and metrics of the whole; None: the door answers for itself."""

    @property
    def is_a_door(self) -> bool:
        """Whether it is a door: nothing else takes both protocols on one port."""
        return self.http == self.grpc


def typed(kind: str, /, **fields: Any) -> Config:
    """Return a message that says its own type; ``kind`` is its name below ``envoy``."""
    return {"@type": f"type.googleapis.com/envoy.{kind}", **fields}


def extension(name: str, kind: str, /, **fields: Any) -> Config:
    """Return a part of Envoy by its name, with its settings."""
    return {"name": name, "typed_config": typed(kind, **fields)}


def seconds(value: float) -> str:
    """Return a time as JSON has it."""
    return f"{value:.9f}".rstrip("0").rstrip(".") + "s"


def socket_address(address: str) -> Config:
    """Return ``host:port`` as Envoy's address."""
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}


def from_file(path: str) -> Config:
    """Return the source of what is read from a file, and read again when another is moved into its place."""
    return {"path_config_source": {"path": path}, "resource_api_version": "V3"}
