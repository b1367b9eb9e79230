"""Plans for a CPU measure the machine, which takes a second and more: in tests it is measured once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from inflight.export.build import pipeline
from inflight.export.plan import gpus


@contextmanager
def this_machine_measured_once() -> Iterator[None]:
    """Have all plans and builds meanwhile see the machine as it was when the first of them measured it."""
    once = functools.cache(gpus.measure_cpu)
    with pytest.MonkeyPatch.context() as changed:
        for module in (gpus, pipeline):
            changed.setattr(module, "measure_cpu", once)
        yield
