"""Plans for a CPU measure the machine, which takes some seconds: in tests it is measured once."""

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
    measured = functools.cache(gpus.measure_cpu)

    def once(step: str = "auto", threads: int | None = None, _progress: object = None) -> gpus.Gpu:
        return measured(step, threads)

    with pytest.MonkeyPatch.context() as changed:
        for module in (gpus, pipeline):
            changed.setattr(module, "measure_cpu", once)
        yield
