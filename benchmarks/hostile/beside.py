"""Measures a neighbour's stream beside clients who send what is much work: gaps with them and without, in one run."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from benchmarks.hostile.pair import serving
from benchmarks.result import Result, Row
from inflight.client.transport import Address
from inflight.errors import EngineFailure

_AMBIGUOUS = 'root ::= root root | "a" | "b%d"'
_PROMPT_BYTES, _BODY_BYTES, _VALUES = 4_100_000, 15_000_000, 2_200_000
_PATIENCE_S = 120.0
_TOKENS = 60
_NICE = 19
_NOBODY = "nobody"
_CHAT = [{"role": "user", "content": "What is a paged KV cache?"}]
MOST = 1.5
"""How much longer a neighbour's gaps may be beside them than without them."""


@dataclass(frozen=True)
class Work:
    """A kind of request, which each of so many clients sends again and again."""

    name: str
    clients: int
    body: Callable[[str, int], bytes]
    """Makes a body, given the model's name and the number of the client."""


def _chat(model: str, **fields: object) -> bytes:
    return json.dumps({"model": model, "messages": _CHAT, "max_tokens": 300, "temperature": 0, **fields}).encode()


def _escaped_values(model: str, _: int) -> bytes:
    values = "1" + "\\u002c1" * _VALUES
    return _chat(model, guided_json="MARK").replace(b"MARK", f'{{\\"enum\\":[{values}]}}'.encode())


_HOSTILE = (
    "{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}",
    "{% for _ in range(99999) %}{% set text = ('a' * 35 * 10**5).find('a' * 10**5 ~ 'b' ~ 'a' * 10**5) %}{% endfor %}",
    "{% for _ in range(99999) %}{% set text = ('ß' * 10**6) | upper %}{% endfor %}",
    "{% for _ in range(99999) %}{% set text = ('a' * 8 * 10**5).rsplit('a' ~ 'b' ~ 'a' * 98) %}{% endfor %}",
    "{% for _ in range(99999) %}{% set list = range(30000) | map('string') | sort %}{% endfor %}",
    "{% for _ in range(99999) %}{% set text = (['ab'] * 200000) | tojson %}{% endfor %}",
)
"""Templates that take all that they may, each by what takes longest in one step."""
_TEMPLATE = "".join(
    f"{{% if messages[0].content == 'hostile {number}' %}}{one}{{% endif %}}" for number, one in enumerate(_HOSTILE)
)


def _rendered(model: str, number: int) -> bytes:
    return _chat(model, messages=[{"role": "user", "content": f"hostile {number}"}])


WORKS = (
    Work("30 ambiguous grammars", 30, lambda model, number: _chat(model, ebnf=_AMBIGUOUS % number)),
    Work("50 ambiguous grammars", 50, lambda model, number: _chat(model, ebnf=_AMBIGUOUS % number)),
    Work(
        "prompts of 4 MB", 2, lambda model, _: _chat(model, messages=[{"role": "user", "content": "a" * _PROMPT_BYTES}])
    ),
    Work("bodies of 15 MB, one string", 2, lambda model, _: _chat(model, guided_json="a" * _BODY_BYTES)),
    Work("bodies of 15 MB, 2.2 million values", 2, _escaped_values),
    Work("hostile templates", len(_HOSTILE), _rendered),
)


@dataclass
class _Felt:
    """A neighbour's gaps between tokens and times to the first, and how the others were answered."""

    gaps_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    longest_ms: list[float] = field(default_factory=list)
    """The longest gap of each round."""
    answers: Counter[int] = field(default_factory=Counter)


def _stream(gateway: Address, model: str, felt: _Felt) -> None:
    """Take one stream, and note the time to its first event and between two events."""
    connection = http.client.HTTPConnection(gateway.host, gateway.port, timeout=_PATIENCE_S)
    try:
        last = began = time.monotonic()
        body = _chat(model, stream=True, max_tokens=_TOKENS, ignore_eos=True)
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise EngineFailure(f"a neighbour got {response.status}: {response.read()[:300]!r}")
        for line in response:
            if line.startswith(b"data: "):
                now = time.monotonic()
                (felt.first_ms if last == began else felt.gaps_ms).append((now - last) * 1e3)
                last = now
    finally:
        connection.close()


