"""What a server's log says of why it ended."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

_NO_CAUSE = re.compile(r"^\s*$|CudaDriverHelper has not been initialized|the server has gone, and the stage with it")
"""What Triton says on every machine without a GPU, and the stages of every server that has ended."""
_CRASH = re.compile(r"Signal \(\d+\) received")
"""A stack trace follows."""
_CAUSES = [
    re.compile(pattern)
    for pattern in (
        r"DeploymentError: (.*?)(?:\\n\\nAt:|$)",  # the stub puts a traceback, its line ends escaped, behind it
        r"^ +what\(\): +(.*)",  # of a C++ exception that nothing caught
        r"^[-\d]+ [\d:,]+ ERROR inflight[\w.]*: (.*)",
        r'"level": "error", "logger": "inflight[\w.]*", "message": "((?:[^"\\]|\\.)*)"',
        r"\| (\w+ +\| \d+ +\| UNAVAILABLE: .*)\|$",
        r"E\d{4} [^\]]* main\.cc:\d+\] (.*)",  # what ends the server, before what libraries say of it
        r"E\d{4} [^\]]*\] (.*)",
    )
]
"""The plainest first."""


def cause(log: Path, ready: int) -> str:
    """Return the line that says best why the server ended.

    Args:
        log: the server's.
        ready: bytes that it had when the server was ready; 0: it never was. The first error of a start brings the
            others with it; of what came in hours of serving, the last is nearest to the end.
    """
    with log.open("rb") as file:
        file.seek(ready)
        text = file.read().decode(errors="replace")
    before = itertools.takewhile(lambda line: not _CRASH.search(line), text.splitlines())
    lines = [line for line in before if not _NO_CAUSE.search(line)]
    for pattern in _CAUSES:
        for line in reversed(lines) if ready else lines:
            if match := pattern.search(line):
                return " ".join(match[1].strip(' "').split())
    return f"its log ends with: {lines[-1].strip()}" if lines else "its log does not say why"
