"""ObservabilitySettings: a deployment's metrics, traces, logs and snapshots."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from inflight.settings.section import ReadBy, Section

RESTARTS_VARIABLE = "INFLIGHT_RESTARTS"
"""JSON: how often `inflight serve` has started this server again, by cause; for the stages' metrics."""
METRICS_VARIABLE = "INFLIGHT_METRICS"
"""``off`` tells the stages to make no metrics; set by ``inflight serve``, whose --no-metrics overrides it."""
LOG_FORMAT_VARIABLE = "INFLIGHT_LOG_FORMAT"
"""Tells the stages the format of their log lines; set by ``inflight serve``, whose --log-format overrides it."""
_OWN_ENGINE_STAGE = ReadBy(
    ("pytorch", "trtllm", "replay"),
    "`{key}` needs Inflight's engine stage: `engine.kind:` pytorch, trtllm or replay",
    off_too=False,
)


class ObservabilitySettings(Section):
    """Metrics, traces and logs."""

    metrics: bool = Field(True, description="serve Prometheus metrics on server.metrics_port")
    inspection: Annotated[bool, _OWN_ENGINE_STAGE] = Field(
        True, description="answer `inspect` requests of `inflight top`: ids, lengths and times of running requests"
    )
    trace_endpoint: Annotated[str | None, _OWN_ENGINE_STAGE] = Field(
        None, description="URL that OTLP traces are posted to, such as http://127.0.0.1:4318/v1/traces; null: no traces"
    )
    trace_sample_ratio: float = Field(
        1.0, ge=0, le=1, description="share of the requests traced whose client has not decided by its `traceparent`"
    )
    log_format: Literal["text", "json"] = Field("text", description="of the stages' log lines")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="of the stages' log lines")
    log_requests: Annotated[Literal["debug", "info"] | None, _OWN_ENGINE_STAGE] = Field(
        None, description="level of the line that is logged for each finished request; null: none"
    )

    @field_validator("trace_endpoint")
    @classmethod
    def _is_a_url(cls, value: str | None) -> str | None:
        if value is not None:
            parts = urlsplit(value)
            if any(character.isspace() for character in value):  # of which `urlsplit` drops some
                raise ValueError("it must be a URL without whitespace, such as http://127.0.0.1:4318/v1/traces")
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
                raise ValueError("it must be an http or https URL, such as http://127.0.0.1:4318/v1/traces")
        return value
