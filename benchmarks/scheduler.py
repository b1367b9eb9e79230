"""What the scheduler costs: its own time per step, with as many sequences running and waiting as there may be.

There is no model: what a step computes is made up, and only the scheduler's calls are timed, with what they have the
KV cache do; in CPU time, which other programs on the machine do not add to. Sequences end and are replaced all the
time, and clients go away while they wait.
"""

from __future__ import annotations

import time
from collections import abc
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.figures import bars, level, panels
from benchmarks.result import Result, Row
from inflight.clock import now_ns
from inflight.engine.config import EngineConfig
from inflight.engine.kvcache.manager import KvCacheManager
from inflight.engine.request import Request
from inflight.engine.scheduler import Scheduler
from inflight.engine.sequence import Sequence
from inflight.engine.stats import EngineStats
from inflight.sampling import SamplingParams

Fairness = Literal["none", "client"]
FAIRNESS: tuple[Fairness, ...] = ("none", "client")
CASES = ((32, 0), (32, 2000), (128, 2000), (512, 2000))
"""Sequences that run and that wait."""
_LIMIT_MS = 1.0
_ROUNDS = 10
_PROMPT, _OUTPUT, _CLIENTS, _PRIORITIES = 32, 256, 50, 3


@dataclass
class _Bench:
    """A scheduler under a load that does not change: whoever ends is replaced."""

    running: int
    waiting: int
    fairness: Fairness

    def __post_init__(self) -> None:
        blocks = 2 * self.running * (_PROMPT + _OUTPUT) // 16
        self._config = config = EngineConfig(
            Path(),
            num_blocks=blocks,
            max_batch_size=self.running,
            max_tokens_per_step=4 * self.running,
            fairness=self.fairness,
        )
        self._cache = KvCacheManager(config.num_blocks, config.block_size)
        self._scheduler = Scheduler(config, self._cache)
        self._chance = np.random.default_rng(0)
        self._added = 0
        self._stats = EngineStats()
        for _ in range(self.running + self.waiting):
            self._scheduler.add(self._sequence())
        while len(self._scheduler.running) < self.running:
            self.step()

    def _sequence(self) -> Sequence:
        number = self._added
        self._added += 1
        request = Request(
            [number, *range(_PROMPT - 1)],
            SamplingParams(int(self._chance.integers(1, _OUTPUT))),
            priority=number % _PRIORITIES,
            client_id=str(number % _CLIENTS),
            deadline_ns=now_ns() + 10**12,
            arrival_ns=now_ns(),
        )
        return Sequence(request, number, 0, _PROMPT + _OUTPUT, None, self._config.priority_aging_ns)

    def step(self) -> float:
        """Do one step; return the seconds of CPU time that the scheduler took."""
        scheduler = self._scheduler
        gone = list(scheduler._queue)[:1] if self.waiting else []
        new = [self._sequence() for _ in range(self.running + self.waiting + len(gone) - self._open())]
        begun = time.thread_time()
        for sequence in gone:
            scheduler.remove(sequence)
        for sequence in new:
            scheduler.add(sequence)
        scheduler.take_expired()
        chunks = scheduler.schedule()
        seconds = time.thread_time() - begun
        ended = []
        for chunk in chunks:
            sequence = chunk.sequence
            assert sequence.table is not None
            self._cache.commit(sequence.table, sequence.tokens, chunk.start + chunk.size)
            if chunk.samples and sequence.append(0, self._stats) is not None:
                ended.append(sequence)
        begun = time.thread_time()
        for sequence in ended:
            scheduler.remove(sequence)
        return seconds + time.thread_time() - begun

    def _open(self) -> int:
        return len(self._scheduler.running) + self._scheduler.num_waiting


def measure_scheduler(steps: int, cases: abc.Sequence[tuple[int, int]] = CASES) -> Result:
    """Measure ``steps`` steps of each case, without and with fairness, in rounds."""
    benches = [_Bench(*case, fairness) for case in cases for fairness in FAIRNESS]
    rounds = [[_milliseconds(bench, max(1, steps // _ROUNDS)) for bench in benches] for _ in range(_ROUNDS)]
    rows = [_row(bench, times) for bench, times in zip(benches, zip(*rounds, strict=True), strict=True)]
    worst = max(rows, key=lambda row: float(row["median_ms"]))
    finding = (
        f"With {worst['running']} sequences running and {worst['waiting']} waiting, of {_CLIENTS} clients and "
        f"{_PRIORITIES} priorities, all with deadlines, the scheduler takes {worst['median_ms']} ms of a step in the "
        f"median, of CPU time; the limit is {_LIMIT_MS:g} ms. Each row is the calmest of {_ROUNDS} rounds, as other "
        f"programs on a machine only add to such a time; in the busiest the median is {worst['busiest_ms']} ms."
    )
    figure, (axes,) = panels(1)
    names = list(dict.fromkeys(f"{row['running']} running, {row['waiting']} waiting" for row in rows))
    heights = {
        name: {f"fairness: {row['fairness']}": float(row["median_ms"]) for row in pair}
        for name, pair in zip(names, zip(rows[::2], rows[1::2], strict=True), strict=True)
    }
    bars(axes, heights, "CPU time per step, ms (median)")
    level(axes, _LIMIT_MS, "limit", 2)
    return Result("scheduler", "What the scheduler costs", finding, rows, figure)


def _milliseconds(bench: _Bench, steps: int) -> np.ndarray:
    return 1000 * np.array([bench.step() for _ in range(steps)])


def _row(bench: _Bench, rounds: abc.Sequence[np.ndarray]) -> Row:
    medians = [float(np.median(times)) for times in rounds]
    calmest = rounds[int(np.argmin(medians))]
    return {
        "running": bench.running,
        "waiting": bench.waiting,
        "fairness": bench.fairness,
        "median_ms": round(min(medians), 3),
        "99_%_ms": round(float(np.quantile(calmest, 0.99)), 3),
        "busiest_ms": round(max(medians), 3),
    }
