"""Takes cores away in bursts, as other guests of an overbooked host do: to prove that no test depends on the time.

    sudo .venv/bin/python tests/support/busy_neighbour.py --burst 1.0 --pause 1.0 &

A loop with real-time priority runs on each core for the length of a burst, on all at the same time; nothing else runs
there meanwhile. Bursts last up to ``--burst`` seconds, pauses between them up to twice ``--pause``, each drawn anew.
That needs root or CAP_SYS_NICE. Linux leaves other tasks 5 % of each second (``kernel.sched_rt_runtime_us``), so a loop
stands still for the last 50 ms of a long burst. It ends with SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Sequence

PRIORITY = 50


def take(core: int, burst_s: float, pause_s: float, end: float, seed: int) -> None:
    """Take ``core`` for up to ``burst_s``, leave it for up to twice ``pause_s``, until ``time.monotonic()`` is ``end``.

    Processes with the same seed and end take their cores at the same times. They end with their parent.
    """
    parent = os.getppid()
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    draw = random.Random(seed)
    at = float(seed)
    while time.monotonic() < end and os.getppid() == parent:
        at += draw.uniform(0, 2 * pause_s)
        time.sleep(max(0.0, at - time.monotonic()))
        at += draw.uniform(0, burst_s)
        while time.monotonic() < at:
            pass


def main() -> None:
    """Read the options and take the cores until the time is over or a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", type=int, action="append", help="a core to take; without it: all of them")
    parser.add_argument("--burst", type=float, default=1.0, metavar="SECONDS", help="how long they are taken at most")
    parser.add_argument("--pause", type=float, default=1.0, metavar="SECONDS", help="how long they are left on average")
    parser.add_argument("--seconds", type=float, default=1e6, help="when to end; without it: at a signal")
    options = parser.parse_args()
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except PermissionError as error:
        sys.exit(f"real-time priority needs root or CAP_SYS_NICE: {error}")
    run(options.core or sorted(os.sched_getaffinity(0)), options.burst, options.pause, options.seconds)


def run(cores: Sequence[int], burst_s: float, pause_s: float, seconds: float) -> None:
    """Take cores, each by a process of its own, until the time is over or SIGTERM or SIGINT comes."""
    seed = int(time.monotonic()) + 1
    arguments = (burst_s, pause_s, time.monotonic() + seconds, seed)
    processes = [multiprocessing.Process(target=take, args=(core, *arguments), daemon=True) for core in cores]
    for process in processes:
        process.start()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"takes {', '.join(f'core {core}' for core in cores)}", flush=True)
    try:
        for process in processes:
            process.join()
    except KeyboardInterrupt:
        for process in processes:
            process.kill()


if __name__ == "__main__":
    main()
