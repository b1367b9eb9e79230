"""Fairness: two clients that both want more than there is; one was first, with all that it wants."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.checkpoints import SMALL, TINY
from benchmarks.drive import Driver, Stream, ask, prompts
from benchmarks.figures import curves, panels
from benchmarks.result import Result, Row
from benchmarks.setting import Setting

_SLOTS = 8
_PROMPT, _OUTPUTS = 64, (16, 48)
_HEAD_START = 20
"""Steps from the first client's requests to the second's."""
_CLIENTS = ("first", "second")


@dataclass
class _Run:
    """What two clients got."""

    streams: dict[str, list[Stream]]
    times: list[float]
    tokens: dict[str, list[int]]
    """Generated until after each step, by client."""
    joined: int
    """The step before which the second client came."""

    @property
    def both_wait(self) -> tuple[int, int]:
        """The steps from when both wait until one of them has nothing more that waits."""
        begun = [max(stream.arrivals_s[0] for stream in self.streams[name]) for name in _CLIENTS]
        return self.joined, int(np.searchsorted(self.times, min(begun)))

    def got(self, name: str) -> int:
        """Return the tokens that a client got while both waited."""
        begin, end = self.both_wait
        return self.tokens[name][end] - self.tokens[name][begin]

    def largest_difference(self) -> int:
        """Return the most by which one was ahead of the other since both waited."""
        begin, end = self.both_wait
        since = [np.array(self.tokens[name][begin:end]) - self.tokens[name][begin] for name in _CLIENTS]
        return int(np.abs(since[0] - since[1]).max(initial=0))


def fairness(setting: Setting) -> Result:
    """Serve two clients by arrival, and by turns."""
    count = setting.pick(64, 24)
    runs = {}
    for kind, value in (("by arrival", "none"), ("by turns", "client")):
        setting.say(f"fairness: {kind}")
        runs[kind] = _serve(setting, count, value)
    rows = [_row(kind, name, run) for kind, run in runs.items() for name in _CLIENTS]
    alone, turns = rows[1], rows[3]
    bound = 2 * _SLOTS * (_PROMPT + _OUTPUTS[1])
    finding = (
        f"Two clients want {count} answers each, the second {_HEAD_START} steps after the first, and {_SLOTS} run at "
        f"once. By arrival the second's first tokens come after {alone['ttft_median_ms']:,} ms in the median, behind "
        f"all that the first wants; by turns after {turns['ttft_median_ms']:,} ms, and while both wait it gets "
        f"{turns['share_%']} % of the tokens, in place of {alone['share_%']} %. By turns neither is ever more than "
        f"{runs['by turns'].largest_difference()} generated tokens ahead; {bound:,}, prompts included, is what "
        "docs/scheduling.md promises. Turns stop paying where one client is alone: the work is the same."
    )
    figure, axes = panels(2)
    for one, (kind, run) in zip(axes, runs.items(), strict=True):
        lines = {f"{name} client": dict(enumerate(run.tokens[name])) for name in _CLIENTS}
        curves(one, {name: _thinned(line) for name, line in lines.items()}, f"steps, {kind}", "tokens generated")
    return Result("fairness", "Fairness between clients", finding, rows, figure)


def _serve(setting: Setting, count: int, value: str) -> _Run:
    driver = Driver(
        setting.engine(setting.pick(SMALL, TINY), max_batch_size=_SLOTS, prefix_reuse=False, fairness=value)
    )
    generator = np.random.default_rng(0)
    run = _Run({name: [] for name in _CLIENTS}, [], {name: [] for name in _CLIENTS}, _HEAD_START)
    for name, steps in zip(_CLIENTS, (_HEAD_START, None), strict=True):
        for prompt in prompts(generator, count, _PROMPT):
            request = ask(prompt, int(generator.integers(*_OUTPUTS)))
            request.client_id = name if value == "client" else ""
            run.streams[name].append(driver.submit(request))
        while driver.engine.busy and (steps is None or len(run.times) < steps):
            driver.step()
            run.times.append(time.perf_counter())
            for client, streams in run.streams.items():
                run.tokens[client].append(sum(len(stream.tokens) for stream in streams))
    return run


def _row(kind: str, name: str, run: _Run) -> Row:
    waits = [1000 * stream.ttft_s for stream in run.streams[name]]
    return {
        "served": kind,
        "client": name,
        "ttft_median_ms": round(float(np.median(waits)), 1),
        "ttft_p99_ms": round(float(np.percentile(waits, 99)), 1),
        "share_%": round(100 * run.got(name) / max(1, sum(run.got(one) for one in _CLIENTS)), 1),
    }


def _thinned(line: dict[int, int]) -> dict[float, float]:
    """Return every so many-th point: a marker for each step would be one blot."""
    steps: Sequence[int] = sorted(line)[:: max(1, len(line) // 24)]
    return {step: line[step] for step in steps}
