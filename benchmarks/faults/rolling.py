"""An update of two replicas, one after the other, under load; and the same with replicas that are killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.faults.load import Load
from benchmarks.faults.replicas import Replica, two_replicas
from benchmarks.result import Result, Row

STOPPED = "SIGTERM"
_BEFORE_S, _AFTER_S = 2.0, 2.0


@dataclass(frozen=True)
class Way:
    """One way for a replica to go away."""

    name: str
    go: Callable[[Replica], float]
    resume: bool
    spares: Sequence[str] = ()
    """The kinds of requests that may fail, since what holds their connections is gone."""


WAYS = (
    Way(STOPPED, Replica.stop, resume=False),
    Way("SIGKILL of Triton", Replica.kill_triton, resume=True),
    Way("SIGKILL of all", Replica.kill_all, resume=True, spares=("KServe over HTTP", "OpenAI", "OpenAI, SSE")),
)


def measure_rolling(clients: int, say: Callable[[str], object]) -> Iterator[Row]:
    """Update two replicas in each way, one after the other, and yield a row for each replica and way.

    Args:
        clients: of each kind of request.
        say: gets a line after each.

    Raises:
        InflightError: the replicas could not be served.
    """
    with two_replicas() as (address, replicas):
        for way in WAYS:
            for place, replica in enumerate(replicas, 1):
                row = asyncio.run(_update(way, place, replica, Load(address, way.resume), clients))
                say(f"{way.name} of replica {place}: {row['failed']} of {row['requests']} failed: {row['how']}")
                yield row


async def _update(way: Way, place: int, replica: Replica, load: Load, clients: int) -> Row:
    ends = len(replica.served.codes)
    async with load.running(clients):
        await asyncio.sleep(_BEFORE_S)
        stopped_s = await asyncio.to_thread(way.go, replica)
        ready_s = await asyncio.to_thread(replica.wait_ready)
        await asyncio.sleep(_AFTER_S)
    stopped = way.name == STOPPED
    return {
        "way": way.name,
        "replica": place,
        "clients resume": "gRPC's" if way.resume else "no",
        "requests": load.asked.total(),
        "failed": load.failed.total(),
        "not as promised": sum(count for kind, count in load.failed.items() if kind not in way.spares),
        "how": "; ".join(f"{count} {how}" for how, count in load.reasons.items()) or "",
        "stopped after, s": round(stopped_s, 1) if stopped else "",
        "exit code": replica.served.codes[ends] if stopped else "",
        "ready again after, s": round(ready_s, 1),
        "longest request, s": round(load.longest_s, 1),
    }


def rolling_result(rows: Sequence[Row]) -> Result:
    """Return the rows as a result."""

    def sums(name: str, *, stopped: bool) -> int:
        return sum(int(row[name]) for row in rows if (row["way"] == STOPPED) == stopped)

    finding = (
        f"Two replicas of the demo behind one Envoy, on one machine, with clients of KServe over HTTP, of gRPC streams "
        f"and of OpenAI's API, whole and as SSE. Stopped by SIGTERM and started again, one after the other: "
        f"{sums('failed', stopped=True)} of {sums('requests', stopped=True)} requests failed, and no client tries any "
        f"again. Killed instead, with gRPC's clients that resume: {sums('failed', stopped=False)} of "
        f"{sums('requests', stopped=False)} failed, {sums('not as promised', stopped=False)} of them against the "
        "promise: where a whole replica is killed, the requests that only its gateway or its Triton knew end with it."
    )
    return Result("rolling", "A rolling update of two replicas", finding, rows)
