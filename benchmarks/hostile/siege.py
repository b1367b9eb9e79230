"""The siege: hostile requests over both protocols at once, beside neighbours whose answers have to stay right.

Request number ``i`` follows from the seed and ``i`` alone, so that each can be sent again by itself.
"""

from __future__ import annotations

import http.client
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

import grpc
from tritonclient.grpc import service_pb2

from benchmarks.hostile.over_grpc import GrpcAttack, grpc_attack
from benchmarks.hostile.over_http import HttpAttack, http_attack
from benchmarks.hostile.target import Places, Target
from benchmarks.result import Result
from inflight.client import Client, GenerateOptions
from inflight.client.transport import Address
from inflight.errors import EngineFailure, InflightError

ANSWERED, REFUSED, FAILED, CLOSED, SILENT = "answered", "refused", "failed", "closed", "silent"
"""What comes of a request: a result; an error that is the client's; one that is the server's; no answer; nothing."""
PATIENCE_S = 300.0
_ATTACKERS, _NEIGHBOURS = 4, 2
_SETTLED, _GROWTH = 2000, 1.5
"""So many requests have filled the stacks and heaps that stay filled: more memory than so many times that is a leak."""
_TOLD = ("Traceback", ".py", "its log says why")
"""What no client should be told."""
_PROMPT = "What is in-flight batching?"


@dataclass
class Siege:
    """What has been seen so far."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    """The outcomes of each kind of request."""
    told: list[str] = field(default_factory=list)
    """What was told that should not have been."""
    silent: list[int] = field(default_factory=list)
    """Requests that got no answer in time."""
    right: int = 0
    """Answers that the neighbours got, equal to their first."""
    wrong: list[str] = field(default_factory=list)
    """Other answers, and errors."""
    memory: list[int] = field(default_factory=list)
    """Bytes, at each twentieth of the requests."""
    left: float = 0
    """Requests that the server still had in flight at the end."""

    @property
    def requests(self) -> int:
        """How many have been sent."""
        return sum(counts.total() for counts in self.outcomes.values())

    def flaws(self) -> list[str]:
        """Return what should not have been, a line each."""
        flaws = [f"request {number} got no answer in {PATIENCE_S:.0f} s" for number in self.silent]
        flaws += [f"a client was told: {text[:300]}" for text in self.told]
        flaws += [f"a neighbour got: {text[:300]}" for text in self.wrong]
        if self.requests >= _SETTLED and self.memory[-1] > _GROWTH * self.memory[len(self.memory) // 2]:
            flaws.append(f"memory has grown more than {_GROWTH}-fold in the second half")
        return flaws + ([f"{self.left:.0f} requests are still in flight"] if self.left else [])


def besiege(places: Places, requests: int, seed: int, first: int, say: Callable[[str], object]) -> Siege:
    """Send the requests from number ``first`` on, those with even numbers over HTTP, the others over gRPC.

    Raises:
        EngineFailure: a process of the server ended.
    """
    target, siege, lock = Target(places), Siege(), threading.Lock()
    channel = grpc.insecure_channel(places.grpc.place, options=[("grpc.max_send_message_length", -1)])

    def send(number: int) -> None:
        if target.gone():
            return
        random = Random(f"{seed} {number}")
        attack = http_attack(random) if number % 2 == 0 else grpc_attack(random)
        outcome, text = (
            _over_http(places.http, attack) if isinstance(attack, HttpAttack) else _over_grpc(channel, attack)
        )
        with lock:
            siege.outcomes.setdefault(attack.kind, Counter())[outcome] += 1
            if outcome == SILENT:
                siege.silent.append(number)
            if any(part in text for part in _TOLD):
                siege.told.append(f"{text} (request {number}, {attack.kind})")
            done = siege.requests
            if done * 20 // requests > (done - 1) * 20 // requests:
                siege.memory.append(target.memory())
                memory = f"{siege.memory[-1] / 2**20:,.0f} MiB"
                say(f"{done:,} of {requests:,} requests, {memory}, {siege.right:,} right answers beside them")

    with channel, _neighbours(places.grpc, siege), ThreadPoolExecutor(_ATTACKERS) as attackers:
        for result in [attackers.submit(send, number) for number in range(first, first + requests)]:
            result.result()
    if gone := target.gone():
        pids = ", ".join(map(str, gone))
        raise EngineFailure(f"after {siege.requests:,} requests process {pids} of the server has ended")
    siege.left = target.requests_left(60)
    return siege


@contextmanager
def _neighbours(rpc: Address, siege: Siege) -> Iterator[None]:
    """Ask the same thing again and again meanwhile."""
    options, stop = GenerateOptions(max_tokens=8), threading.Event()
    with Client(rpc.url) as client:
        expected = client.generate(_PROMPT, options).text

    def ask() -> None:
        with Client(rpc.url) as client:
            while not stop.is_set():
                try:
                    text = client.generate(_PROMPT, options).text
                except InflightError as error:
                    siege.wrong.append(f"{type(error).__name__}: {error}")
                    return
                siege.right += text == expected
                if text != expected:
                    siege.wrong.append(text)

    with ThreadPoolExecutor(_NEIGHBOURS) as neighbours:
        asked = [neighbours.submit(ask) for _ in range(_NEIGHBOURS)]
        try:
            yield
        finally:
            stop.set()
            for one in asked:
                one.result()


def _over_http(address: Address, attack: HttpAttack) -> tuple[str, str]:
    """Return what came of it, and the beginning of the answer's text."""
    with socket.create_connection((address.host, address.port), timeout=PATIENCE_S) as connection:
        try:
            try:
                connection.sendall(attack.wire)
                if not attack.answered:
                    connection.shutdown(socket.SHUT_WR)
            except ConnectionError:
                pass  # refused before its end; the reason may have come
            response = http.client.HTTPResponse(connection)
            response.begin()
            text = response.read().decode(errors="replace")
        except TimeoutError:
            return SILENT, ""
        except (OSError, http.client.HTTPException, ValueError):
            return CLOSED, ""
    told = text if '"error"' in text else ""
    return _kind_of(response.status, told), told


