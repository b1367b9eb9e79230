"""All tests share these: marks that follow from others, what the machine did meanwhile, interpreted kernels.

A failed test says what the machine did meanwhile. Where other guests of the host took a part of the cores it is tried
again, and the summary says so; a test marked ``alone`` is skipped where they took a good part.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import psutil
import pytest

_MOST_TAKEN = 0.2
"""The share of the cores' time that other guests of the host may take from a test of times; usually some hundredths."""
_LITTLE_TAKEN = 0.05
"""The share of the same kind beyond which a failure may be the machine's."""
_LEAST_TAKEN_S = 0.1
"""Less is a tick or two of the kernel's count, which says nothing of a test that is over at once."""
_BEFORE = pytest.StashKey[tuple[float, dict[str, float]]]()

if not Path("/dev/nvidiactl").exists():  # Triton looks once, when whoever is first imports it
    os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("hypothesis"):  # a GPU machine may lack it
    from tests.support.properties import load_profile

    load_profile()

# What a shell's script starts with `&` ignores Ctrl-C, and so would the programs that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # pytest reads the marks in this hook too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the marks ``property``, ``proof``, ``release`` and ``flaky`` where they follow from others."""
    swept: dict[tuple[str, object], list[pytest.Item]] = {}
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("property")
        if item.get_closest_marker("sweep"):
            engine = item.callspec.params.get("engine") if hasattr(item, "callspec") else None
            swept.setdefault((item.nodeid.partition("[")[0], engine), []).append(item)
        item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=1, condition=partial(_others_disturbed, item)))
    for cases in swept.values():
        _mark_sweep(cases)
    for item in items:
        if any(item.get_closest_marker(mark) for mark in ("alone", "release")):
            item.add_marker("proof")


def _mark_sweep(cases: list[pytest.Item]) -> None:
    """Mark all cases but the first as proofs, and all but ``most``, evenly spaced, as left to a release."""
    most = cases[0].get_closest_marker("sweep").kwargs.get("most", len(cases))  # type: ignore[union-attr]
    kept = {round(place * len(cases) / most) for place in range(most)}
    for place, item in enumerate(cases):
        if place:
            item.add_marker("proof")
        if place not in kept:
            item.add_marker("release")


def _waited_s() -> dict[str, float]:
    """Return the seconds since boot that others took of all cores, and that some task waited for each resource."""
    waited = {"stolen by other guests": psutil.cpu_times().steal}
    for path in Path("/proc/pressure").glob("*"):
        waited[f"waited for {path.name}"] = int(path.read_text().split("total=")[1].split()[0]) / 1e6
    return waited


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_BEFORE] = time.monotonic(), _waited_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and item.get_closest_marker("alone") and (taken := _taken_by_others(item, call)):
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] or 0, f"Skipped: {taken}")
    if report.failed and _BEFORE in item.stash:
        began, before = item.stash[_BEFORE]
        after = _waited_s()
        seconds = ", ".join(f"{name} {after[name] - before[name]:.1f} s" for name in after)
        load = " ".join(f"{one:.1f}" for one in os.getloadavg())
        free_gib = psutil.virtual_memory().available / 2**30
        text = f"in {time.monotonic() - began:.1f} s: {seconds}; load {load}; {free_gib:.1f} GiB free"
        report.sections.append(("The machine meanwhile", text))
    return report


def _taken_by_others(item: pytest.Item, call: pytest.CallInfo[None]) -> str:
    """Return in words how much of the cores other guests took, where a test that looks at times cannot be held to any.

    A fixture that failed for that fails again, at once, for each of its tests: the error remembers why.
    """
    assert call.excinfo is not None, "it failed"
    error = call.excinfo.value
    if (share := _share_taken(item)) > _MOST_TAKEN:
        error.taken_by_others = f"other guests of the host took {share:.0%} of the cores meanwhile"  # type: ignore[attr-defined]
    return getattr(error, "taken_by_others", "")


def _share_taken(item: pytest.Item) -> float:
    """Return the share of the cores that other guests of the host took since the test began."""
    began, before = item.stash[_BEFORE]
    taken = psutil.cpu_times().steal - before["stolen by other guests"]
    return taken / (time.monotonic() - began) / (os.cpu_count() or 1) if taken >= _LEAST_TAKEN_S else 0.0


def _others_disturbed(item: pytest.Item) -> bool:
    return _BEFORE in item.stash and _share_taken(item) > _LITTLE_TAKEN


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why tests were tried again: what fails once in a hundred runs may not be seen again soon."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.write_sep("_", f"{report.nodeid} was tried again")
        report.toterminal(terminalreporter._tw)


@pytest.fixture
def triton_api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[ModuleType], None]]:
    """Takes what stands in for ``triton_python_backend_utils``; what is imported with it is forgotten at the end."""
    known = set(sys.modules)
    yield lambda api: monkeypatch.setitem(sys.modules, "triton_python_backend_utils", api)
    for name in {name for name in sys.modules if name.startswith("inflight.triton")} - known:
        package, _, child = name.rpartition(".")
        del sys.modules[name]
        if package in sys.modules:  # `from package import child` takes its attribute before it looks for a module
            delattr(sys.modules[package], child)
