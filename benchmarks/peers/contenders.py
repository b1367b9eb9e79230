"""How each contender is started: its worker in its own environment, and what is converted for it beforehand."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.checkpoints import written_once
from benchmarks.environments import Home
from benchmarks.peers.environments import home_of
from benchmarks.peers.jobs import Worker
from benchmarks.peers.variants import OURS, WORKERS, Variant
from inflight.resources import ROOT

_CACHE_SHARE = 5
"""vLLM's KV cache gets the memory divided by this, in whole GiB: it cannot be given in tokens."""
_TCMALLOC, _OPENMP = "tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4", "venv/lib/libiomp5.so"


@dataclass(frozen=True)
class Place:
    """Where things are, and how programs are run there."""

    folder: Path
    """Of converted checkpoints, logs and what was measured."""
    under: Sequence[str] = ()
    """A command that each measurement is run under, e.g. ``taskset -c 0-3``."""
    timeout_s: float = 1800

    def worker(self, contender: str, measures: bool) -> Worker:
        """Return a contender's worker; ``measures``: it runs under ``under``.

        Raises:
            InflightError: the peer's environment has not been made.
        """
        python, environment = sys.executable, {}
        if contender != OURS:
            home = home_of(contender)
            python, environment = str(home.python), variables(home)
        command = [*(self.under if measures else ()), python, "-m", WORKERS[contender]]
        paths = {"PYTHONPATH": str(ROOT)}
        return Worker(contender, command, environment | paths, self.folder / "logs" / f"{contender}.log")

    def converted(self, variant: Variant, source: Path) -> Path:
        """Return the directory of a checkpoint in the variant's form, made by the contender where it is not there yet.

        Raises:
            InflightError: the contender could not convert it.
        """
        directory = self.folder / f"{source.name}-{variant.contender}-{variant.form}"

        def write(made: Path) -> None:
            job = {"action": "prepare", "source": str(source.resolve()), "output": str(made.resolve())}
            worker = self.worker(variant.contender, measures=False)
            worker.do(job | {"settings": dict(variant.settings)}, self.timeout_s)
            if not (made / "config.json").is_file():  # what says to ``written_once`` that it is whole
                (made / "config.json").write_bytes((source / "config.json").read_bytes())

        return written_once(directory, write)


def cores() -> list[int]:
    """Return the processors that this process may use: every contender gets a thread for each."""
    return sorted(os.sched_getaffinity(0))


def variables(home: Home) -> dict[str, str]:
    """Return the variables with which a peer runs best, or at all."""
    if home.name == "llama.cpp":
        return {"LLAMA_CPP_LIB_PATH": str(home.folder.resolve() / "build/bin")}
    if home.name != "vllm":
        return {}
    preloaded = filter(None, map(home.find_library, (_TCMALLOC, _OPENMP)))
    chosen: dict[str, Any] = {
        "LD_PRELOAD": ":".join(map(str, preloaded)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores())),
        "VLLM_CPU_KVCACHE_SPACE": max(2, psutil.virtual_memory().total // _CACHE_SHARE >> 30),
        "VLLM_CACHE_ROOT": home.folder.resolve() / "cache",
        "VLLM_ENABLE_V1_MULTIPROCESSING": 0,  # the engine alone is measured in one process; a server has its own
        "VLLM_NO_USAGE_STATS": 1,
        "HF_HUB_OFFLINE": 1,
    }
    return {name: str(value) for name, value in chosen.items()}
