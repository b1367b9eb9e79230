"""What a soak of a server has shown: a table and a picture of memory, a table of the requests' ends, and a verdict."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Callable, Sequence

from benchmarks.figures import legend_above, panels
from benchmarks.result import Result
from benchmarks.server_soak.processes import Held
from benchmarks.server_soak.run import Soaked
from benchmarks.server_soak.session import LEFT, WRONG
from benchmarks.server_soak.traffic import KINDS
from inflight.contract import DETOKENIZER, ENGINE, TOKENIZER
from inflight.report.plots import COLOURS, GREY

WARM_UP = 0.4
"""Of the time: by then caches are full, of the KV cache's pages, of compiled products, of buffers."""
MOST_GROWTH_MIB = 24.0
"""That a process may gain after the warm-up and still be called flat."""
LONGEST_STOP_S = 15.0
"""A server takes some seconds; one that waits for a request which nobody has takes its exit timeout, 30 s or more."""
_MIB = 2**20
_PROCESSES = {"triton": "Triton", TOKENIZER: "tokenizer", ENGINE: "engine", DETOKENIZER: "detokenizer"}


def growth_mib(soaked: Soaked, process: str) -> float:
    """Return by how much a process grew after the warm-up: its last tenth's median over that of the tenth after it."""
    sizes = _series(soaked, process, lambda held: held.uss / _MIB)
    late = sizes[int(WARM_UP * len(sizes)) :]
    tenth = max(1, len(sizes) // 10)
    return statistics.median(late[-tenth:]) - statistics.median(late[:tenth])


def faults(soaked: Soaked) -> list[str]:
    """Return what a server must not show, each in some words; empty: the soak is passed."""
    found = [f"{len(soaked.wrong)} requests ended wrong"] if soaked.wrong else []
    for process, name in _PROCESSES.items():
        if process not in soaked.samples[-1].processes:
            found.append(f"the process of {name} is gone")
        elif (growth := growth_mib(soaked, process)) > MOST_GROWTH_MIB:
            found.append(f"{name} grew by {growth:.0f} MiB after the warm-up")
    if soaked.books:
        found.append(soaked.books)
    # SIGKILL is how a server is ended that keeps a request of a client that has left: see inflight/serve/shutdown.py.
    if soaked.stop_s > LONGEST_STOP_S or soaked.exit_code not in (0, -signal.SIGKILL):
        found.append(f"the server took {soaked.stop_s:.1f} s to stop, with code {soaked.exit_code}")
    return found


def results(soaked: Soaked) -> list[Result]:
    """Return the results: memory, and ends."""
    found = faults(soaked)
    minutes = soaked.seconds / 60
    verdict = f"Faults: {'; '.join(found)}." if found else "No process grows after the warm-up, and nothing is lost."
    ends = sum(count for (_, how), count in soaked.ends.items() if how not in (WRONG, LEFT, "refused"))
    finding = (
        f"{minutes:.0f} minutes, {soaked.requests:,} requests of random lengths over gRPC and HTTP: {ends:,} ended "
        f"with a finish reason, or were past their deadline before they began; {_total(soaked, LEFT):,} were left by "
        f"their clients, {_total(soaked, 'refused'):,} refused as they must be, {_total(soaked, WRONG):,} ended wrong. "
        f"The idle engine's books are {'wrong' if soaked.books else 'right'}; the server took {soaked.stop_s:.1f} s "
        f"to stop. {verdict}"
    )
    figure, [axes] = panels(1)
    at = [sample.at_s / 60 for sample in soaked.samples]
    for (process, name), colour in zip(_PROCESSES.items(), COLOURS, strict=False):
        there = [sample for sample in soaked.samples if process in sample.processes]
        sizes = [sample.processes[process].uss / _MIB for sample in there]
        axes.plot([sample.at_s / 60 for sample in there], sizes, color=colour, linewidth=1.6, label=name)
    axes.plot(at, [sample.shared / _MIB for sample in soaked.samples], color=GREY, linewidth=1.2, label="/dev/shm")
    axes.axvspan(0, WARM_UP * minutes, color=GREY, alpha=0.12, linewidth=0)
    axes.annotate("warm-up", (0, 1), (4, -4), xycoords=("data", "axes fraction"), textcoords="offset points", va="top")
    axes.set_xlim(0, minutes)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes of mixed traffic")
    axes.set_ylabel("memory of its own, MiB")
    legend_above(axes, columns=5)
    return [
        Result("memory", "Memory of a server's processes", finding, _memory_rows(soaked), figure),
        Result("ends", "How the requests ended", "By kind of request, and by end.", _end_rows(soaked)),
    ]


def _memory_rows(soaked: Soaked) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    for process, name in _PROCESSES.items():
        sizes = _series(soaked, process, lambda held: held.uss / _MIB)
        if not sizes:
            continue
        files = _series(soaked, process, lambda held: held.files)
        threads = _series(soaked, process, lambda held: held.threads)
        rows.append(
            {
                "process": name,
                "MiB_at_start": round(sizes[0], 1),
                "after_warm-up": round(sizes[int(WARM_UP * (len(sizes) - 1))], 1),
                "at_end": round(sizes[-1], 1),
                "growth_after_warm-up": round(growth_mib(soaked, process), 1),
                "open_files": f"{files[0]:.0f} to {files[-1]:.0f}",
                "threads": f"{threads[0]:.0f} to {threads[-1]:.0f}",
            }
        )
    return rows


def _end_rows(soaked: Soaked) -> list[dict[str, float | str]]:
    ways = ["stop", "length", "cancelled", "deadline", LEFT, "refused", WRONG]
    ways += sorted({how for _, how in soaked.ends} - set(ways))
    return [{"kind": kind, **{how: soaked.ends[kind, how] for how in ways}} for kind in KINDS]


def _series(soaked: Soaked, process: str, value: Callable[[Held], float]) -> Sequence[float]:
    return [value(sample.processes[process]) for sample in soaked.samples if process in sample.processes]


def _total(soaked: Soaked, how: str) -> int:
    return sum(count for (_, one), count in soaked.ends.items() if one == how)
