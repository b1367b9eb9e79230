"""What a soak with crashes has shown: ends, crashes, and what the processes hold at equal ages."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from benchmarks.figures import legend_above, panels
from benchmarks.result import Result, Row
from benchmarks.server_soak.crashes import SHARE, Crashed
from benchmarks.server_soak.processes import DOOR, GATEWAY, SERVER, SUPERVISOR, Held
from benchmarks.server_soak.report import LONGEST_STOP_S, MOST_GROWTH_MIB, WARM_UP
from benchmarks.server_soak.resuming import CHAT, TYPED
from benchmarks.server_soak.session import LEFT, WRONG
from benchmarks.server_soak.traffic import KINDS
from inflight.contract import DETOKENIZER, ENGINE, TOKENIZER
from inflight.report.plots import COLOURS, GREY

_MIB = 2**20
_NAMES = {
    SERVER: "Triton",
    TOKENIZER: "tokenizer",
    ENGINE: "engine",
    DETOKENIZER: "detokenizer",
    GATEWAY: "gateway",
    DOOR: "door",
    SUPERVISOR: "inflight serve",
}
_SHARED = "/dev/shm"
"""A row of its own: the files there that the processes have mapped."""
_MOST_FILES = 50
"""How many descriptors more a process may have than one of its age had before: connections come and go."""
_MOST_SHARED_MIB = 64
"""How much more shared memory than at the same age before: a stage's grows to its largest inputs, and never shrinks."""
_PART_OF_LIFE = 0.6
"""Of the longest life of a process of a name: those that lived so long are compared, at ages that all have reached."""


def _lives(soaked: Crashed, name: str) -> list[list[Held]]:
    """Return the samples of each process of a name that lived for long, one process after another.

    ``_SHARED`` has the lives of the server.
    """
    lives: dict[int, list[Held]] = {}
    for sample in soaked.samples:
        held = sample.processes.get(SERVER if name == _SHARED else name)
        if held and name == _SHARED:
            held = replace(held, uss=sample.shared, pss=sample.shared, files=0, threads=0)
        if held:
            lives.setdefault(held.process, []).append(held)
    longest = max((life[-1].age_s for life in lives.values()), default=0.0)
    return [life for life in lives.values() if life[-1].age_s >= _PART_OF_LIFE * longest]


def _compared(soaked: Crashed, name: str) -> tuple[Sequence[Held], Sequence[Held]]:
    """Return the samples of the first and of the last process of a name, at the same ages.

    Where one process has lived all the time, they are those behind the warm-up, and the last ones.
    """
    lives = _lives(soaked, name)
    if len(lives) < 2:
        return _ends(lives[0])
    age_s = min(life[-1].age_s for life in lives)
    first, last = ([held for held in life if age_s / 2 <= held.age_s <= age_s] for life in (lives[0], lives[-1]))
    return first or lives[0][-1:], last or lives[-1][-1:]


