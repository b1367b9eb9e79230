"""How slow this machine is: what is promised within seconds of a usual one takes longer here."""

from __future__ import annotations

import functools
import resource
import subprocess
import sys

IMPORT_S = 2.0
"""CPU time of ``import torch`` on a usual machine; an AMD EPYC whose cores' caches others share takes 3 s."""


@functools.cache
def slowness() -> float:
    """Return how many times as long as a usual machine this one computes; 1 if it is no slower.

    CPU time is counted, so that what else the machine does meanwhile is not.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return max(1.0, (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / IMPORT_S)
