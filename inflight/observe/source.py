"""Looks at a running server: the engine's snapshot over gRPC or HTTP, and the page of metrics over HTTP."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import httpx

from inflight.addresses import direct_mounts, in_url, tls_context
from inflight.client.address import parse_address
from inflight.client.aio import transport_to
from inflight.client.errors import RequestTimeout, ServerUnreachable
from inflight.client.reach import find_problem
from inflight.client.request import Request
from inflight.client.transport import make_transport
from inflight.contract import ENGINE
from inflight.engine.snapshot import Snapshot
from inflight.errors import EngineFailure, InflightError, NotFound
from inflight.observe.page import Page

PATIENCE_S = 3.0
"""What one look of many may take: a server that hangs is told of, not waited for."""
ONCE_PATIENCE_S = 10.0
"""What one look may take where no other follows: on a busy machine an answer may take seconds to come and go."""
DEFAULT_METRICS_PORT = 8002
_METRICS_SCHEMES = ("http", "https")


@dataclass(frozen=True, slots=True)
class Look:
    """What a server said at one moment. Either half may be missing: then there is the reason."""

    at_s: float
    """``time.monotonic()`` when the page came, or why not: rates are taken over it."""
    snapshot: Snapshot | InflightError
    page: Page | InflightError

    @property
    def failed(self) -> bool:
        """Whether there is nothing to show."""
        return isinstance(self.snapshot, InflightError) and isinstance(self.page, InflightError)


class Source:
    """Looks at one server."""

    def __init__(self, url: str, metrics: str | None, patience_s: float = PATIENCE_S) -> None:
        """
        Args:
            url: of gRPC, or of HTTP if it says so.
            metrics: ``host:port`` of the metrics; None: the host of ``url``, port 8002.
            patience_s: seconds that one look may take.

        Raises:
            InvalidRequest: either is no address.
            UnsupportedFeature: ``url`` is of gRPC, whose libraries are not installed.
        """
        self._address = parse_address(url)
        if metrics is not None:
            parse_address(metrics, "http", "--metrics", _METRICS_SCHEMES)
        self.url = url
        self.metrics = f"{in_url(self._address.host)}:{DEFAULT_METRICS_PORT}" if metrics is None else metrics
        self._transport = make_transport(self._address.scheme, url, ENGINE, patience_s)
        self._http = httpx.AsyncClient(timeout=patience_s, mounts=direct_mounts(self.metrics), verify=tls_context())
        self._patience_s = patience_s

    async def look(self) -> Look:
        """Ask for both, at once."""
        snapshot, (at_s, page) = await asyncio.gather(self._snapshot(), self._timed_page())
        return Look(at_s, snapshot, page)

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()
        await self._http.aclose()

    async def _snapshot(self) -> Snapshot | InflightError:
        try:
            return Snapshot.from_json(await asyncio.wait_for(self._inspect(), self._patience_s))
        except TimeoutError:
            return RequestTimeout(f"{self.url}: no snapshot within {self._patience_s:g} s")
        except (EngineFailure, NotFound, ServerUnreachable) as error:  # not what the server says, or not of itself
            return await self._problem() or error
        except InflightError as error:
            return error

    async def _problem(self) -> InflightError | None:
        """Return why the engine cannot be asked; None: it can."""
        return await find_problem(self._address, ENGINE, self._transport, lambda other: transport_to(other, ENGINE))

    async def _inspect(self) -> str:
        # To the call's end: one that is left right after its answer can stay with Triton (2.51), and hold up its stop.
        answers = [outputs async for outputs in self._transport.replies(Request({"inspect": [True]}))]
        if not answers:
            raise EngineFailure(f"{self.url}: the answer has no snapshot")
        return str(answers[0]["snapshot"][0])

    async def _timed_page(self) -> tuple[float, Page | InflightError]:
        page = await self._page()
        return time.monotonic(), page

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
