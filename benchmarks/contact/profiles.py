"""Which kernels take the time of a step, and which part of the host: PyTorch's profiler over steps of each kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.contact.engines import started
from benchmarks.contact.stage import Contact
from benchmarks.drive import Driver, ask, prompts
from inflight.engine.engine import Engine

_STEPS = 3
_TOP, _NAMED = 25, 6
_SETTLE = 4
"""Steps between the last first token and the profile."""


def profiles(contact: Contact, _case: str) -> None:
    """Profile steps that decode, one that does both, and one long prefill; the tables go to ``profile.txt``."""
    sizes = contact.sizes
    streams = (1, min(64, max(batch.streams for batch in sizes.batches)))
    with started(contact, max_batch_size=streams[-1]) as engine:
        for count in streams:
            with contact.recorder.attempt(f"decode step at {count}"):
                _decode(contact, engine, count)
        with contact.recorder.attempt("mixed step"):
            _mixed(contact, engine)
        with contact.recorder.attempt("prefill step"):
            _prefill(contact, engine)


def _decode(contact: Contact, engine: Engine, count: int) -> None:
    driver = _decoding(contact, engine, count)
    _host_parts(contact, engine, f"decode step at {count}", driver.step)
    with _profiled(contact, f"decode step at {count}", _STEPS):
        for _ in range(_STEPS):
            driver.step()
    driver.finish()


def _mixed(contact: Contact, engine: Engine) -> None:
    """Eight streams decode while a prompt of a hundred tokens comes."""
    driver = _decoding(contact, engine, min(8, engine._config.max_batch_size - 1) or 1)
    prompt = min(100, contact.sizes.prefill)
    for last in (False, True):  # the first time kernels may be compiled
        driver.submit(ask(_prompt(1, prompt)[0], 2))
        driver.step()  # which was launched before the prompt came
        if last:
            with _profiled(contact, "mixed step", 1):
                driver.step()
        for _ in range(_SETTLE):
            driver.step()
    driver.finish()


def _prefill(contact: Contact, engine: Engine) -> None:
    driver = Driver(engine)
    for last in (False, True):
        driver.submit(ask(_prompt(1, contact.sizes.prefill)[0], 1))
        if last:
            with _profiled(contact, f"prefill step of {contact.sizes.prefill}", 1):
                driver.step()
        driver.finish()


def _decoding(contact: Contact, engine: Engine, count: int) -> Driver:
    """Return a driver whose streams all decode and go on for a while."""
    batch = contact.sizes.batches[0]
    driver = Driver(engine)
    most = 3 * (_STEPS + _SETTLE) if contact.dry else 8 * (_STEPS + _SETTLE) + count
    streams = [driver.submit(ask(prompt, most)) for prompt in _prompt(count, batch.prompt)]
    while not all(one.arrivals_s for one in streams):
        driver.step()
    for _ in range(_SETTLE):
        driver.step()
    return driver


def _prompt(count: int, length: int) -> list[list[int]]:
    return prompts(np.random.default_rng(count), count, length)


def _host_parts(contact: Contact, engine: Engine, name: str, step: Callable[[], None]) -> None:
    before, begun = dict(engine.stats.step_part), time.perf_counter()
    for _ in range(_STEPS):
        step()
    whole = 1000 * (time.perf_counter() - begun) / _STEPS
    parts = {part: 1000 * (spent - before[part]) / _STEPS for part, spent in engine.stats.step_part.items()}
    note = ", ".join(f"{part} {spent:.2f}" for part, spent in parts.items())
    contact.recorder.add(f"{name}, all of it", round(whole, 3), "ms", note=note)


@contextmanager
def _profiled(contact: Contact, name: str, steps: int) -> Iterator[None]:
    activities = [ProfilerActivity.CPU] + ([] if contact.dry else [ProfilerActivity.CUDA])
    with profile(activities=activities) as seen:
        yield
        contact.wait()
    kind = "cpu" if contact.dry else "device"
    averages = seen.key_averages()
    with (contact.folder / "profile.txt").open("a") as file:
        table = averages.table(sort_by=f"self_{kind}_time_total", row_limit=_TOP, max_name_column_width=60)
        file.write(f"{name}\n{table}\n\n")
    # An operator of the host has the time of the kernels that it launched, which are there too.
    where = DeviceType.CPU if contact.dry else DeviceType.CUDA
    averages = [one for one in averages if one.device_type == where]
    times = [(getattr(one, f"self_{kind}_time_total") / steps, one.count, one.key) for one in averages]
    whole = sum(micros for micros, _, _ in times)
    count = sum(count for _, count, _ in times) / steps
    contact.recorder.add(f"{name}, time of kernels", round(whole / 1000, 3), "ms")
    contact.recorder.add(f"launches of a {name}", round(count), "launches")
    for micros, launches, key in sorted(times, reverse=True)[:_NAMED]:
        note = f"{launches / steps:.0f} launches, {micros / whole:.0%}"
        contact.recorder.add(f"{name}: {key[:60]}", round(micros, 1), "us", note=note, detail=True)