def _ends(life: Sequence[Held]) -> tuple[Sequence[Held], Sequence[Held]]:
    """Return the samples of one process behind its warm-up, and its last ones."""
    tenth = max(1, len(life) // 10)
    return life[int(WARM_UP * len(life)) :][:tenth], life[-tenth:]


def _within(soaked: Crashed, name: str) -> float:
    """Return the most MiB that a process of a name has grown by in its life, after its warm-up."""
    both = map(_ends, _lives(soaked, name))
    return max(_median(last, "uss") - _median(first, "uss") for first, last in both) / _MIB


def _median(held: Sequence[Held], what: str) -> float:
    return statistics.median(getattr(one, what) for one in held)


def _memory_rows(soaked: Crashed) -> list[Row]:
    rows: list[Row] = []
    for name, words in (_NAMES | {_SHARED: _SHARED}).items():
        if not (lives := _lives(soaked, name)):
            continue
        first, last = _compared(soaked, name)
        before, after = _median(first, "uss") / _MIB, _median(last, "uss") / _MIB
        rows.append(
            {
                "process": words,
                "long_lives": len(lives),
                "MiB_first": round(before, 1),
                "MiB_last": round(after, 1),
                "growth": round(after - before, 1),
                "growth_within_a_life": round(_within(soaked, name), 1),
                "open_files": _from_to(first, last, "files"),
                "threads": _from_to(first, last, "threads"),
            }
        )
    return rows


def _from_to(first: Sequence[Held], last: Sequence[Held], what: str) -> str:
    before, after = _median(first, what), _median(last, what)
    return f"{before:.0f} to {after:.0f}" if before or after else "-"


def faults(soaked: Crashed) -> list[str]:
    """Return what must not be, each in some words; empty: the soak is passed."""
    found = [f"{len(soaked.wrong)} requests ended wrong"] if soaked.wrong else []
    for name, words in _NAMES.items():
        if not _lives(soaked, name):
            continue
        first, last = _compared(soaked, name)
        growth = _median(last, "uss") - _median(first, "uss")
        files = min(held.files for held in last) - min(held.files for held in first)
        if growth / _MIB > MOST_GROWTH_MIB:
            found.append(f"{words} has grown by {growth / _MIB:.0f} MiB")
        if files > _MOST_FILES:
            found.append(f"{words} has {files} descriptors more")
    if _lives(soaked, _SHARED):
        first, last = _compared(soaked, _SHARED)
        if (growth := (_median(last, "uss") - _median(first, "uss")) / _MIB) > _MOST_SHARED_MIB:
            found.append(f"the processes have {growth:.0f} MiB more in /dev/shm")
    if soaked.books:
        found.append(soaked.books)
    if soaked.stop_s > LONGEST_STOP_S or soaked.exit_code != 0:
        found.append(f"`inflight serve` took {soaked.stop_s:.1f} s to stop, with code {soaked.exit_code}")
    return found + [f"{one} was left behind" for one in soaked.left_behind]


def results(soaked: Crashed) -> list[Result]:
    """Return the results: crashes, ends, memory; those of a soak without a crash have names of their own."""
    no, title = ("", "The crashes") if soaked.crashes else ("no-", "The same without a crash")
    return [
        Result(f"{no}crashes", title, _finding(soaked), _crash_rows(soaked), _picture(soaked)),
        Result(f"{no}crash-ends", "How the requests ended", "By kind of request, and by end.", _end_rows(soaked)),
        Result(
            f"{no}crash-memory",
            "What the processes hold",
            "A process that was started again is compared with the first one of its name at the same ages; one that "
            "has lived all the time, with itself after the warm-up. The growth within a life is the largest of all "
            "long lives, after the warm-up. Shared memory is compared at the same ages of Triton.",
            _memory_rows(soaked),
        ),
    ]


def _finding(soaked: Crashed) -> str:
    typed, left, wrong = (_total(soaked, how) for how in (TYPED, LEFT, WRONG))
    found = faults(soaked)
    grows = "from life to life" if soaked.crashes else "after the warm-up"
    verdict = f"Faults: {'; '.join(found)}." if found else f"Nothing grows {grows}, and nothing is lost."
    return (
        f"{soaked.seconds / 60:.0f} minutes at {SHARE:.0%} of the knee of {soaked.knee:.1f} requests/s, with "
        f"{len(soaked.crashes)} crashes: each of {soaked.requests:,} requests ended once. {left:,} were left by their "
        f"clients, {_total(soaked, 'refused'):,} refused as they must be, {typed:,} of a kind that cannot be resumed "
        f"ended with a typed error, {wrong:,} ended wrong, and all others ended with a finish reason. "
        f"{soaked.hostile.total():,} raw hostile requests came beside them. The idle engine's books are "
        f"{'wrong' if soaked.books else 'right'}; `inflight serve` took {soaked.stop_s:.1f} s to stop, with code "
        f"{soaked.exit_code}, and left {len(soaked.left_behind)} processes and files. {verdict}"
    )


def _crash_rows(soaked: Crashed) -> list[Row]:
    return [
        {
            "minute": round(crash.at_s / 60, 1),
            "process": _NAMES[crash.process],
            "requests_running": crash.running,
            "ready_again_s": round(crash.ready_s, 1),
            "next_good_answer_s": round(crash.back_s, 1),
        }
        for crash in soaked.crashes
    ] or [{"process": "none"}]


def _end_rows(soaked: Crashed) -> list[Row]:
    ways = ["stop", "length", "cancelled", "deadline", LEFT, "refused", TYPED, WRONG]
    ways += sorted({how for _, how in soaked.ends} - set(ways))
    return [{"kind": kind, **{how: soaked.ends[kind, how] for how in ways}} for kind in (*KINDS, CHAT)]


def _total(soaked: Crashed, how: str) -> int:
    return sum(count for (_, one), count in soaked.ends.items() if one == how)


def _picture(soaked: Crashed) -> Figure:
    figure, [axes] = panels(1)
    for (name, words), colour in zip(_NAMES.items(), COLOURS * 2, strict=False):
        there = [sample for sample in soaked.samples if name in sample.processes]
        if there:
            sizes = [sample.processes[name].uss / _MIB for sample in there]
            axes.plot([sample.at_s / 60 for sample in there], sizes, color=colour, linewidth=1.4, label=words)
    at, shared = zip(*((sample.at_s / 60, sample.shared / _MIB) for sample in soaked.samples), strict=True)
    axes.plot(at, shared, color=GREY, linewidth=1.4, linestyle="--", label="/dev/shm")
    for crash in soaked.crashes:
        axes.axvline(crash.at_s / 60, color=GREY, linewidth=0.8, linestyle=":")
        axes.annotate(
            _NAMES[crash.process],
            (crash.at_s / 60, 1),
            (2, -4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            rotation=90,
            va="top",
            fontsize="x-small",
        )
    axes.set_xlim(0, soaked.seconds / 60)
    axes.set_ylim(0, 1.25 * axes.get_ylim()[1])  # room for the names
    axes.set_xlabel("minutes; at each dotted line, the process that it names was killed")
    axes.set_ylabel("memory of its own, MiB")
    legend_above(axes, columns=8)
    return figure
