"""Times the phases of native steps, with the machine's roofs measured before and after each handful of them."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.checkpoints import Shape
from benchmarks.native.bounds import Bound, Load, Types, Work, bound_of, work_of
from benchmarks.native.probe import Probe
from benchmarks.random_weights import RandomShards, write_config
from benchmarks.setting import BLOCK_SIZE
from inflight.engine.attention.torch_backend import QueryRange
from inflight.engine.checkpoint import load_config, load_model, outline_model
from inflight.engine.native.model import NativeModel

REST = "rest"
"""Phases without a bound, and what is not in the library: norms, rotations, the embedding, the call itself."""
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sampling:
    """How much is measured."""

    rounds: int
    steps_s: float = 0.3
    """The least time of a round's steps."""
    probe_s: float = 0.05
    """The time of each roof, before and after the steps."""


@dataclass(frozen=True)
class PhaseTimes:
    """The phases of one load: medians of the rounds."""

    load: Load
    work: dict[str, Work]
    seconds: dict[str, float]
    """By phase, ``REST`` among them."""
    bounds: dict[str, Bound]
    """At the speeds of the machine beside the steps."""

    @property
    def whole(self) -> float:
        """The seconds of a step."""
        return sum(self.seconds.values())

    @property
    def bound(self) -> float:
        """The seconds that a step takes at the least, phase by phase."""
        return sum(bound.seconds for bound in self.bounds.values())


class NativeSteps:
    """A model with random weights, whose steps the library computes."""

    def __init__(self, shape: Shape, types: Types, instruction_set: str, threads: int, tokens: int) -> None:
        """
        Args:
            shape: of the model.
            types: of weights and of the cache.
            instruction_set, threads: of the library.
            tokens: the most that the cache must have room for, in whole blocks for each stream.

        Raises:
            NativeError: the library is not there, or cannot compute it.
        """
        self._shape, self._types, self._dots = shape, types, instruction_set in ("avx512_bf16", "amx")
        dtype = torch.float32 if types.weights == "float32" else torch.bfloat16
        shards = RandomShards(shape, False, _CPU)
        with tempfile.TemporaryDirectory() as folder:
            directory = write_config(shape, Path(folder), fp8=False)
            config = load_config(directory)
            outline = outline_model(directory, config, dtype, _CPU, tokens, types.cache, open_shards=lambda _: shards)
            loaded = load_model(outline, _CPU)
        self._pool = loaded.make_kv_pool(-(-tokens // BLOCK_SIZE), BLOCK_SIZE)
        keys, values, *scales_of_slots = self._pool.parts
        for memory in (keys, values):
            # What was never written is one page of zeros to the system, which the caches hold.
            memory.normal_() if memory.is_floating_point() else memory.random_(-127, 128)
        for scales in scales_of_slots:
            scales.fill_(1 / 127)
        weights = "int8" if types.weights == "int8" else "checkpoint"
        self._model = NativeModel(loaded.model, instruction_set, threads, weights)
        self._model.use(self._pool, BLOCK_SIZE)

    def measure(self, load: Load, probe: Probe, sampling: Sampling) -> PhaseTimes:
        """Time steps of one load, beside the machine's roofs."""
        work = work_of(self._shape, load, self._types, self._dots, probe.packed_bytes)
        self._run(load)
        seconds, bounds = list[dict[str, float]](), list[dict[str, Bound]]()
        for _ in range(sampling.rounds):
            before = probe.measure(sampling.probe_s)
            seconds.append(self._round(load, list(work), sampling.steps_s))
            roofs = before.mean(probe.measure(sampling.probe_s))
            bounds.append({name: bound_of(one, roofs) for name, one in work.items()})
        median = {name: statistics.median(one[name] for one in seconds) for name in (*work, REST)}
        return PhaseTimes(load, work, median, {name: _median([one[name] for one in bounds]) for name in work})

    def _round(self, load: Load, names: Sequence[str], least_s: float) -> dict[str, float]:
        """Return the mean seconds of each phase, of steps that take ``least_s`` together."""
        before, spent, steps = self._model.phases(), 0.0, 0
        while spent < least_s:
            spent += self._run(load)
            steps += 1
        after = self._model.phases()
        found = {name: (after[name] - before[name]) / steps for name in names}
        return found | {REST: spent / steps - sum(found.values())}

    def _run(self, load: Load) -> float:
        """Compute a step, and return its seconds."""
        each = -(-(load.start + load.tokens) // BLOCK_SIZE)
        ranges = [
            QueryRange(place * load.tokens, load.start, load.tokens, list(range(place * each, (place + 1) * each)))
            for place in range(load.streams)
        ]
        ids = np.random.default_rng(0).integers(0, self._shape.vocab, load.streams * load.tokens)
        rows = [(place + 1) * load.tokens - 1 for place in range(load.streams)]
        begun = time.perf_counter()
        self._model(ids, ranges, rows)
        return time.perf_counter() - begun


def cache_tokens(loads: Sequence[Load]) -> int:
    """Return the tokens of a cache that has room for the largest of the loads."""
    return max(load.streams * -(-(load.start + load.tokens) // BLOCK_SIZE) * BLOCK_SIZE for load in loads)


def _median(bounds: Sequence[Bound]) -> Bound:
    return Bound(
        statistics.median(one.by_bytes for one in bounds), statistics.median(one.by_products for one in bounds)
    )
