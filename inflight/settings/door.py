"""DoorSettings: Envoy in front of Triton and the gateway, as one server with one set of rules. See docs/door.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from inflight.settings.section import Section

STANDARD_OUTPUT = "-"
"""The ``access_log`` that is written to the standard output of `inflight serve`."""
_HEADER = re.compile(r"[a-z0-9-]{1,64}")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):(\d{1,5})")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


def check_address(value: str) -> str:
    """Return ``host:port`` as it is; an IPv6 address stands in brackets. Raises ValueError: it is none."""
    match = _ADDRESS.fullmatch(value)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ValueError("it must be host:port, such as 10.0.0.7:8000")
    return value


class TlsSettings(Section):
    """TLS towards clients. The files are read again when they change."""

    certificate: Path | None = Field(
        None, description="PEM file of the certificate and its chain, relative to the deployment; null: no TLS"
    )
    private_key: Path | None = Field(None, description="PEM file of its key, without a password")
    client_ca: Path | None = Field(
        None,
        description="PEM file of the authorities whose certificates clients must have (mutual TLS); null: none",
    )

    @model_validator(mode="after")
    def _is_whole(self) -> TlsSettings:
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("`certificate` and `private_key` need each other")
        if self.client_ca is not None and self.certificate is None:
            raise ValueError("`client_ca` needs `certificate`")
        return self


class JwtSettings(Section):
    """JSON Web Tokens as `Authorization: Bearer`."""

    jwks_file: Path | None = Field(
        None,
        description="file of the issuer's public keys (JWKS), relative to the deployment; every route but liveness and "
        "readiness then needs a token. It is read again when it changes. null: no tokens",
    )
    issuer: str | None = Field(None, description="what `iss` must be; null: anything")
    audiences: tuple[str, ...] = Field((), description="one of them must be in `aud`; none: anything")

    @model_validator(mode="after")
    def _has_keys(self) -> JwtSettings:
        if self.jwks_file is None and self.model_fields_set - {"jwks_file"}:
            raise ValueError(f"`{min(self.model_fields_set - {'jwks_file'})}` needs `jwks_file`")
        return self


class RateLimitSettings(Section):
    """Requests of one client: of an API key, a token's `sub`, a client's certificate, or else an address."""

    requests: int | None = Field(
        None, ge=1, description="requests that a client may send in `interval_s`; more get 429. null: no limit"
    )
    interval_s: float = Field(
        1, ge=0.05, le=86_400, allow_inf_nan=False, description="seconds that they are counted in"
    )
    burst: int | None = Field(
        None, ge=1, description="requests at once after a time without any; null: as many as `requests`"
    )
    max_clients: int = Field(
        10_000, ge=1, description="clients that are counted; the one seen longest ago is forgotten"
    )

    @model_validator(mode="after")
    def _has_a_rate(self) -> RateLimitSettings:
        if self.requests is None and self.model_fields_set - {"requests"}:
            raise ValueError(f"`{min(self.model_fields_set - {'requests'})}` needs `requests`")
        return self


class VariantSettings(Section):
    """A second deployment that gets a share of the requests (A/B)."""

    address: str | None = Field(
        None, description="host:port of the second deployment's door, without TLS; null: no second deployment"
    )
    percent: int = Field(10, ge=0, le=100, description="share of the requests that it gets")
    sticky_header: str | None = Field(
        None,
        description="requests with the same value of this header, such as x-session-id, go to the same deployment; "
        "null: each request goes by chance",
    )
    name: str = Field("b", description="what `x-inflight-variant` says of its answers; of the first one's it says `a`")

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        return value and check_address(value)

    @field_validator("sticky_header")
    @classmethod
    def _is_a_header(cls, value: str | None) -> str | None:
        if value is not None and not _HEADER.fullmatch(value):
            raise ValueError("it must be a header's name in small letters, digits and hyphens")
        return value

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if value == "a" or not _NAME.fullmatch(value):
            raise ValueError("it must be of letters, digits, `.`, `_` and `-`, and not `a`")
        return value

    @model_validator(mode="after")
    def _has_an_address(self) -> VariantSettings:
        if self.address is None and self.model_fields_set - {"address"}:
            raise ValueError(f"`{min(self.model_fields_set - {'address'})}` needs `address`")
        return self


class DoorSettings(Section):
    """Envoy in front of Triton and OpenAI's API."""

    enabled: bool = Field(
        False,
        description="have Envoy own the public ports, each of which then serves everything; needs the extra `door`",
    )
    threads: int | None = Field(
        None, ge=1, le=256, description="threads that serve; null: one for each four cores, at least one"
    )
    api_keys_file: Path | None = Field(
        None,
        description="file of API keys, one per line, relative to the deployment; every route but liveness and "
        "readiness then needs one, over every protocol, as `Authorization: Bearer`. It is read again when it changes. "
        "null: none",
    )
    tls: TlsSettings = TlsSettings()
    jwt: JwtSettings = JwtSettings()
    rate_limit: RateLimitSettings = RateLimitSettings()
    access_log: Path | None = Field(
        None,
        description="file that gets a line of JSON for each request, without prompts and keys; `-`: standard output; "
        "null: none. The file grows until it is rotated, by logrotate's `copytruncate` for example",
    )
    retries: int = Field(
        14,
        ge=0,
        le=100,
        description="how often a server that is away is tried for a request, after 0.25 s to 2 s each; 14 bridge a "
        "restart of about ten seconds",
    )
    max_body_bytes: int = Field(
        32 << 20,
        ge=1024,
        le=1 << 30,
        description="bytes of a request's body, with the client's name that the door adds to those of KServe; a stream "
        "of gRPC as a whole has no limit",
    )
    max_header_kib: int = Field(60, ge=1, le=8192, description="KiB of a request's headers")
    max_headers: int = Field(100, ge=10, description="headers of a request")
    max_connections: int = Field(4096, ge=1, description="connections at once; one more is closed")
    max_streams: int = Field(1024, ge=1, description="requests at once of one connection of HTTP/2")
    max_memory_bytes: int = Field(
        1 << 30,
        ge=64 << 20,
        description="Envoy's own memory; near it, new requests are refused, and those that hold much of it are ended",
    )
    idle_timeout_s: Seconds = Field(300, description="a connection without a request for so long is closed")
    header_timeout_s: Seconds = Field(30, description="seconds that a request's headers may take")
    request_timeout_s: Seconds = Field(300, description="seconds that a whole request of HTTP/1 may take to arrive")
    stream_idle_timeout_s: Seconds = Field(
        3600, description="a request in which nothing moves, in either direction, for so long is ended"
    )
    client_timeout_s: Seconds = Field(
        60, description="a client that takes nothing of what waits for it for so long loses its connection"
    )
    ab: VariantSettings = VariantSettings()
    behind_a_door: bool = Field(
        False,
        description="whether another door stands before this one: a request that its server cannot take gets 503 at "
        "once, `retries` does not count, and that door sends it to another server",
    )

    @property
    def asks(self) -> bool:
        """Whether clients need a key or a token."""
        return self.api_keys_file is not None or self.jwt.jwks_file is not None

    @model_validator(mode="after")
    def _asks_for_one_thing(self) -> DoorSettings:
        if self.api_keys_file is not None and self.jwt.jwks_file is not None:
            raise ValueError("`api_keys_file` and `jwt.jwks_file` exclude each other: both are `Authorization: Bearer`")
        if not self.enabled and (given := self.model_fields_set - {"enabled"}):
            raise ValueError(f"`{min(given)}` needs `enabled: true`")
        return self

    def located(self, place: Callable[[Path], Path]) -> DoorSettings:
        """Return the settings with each path as ``place`` returns it."""
        if not self.enabled:
            return self

        def files(section: Section) -> dict[str, Path | None]:
            given = ((name, getattr(section, name)) for name in type(section).model_fields)
            return {
                name: value if str(value) == STANDARD_OUTPUT else place(value)
                for name, value in given
                if isinstance(value, Path)
            }

        inner = {name: getattr(self, name) for name in ("tls", "jwt")}
        moved = {name: section.model_copy(update=files(section)) for name, section in inner.items()}
        return self.model_copy(update=files(self) | moved)
