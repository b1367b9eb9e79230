"""ServerSettings: where a server listens, and how long its starts and ends may take."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from inflight.settings.section import Section

OperatorsApi = Literal["shared-memory", "trace", "logging"]
"""Parts of Triton's API that no request needs: who registers memory, or changes what is logged, rules the server."""


class ServerSettings(Section):
    """Where the server listens."""

    host: str = Field("127.0.0.1", description="address to bind")
    http_port: int = Field(8000, ge=1, le=65535, description="HTTP port")
    grpc_port: int = Field(8001, ge=1, le=65535, description="gRPC port")
    metrics_port: int = Field(8002, ge=1, le=65535, description="Prometheus metrics port")
    status_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="port of /live, /ready, /status and /metrics of `inflight serve` itself, which answers while the "
        "server is away; of /live and /ready alone where clients need keys, tokens or certificates; null: only the "
        "door asks, on a port of this machine alone",
    )
    start_timeout_s: int | None = Field(
        None,
        ge=1,
        description="seconds until every stage must be ready; null: 3600 with TensorRT-LLM, which loads, compiles and "
        "tunes first, and 600 with any other engine",
    )
    exit_timeout_s: int = Field(30, ge=1, description="seconds that running requests get at shutdown")
    drain_delay_s: float = Field(
        0,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="seconds from SIGTERM, when /ready says 503, until no more requests are taken: a load balancer "
        "needs them to notice",
    )
    open_apis: tuple[OperatorsApi, ...] = Field(
        (), description="operators' parts of Triton's API that anyone who reaches the ports may use; closed otherwise"
    )
    hang_timeout_s: float | None = Field(
        60,
        ge=5,
        le=3600,
        allow_inf_nan=False,
        description="a stage that waits in one step or call for so long hangs, and so does a server that answers "
        "nothing on its streams for so long; the server is started again. A stage that computes gets ten times as "
        "long. null: whatever stands still is left alone, for debuggers",
    )
