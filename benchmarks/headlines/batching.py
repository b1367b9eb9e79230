"""In-flight batching beside static and dynamic batching (G.-I. Yu et al., Orca, OSDI 2022)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.checkpoints import SMALL, TINY
from benchmarks.drive import Driver, Stream, ask, prompts
from benchmarks.figures import bars, panels
from benchmarks.medians import median_interval
from benchmarks.result import Result, Row
from benchmarks.setting import Setting
from inflight.engine.request import Request

_MODES = ("inflight", "dynamic", "static")
_SLOTS = 16
_PROMPT, _LONGEST = 32, 256
_DELAY_MS = 20.0
_LOAD = 0.5
"""Of the requests per second that in-flight batching can do, where requests arrive one by one."""
_KINDS = ("equal", "uniform", "long tail")
_CAVEAT = (
    "On a CPU a step with few sequences is quicker than one with many; on a GPU it takes about as long, because "
    "reading the weights is what takes the time. So a half-empty static batch costs a CPU less, and tokens per "
    "step, not tokens per second, is the gain that a GPU sees."
)


@dataclass(frozen=True)
class _Run:
    seconds: float
    steps: int
    tokens: int


def batching(setting: Setting) -> Result:
    """Serve the same requests in each mode: all waiting from the start, by the spread of lengths; then one by one."""
    count = setting.pick(96, 24)
    drivers = {mode: _driver(setting, mode) for mode in _MODES}
    rows: list[Row] = []
    for kind in _KINDS:
        runs: dict[str, list[_Run]] = {mode: [] for mode in _MODES}
        for number in range(setting.pick(5, 1)):
            setting.say(f"batching: {kind} lengths, round {number + 1}")
            for mode in _MODES[number % 3 :] + _MODES[: number % 3]:
                runs[mode].append(_saturate(drivers[mode], _requests(kind, count, setting.pick(1.0, 0.1))))
        rows += [_row(kind, mode, runs) for mode in _MODES]
    gap_s = statistics.median(run.seconds for run in runs["inflight"]) / count / _LOAD
    waits = {}
    for mode, driver in drivers.items():
        setting.say(f"batching: requests that arrive one by one, {mode}")
        waits[mode] = _arriving(driver, _requests(kind, count, setting.pick(1.0, 0.1)), gap_s)
    table = [{**row, **_latencies(row, waits)} for row in rows]
    return Result("batching", "In-flight, dynamic and static batching", _finding(table), table, _figure(table), _CAVEAT)


def _driver(setting: Setting, mode: str) -> Driver:
    more: dict[str, Any] = {"max_queue_delay_ms": _DELAY_MS} if mode == "dynamic" else {}
    return Driver(
        setting.engine(setting.pick(SMALL, TINY), mode=mode, max_batch_size=_SLOTS, prefix_reuse=False, **more)
    )


def _requests(kind: str, count: int, scale: float) -> list[Request]:
    """Return requests whose outputs have 64 tokens on average, whatever their spread."""
    generator = np.random.default_rng(0)
    drawn = {
        "equal": np.full(count, 64.0),
        "uniform": generator.uniform(8, 120, count),
        "long tail": np.clip(generator.lognormal(np.log(36), 1.1, count), 4, _LONGEST),
    }[kind]
    lengths = np.maximum(2, scale * drawn).astype(int).tolist()
    return [ask(prompt, length) for prompt, length in zip(prompts(generator, count, _PROMPT), lengths, strict=True)]


def _saturate(driver: Driver, requests: Sequence[Request]) -> _Run:
    begun, steps = time.perf_counter(), driver.engine.stats.steps
    streams = driver.run(requests)
    seconds = time.perf_counter() - begun
    return _Run(seconds, driver.engine.stats.steps - steps, sum(len(stream.tokens) for stream in streams))


def _arriving(driver: Driver, requests: Sequence[Request], gap_s: float) -> list[Stream]:
    """Submit a request every ``gap_s`` on average, as a Poisson process does."""
    times = np.cumsum(np.random.default_rng(0).exponential(gap_s, len(requests))).tolist()
    begun, streams = time.perf_counter(), list[Stream]()
    while len(streams) < len(requests) or driver.engine.busy:
        now = time.perf_counter() - begun
        while len(streams) < len(requests) and times[len(streams)] <= now:
            streams.append(driver.submit(requests[len(streams)]))
        if driver.engine.busy:
            driver.step()
        else:
            time.sleep(max(0.0, times[len(streams)] - now))
    return streams


def _row(kind: str, mode: str, runs: Mapping[str, Sequence[_Run]]) -> Row:
    pairs = list(zip(runs["inflight"], runs[mode], strict=True))
    ratios = [other.seconds / ours.seconds for ours, other in pairs]
    low, high = median_interval(ratios)
    return {
        "lengths": kind,
        "mode": mode,
        "tokens_per_s": round(statistics.median(run.tokens / run.seconds for run in runs[mode])),
        "tokens_per_step": round(statistics.median(run.tokens / run.steps for run in runs[mode]), 2),
        "inflight_gains": round(statistics.median(ratios), 2),
        "95_%_interval": f"{low:.2f} to {high:.2f}",
        "inflight_gains_in_steps": round(statistics.median(other.steps / ours.steps for ours, other in pairs), 2),
    }


def _latencies(row: Row, waits: Mapping[str, Sequence[Stream]]) -> Row:
    """Return the columns of requests that arrive one by one; they have the long tail alone."""
    if row["lengths"] != _KINDS[-1]:
        return {"arriving: TTFT_median_ms": "", "arriving: E2E_median_ms": ""}
    streams = waits[str(row["mode"])]
    ttft = statistics.median(1000 * stream.ttft_s for stream in streams)
    e2e = statistics.median(1000 * (stream.arrivals_s[-1] - stream.submitted_s) for stream in streams)
    return {"arriving: TTFT_median_ms": round(ttft, 1), "arriving: E2E_median_ms": round(e2e, 1)}


def _finding(rows: Sequence[Row]) -> str:
    by = {(row["lengths"], row["mode"]): row for row in rows}
    equal, tail, dynamic = by["equal", "static"], by["long tail", "static"], by["long tail", "dynamic"]
    ours = by["long tail", "inflight"]
    return (
        f"With {_SLOTS} slots and outputs of 64 tokens on average, static batching takes {tail['inflight_gains']} "
        f"times as long as in-flight batching where lengths have a long tail ({tail['95_%_interval']}; "
        f"{tail['inflight_gains_in_steps']} times the steps), and {equal['inflight_gains']} times where all are "
        "equally long: a batch that nobody joins lasts as long as its longest output. That is where it stops "
        "paying: equal lengths that all wait already. Where requests arrive one by one, at half of what in-flight "
        f"batching can do, the first token comes after {ours['arriving: TTFT_median_ms']} ms in the median, with "
        f"dynamic batching ({_DELAY_MS:g} ms) after {dynamic['arriving: TTFT_median_ms']} ms, with static after "
        f"{tail['arriving: TTFT_median_ms']} ms."
    )


def _figure(rows: Sequence[Row]) -> Figure:
    figure, (left, middle, right) = panels(3)
    for axes, column, label in (
        (left, "tokens_per_s", "output tokens/s, all waiting"),
        (middle, "tokens_per_step", "output tokens per step, all waiting"),
    ):
        groups = {
            kind: {str(row["mode"]): float(row[column]) for row in rows if row["lengths"] == kind} for kind in _KINDS
        }
        bars(axes, groups, label)
    tail = [row for row in rows if row["lengths"] == _KINDS[-1]]
    shown = {"TTFT": "arriving: TTFT_median_ms", "E2E": "arriving: E2E_median_ms"}
    bars(right, {name: {str(row["mode"]): float(row[column]) for row in tail} for name, column in shown.items()},
         "arriving one by one, median, ms")  # fmt: skip
    for axes in (left, middle):
        axes.legend().remove()
    return figure
