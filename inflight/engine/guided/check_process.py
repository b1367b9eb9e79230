"""The process in which guides are checked: it may hang or crash without harm, and the engine then starts another.

    python -m inflight.engine.guided.check_process FILE_DESCRIPTOR

The descriptor is of a connection. By it come the tokens and the limits, then guides; each is answered by a
``CheckedGuide`` or by the error that it is refused with. When the connection ends, the process does. A check that takes
more CPU time than it may ends the process by the signal SIGPROF.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue

from llguidance import LLParserLimits, LLTokenizer

from inflight.engine.guided.guide_check import CheckedGuide, checked_guide, parser_limits
from inflight.errors import EngineFailure, InflightError
from inflight.sampling import Guide

log = logging.getLogger(__name__)

STACK_BYTES = 256 << 20
"""Of a thread that compiles: llguidance follows references and names by recursion, and no error stops it at the end of
its stack. This is reserved, and takes memory only where it is used. ``max_guide_bytes`` bounds the depth."""
_MEMORY_BYTES = 1 << 30
"""Of address space that checks may take; llguidance ends the process where it gets no more."""


def main() -> None:
    """Check what comes, one after the other, until the connection ends."""
    connection: Connection = Connection(int(sys.argv[1]))
    table, seconds, *limited = connection.recv()
    tokens, limits = table.tokenizer(), parser_limits(*limited)
    guides: SimpleQueue[Guide] = SimpleQueue()
    threading.stack_size(STACK_BYTES)
    # The connection is read while a guide is checked, so that its end ends the process at once.
    work = partial(_work, connection, guides, seconds, partial(_outcome, tokens=tokens, limits=limits))
    threading.Thread(target=work, name="guides", daemon=True).start()
    _limit_memory()
    connection.send(None)  # it is ready
    try:
        while True:
            guides.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)


def _work(
    connection: Connection,
    guides: SimpleQueue[Guide],
    seconds: float,
    outcome: Callable[[Guide], CheckedGuide | InflightError],
) -> None:
    while True:
        guide = guides.get()
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of CPU time, of all threads
        answer = outcome(guide)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(answer)


def _outcome(guide: Guide, tokens: LLTokenizer, limits: LLParserLimits) -> CheckedGuide | InflightError:
    try:
        return checked_guide(guide, tokens, limits)
    except InflightError as error:
        return error
    except BaseException:  # what Rust panics with is no Exception
        log.exception("a guide could not be compiled")
        return EngineFailure("the guide could not be compiled; the server's log says why")


def _limit_memory() -> None:
    """Let this process take so much more, where it can be found out what it has."""
    try:
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (taken + _MEMORY_BYTES, taken + _MEMORY_BYTES))


if __name__ == "__main__":
    main()
