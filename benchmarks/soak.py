"""The soak: very many short requests through one engine; memory stays flat, and at every idle moment no block is lost.

Lengths are random, as users' are. Requests come in waves, and between two waves the engine is idle. They share
beginnings, so that the prefix cache is used and evicted all the time; some are cancelled, some sampled, some past their
deadline before they begin to run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.checkpoints import SMALL, TINY, VOCAB
from benchmarks.figures import legend_above, panels
from benchmarks.result import Result
from benchmarks.setting import Setting
from inflight.clock import now_ns
from inflight.engine.engine import Engine
from inflight.engine.request import Request
from inflight.engine.stats import process_memory
from inflight.errors import DeadlineExceeded, EngineFailure
from inflight.load.compare.bootstrap import block_length
from inflight.load.compare.compare import interval
from inflight.report.plots import BLUE, GREY
from inflight.sampling import SamplingParams

TOLERANCE = 32
"""Bytes per request that memory may grow by: less than any record of a request takes."""
_WAVE = 64
_BLOCKS, _BLOCK_SIZE = 256, 4
_STEP_TOKENS = 512
_MEDIAN_TOKENS, _MOST_TOKENS, _SIGMA = 12, 400, 1.0
"""Of prompts, and the standard deviation of the logarithms: lengths are lognormal."""
_WARM_UP = 0.2
"""Of all requests: what allocators and caches take once."""
_RESAMPLES = 2000
_BEGINNINGS = 40


@dataclass(frozen=True)
class Soaked:
    """What a soak has seen."""

    requests: Sequence[int]
    """Done so far, at each idle moment."""
    resident: Sequence[int]
    """Bytes in memory, likewise."""
    seconds: float
    evictions: int
    cancelled: int
    refused: int
    """Past their deadlines."""

    def growth(self) -> tuple[float, float, float]:
        """Return the slope of memory over requests, in bytes per request, and its 95 % interval.

        The slope is that of least squares, after the warm-up; the interval is by bootstrap of the residuals in blocks
        of neighbours (H. R. Kuensch, Annals of Statistics 17, 1989), because memory that was taken stays taken.
        """
        begin = next(place for place, done in enumerate(self.requests) if done >= _WARM_UP * self.requests[-1])
        across = np.array(self.requests[begin:], dtype=float)
        across -= across.mean()
        up = np.array(self.resident[begin:], dtype=float)
        power = float(across @ across)
        slope = float(across @ up) / power
        residuals = up - up.mean() - slope * across
        drawn = _in_blocks(residuals, block_length(residuals.tolist()), np.random.default_rng(0))
        low, high = interval(slope + drawn @ across / power, 0.95)
        return slope, low, high


def _in_blocks(values: np.ndarray, length: int, generator: np.random.Generator) -> np.ndarray:
    """Return resamples of a series, [resamples, len(values)], each of stretches of neighbours."""
    count = len(values)
    begins = generator.integers(0, count - length + 1, (_RESAMPLES, -(-count // length)))
    places = (begins[:, :, None] + np.arange(length)).reshape(_RESAMPLES, -1)[:, :count]
    return values[places]


class _Soak:
    def __init__(self, engine: Engine, requests: int) -> None:
        self._engine, self._requests = engine, requests
        self._generator = np.random.default_rng(0)
        self._beginnings = self._generator.integers(1, VOCAB, (_BEGINNINGS, 8)).tolist()
        self.cancelled = self.refused = 0

    def wave(self, count: int) -> None:
        """Send so many requests, and step until the engine is idle.

        Raises:
            EngineFailure: a request did not end once, or its blocks are not back.
        """
        generator = self._generator
        requests = [self._request() for _ in range(count)]
        for request in requests:
            self._engine.submit(request)
        leaving = {request.key for request, draw in zip(requests, generator.random(count), strict=True) if draw < 0.05}
        open_keys = {request.key for request in requests}
        while self._engine.busy:
            if leaving:
                key = leaving.pop()
                self.cancelled += key in open_keys
                self._engine.cancel(key)
            for output in self._engine.step():
                if output.error is not None and not isinstance(output.error, DeadlineExceeded):
                    raise output.error
                self.refused += output.error is not None
                if output.finished:
                    open_keys.remove(output.key)
        self._check(open_keys)

    def _request(self) -> Request:
        generator = self._generator
        beginning = self._beginnings[generator.integers(_BEGINNINGS)][: generator.integers(1, 9)]
        length = int(np.clip(generator.lognormal(np.log(_MEDIAN_TOKENS), _SIGMA), 1, _MOST_TOKENS))
        prompt = [*beginning, *generator.integers(1, VOCAB, length).tolist()]
        sampled = generator.random() < 0.5
        sampling = SamplingParams(int(generator.integers(1, 5)), temperature=1.0 if sampled else None, ignore_eos=True)
        late = generator.random() < 0.01
        return Request(prompt, sampling, deadline_ns=now_ns() if late else None)

    def _check(self, left: set[int]) -> None:
        if left:
            raise EngineFailure(f"{len(left)} requests have not ended, and the engine is idle")
        self._engine._cache.check()
        stats = self._engine.stats
        now = stats.state()
        if now.kv_blocks_used or now.kv_blocks_reserved:
            raise EngineFailure(f"idle, yet {now.kv_blocks_used} blocks are used and {now.kv_blocks_reserved} reserved")


def soak(setting: Setting, requests: int) -> Soaked:
    """Send so many requests.

    Raises:
        EngineFailure: a request failed, or at an idle moment free + cached != total, or a block is promised to nobody.
    """
    engine = setting.engine(
        setting.pick(SMALL, TINY),
        0,
        block_size=_BLOCK_SIZE,
        num_blocks=_BLOCKS,
        policy="max_utilization",
        max_tokens_per_step=_STEP_TOKENS,
    )
    run, generator = _Soak(engine, requests), np.random.default_rng(1)
    done: list[int] = []
    resident: list[int] = []
    begun = time.perf_counter()
    while not done or done[-1] < requests:
        so_far = done[-1] if done else 0
        count = min(int(generator.integers(1, _WAVE + 1)), requests - so_far)
        try:
            run.wave(count)
        except AssertionError as error:  # the cache's books, which it checks itself when it is idle
            raise EngineFailure(f"after {so_far:,} requests: {error}") from error
        done.append(so_far + count)
        resident.append(process_memory()["cpu"])
        if done[-1] * 20 // requests > so_far * 20 // requests:
            setting.say(f"{done[-1]:,} of {requests:,} requests, {resident[-1] / 2**20:,.1f} MiB in memory")
    seconds = time.perf_counter() - begun
    return Soaked(done, resident, seconds, engine.stats.kv_cache_evictions, run.cancelled, run.refused)


def soak_result(soaked: Soaked) -> tuple[Result, bool]:
    """Return the result, and whether memory was flat: whether growth by more than ``TOLERANCE`` is ruled out."""
    slope, low, high = soaked.growth()
    flat = high <= TOLERANCE
    total = soaked.requests[-1]
    row: dict[str, float | str] = {
        "requests": total,
        "idle_moments": len(soaked.requests),
        "seconds": round(soaked.seconds, 1),
        "evicted_blocks": soaked.evictions,
        "cancelled": soaked.cancelled,
        "past_deadline": soaked.refused,
        "resident_MiB_at_end": round(soaked.resident[-1] / 2**20, 1),
        "growth_bytes_per_request": round(slope, 2),
        "95_%_interval": f"{low:.2f} to {high:.2f}",
        "flat": "yes" if flat else "no",
    }
    finding = (
        f"At all {len(soaked.requests):,} idle moments of {total:,} short requests free + cached == total and "
        f"nothing is reserved; memory grows by {slope:.2f} bytes per request ({low:.2f} to {high:.2f}), and at most "
        f"{TOLERANCE} are called flat: {'it is' if flat else 'it is not'}."
    )
    figure, [axes] = panels(1)
    axes.plot(soaked.requests, [size / 2**20 for size in soaked.resident], color=BLUE, linewidth=1.2)
    axes.axvspan(0, _WARM_UP * total, color=GREY, alpha=0.12, linewidth=0, label="warm-up")
    axes.set_ylim(0, 1.15 * max(soaked.resident) / 2**20)
    axes.set_xlabel("requests")
    axes.set_ylabel("resident memory, MiB")
    legend_above(axes)
    return Result("soak", "The soak", finding, [row], figure), flat
