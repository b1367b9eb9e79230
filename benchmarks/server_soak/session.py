"""One request of the soak, to its end; and what that end was."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from benchmarks.server_soak.traffic import Ask
from inflight.client.answer import Chunk, Collector, read_chunk
from inflight.client.transport import Transport, make_transport
from inflight.contract import ENGINE, ENSEMBLE
from inflight.errors import DeadlineExceeded, InflightError, InvalidRequest, UnsupportedFeature

_PATIENCE_S = 240.0
"""No request of the soak takes so long."""
_CONNECT_S = 10.0
SLOW_S = 0.1
"""What a client that reads slowly waits between two chunks."""
LEFT, WRONG = "left", "wrong"
"""A client that did not wait for the end; and every end that a request must not have."""


@dataclass
class End:
    """How a request ended."""

    how: str
    """A finish reason, "refused", ``LEFT``, or ``WRONG``."""
    detail: str = ""
    """What was wrong."""
    typed: bool = False
    """Whether the client got an error that says so."""
    received: list[dict[str, Any]] = field(default_factory=list)
    """What came, chunk by chunk, in short."""


class Clients:
    """The connections of the soak."""

    def __init__(self, host: str, grpc_port: int, http_port: int) -> None:
        self._transports: dict[str, Transport] = {
            "grpc": make_transport("grpc", f"{host}:{grpc_port}", ENSEMBLE, _CONNECT_S),
            "http": make_transport("http", f"{host}:{http_port}", ENSEMBLE, _CONNECT_S),
        }
        self._stop_url = f"http://{host}:{http_port}/v2/models/{ENGINE}/generate_stream"
        self._http = httpx.AsyncClient(timeout=_CONNECT_S, trust_env=False)

    async def close(self) -> None:
        """Close all connections."""
        for transport in self._transports.values():
            await transport.close()
        await self._http.aclose()

    async def send(self, ask: Ask) -> End:
        """Send a request, leave it if that is what its client does, and return how it ended."""
        collector, chunks = Collector(ask.request.sequences), list[Chunk]()
        stopper = asyncio.create_task(self._stop_later(ask)) if ask.leaves == "stops" else None
        stays = ask.stays_s if ask.leaves == "closes" else _PATIENCE_S
        try:
            await asyncio.wait_for(self._read(ask, collector, chunks), stays)
        except TimeoutError:
            end = End(LEFT) if ask.leaves == "closes" else End(WRONG, f"no end after {_PATIENCE_S:g} s")
        except (InflightError, ValueError) as error:
            end = _failed(ask, error)
        else:
            end = _ended(ask, chunks)
        finally:
            if stopper is not None:
                stopper.cancel()
                with suppress(asyncio.CancelledError):
                    await stopper
        if end.how == WRONG:
            end.received = [_in_short(chunk) for chunk in chunks]
        return end

    async def _read(self, ask: Ask, collector: Collector, chunks: list[Chunk]) -> None:
        replies = self._transports[ask.over].replies(ask.request)
        try:
            async for outputs in replies:
                chunk = read_chunk(outputs, ask.request.top_log_probs)
                chunks.append(chunk)
                collector.add(chunk)  # it checks that no text is missing
                await self._dawdle(ask)
        finally:
            await replies.aclose()

    async def _dawdle(self, ask: Ask) -> None:
        """Wait before the next chunk is read, where the client is a slow one."""
        if ask.reads_slowly:
            await asyncio.sleep(SLOW_S)

    async def _stop_later(self, ask: Ask) -> None:
        await asyncio.sleep(ask.stays_s)
        with suppress(httpx.TransportError):  # then the request goes on to its own end
            await self._http.post(self._stop_url, json={"id": ask.request.id, "stop": True})


def _ended(ask: Ask, chunks: list[Chunk]) -> End:
    """Return the end of a request whose responses came without an error: each sequence has one reason, at its end."""
    if ask.is_refused:
        return End(WRONG, "it was to be refused")
    reasons: list[str] = []
    for index in range(ask.request.sequences):
        of_one = [chunk.finish_reason for chunk in chunks if chunk.index == index]
        given = [reason for reason in of_one if reason]
        if len(given) != 1 or of_one[-1] is None:
            return End(WRONG, f"sequence {index} has the finish reasons {given} in {len(of_one)} responses")
        reasons += given
    return End(reasons[0])


def _failed(ask: Ask, error: Exception) -> End:
    if ask.is_refused and isinstance(error, InvalidRequest | UnsupportedFeature):
        return End("refused")
    if ask.kind == "deadline" and isinstance(error, DeadlineExceeded):
        return End("deadline")
    return End(WRONG, f"{type(error).__name__}: {error}", typed=True)


def _in_short(chunk: Chunk) -> dict[str, Any]:
    kept = {name: value for name, value in asdict(chunk).items() if name in ("index", "finish_reason", "start", "end")}
    return kept | {"text": chunk.text[:40]}
