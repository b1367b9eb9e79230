"""Takes cores away in bursts, as other guests of an overbooked host do: to prove that no test depends on the time.

    sudo .venv/bin/python tests/support/busy_neighbour.py &

A loop with real-time priority runs on each core for the length of a burst, on all at the same time; nothing else runs
there meanwhile. Bursts last up to a second, pauses between them up to two, each drawn anew.
That needs root or CAP_SYS_NICE. Linux leaves other tasks 5 % of each second (``kernel.sched_rt_runtime_us``), so a loop
stands still for the last 50 ms of a long burst. It ends with SIGINT or SIGTERM.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time

PRIORITY = 50
BURST_S, PAUSE_S = 1.0, 2.0
"""The longest."""


def take(core: int, seed: int) -> None:
    """Take ``core`` again and again until the parent ends; processes with the same seed do so at the same times."""
    parent = os.getppid()
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    draw = random.Random(seed)
    at = float(seed)
    while os.getppid() == parent:
        at += draw.uniform(0, PAUSE_S)
        time.sleep(max(0.0, at - time.monotonic()))
        at += draw.uniform(0, BURST_S)
        while time.monotonic() < at:
            pass


def main() -> None:
    """Take all cores until SIGTERM or SIGINT comes."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except PermissionError as error:
        sys.exit(f"real-time priority needs root or CAP_SYS_NICE: {error}")
    seed = int(time.monotonic()) + 1
    cores = sorted(os.sched_getaffinity(0))
    processes = [multiprocessing.Process(target=take, args=(core, seed), daemon=True) for core in cores]
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
