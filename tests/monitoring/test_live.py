"""A real Prometheus scrapes a real server under load: every rule, panel and runbook's query evaluates and has data."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from inflight.contract import ENGINE
from inflight.metrics import FAMILIES
from monitoring.generate.boards.gateway import GATEWAY_BOARD
from monitoring.generate.objectives import Objectives
from monitoring.generate.recording import recordings
from monitoring.generate.rule import Timescale
from tests.monitoring.support.boards import BOARDS, expressions, panels
from tests.monitoring.support.names import names
from tests.monitoring.support.runbooks import RUNBOOKS, queries
from tests.monitoring.support.stack import ROOM_S, Stack, stack, wait_for
from tests.support.tables import each_row

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus is not installed"),
]
RECORDINGS = [rule.record for group in recordings(Objectives(), Timescale()).values() for rule in group]
LATENCY = ("InflightTtft", "InflightItl")
PANELS = [panel for board in BOARDS if board["uid"] != GATEWAY_BOARD.uid for panel in panels(board)]
"""Those of the servers; a gateway's are in test_gateway_board.py."""


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
        wait_for(lambda: running.prometheus.instant(record), ROOM_S, f"{record} has no data")
        yield Loaded(running, start, time.time())


def test_every_rule_evaluates_and_a_healthy_server_keeps_no_alert(loaded: Loaded) -> None:
    groups = loaded.stack.prometheus.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    assert {rule["name"] for rule in rules} >= set(RECORDINGS)
    # How fast it is depends on what else this machine does; nothing else does for long.
    wait_for(lambda: all(name.startswith(LATENCY) for name in loaded.stack.firing()), 30, str(loaded.stack.firing()))


@each_row("record", RECORDINGS)
def test_recording_rules_have_data(loaded: Loaded, record: str) -> None:
    assert loaded.stack.prometheus.has_data(record, loaded.start, loaded.end)


@each_row("panel", PANELS, ids=lambda panel: panel["title"])
def test_panels_have_data(loaded: Loaded, panel: dict[str, Any]) -> None:
    for expr in expressions(panel):
        asked = expr.replace("$__rate_interval", "4s").replace("$instance", ".*").replace("$model", ".*")
        found = loaded.stack.prometheus.has_data(asked, loaded.start, loaded.end)
        assert found or _of_another_engine(expr), expr


@each_row("path", RUNBOOKS, ids=lambda path: path.stem)
def test_runbook_queries_evaluate(loaded: Loaded, path: Path) -> None:
    assert queries(path)
    for query in queries(path):
        loaded.stack.prometheus.instant(query, loaded.end)


def _of_another_engine(expr: str) -> bool:
    """Whether an expression needs a family that the portable engine does not export."""
    families = [FAMILIES[name] for name in names(expr) if name in FAMILIES]
    return any(not family.exported_by(ENGINE, "pytorch") for family in families if ENGINE in family.stages)
