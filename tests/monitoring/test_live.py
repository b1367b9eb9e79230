"""A real Prometheus scrapes a real server under load: every rule, panel and runbook's query evaluates and has data."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from inflight.contract import ENGINE
from inflight.metrics import FAMILIES
from inflight.monitoring.boards.all import DASHBOARDS
from inflight.monitoring.objectives import Objectives
from inflight.monitoring.panels import Panel
from inflight.monitoring.recording import recordings
from inflight.monitoring.render import expression, render
from inflight.monitoring.timescale import Timescale
from tests.monitoring.runbooks import RUNBOOKS, queries
from tests.monitoring.stack import Stack, stack, wait_for
from tests.monitoring.test_names import names

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus is not installed"),
]
RECORDINGS = [rule.record for group in recordings(Objectives(), Timescale()).values() for rule in group]
LATENCY = ("InflightTtft", "InflightItl")
PANELS = [pytest.param(panel, id=f"{board.uid}: {panel.title}") for board in DASHBOARDS for panel in board.panels]


@dataclass(frozen=True)
class Loaded:
    """A watched server after a load, and when that was."""

    stack: Stack
    start: float
    end: float


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    with stack(tmp_path_factory.mktemp("live")) as running:
        start = time.time()
        while time.time() < start + 8:
            ends = asyncio.run(running.ask(8))
            assert set(ends) <= {"stop", "length"}
        record = RECORDINGS[-1]
        wait_for(lambda: running.prometheus.instant(record), 20, f"{record} has no data")
        yield Loaded(running, start, time.time())


def test_every_rule_evaluates_and_a_healthy_server_keeps_no_alert(loaded: Loaded) -> None:
    groups = loaded.stack.prometheus.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    assert {rule["name"] for rule in rules} >= set(RECORDINGS)
    # How fast it is depends on what else this machine does; nothing else does for long.
    wait_for(lambda: all(name.startswith(LATENCY) for name in loaded.stack.firing()), 30, str(loaded.stack.firing()))


@pytest.mark.parametrize("record", RECORDINGS)
def test_every_recording_rule_has_data(loaded: Loaded, record: str) -> None:
    assert loaded.stack.prometheus.range(record, loaded.start, loaded.end, 1)


@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_has_data(loaded: Loaded, panel: Panel) -> None:
    for query in panel.queries:
        found = loaded.stack.prometheus.range(expression(query, 4), loaded.start, loaded.end, 1)
        assert found or _of_another_engine(query.expr), f"{query.legend}: {query.expr}"


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda path: path.stem)
def test_every_query_of_a_runbook_evaluates(loaded: Loaded, path: Path) -> None:
    assert queries(path)
    for query in queries(path):
        loaded.stack.prometheus.instant(query, loaded.end)


def test_every_dashboard_is_drawn(loaded: Loaded, tmp_path: Path) -> None:
    written = list(render(loaded.stack.prometheus, tmp_path, loaded.start, loaded.end))
    assert written == [tmp_path / f"{board.uid}.svg" for board in DASHBOARDS]
    for board, path in zip(DASHBOARDS, written, strict=True):
        text = path.read_text()
        assert all(panel.title in text for panel in board.panels)
        empty = [panel for panel in board.panels if all(_of_another_engine(query.expr) for query in panel.queries)]
        assert text.count("no data") == len(empty)


def _of_another_engine(expr: str) -> bool:
    """Whether an expression needs a family that the portable engine does not export."""
    families = [FAMILIES[name] for name in names(expr) if name in FAMILIES]
    return any(not family.exported_by(ENGINE, "pytorch") for family in families if ENGINE in family.stages)