@contextmanager
def _clients(gateway: Address, model: str, number: int, answers: Counter[int]) -> Iterator[None]:
    """Have the clients of a work send, from a process of their own; those that wait at the end are left."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_attack, args=(gateway, model, number, theirs), daemon=True)
    process.start()
    try:
        ours.recv()
        yield
        ours.send(None)
        answers.update(ours.recv())
    finally:
        process.kill()
        process.join()


def _attack(gateway: Address, model: str, number: int, connection: Connection) -> None:
    """Send until the end is told. It is less urgent than all else, as clients of other machines take none of this one's
    processors."""
    os.nice(_NICE)
    work, answers, ends = WORKS[number], Counter[int](), threading.Event()

    def send(body: bytes) -> None:
        while not ends.is_set():
            client = http.client.HTTPConnection(gateway.host, gateway.port, timeout=_PATIENCE_S)
            try:
                client.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
                response = client.getresponse()
                response.read()
                answers[response.status] += 1
            except OSError:
                answers[0] += not ends.is_set()
            finally:
                client.close()

    bodies = [work.body(model, number) for number in range(work.clients)]
    connection.send(None)
    for body in bodies:
        threading.Thread(target=send, args=(body,), daemon=True).start()
    connection.recv()
    ends.set()
    connection.send(answers)


def _feel(gateway: Address, model: str, seconds: float, felt: _Felt) -> None:
    """Take streams for so long: a round."""
    known, until = len(felt.gaps_ms), time.monotonic() + seconds
    while time.monotonic() < until:
        _stream(gateway, model, felt)
    felt.longest_ms.append(max(felt.gaps_ms[known:], default=0.0))


def beside(seconds: float, rounds: int, say: Callable[[str], object]) -> Result:
    """Measure a neighbour for ``seconds`` without the others, and then beside each kind of them, in several rounds.

    Raises:
        EngineFailure: the server does not serve.
    """
    felt = {name: _Felt() for name in (_NOBODY, *(work.name for work in WORKS))}
    with serving(door=False, template=_TEMPLATE) as serve:
        gateway, model = serve.front.places.gateway, serve.front.model
        assert gateway is not None, "the pair has a gateway"
        _feel(gateway, model, seconds, _Felt())
        for _ in range(rounds):
            _feel(gateway, model, seconds, felt[_NOBODY])
            for number, work in enumerate(WORKS):
                with _clients(gateway, model, number, felt[work.name].answers):
                    _feel(gateway, model, seconds, felt[work.name])
                serve.wait_until_served()
            for name, one in felt.items():
                say(f"{name}: {one.longest_ms[-1]:.0f} ms")
    rows = [_row(name, one) for name, one in felt.items()]
    return Result("beside", "What a neighbour feels", finding(rows), rows)


def _row(name: str, felt: _Felt) -> Row:
    gaps = sorted(felt.gaps_ms) or [0.0]
    return {
        "beside": name,
        "gap_ms": round(statistics.fmean(gaps), 2),
        "p50_ms": round(gaps[len(gaps) // 2], 2),
        "p99_ms": round(gaps[len(gaps) * 99 // 100], 1),
        "longest_ms": round(statistics.median(felt.longest_ms), 1),
        "worst_ms": round(gaps[-1], 1),
        "first_token_ms": round(max(felt.first_ms, default=0.0), 1),
        "answers": ", ".join(f"{count} x {status}" for status, count in sorted(felt.answers.items())),
    }


def finding(rows: list[Row]) -> str:
    """Return what the rows show."""
    quiet, *others = rows
    longer = [
        f"{row['beside']} ({name}: {float(row[key]) / max(0.01, float(quiet[key])):.1f} times)"
        for row in others
        for key, name in (("p50_ms", "median"), ("longest_ms", "longest gap"))
        if float(row[key]) > MOST * float(quiet[key])
    ]
    told = f"more than {MOST:g} times as long as without them" + (": " + "; ".join(longer) if longer else " nowhere")
    return (
        "Streams of the demo over OpenAI's API, one after the other, beside clients who send the same again and again, "
        "from a process of the lowest priority, since clients of other machines take none of this one's processors. "
        f"Their gaps are {told}. All columns are of the streams, but for the answers that the others got: longest is "
        "the median of each round's longest gap, worst the longest of all, and first token the longest time to one."
    )
