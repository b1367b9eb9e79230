"""Reads from a server's log how its start goes and why it ended, keeps the log of one that crashed, and bounds it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from inflight.serve.vitals import End

UNKNOWN = "its log does not say why"
MOST_BYTES = 64 << 20
"""Bytes of a log. When there are more, they become the log before, named with ``.1``, and the log begins anew."""
_KEPT_BYTES = 4 << 20
"""The bytes of the end of a log that are read, and kept."""
_NO_CAUSE = re.compile(r"^\s*$|CudaDriverHelper has not been initialized|the server has gone, and the stage with it")
"""Lines that give no cause: Triton writes one on every machine without a GPU, and a stage writes the other after each
end of its server."""
_CRASH = re.compile(r"^Signal \((?!15\)|2\))\d+\) received\.$", re.MULTILINE)
"""A stack trace follows; after SIGTERM and SIGINT, which Triton tells in the same words, its end in order. The whole
line: a client's text that is logged stands in a line with more."""
_FRAME = re.compile(r"^ *\d+# (?!0x)(\w+::\S.*) in \S+$")
"""A frame of a stack trace that has a name of C++, which no frame of the system's library has."""
_EXCEPTION = re.compile(r"^ +what\(\): +(.*)")
"""The message of a C++ exception that nothing caught."""
_MEANINGS = {
    "boost::interprocess::lock_exception": "a stage that it waited for showed no sign of life",
    "std::bad_alloc": "it got no memory",
}
_OF_AN_END = [
    _EXCEPTION,
    re.compile(r"^[-\d]+ [\d:,]+ ERROR inflight\.trtllm\.watchdog: (.*)"),
    re.compile(r'"level": "error", "logger": "inflight\.trtllm\.watchdog", "message": "((?:[^"\\]|\\.)*)"'),
    re.compile(r"E\d{4} [^\]]* main\.cc:\d+\] (.*)"),
]
"""Lines that only an error writes that ends a server. The plainest come first."""
_OF_A_START = [
    re.compile(pattern)
    for pattern in (
        r"DeploymentError: (.*?)(?:\\n\\nAt:|$)",  # the stub puts a traceback, its line ends escaped, behind it
        _EXCEPTION.pattern,
        r"^[-\d]+ [\d:,]+ ERROR inflight[\w.]*: (.*)",
        r'"level": "error", "logger": "inflight[\w.]*", "message": "((?:[^"\\]|\\.)*)"',
        r"\| (\w+ +\| \d+ +\| UNAVAILABLE: .*)\|$",
        r"E\d{4} [^\]]* main\.cc:\d+\] (.*)",  # what ends the server, before what libraries say of it
        r"E\d{4} [^\]]*\] (.*)",
    )
]
"""Lines of errors, each of which ends a start. The plainest come first."""


_STAGE_LINE = re.compile(r"[-\d]+ [\d:,]+ (?P<level>[A-Z]+) inflight[\w.]*: (?P<message>.*)")
"""Matches a line of text that a stage has logged."""


class StageLine(NamedTuple):
    """A line that a stage has logged."""

    level: str
    """``INFO``, ``WARNING`` or another name of Python's levels."""
    message: str


class StageLog:
    """Reads what the stages log, as it is written; Triton's own lines, and what was read before, are left out."""

    def __init__(self) -> None:
        self._log, self._read, self._rest = Path(), 0, ""
        self._told = set[StageLine]()

    def new_lines(self, log: Path) -> list[StageLine]:
        """Return what was logged since the last call; from its beginning, where it is another log than then."""
        if log != self._log:
            self._log, self._read, self._rest = log, 0, ""
        with log.open("rb") as file:
            file.seek(self._read)
            written = file.read()
        self._read += len(written)
        *lines, self._rest = (self._rest + written.decode(errors="replace")).split("\n")
        found = [line for line in map(_stage_line, lines) if line is not None]
        new = [line for line in dict.fromkeys(found) if line not in self._told]
        self._told |= set(new)
        return new


def _stage_line(line: str) -> StageLine | None:
    if match := _STAGE_LINE.match(line):
        return StageLine(match["level"], match["message"])
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        entry = json.loads(line)
        if entry["logger"].partition(".")[0] == "inflight":
            return StageLine(entry["level"].upper(), str(entry["message"]))
    return None


def cause(log: Path, ready: int) -> str:
    """Return what says best why the server ended, or ``UNKNOWN``.

    Args:
        log: the server's.
        ready: bytes that it had when the server was ready; 0: it never was. The first error of a start brings the
            others with it. A server that serves logs errors that it outlives, so only what ends one counts, the last.
    """
    with log.open("rb") as file:
        file.seek(max(ready, log.stat().st_size - _KEPT_BYTES) if ready else 0)
        text = file.read().decode(errors="replace")
    lines = text.splitlines()
    before = list(itertools.takewhile(lambda line: not _CRASH.search(line), lines))
    said = [line for line in before if not _NO_CAUSE.search(line)]
    for pattern in _OF_AN_END if ready else _OF_A_START:
        for line in reversed(said) if ready else said:
            if match := pattern.search(line):
                words = " ".join(match[1].strip(' "').split())
                return f"{_MEANINGS[words]} ({words})" if words in _MEANINGS else words
    frames = (match[1] for line in lines[len(before) :] if (match := _FRAME.match(line)))
    return f"its stack names {frame}" if (frame := next(frames, "")) else UNKNOWN


class CrashWatch:
    """Looks whether a server crashes on and on, as its log grows.

    Triton's report of a crash needs memory: where that is what is broken, the report crashes too, and is told again.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._began = self._read = log.stat().st_size
        self._crashes = 0

    def look(self) -> End | None:
        """Return the end of a server whose log has told of more than one crash since the watch began."""
        if self._log.stat().st_size < self._read:  # it has begun anew
            self._began, self._read = 1, 0
        with self._log.open("rb") as file:
            file.seek(self._read)
            lines, _, _ = file.read().rpartition(b"\n")
        self._read += len(lines)
        self._crashes += len(_CRASH.findall(lines.decode(errors="replace")))
        if self._crashes < 2:
            return None
        said = cause(self._log, self._began)
        return End("crash", f"the server crashes again while it tells of its crash: {said}")


def bound(log: Path) -> bool:
    """Begin a log anew if it is long; what is written in this moment may be lost. Return whether it was.

    Whoever writes it must do so at its end, wherever that is (O_APPEND).
    """
    try:
        if log.stat().st_size <= MOST_BYTES:
            return False
        with contextlib.suppress(OSError):  # the disk is full: then the log before is what is given up
            shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)
    except OSError:  # somebody has removed it, which is no reason to end what writes it
        return False
    return True


def keep(log: Path, name: str) -> Path | None:
    """Copy the end of a log to the user's state directory (XDG), in place of the one of that name; return where it is.

    None: it cannot be written there.
    """
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
        kept = Path(state) / "inflight" / name
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.unlink(missing_ok=True)
        with (
            log.open("rb") as file,
            os.fdopen(os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy,
        ):
            file.seek(max(0, log.stat().st_size - _KEPT_BYTES))
            copy.write(file.read())
    except (OSError, RuntimeError):  # the latter: this user has no home directory, as in some containers
        return None
    return kept