def _kind_of(status: int, error: str) -> str:
    if status < 400:
        return REFUSED if error else ANSWERED
    return REFUSED if status < 500 or status == 501 else FAILED


def _over_grpc(channel: grpc.Channel, attack: GrpcAttack) -> tuple[str, str]:
    try:
        if not attack.streams:
            channel.unary_unary(attack.method)(attack.messages[0], timeout=PATIENCE_S, metadata=attack.metadata)
            return ANSWERED, ""
        call = channel.stream_stream(attack.method)(iter(attack.messages), timeout=PATIENCE_S, metadata=attack.metadata)
        errors = [service_pb2.ModelStreamInferResponse.FromString(message).error_message for message in call]
        return (REFUSED if any(errors) else ANSWERED), "\n".join(errors)
    except grpc.RpcError as error:
        code, text = error.code(), error.details() or ""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and text == "Deadline Exceeded":
            return SILENT, ""
        return (FAILED if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) else REFUSED), text


def siege_result(siege: Siege) -> Result:
    """Return what came of each kind of request."""
    kinds = (ANSWERED, REFUSED, FAILED, CLOSED, SILENT)
    rows: list[dict[str, float | str]] = []
    for kind, counts in sorted(siege.outcomes.items()):
        rows.append({"kind": kind, "requests": counts.total(), **{name: counts[name] for name in kinds}})
    memory = [f"{size / 2**20:,.0f}" for size in siege.memory]
    finding = (
        f"{siege.requests:,} requests, half over HTTP and half over gRPC: the same processes serve to the end, and "
        f"{siege.right:,} answers of neighbours meanwhile are right, {len(siege.wrong)} wrong. "
        f"{siege.left:.0f} requests are in flight afterwards. The server and its stages have {memory[0]} MiB of memory "
        f"after a twentieth, {memory[len(memory) // 2]} after half, {memory[-1]} at the end. Failed: Triton answers "
        "500 or INTERNAL to what it cannot parse; closed: a connection whose bytes are no HTTP request."
    )
    return Result("hostile", "Hostile requests", finding, rows)
