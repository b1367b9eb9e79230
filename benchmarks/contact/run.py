"""Runs the stages of a call, each in processes of its own that are killed when their time is over.

Only the standard library is needed here: what a stage lacks is found by the stage.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.contact.plan import Stage
from benchmarks.contact.record import Recorder, lines

WITHOUT_KERNELS = {"CONTACT_KERNELS": "0"}
_POLL_S = 0.05
_LOG_TAIL = 4096


@dataclass
class _Running:
    """A process of a stage."""

    case: str
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    began: float
    until: float


class Interrupted(Exception):
    """A call has been asked to end."""


class Run:
    """One call."""

    def __init__(
        self,
        call: str,
        output: Path,
        environment: Mapping[str, str],
        seconds: float,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            call: A, B or C.
            output: folder of ``contact.jsonl`` and ``contact.log``.
            environment: of all stages.
            seconds: of the whole call; what has no time left is not begun.
            interrupted: whether the call is to end; asked all the time.
        """
        self.results = output / "contact.jsonl"
        self._call, self._log = call, output / "contact.log"
        self._environment = dict(environment)
        self._ends = time.monotonic() + seconds
        self._interrupted = interrupted

    def stages(self, stages: Sequence[Stage]) -> None:
        """Run them one after the other; a stage that fails stops no other.

        Raises:
            Interrupted: the call is to end; nothing of it runs any more.
            OSError: the results cannot be written; nothing runs any more.
        """
        for stage in stages:
            recorder = Recorder(self.results, self._call, stage.name)
            if stage.within and shutil.which(stage.within[0]) is None:
                recorder.outcome("skipped", 0, f"{stage.within[0]} is not here")
                continue
            known = len(lines(self.results))
            self._stage(stage, recorder)
            if stage.judges and not _all_good(lines(self.results)[known:], stage.name):
                self._environment |= WITHOUT_KERNELS
                recorder.add("stop rule", "kernels off", note="from here on PyTorch alone runs the steps")

    def _stage(self, stage: Stage, recorder: Recorder) -> None:
        waiting, running = list(stage.cases or ("",)), list[_Running]()
        try:
            while waiting or running:
                if self._interrupted():
                    raise Interrupted
                while waiting and len(running) < stage.at_once:
                    case = waiting.pop(0)
                    left = min(stage.seconds, self._ends - time.monotonic())
                    if left <= 1:
                        recorder.outcome("not begun", 0, " ".join((case, "no time was left")).strip())
                        continue
                    running.append(self._start(stage, case, left))
                time.sleep(_POLL_S)
                for one in [one for one in running if _is_over(one)]:
                    [code] = _end(one)
                    running.remove(one)
                    self._note(stage, one, code, recorder)
        except BaseException:
            for one, code in zip(running, _end(*running), strict=True):
                self._note(stage, one, code, recorder)
            raise

    def _start(self, stage: Stage, case: str, seconds: float) -> _Running:
        log = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed when the process has ended
        more = {"CONTACT_FILE": str(self.results), "CONTACT_CALL": self._call, "CONTACT_STAGE": stage.name}
        process = subprocess.Popen(
            stage.program(case),
            env={**os.environ, **self._environment, **more},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all that it starts can be ended with it
        )
        now = time.monotonic()
        return _Running(case, process, log, now, now + seconds)

    def _note(self, stage: Stage, one: _Running, code: int | None, recorder: Recorder) -> None:
        """Note how a process ended: by itself with ``code``, or not."""
        seconds = time.monotonic() - one.began
        if code is None and seconds < one.until - one.began:
            outcome = "interrupted"
        elif code is None:
            outcome = "timed out"
        elif code < 0:
            outcome = f"crashed: {signal.Signals(-code).name}"
        else:
            outcome = "failed" if code else "done"
        said = self._keep_log(stage, one)
        recorder.outcome(outcome, seconds, " ".join((one.case, "" if outcome == "done" else said)).strip())

    def _keep_log(self, stage: Stage, one: _Running) -> str:
        """Append what a process said to the log, and return its last line."""
        one.log.seek(0)
        said = one.log.read()
        one.log.close()
        with self._log.open("ab") as log:
            log.write(f"==== {self._call}: {stage.name} {one.case}\n".encode() + said + b"\n")
        told = [line for line in said[-_LOG_TAIL:].decode(errors="replace").splitlines() if line.strip()]
        return told[-1].strip()[:200] if told else ""


def _is_over(one: _Running) -> bool:
    return one.process.poll() is not None or time.monotonic() > one.until


def _end(*ended: _Running) -> list[int | None]:
    """End all that is left of processes; return how each ended by itself, None if it had not."""
    codes = [one.process.poll() for one in ended]
    for one in ended:  # all of them before any is waited for, which may be interrupted again
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)
    for one in ended:
        one.process.wait()
    return codes


def _all_good(found: Sequence[Mapping[str, object]], stage: str) -> bool:
    mine = [line for line in found if line["stage"] == stage]
    wrong = [line for line in mine if line.get("good") is False or line.get("outcome") not in (None, "done")]
    return bool(mine) and not wrong
