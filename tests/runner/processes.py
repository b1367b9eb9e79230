"""Runs the parts, a few at a time, and gathers what their processes tell."""

from __future__ import annotations

import atexit
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from tests.runner.imports import ROOT
from tests.runner.parts import Part

WAITING = 2
"""Parts that mostly wait and run at the same time, beside those that compute."""
_NOTHING_SELECTED = 5
"""Pytest's exit code where no test has the marks."""
STOP_S = 60.0
"""A process has so long to end after its tests, and to end its fixtures' servers after an interrupt."""


@dataclass(frozen=True)
class Ended:
    """A test that has ended, for good."""

    test: str
    kind: str
    outcome: str
    seconds: float


@dataclass
class Result:
    """A part's tests, and how it ended."""

    part: Part
    ended: list[Ended] = field(default_factory=list)
    repeated: list[tuple[str, str]] = field(default_factory=list)
    """Tests that were tried again, each with the first line of its failure."""
    broke: str = ""
    """Why the process ended before its tests did."""
    output: str = ""
    seconds: float = 0.0

    @property
    def counts(self) -> Counter[str]:
        """Tests by outcome."""
        return Counter(one.outcome for one in self.ended)

    @property
    def failed(self) -> bool:
        """Whether a test failed, or did not run."""
        return bool(self.broke or self.counts["failed"])


class Runner:
    """Runs parts in processes: as many at a time as it has workers, besides those that wait."""

    def __init__(
        self,
        workers: int,
        folder: Path,
        done: Callable[[Result], object],
        options: Sequence[str] = (),
        progress: Callable[[int, float, str], object] = lambda *_: None,
        every_s: float = 60.0,
        imported: Sequence[str] = (),
    ) -> None:
        """Make a runner; nothing runs yet.

        Args:
            workers: processes at a time.
            folder: gets the processes' output.
            done: called for each part that has ended, one at a time.
            options: more arguments of pytest.
            progress: called every ``every_s`` seconds with the number of tests that have ended, and the seconds and the
                name of the one that has run longest.
            every_s: see ``progress``.
            imported: modules that are imported once, by a process that those of the parts are forked from. The first
                part does not wait for that, and imports all by itself, as all do without any.
        """
        self._workers, self._folder, self._done, self._options = workers, folder, done, options
        self._progress, self._every_s = progress, every_s
        self._spawned, self._forked = new_processes([]), new_processes(imported)
        self._lock = threading.Lock()
        self._processes: set[BaseProcess] = set()
        self._stopped = False
        self._number = 0

    def run(self, parts: Sequence[Part]) -> list[Result]:
        """Run all parts; those that run alone are the last."""
        results: list[Result] = []
        computing = [part for part in parts if not part.waits and not part.alone]
        waiting = [part for part in parts if part.waits]
        alone = [part for part in parts if part.alone]
        try:
            for queues in ([*[computing] * self._workers, *[waiting] * WAITING], [alone]):
                threads = [threading.Thread(target=self._work, args=(queue, results)) for queue in queues]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    while thread.is_alive():
                        thread.join(self._every_s)
                        self._tell_progress()
        except KeyboardInterrupt:
            self._stop()
            raise
        return results

    def _tell_progress(self) -> None:
        """Tell the number of tests that have ended, and which one has run longest, for how many seconds."""
        ended, longest = 0, (0.0, "")
        for told in sorted(self._folder.glob("*.jsonl")):
            result = Result(Part((), "", 0.0))
            begun = _read(told, result)
            ended += len(result.ended)
            if begun:
                longest = max(longest, (time.time() - told.stat().st_mtime, begun))
        self._progress(ended, *longest)

    def _work(self, queue: list[Part], results: list[Result]) -> None:
        while True:
            with self._lock:
                if self._stopped or not queue:
                    return
                part = queue.pop(0)
                self._number += 1
                place = self._folder / f"{self._number:03}"
                process = self._start(part, place)
            result = self._wait(process, part, place)
            with self._lock:
                results.append(result)
                self._done(result)

    def _start(self, part: Part, place: Path) -> BaseProcess:
        """Start a part's process; only one thread at a time may."""
        told, output = place.with_suffix(".jsonl"), place.with_suffix(".log")
        arguments = ["-p", "tests.runner.plugin", "--tell", str(told), "-m", part.marks, *self._options, *part.files]
        context = self._spawned if self._number == 1 else self._forked
        process = context.Process(target=run_pytest, args=(arguments, {"HYPOTHESIS_PROFILE": part.profile}, output))
        process.start()
        self._processes.add(process)
        return process

    def _wait(self, process: BaseProcess, part: Part, place: Path) -> Result:
        """Wait for the end of a part's process; return what its tests told."""
        told, output = place.with_suffix(".jsonl"), place.with_suffix(".log")
        began = time.monotonic()
        connection.wait([process.sentinel])
        with self._lock:  # a start polls all processes, and of two threads that poll one, one gets a wrong code
            process.join()
            self._processes.discard(process)
            code = process.exitcode
        assert code is not None
        result = Result(part, output=output.read_text(errors="replace"), seconds=time.monotonic() - began)
        begun = _read(told, result)
        if begun or code not in (0, 1, _NOTHING_SELECTED) or (code == 1 and not result.counts["failed"]):
            result.broke = f"{_how(code)} {f'in {begun}' if begun else 'outside of a test'}"
        return result

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            running = {process.sentinel: process for process in self._processes if process.is_alive()}
            for process in running.values():
                os.kill(process.pid or 0, signal.SIGINT)
        end = time.monotonic() + STOP_S
        while running and (ended := connection.wait(running, end - time.monotonic())):
            for sentinel in ended:
                del running[sentinel]  # type: ignore[arg-type]
        for process in running.values():
            process.kill()


def new_processes(imported: Sequence[str]) -> BaseContext:
    """Return what starts processes that have imported these modules: they are forked from one that does it once.

    Their libraries compute with one thread each, since there are more processes than cores.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    if not imported:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(imported))
    return context


def run_pytest(arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
    """Run pytest in this process, which was made for it, and end with its code.

    Args:
        arguments: pytest's.
        environment: variables that it has besides.
        output: gets what it prints.
    """
    signal.signal(signal.SIGINT, _interrupt_once)
    os.chdir(ROOT)
    os.environ.update(environment)
    nothing = os.open(os.devnull, os.O_RDONLY)
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream, file in ((0, nothing), (1, written), (2, written)):
        os.dup2(file, stream)
    import pytest  # here: the runner itself does without it, and `needs` runs where it is not installed

    code = pytest.main(list(arguments))
    # A thread that goes on would keep the process: it is shown, and ended.
    faulthandler.dump_traceback_later(STOP_S, exit=True, file=2)
    atexit._run_exitfuncs()  # multiprocessing leaves them out; temporary folders go in them
    sys.exit(code)


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """Interrupt the tests, and ignore a second signal: Ctrl-C in a terminal comes from there and from ``_stop``."""
    signal.signal(signal.SIGINT, lambda *_: None)
    raise KeyboardInterrupt


def _read(told: Path, result: Result) -> str:
    """Add what a process told to its result; return the test that began and did not end."""
    begun = ""
    whole, _, _ = told.read_text().rpartition("\n") if told.is_file() else ("", "", "")
    for line in whole.splitlines():
        said = json.loads(line)
        if "begins" in said:
            begun = said["begins"]
        elif "repeats" in said:
            result.repeated.append((said["repeats"], said["cause"]))
        else:
            result.ended.append(Ended(said.pop("ends"), **said))
            begun = ""
    return begun


def _how(code: int) -> str:
    return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"pytest ended with code {code}"
