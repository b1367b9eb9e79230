"""What all processes with users have seen, in one place: live figures, and the result at the end.

Requests go to a file as they come; memory holds the last few hundred, until the result is computed.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from inflight.load.measurements import Distribution, RequestRecord, measure
from inflight.load.overhead import CPU_LIMIT, ClientHealth, LoopWatch
from inflight.load.result import LoadResult
from inflight.load.swarm.cost import SwarmCost, cpu_of
from inflight.load.workload import Workload

_RECENT = 500
"""Requests that the live figures are about."""
_RATE_S = 6.0
"""Seconds that live rates are about, at least: two of locust's reports."""


@dataclass(frozen=True)
class SwarmResult(LoadResult):
    """A load test that locust has run."""

    cost: SwarmCost

    def summary(self) -> dict[str, Any]:
        """Return all but the single requests, as a JSON object."""
        return super().summary() | {"swarm": asdict(self.cost) | {"client_larger": self.cost.client_larger}}


@dataclass
class _Source:
    """The last that is known of one process with users."""

    tokens: int = 0
    running: int = 0
    cpu_s: float = 0.0
    locust_cpu_s: float = 0.0
    seconds: float = 0.0
    lost: bool = False


class Gathering:
    """The records of one test."""

    def __init__(self, workload: Workload, server_pid: int | None, distributed: bool) -> None:
        """
        Args:
            workload: what is sent.
            server_pid: the server's process, if it is on this machine.
            distributed: whether users are in other processes than this one, whose CPU then counts too.
        """
        self._distributed = distributed
        self.outcomes: Counter[str] = Counter()
        self.recent: deque[RequestRecord] = deque(maxlen=_RECENT)
        self.kinds: set[str] = set()
        self._workload = workload
        self._spool = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 (as long as this object; gone with it)
        self._sources: dict[str, _Source] = {}
        self._server_pid = server_pid
        self._server_cpu_before = cpu_of(server_pid)
        self._own_cpu_before = time.process_time()
        self._began = time.monotonic()
        self._course: deque[tuple[float, int, float, float | None]] = deque(maxlen=60)

    def add(self, source: str, batch: dict[str, Any]) -> None:
        """Take in what a process with users has seen since its last batch (``Station.batch``)."""
        for kind, row in batch["records"]:
            self.kinds.add(kind)
            self.outcomes[row["outcome"]] += 1
            self.recent.append(RequestRecord.from_json(row))
            self._write(source, "record", row)
        if batch["samples"]:
            self._write(source, "samples", batch["samples"])
        self._sources[source] = _Source(**{name: batch[name] for name in _Source.__dataclass_fields__})
        now = time.monotonic()
        if not self._course or now - self._course[-1][0] >= 1:
            self._course.append((now, self._tokens, self._client_cpu(), cpu_of(self._server_pid)))

    def _write(self, *line: object) -> None:
        self._spool.write(json.dumps(line) + "\n")

    def _lines(self) -> Iterator[tuple[str, str, Any]]:
        self._spool.seek(0)
        return (tuple(json.loads(line)) for line in self._spool)

    @property
    def _tokens(self) -> int:
        return sum(one.tokens for one in self._sources.values())

    @property
    def running(self) -> int:
        """Requests under way."""
        return sum(one.running for one in self._sources.values())

    def rates(self) -> tuple[float, float, float | None] | None:
        """Return output tokens per second, and cores used by the client and by the server, lately; None: too early."""
        if not self._course:
            return None
        last = self._course[-1]
        before = next((one for one in reversed(self._course) if last[0] - one[0] >= _RATE_S), self._course[0])
        span = last[0] - before[0]
        if span <= 0:
            return None
        server = None if last[3] is None or before[3] is None else (last[3] - before[3]) / span
        return (last[1] - before[1]) / span, (last[2] - before[2]) / span, server

    def _client_cpu(self) -> float:
        """Return CPU seconds of all processes of locust since the begin."""
        own = time.process_time() - self._own_cpu_before if self._distributed else 0.0
        return own + sum(one.cpu_s + one.locust_cpu_s for one in self._sources.values())

    def cost(self, lost_workers: int) -> SwarmCost:
        """Return what the test has cost."""
        now = cpu_of(self._server_pid)
        known = now is not None and self._server_cpu_before is not None
        return SwarmCost(
            workers=len(self._sources),
            lost_workers=lost_workers,
            seconds=time.monotonic() - self._began,
            client_cpu_s=self._client_cpu(),
            server_cpu_s=(now or 0.0) - (self._server_cpu_before or 0.0) if known else None,
        )

    def result(self, cost: SwarmCost, load_ended_s: float, interrupted: bool, command: str) -> SwarmResult:
        """Return the result of the test."""
        records: list[RequestRecord] = []
        samples: dict[str, list[list[float]]] = {}
        for source, what, value in self._lines():
            if what == "record":
                records.append(RequestRecord.from_json(value))
            else:
                samples.setdefault(source, []).extend(value)
        steady = self._workload.steady
        window = (steady[0] if steady[0] < load_ended_s else 0.0, min(steady[1], load_ended_s))
        return SwarmResult(
            scenario=self._workload.scenario,
            seed=self._workload.seed,
            transport=" and ".join(sorted(self.kinds)),
            command=command,
            records=sorted(records, key=lambda one: (one.start_s, one.session, one.turn)),
            window=window,
            load_ended_s=load_ended_s,
            interrupted=interrupted,
            client=self._health(samples, window, measure(records, window, {}).send_delay_ms, cost),
            cost=cost,
        )

    def _health(
        self,
        samples: dict[str, list[list[float]]],
        window: tuple[float, float],
        delay: Distribution | None,
        cost: SwarmCost,
    ) -> ClientHealth:
        """Return the client's share: that of the busiest of the processes that send, and all reasons of all."""
        each = {
            source: LoopWatch(time.monotonic, [(at, lag, cpu) for at, lag, cpu in rows]).health(window, None)
            for source, rows in samples.items()
        }
        lags = [lag for rows in samples.values() for at, lag, _ in rows if window[0] <= at < window[1]]
        many = len(each) > 1
        reasons = [
            f"worker {number}: {reason}" if many else reason
            for number, one in enumerate(each.values())
            for reason in one.reasons
        ]
        for one in self._sources.values():
            if one.seconds and one.locust_cpu_s / one.seconds > CPU_LIMIT:
                share = one.locust_cpu_s / one.seconds
                reasons.append(f"a process with users used {share:.0%} of a core (limit: {CPU_LIMIT:.0%})")
            if one.lost:
                reasons.append("a process that sends was lost")
        if cost.lost_workers:
            reasons.append(f"{cost.lost_workers} of {cost.workers} workers were lost, with their last requests")
        # Who sent late is not known here: it is said once, of all.
        reasons += LoopWatch(time.monotonic).health(window, delay).reasons
        shares = [one.cpu_share for one in each.values() if one.cpu_share is not None]
        return ClientHealth(
            Distribution.of(lags, 1000), max(shares, default=None), delay, bool(reasons), tuple(reasons)
        )
