"""What each option, and each commit, brings: engines side by side, each in a process of its own, round after round.

The engine is that of the benchmark ``peers``: it answers prompts, and tells prefill from decode. Another commit is
checked out to a folder of its own, where its library is built; this checkout's worker then imports its package.
"""

from __future__ import annotations

import io
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.medians import median_interval
from benchmarks.peers.choice import in_turn
from benchmarks.peers.jobs import Worker
from benchmarks.peers.measure import measured_of
from benchmarks.peers.variants import OURS, WORKERS
from benchmarks.peers.workers.work import Cell
from benchmarks.result import Result, Row
from inflight.errors import InflightError
from inflight.resources import ROOT

_TIMEOUT_S = 600
_DTYPE = {"dtype": "bfloat16"}
Round = Mapping[str, Mapping[str, Any]]
"""What was measured in a round, by the engines' names."""


@dataclass(frozen=True)
class Engine:
    """One of the engines that are measured."""

    name: str
    threads: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``EngineConfig``."""
    checkout: Path = ROOT


@dataclass(frozen=True)
class Change:
    """What is compared: an engine with a change, and the one without it."""

    name: str
    changed: Engine
    before: Engine


def option_changes(instruction_sets: Sequence[str], threads: int) -> list[Change]:
    """Return what the engine's options bring, each beside the engine that has the others at their best."""
    chosen, *others = instruction_sets

    def engine(name: str, threads: int = threads, **settings: Any) -> Engine:
        return Engine(name, threads, _DTYPE | {"cpu_step": chosen} | settings)

    best = engine("bfloat16")
    found = [Change("the native step, not PyTorch", best, engine("PyTorch", cpu_step="pytorch"))]
    found += [Change(f"{chosen}, not {name}", best, engine(name, cpu_step=name)) for name in others]
    if threads > 1:
        found.append(Change(f"{threads} threads, not 1", best, engine("1 thread", 1)))
    wide_cache = engine("float32 KV", kv_cache_dtype="float32")
    return [
        *found,
        Change("weights in bfloat16, not float32", wide_cache, engine("float32", dtype="float32")),
        Change("a KV cache in bfloat16, not float32", best, wide_cache),
        Change("weights in INT8, not bfloat16", engine("INT8", weights="int8"), best),
    ]


def commit_changes(commits: Sequence[str], folder: Path, threads: int, say: Callable[[str], object]) -> list[Change]:
    """Return what commits brought, each beside the one in front of it; this checkout is the last.

    Raises:
        InflightError: a commit is not there, or its library cannot be built.
    """
    names = [_git("log", "-1", "--format=%h %s", commit).decode().strip() for commit in commits]
    engines = [Engine(commit, threads, _DTYPE, _checkout(commit, folder / commit, say)) for commit in commits] + [
        Engine("this checkout", threads, _DTYPE)
    ]
    told = [*(name.split(":")[0].split(";")[0] for name in names), "this checkout"]
    return [Change(name, new, old) for name, (old, new) in zip(told[1:], pairwise(engines), strict=True)]


def measure_changes(
    changes: Sequence[Change],
    checkpoint: Path,
    cells: Sequence[Cell],
    rounds: int,
    folder: Path,
    under: Sequence[str],
    say: Callable[[str], object],
) -> list[dict[str, Any]]:
    """Measure each engine of the changes once a round, and return the rounds, by the engines' names.

    Args:
        changes: whose engines are measured.
        checkpoint: directory of the model.
        cells: loads of each engine.
        rounds: how often; each round begins with another engine.
        folder: where logs go.
        under: a command that each engine is run under.
        say: gets a line about each measurement.

    Raises:
        InflightError: an engine failed.
    """
    engines = list({one.name: one for change in changes for one in (change.before, change.changed)}.values())
    found: list[dict[str, Any]] = []
    for number in range(rounds):
        found.append({})
        for engine in in_turn(engines, number):
            say(f"round {number + 1} of {rounds}: {engine.name}")
            found[-1][engine.name] = _measure(engine, checkpoint, cells, number, folder, under)
    return found


def changes_result(
    name: str, title: str, lead: str, changes: Sequence[Change], figures: Sequence[str], found: Sequence[Round]
) -> Result:
    """Return the table of what each change brought in each of the figures, which are those of ``measured_of``."""
    rows: list[Row] = []
    for change in changes:
        row: dict[str, float | str] = {"change": change.name}
        for load in figures:
            new, old = (
                [one[engine.name]["figures"][load] for one in found] for engine in (change.changed, change.before)
            )
            ratios = [one / other for one, other in zip(new, old, strict=True)]
            low, high = median_interval(ratios)
            row[f"{load}, times"] = f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"
            row[f"{load}, tokens/s"] = round(statistics.median(new), 1)
        rows.append(row)
    others = max(one["others"] for each in found for one in each.values())
    finding = (
        f"{lead} The engine in one process, without a server, in bfloat16 where nothing else is said; each in a "
        f"process of its own, one after the other, {len(found)} rounds. Times are ratios of speeds in one round, their "
        "median with its 95 % interval; tokens per second are those with the change. Other processes and "
        f"other guests of the host took {100 * others:.0f} % of the processors at the most."
    )
    return Result(name, title, finding, rows)


def _measure(
    engine: Engine, checkpoint: Path, cells: Sequence[Cell], seed: int, folder: Path, under: Sequence[str]
) -> dict[str, Any]:
    paths = _paths(engine, folder)
    # -P: this folder, from which this command runs, must not hide the engine's package.
    command = [*under, sys.executable, "-P", "-m", WORKERS[OURS]]
    worker = Worker(engine.name, command, {"PYTHONPATH": str(paths)}, folder / "logs" / f"{engine.name}.log")
    job = {"action": "speed", "model": str(checkpoint.resolve()), "settings": dict(engine.settings), "seed": seed}
    job |= {"threads": engine.threads, "times": 1, "cells": [asdict(cell) for cell in cells]}
    return measured_of(cells, worker.do(job, _TIMEOUT_S))


def _paths(engine: Engine, folder: Path) -> Path:
    """Return a folder that has the engine's package, and the benchmarks of this checkout."""
    paths = folder.resolve() / "paths" / engine.name
    paths.mkdir(parents=True, exist_ok=True)
    for name, source in (("inflight", engine.checkout), ("benchmarks", ROOT)):
        link = paths / name
        link.unlink(missing_ok=True)
        link.symlink_to(source.resolve() / name)
    return paths


def _checkout(commit: str, folder: Path, say: Callable[[str], object]) -> Path:
    """Return a folder with the files of a commit and its library, where the commit has one."""
    if not (folder / "pyproject.toml").is_file():
        with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as files:
            files.extractall(folder, filter="data")
    build = folder / "native/build.py"
    if build.is_file():
        say(f"building the library of {commit}")
        done = subprocess.run([sys.executable, str(build)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise InflightError(f"{build} failed:\n{done.stderr}")
    return folder


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False)
    if done.returncode:
        raise InflightError(done.stderr.decode(errors="replace").strip())
    return done.stdout
