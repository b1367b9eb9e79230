"""The siege: hostile requests over all protocols at once, beside neighbours whose answers have to stay right.

Request number ``i`` follows from the seed and ``i`` alone, so that each can be sent again by itself.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import grpc

from benchmarks.hostile.over_gateway import gateway_attack
from benchmarks.hostile.over_grpc import GrpcAttack, grpc_attack
from benchmarks.hostile.over_http import HttpAttack, http_attack
from benchmarks.hostile.sending import (
    ANSWERED,
    CLOSED,
    FAILED,
    PATIENCE_S,
    REFUSED,
    SILENT,
    Answer,
    over_grpc,
    over_http,
)
from benchmarks.hostile.target import Holding, Places, Target
from benchmarks.result import Result, Row
from inflight.addresses import read_directly
from inflight.client import Client, GenerateOptions
from inflight.client.transport import Address
from inflight.errors import EngineFailure, InflightError

_ATTACKERS, _NEIGHBOURS = 4, 2
_SETTLED, _GROWTH = 2000, 1.5
"""So many requests have filled the stacks and heaps that stay filled: more memory than so many times that is a leak."""
_DESCRIPTORS = 64
"""How many more there may be at the end than after half: connections come and go."""
_TOLD = ("Traceback", ".py", "its log says why")
"""What no client should be told."""
_PROMPT = "What is in-flight batching?"
_SAMPLES = 20


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
    held: list[Holding] = field(default_factory=list)
    """What the processes held, at each twentieth of the requests."""
    left: float = 0
    """Requests that the server still had in flight at the end."""
    failed: dict[str, list[int]] = field(default_factory=dict)
    """The numbers of requests that failed, by the kind of request and what was said."""
    tracebacks: int = 0
    """In the logs, of this time."""
    door: bool = False
    """Whether the requests are sent to a door."""

    @property
    def requests(self) -> int:
        """How many have been sent."""
        return sum(counts.total() for counts in self.outcomes.values())

    def flaws(self) -> list[str]:
        """Return what should not have been, a line each."""
        flaws = [f"request {number} got no answer in {PATIENCE_S:.0f} s" for number in self.silent]
        flaws += [f"a client was told: {text[:300]}" for text in self.told]
        flaws += [f"a neighbour got: {text[:300]}" for text in self.wrong]
        flaws += [f"request {numbers[0]}, {gist}" for gist, numbers in self.failed.items() if "gateway: 5" in gist]
        flaws += [f"the logs have {self.tracebacks} tracebacks more"] if self.tracebacks else []
        if self.requests >= _SETTLED:
            half, end = self.held[len(self.held) // 2], self.held[-1]
            if end.memory > _GROWTH * half.memory:
                flaws.append(f"memory has grown more than {_GROWTH}-fold in the second half")
            if end.files > half.files + _DESCRIPTORS:
                flaws.append(f"{end.files - half.files} descriptors more than after half are open")
        return flaws + ([f"{self.left:.0f} requests are still in flight"] if self.left else [])

    def note(self, number: int, kind: str, answer: Answer) -> None:
        """Note what came of a request."""
        self.outcomes.setdefault(kind, Counter())[answer.outcome] += 1
        if answer.outcome == SILENT:
            self.silent.append(number)
        if answer.outcome == FAILED:
            self.failed.setdefault(f"{kind}: {answer.gist}", []).append(number)
        if any(part in answer.text for part in _TOLD):
            self.told.append(f"{answer.text} (request {number}, {kind})")


def besiege(places: Places, requests: int, seed: int, first: int, say: Callable[[str], object]) -> Siege:
    """Send the requests from number ``first`` on: over HTTP, gRPC and, where there is a gateway, to it, in turn.

    Raises:
        EngineFailure: a process of the server ended.
    """
    target, lock = Target(places), threading.Lock()
    siege = Siege(door=target.is_door)
    model = _model_of(places.gateway) if places.gateway else ""
    channel = grpc.insecure_channel(places.grpc.place, options=[("grpc.max_send_message_length", -1)])

    def send(number: int) -> None:
        if target.gone():
            return
        kind, answer = _send(places, channel, model, seed, number)
        with lock:
            siege.note(number, kind, answer)
            done = siege.requests
            if done * _SAMPLES // requests > (done - 1) * _SAMPLES // requests:
                siege.held.append(target.holding())
                say(f"{done:,} of {requests:,} requests, {siege.held[-1]}, {siege.right:,} right answers beside them")

    with channel, _neighbours(places.grpc, siege), ThreadPoolExecutor(_ATTACKERS) as attackers:
        for result in [attackers.submit(send, number) for number in range(first, first + requests)]:
            result.result()
    if gone := target.gone():
        pids = ", ".join(map(str, gone))
        raise EngineFailure(f"after {siege.requests:,} requests process {pids} of the server has ended")
    siege.left = target.requests_left(60)
    siege.tracebacks = target.new_tracebacks()
    return siege


def _model_of(gateway: Address) -> str:
    return str(json.loads(read_directly(f"{gateway.url}/v1/models", timeout_s=60))["data"][0]["id"])


def _send(places: Places, channel: grpc.Channel, model: str, seed: int, number: int) -> tuple[str, Answer]:
    """Send request ``number``; return its kind, and what came of it."""
    random = Random(f"{seed} {number}")
    if places.gateway is not None and number % 3 == 2:
        to_gateway = gateway_attack(random, model)
        return to_gateway.kind, over_http(places.gateway, to_gateway)
    if number % (2 if places.gateway is None else 3) == 0:
        to_triton: HttpAttack = http_attack(random)
        return to_triton.kind, over_http(places.http, to_triton)
    call: GrpcAttack = grpc_attack(random)
    return call.kind, over_grpc(channel, call)


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


def siege_results(siege: Siege) -> list[Result]:
    """Return what came of each kind of request, and every distinct answer that says that the server has failed."""
    kinds = (ANSWERED, REFUSED, FAILED, CLOSED, SILENT)
    rows: list[Row] = []
    for kind, counts in sorted(siege.outcomes.items()):
        rows.append({"kind": kind, "requests": counts.total(), **{name: counts[name] for name in kinds}})
    held = siege.held
    least, most = min(one.shared for one in held), max(one.shared for one in held)
    name, through = ("-door", " through the door") if siege.door else ("", "")
    finding = (
        f"{siege.requests:,} requests over every protocol{through}: the same processes serve to the end, and "
        f"{siege.right:,} answers of neighbours meanwhile are right, {len(siege.wrong)} wrong. "
        f"{siege.left:.0f} requests are in flight afterwards, and the logs have {siege.tracebacks} tracebacks. All "
        f"processes together hold {held[0]} after a twentieth; {held[len(held) // 2]} after half; {held[-1]} at the "
        f"end. Shared memory was between {least / 2**20:,.0f} and {most / 2**20:,.0f} MiB. The largest step of memory "
        f"from twentieth to twentieth in the second half is {_largest_step(held):,.0f} MiB. Failed: Triton answers 500 "
        "or INTERNAL to what it cannot parse; closed: a connection whose bytes are no HTTP request."
    )
    failures: list[Row] = [
        {"request and answer": gist.replace("|", "/"), "requests": len(numbers), "first": numbers[0]}
        for gist, numbers in sorted(siege.failed.items())
    ]
    told = f"{len(failures)} distinct answers with a status of 500, 502 or above 504, or INTERNAL or UNKNOWN."
    return [
        Result(f"hostile{name}", f"Hostile requests{through}", finding, rows),
        Result(f"failures{name}", f"Every distinct failure that a client was told{through}", told, failures),
    ]


def _largest_step(held: list[Holding]) -> float:
    late = held[len(held) // 2 :]
    return max((after.memory - before.memory for before, after in pairwise(late)), default=0) / 2**20
