"""Prometheus' HTTP API: what is asked of a running Prometheus, over its own paths."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import httpx

from inflight.addresses import direct_mounts, tls_context
from inflight.errors import InflightError

_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "y": 31536000}


class PrometheusError(InflightError):
    """A Prometheus that does not answer, refuses a query, or scrapes no server; the message is one line."""

    status, triton_code, label = "UNAVAILABLE", "UNAVAILABLE", "prometheus"


@dataclass(frozen=True)
class Series:
    """One series of a range: its labels, and values by times since the epoch; NaN and infinities are left out."""

    labels: dict[str, str]
    times: list[float]
    values: list[float]


class Prometheus:
    """One Prometheus server."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def get(self, path: str, **parameters: str | float) -> Any:
        """Return ``data`` of an answer of ``/api/v1/<path>``.

        Raises:
            PrometheusError: it cannot be reached, is not Prometheus, or refuses the query; in its words.
        """
        try:
            with httpx.Client(mounts=direct_mounts(self._url), timeout=60, verify=tls_context()) as client:
                body = client.get(f"{self._url}/api/v1/{path}", params=parameters).json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            said = f"{error}; name another with --prometheus"
            raise PrometheusError(f"{self._url} does not answer as Prometheus does: {said}") from None
        if not isinstance(body, dict) or body.get("status") != "success":
            said = body.get("error", "no reason given") if isinstance(body, dict) else "no reason given"
            raise PrometheusError(f"{self._url} refuses the query: {said}")
        return body["data"]

    def instant(self, expr: str, time: float | None = None) -> list[dict[str, Any]]:
        """Return the samples of an expression, now or at ``time``, each with ``metric`` and ``value``."""
        at = {} if time is None else {"time": time}
        result: list[dict[str, Any]] = self.get("query", query=expr, **at)["result"]
        return result

    def range(self, expr: str, start: float, end: float, step_s: float) -> list[Series]:
        """Return the series of an expression between two times since the epoch, a value each ``step_s`` seconds."""
        result = self.get("query_range", query=expr, start=start, end=end, step=step_s)["result"]
        return [series for one in result if (series := _series(one)).values]

    def scrape_interval_s(self, job: str) -> float:
        """Return how often a job is scraped, in seconds.

        Raises:
            PrometheusError: no target of that job is scraped.
        """
        targets = self.get("targets", state="active")["activeTargets"]
        intervals = [_duration_s(one["scrapeInterval"]) for one in targets if one["scrapePool"] == job]
        if not intervals:
            known = ", ".join(sorted({one["scrapePool"] for one in targets})) or "none"
            raise PrometheusError(f"{self._url} scrapes no target of the job {job!r}; its jobs: {known}")
        return max(intervals)


def _series(one: dict[str, Any]) -> Series:
    points = [(float(time), float(value)) for time, value in one["values"]]
    kept = [(time, value) for time, value in points if value - value == 0]
    return Series(one["metric"], [time for time, _ in kept], [value for _, value in kept])


def _duration_s(text: str) -> float:
    return sum(float(count) * _SECONDS[unit] for count, unit in re.findall(r"(\d+)(ms|[smhdwy])", text))
