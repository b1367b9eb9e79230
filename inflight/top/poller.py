"""Polls a running server: the engine's snapshot over gRPC or HTTP, and the page of metrics over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from inflight.addresses import direct_mounts, in_url, tls_context
from inflight.client.errors import RequestTimeout, ServerUnreachable
from inflight.client.transport import find_problem, inspect, make_transport, parse_address
from inflight.contract import ENGINE
from inflight.engine.snapshot import Snapshot
from inflight.errors import EngineFailure, InflightError, NotFound

PATIENCE_S = 3.0
"""What one poll of many may take: the screen reports a server that hangs, and does not wait for it."""
ONCE_PATIENCE_S = 10.0
"""What one poll may take where no other follows: on a busy machine an answer may take seconds to come and go."""
DEFAULT_METRICS_PORT = 8002

Buckets = dict[float, float]
"""Upper bound to the number of observations up to it; the last bound is infinite."""


class Page:
    """The samples of a server's Prometheus page; what they mean is not known here."""

    def __init__(self, text: str) -> None:
        """
        Raises:
            EngineFailure: it is not a page of metrics.
        """
        self._samples: defaultdict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        # Without the comments, names stay as they are: the parser renames counters that do not end in `_total`, and
        # Triton has the stages' histograms as counters, one for each of `_bucket`, `_sum` and `_count`.
        lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
        try:
            for family in text_string_to_metric_families(lines):
                for sample in family.samples:
                    self._samples[sample.name].append((sample.labels, sample.value))
        except ValueError as error:
            raise EngineFailure(f"it is not a page of metrics: {error}") from None

    def value(self, name: str, **labels: str) -> float | None:
        """Return the sum of the samples of this name that have these labels; None where there are none."""
        found = [
            value for have, value in self._samples.get(name, ()) if all(have.get(k) == v for k, v in labels.items())
        ]
        return sum(found) if found else None

    def buckets(self, name: str) -> Buckets:
        """Return a histogram's cumulative counts by upper bound, over all its series; empty where there is none."""
        counts: defaultdict[float, float] = defaultdict(float)
        for labels, value in self._samples.get(f"{name}_bucket", ()):
            counts[float(labels["le"])] += value
        return dict(sorted(counts.items()))


@dataclass(frozen=True, slots=True)
class Poll:
    """What a server said at one moment. Either half may be missing: then there is the reason."""

    at_s: float
    """``time.monotonic()`` when the page came, or why not: rates are taken over it."""
    snapshot: Snapshot | InflightError
    page: Page | InflightError

    @property
    def failed(self) -> bool:
        """Whether there is nothing to show."""
        return isinstance(self.snapshot, InflightError) and isinstance(self.page, InflightError)


class ServerPoller:
    """Polls one server."""

    def __init__(self, url: str, metrics: str | None, patience_s: float = PATIENCE_S) -> None:
        """
        Args:
            url: of gRPC, or of HTTP if it says so.
            metrics: ``host:port`` of the metrics; None: the host of ``url``, port 8002.
            patience_s: seconds that one poll may take.

        Raises:
            InvalidRequest: either is no address.
            UnsupportedFeature: ``url`` is of gRPC, whose libraries are not installed.
        """
        self._address = parse_address(url)
        if metrics is not None:
            parse_address(metrics, "http", "--metrics", ("http", "https"))
        self.url = url
        self.metrics = f"{in_url(self._address.host)}:{DEFAULT_METRICS_PORT}" if metrics is None else metrics
        self._transport = make_transport(self._address.scheme, url, ENGINE, patience_s)
        self._http = httpx.AsyncClient(timeout=patience_s, mounts=direct_mounts(self.metrics), verify=tls_context())
        self._patience_s = patience_s

    async def poll(self) -> Poll:
        """Ask for both, at once."""

        async def timed_page() -> tuple[float, Page | InflightError]:
            page = await self._page()
            return time.monotonic(), page

        snapshot, (at_s, page) = await asyncio.gather(self._snapshot(), timed_page())
        return Poll(at_s, snapshot, page)

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()
        await self._http.aclose()

    async def _snapshot(self) -> Snapshot | InflightError:
        try:
            return Snapshot.from_json(await asyncio.wait_for(inspect(self._transport, self.url), self._patience_s))
        except TimeoutError:
            return RequestTimeout(f"{self.url}: no snapshot within {self._patience_s:g} s")
        except (EngineFailure, NotFound, ServerUnreachable) as error:  # not what the server says, or not of itself
            return await find_problem(self._address, ENGINE, self._transport) or error
        except InflightError as error:
            return error

    async def _page(self) -> Page | InflightError:
        url = f"{self.metrics if '://' in self.metrics else f'http://{self.metrics}'}/metrics"
        try:
            response = await self._http.get(url)
            if response.status_code != httpx.codes.OK:
                return ServerUnreachable(f"{url} answers {response.status_code}")
            return Page(response.text)
        except InflightError as error:
            return type(error)(f"{url}: {error}")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return ServerUnreachable(f"{url}: {error or type(error).__name__}")
