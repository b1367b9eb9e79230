"""What tests ask a running Prometheus, over its HTTP API."""

from __future__ import annotations

import math
from typing import Any

import httpx


class Prometheus:
    """One Prometheus server on this machine."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **parameters: str | float) -> Any:
        """Return ``data`` of an answer of ``/api/v1/<path>``.

        Raises:
            httpx.HTTPError: Prometheus cannot be reached.
            ValueError: the answer is not JSON, such as while Prometheus starts.
        """
        body = httpx.get(f"{self._url}/api/v1/{path}", params=parameters, timeout=60, trust_env=False).json()
        assert body["status"] == "success", body
        return body["data"]

    def instant(self, expr: str, time: float | None = None) -> list[dict[str, Any]]:
        """Return the samples of an expression, now or at ``time``, each with ``metric`` and ``value``."""
        at = {} if time is None else {"time": time}
        result: list[dict[str, Any]] = self.get("query", query=expr, **at)["result"]
        return result

    def has_data(self, expr: str, start: float, end: float) -> bool:
        """Whether an expression has a finite value at a full second between two times since the epoch."""
        result = self.get("query_range", query=expr, start=start, end=end, step=1)["result"]
        values = [float(value) for series in result for _, value in series["values"]]
        return any(math.isfinite(value) for value in values)
