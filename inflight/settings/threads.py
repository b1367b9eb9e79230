"""How many threads compute where a deployment does not say."""

from __future__ import annotations

import os

_FEW_CORES = 8
"""With fewer, a core that is left to the server is missed more in the engine than in the server."""


def cpu_threads(native: bool) -> int:
    """Return how many threads the portable engine computes with on this machine's CPU, unless its deployment says.

    Beside a model of 125M parameters the server and the other stages take a sixth of two cores at the most (``make
    bench ARGS=serving-cost``). Inflight's own kernels share a step by small tasks, so that a core that serving takes
    for a while delays a task, and all cores compute. PyTorch gives each thread an equal part, and all wait for the
    slowest.

    Args:
        native: whether Inflight's own kernels compute.
    """
    cores = len(os.sched_getaffinity(0))
    return cores if native and cores < _FEW_CORES else max(1, cores - 1)
