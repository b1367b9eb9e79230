"""Takes a core away in bursts, as another guest of an overbooked host does: to prove that no test depends on the time.

    sudo .venv/bin/python tests/support/busy_neighbour.py --core 1 --burst 1.0 --pause 1.0 &

A loop with real-time priority runs on the core for the length of a burst; nothing else runs on that core meanwhile.
That needs root or CAP_SYS_NICE. Linux leaves other tasks 5 % of each second (``kernel.sched_rt_runtime_us``), so the
loop stands still for the last 50 ms of a long burst. It ends with SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

PRIORITY = 50


def take(core: int, burst_s: float, pause_s: float, seconds: float) -> int:
    """Take ``core`` for ``burst_s`` and leave it for ``pause_s``, for ``seconds``; return the number of bursts."""
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    print(f"takes core {core}", flush=True)
    end, bursts = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        until = time.monotonic() + burst_s
        while time.monotonic() < until:
            pass
        bursts += 1
        time.sleep(pause_s)
    return bursts


def main() -> None:
    """Read the options and take the core until the time is over or a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", type=int, default=1, help="which core to take")
    parser.add_argument("--burst", type=float, default=1.0, metavar="SECONDS", help="how long it is taken")
    parser.add_argument("--pause", type=float, default=1.0, metavar="SECONDS", help="how long it is left")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="when to end; without it: at a signal")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        take(options.core, options.burst, options.pause, options.seconds)
    except PermissionError as error:
        sys.exit(f"real-time priority needs root or CAP_SYS_NICE: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
