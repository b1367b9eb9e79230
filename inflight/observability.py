"""ObservabilitySettings: what a deployment shows of itself, in metrics, traces and logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

RESTARTS_VARIABLE = "INFLIGHT_RESTARTS"
"""JSON: how often `inflight serve` has started this server again, by cause; for the stages' metrics."""
METRICS_VARIABLE = "INFLIGHT_METRICS"
"""``off`` tells the stages to make no metrics; set by ``inflight serve``, whose --no-metrics has the last word."""
LOG_FORMAT_VARIABLE = "INFLIGHT_LOG_FORMAT"
"""Tells the stages the format of their log lines; set by ``inflight serve``, whose --log-format has the last word."""


class ObservabilitySettings(BaseModel):
    """Metrics, traces and logs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metrics: bool = Field(True, description="serve Prometheus metrics on server.metrics_port")
    inspection: bool = Field(
        True, description="answer `inspect` requests of `inflight top`: ids, lengths and times of running requests"
    )
    trace_endpoint: str | None = Field(
        None, description="URL that OTLP traces are posted to, such as http://127.0.0.1:4318/v1/traces; null: no traces"
    )
    trace_sample_ratio: float = Field(
        1.0, ge=0, le=1, description="share of the requests traced whose client has not decided by its `traceparent`"
    )
    log_format: Literal["text", "json"] = Field("text", description="of the stages' log lines")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="of the stages' log lines")
    log_requests: Literal["debug", "info"] | None = Field(
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

    def unread(self, engine: str) -> Iterator[tuple[str, str]]:
        """Yield the settings that are given and would have no effect with this engine, each with what it needs."""
        if "trace_sample_ratio" in self.model_fields_set and self.trace_endpoint is None:
            yield "trace_sample_ratio", "`observability.trace_endpoint`"
        if self.log_requests is not None and _level(self.log_requests) < _level(self.log_level):
            yield "log_requests", f"`observability.log_level: {self.log_requests}`; it is {self.log_level}"
        if engine == "tensorrtllm":
            for name in ("trace_endpoint", "log_requests", "inspection"):
                if name in self.model_fields_set and getattr(self, name):
                    yield name, "Inflight's engine stage: `engine.kind:` pytorch, trtllm or replay"


def _level(name: str) -> int:
    return int(getattr(logging, name.upper()))
