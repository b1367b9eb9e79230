"""A worker: a program in a peer's own environment that reads one job, does it, and answers with one line of JSON.

Only the standard library and numpy are imported here, because each environment has nothing else in common. The job is
JSON on the standard input. The answer is the last line of the standard output; whatever the peer itself prints goes to
the standard error.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Prompts = Sequence[list[int]]
Settings = Mapping[str, Any]
_LOWEST, _HIGHEST = 4, 4096
"""Prompts draw their tokens from these; every vocabulary has them."""
_STAT, _TICKS = Path("/proc/stat"), os.sysconf("SC_CLK_TCK")
_WARM_PROMPT, _WARM_TOKENS = 16, 4


@dataclass(frozen=True)
class Cell:
    """One load: so many streams at once, each with a prompt and an answer of so many tokens."""

    streams: int
    prompt: int
    output: int


class Meter:
    """Notes the time and the process's CPU time, of all threads, at the two ends of a phase.

    Prefill ends when each stream has its first token; decode is what comes after.
    """

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._made = [0] * cell.streams
        self._waiting = cell.streams
        self._begun = self._filled = self._ended = (0.0, 0.0)
        self._with_prefill = 0

    def begin(self) -> None:
        """Note that the prompts are handed over now."""
        self._begun = _now()

    def came(self, counts: Mapping[int, int]) -> None:
        """Note new tokens, by stream, of one step."""
        self._ended = _now()
        for stream, count in counts.items():
            self._waiting -= count > 0 and self._made[stream] == 0
            self._made[stream] += count
        if self._waiting == 0 and self._filled[0] == 0.0:
            self._filled, self._with_prefill = self._ended, sum(self._made)

    def figures(self) -> dict[str, float]:
        """Return tokens per second, and CPU milliseconds per token, of each phase.

        Raises:
            ValueError: a stream got another number of tokens than was asked for.
        """
        if set(self._made) != {self._cell.output}:
            raise ValueError(f"made {sorted(set(self._made))} tokens a stream; {self._cell.output} were asked for")
        prompt_tokens = self._cell.streams * self._cell.prompt
        decoded = sum(self._made) - self._with_prefill
        return _phase("prefill", prompt_tokens, self._begun, self._filled) | _phase(
            "decode", decoded, self._filled, self._ended
        )


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _phase(name: str, tokens: int, begun: tuple[float, float], ended: tuple[float, float]) -> dict[str, float]:
    seconds, cpu_seconds = ended[0] - begun[0], ended[1] - begun[1]
    return {f"{name}_tokens_per_s": tokens / seconds, f"{name}_cpu_ms_per_token": 1000 * cpu_seconds / tokens}


class Others:
    """How much of the processors others have taken since it was made: other processes, and other guests of the host."""

    def __init__(self, own: Callable[[], float], cores: Iterable[int]) -> None:
        """
        Args:
            own: returns the CPU seconds so far that are not others'.
            cores: the processors; a peer may have bound the calling thread to one of them by now.
        """
        self._cores = {f"cpu{number}" for number in cores}
        self._own = own
        self._begun = (*self._seconds(), own())

    def share(self) -> float:
        """Return others' part of the processors' time, from 0 to 1."""
        busy, every = self._seconds()
        return max(0.0, busy - self._begun[0] - (self._own() - self._begun[2])) / max(every - self._begun[1], 0.01)

    def _seconds(self) -> tuple[float, float]:
        """Return the processors' busy seconds so far, stolen ones among them, and all their seconds."""
        lines = [line.split() for line in _STAT.read_text().splitlines()]
        found = [list(map(int, line[1:9])) for line in lines if line and line[0] in self._cores]
        every = sum(map(sum, found))
        waited = sum(core[3] + core[4] for core in found)  # idle, and idle while something is read
        return (every - waited) / _TICKS, every / _TICKS


class Model(Protocol):
    """A peer with a model loaded."""

    def run(self, prompts: Prompts, tokens: int, meter: Meter) -> None:
        """Answer each prompt with exactly so many tokens, greedily, all at once; tell ``meter`` of each step."""

    def log_probs(self, prompt: list[int]) -> npt.NDArray[np.float32]:
        """Return ``[len(prompt), vocab]``: log-probs (or logits) of the token after each token of the prompt."""


class Peer(Protocol):
    """The module of a peer: how a checkpoint is converted for it, and loaded."""

    PACKAGES: tuple[str, ...]
    """The packages whose versions a result names."""

    def prepare(self, source: Path, output: Path, settings: Settings) -> None:
        """Write what the peer loads to the empty folder ``output``."""

    def load(self, model: Path, settings: Settings, threads: int, cells: Sequence[Cell]) -> Model:
        """Return the model, ready for ``cells``."""


def speed(peer: Peer, job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure each cell of the job ``times`` times after a short run of as many streams; return each figure's median.

    A machine that is shared with others stands still now and then; one such moment must not be a round's figure.
    """
    cells, times, cores = [Cell(**cell) for cell in job["cells"]], job["times"], os.sched_getaffinity(0)
    model = peer.load(Path(job["model"]), job["settings"], job["threads"], cells)
    figures, others = [], Others(time.process_time, cores)
    for number, cell in enumerate(cells):
        warm, measured = Cell(cell.streams, min(cell.prompt, _WARM_PROMPT), _WARM_TOKENS), []
        for time_of_cell, load in enumerate((warm, *[cell] * times)):
            meter = Meter(load)
            prompts = random_prompts(load, (1000 * job["seed"] + number) * (1 + times) + time_of_cell)
            meter.begin()
            model.run(prompts, load.output, meter)
            measured.append(meter.figures())
        figures.append({name: statistics.median(one[name] for one in measured[1:]) for name in measured[0]})
    return {"cells": figures, "others": others.share(), "versions": versions(peer)}


def quality(peer: Peer, job: Mapping[str, Any]) -> dict[str, Any]:
    """Write the next token's log-probs at every position of the job's prompts as float32 ``[positions, vocab]``."""
    longest = max(map(len, job["prompts"]))
    model = peer.load(Path(job["model"]), job["settings"], job["threads"], [Cell(1, longest, 1)])
    np.save(job["output"], np.concatenate([normalized(model.log_probs(prompt)) for prompt in job["prompts"]]))
    return {}


def normalized(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return logits, or log-probs of any offset, ``[n, vocab]``, as log-probs."""
    values = logits.astype(np.float64)
    values -= values.max(axis=-1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=-1, keepdims=True))
    return values.astype(np.float32)


def random_prompts(cell: Cell, seed: int) -> list[list[int]]:
    """Return the cell's prompts; they depend on ``seed`` alone, and no two begin alike, but by chance."""
    generator = random.Random(seed)
    return [[generator.randrange(_LOWEST, _HIGHEST) for _ in range(cell.prompt)] for _ in range(cell.streams)]


def versions(peer: Peer) -> dict[str, str]:
    """Return the versions of the peer's packages."""
    return {name: importlib.metadata.version(name) for name in peer.PACKAGES}


def main(peer: Peer) -> None:
    """Do the job of the standard input, and answer on the standard output."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    if job["action"] == "prepare":
        peer.prepare(Path(job["source"]), Path(job["output"]), job["settings"])
        result: dict[str, Any] = {}
    else:
        result = {"speed": speed, "quality": quality}[job["action"]](peer, job)
    print(json.dumps({"result": result}), file=answer, flush=True)
    os._exit(0)  # some of the peers take seconds to end, or crash when they do
