"""Every metric that a rule, a panel or a runbook names exists: in the table of families, or among Triton's own.

The runbooks' queries are also evaluated, in test_live.py; so are rules and panels.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from inflight.engine.request import FinishReason
from inflight.errors import InflightError
from inflight.metrics import FAMILIES, GATEWAY, SUPERVISOR
from inflight.settings.deployment import Deployment
from monitoring.generate.alerts import alerts
from monitoring.generate.boards.all import dashboard_files
from monitoring.generate.objectives import Objectives
from monitoring.generate.recording import recordings
from monitoring.generate.rule import Timescale
from tests.monitoring.support.boards import BOARDS, COLUMNS, alerts_of, expressions, panels, rows
from tests.monitoring.support.names import names
from tests.monitoring.support.runbooks import RUNBOOKS, queries
from tests.support.tables import each_row

ROOT = Path(__file__).parents[2]
TRITONS = {
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_queue_duration_us",
    "nv_cpu_utilization",
    "nv_cpu_memory_used_bytes",
    "nv_cpu_memory_total_bytes",
}
"""Families of Triton's own that are used; test_live.py finds them in a scrape."""
OUTCOMES = (
    {reason.value for reason in FinishReason}
    | {InflightError.label}
    | {kind.label for kind in InflightError.__subclasses__() if kind.__module__ == InflightError.__module__}
)
PROMETHEUS = {"up", "ALERTS"}
RECORDED = {rule.record: rule.expr for group in recordings(Objectives(), Timescale()).values() for rule in group}
ALERTING = {rule.name: rule.expr for group in alerts(Objectives(), Timescale()).values() for rule in group}
PANELS = [expr for board in BOARDS for panel in panels(board) for expr in expressions(panel)]
RUNBOOK_QUERIES = {f"{path.stem}: {query}": query for path in RUNBOOKS for query in queries(path)}
EXPORTED = FAMILIES | {family.name: family for family in (*GATEWAY, *SUPERVISOR)}
SERIES = {
    f"{name}{suffix}"
    for name, family in EXPORTED.items()
    for suffix in (("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",))
}


@each_row("expr", [*RECORDED.values(), *ALERTING.values(), *PANELS, *RUNBOOK_QUERIES.values()])
def test_metrics_of_all_queries_exist(expr: str) -> None:
    found = names(expr)
    assert found <= SERIES | TRITONS | PROMETHEUS | set(RECORDED)
    assert found or expr == "time()"


@each_row("expr", [*RECORDED.values(), *ALERTING.values(), *PANELS, *RUNBOOK_QUERIES.values()])
def test_label_values_of_all_queries_exist(expr: str) -> None:
    assert not unknown(expr)


@each_row(
    ("expr", "said"),
    [
        ('inflight_requests_total{outcome="ended"}', "outcome ended"),
        ('rate(inflight_requests_total{outcome!~"stop|queuefull"}[5m])', "outcome queuefull"),
        ('instance_outcome:inflight_requests:rate5m{outcome=~"internal|late"}', "outcome late"),
        ('instance:inflight_requests:rate5m{outcome="stop"}', "label outcome"),
        ('inflight_kv_cache_blocks{state="taken"}', "state taken"),
    ],
)
def test_unknown_finds_labels_and_values(expr: str, said: str) -> None:
    assert unknown(expr) == [said]


def unknown(expr: str) -> list[str]:
    """Return the labels, and the values of labels, in an expression that nothing has."""
    found = []
    for name, matchers in re.findall(r"((?:\w+:)?inflight_[\w:]+)\{([^}]*)\}", expr):
        known = _labels(name)
        for label, value in re.findall(r'(\w+)[!=]~?"([^"$]*)"', matchers):
            if label not in known:
                found.append(f"label {label}")
            elif known[label]:
                found += [f"{label} {one}" for one in value.split("|") if one not in known[label]]
    return found


def _labels(name: str) -> dict[str, tuple[str, ...]]:
    """Return the labels of a series, each with its values; () where these are told at run time."""
    if ":" in name:
        assert name in RECORDED
        level = name.split(":")[0]
        return {label: tuple(OUTCOMES) if label == "outcome" else () for label in level.split("_")}
    family = EXPORTED.get(name) or EXPORTED[re.sub("_(bucket|sum|count)$", "", name)]
    known = {"model": family.stages, "le": tuple(f"{bound:g}" for bound in family.buckets)} | dict(family.labels)
    return known | ({"outcome": tuple(OUTCOMES)} if "outcome" in known else {}) | {"instance": ()}


@each_row("name", dashboard_files())
def test_the_committed_dashboards_are_the_generators(name: str) -> None:
    assert (ROOT / "monitoring/dashboards" / name).read_text() == dashboard_files()[name], "make dashboards"


def test_no_committed_dashboard_is_left_over() -> None:
    assert {path.name for path in (ROOT / "monitoring/dashboards").iterdir()} == set(dashboard_files())


@each_row("board", BOARDS, ids=lambda board: board["uid"])
def test_panels_say_what_they_show_link_to_runbooks_that_exist_and_fill_the_grid(board: dict[str, Any]) -> None:
    for within in rows(board).values():
        assert sum(panel["gridPos"]["w"] for panel in within) % COLUMNS == 0
        for panel in within:
            assert panel["description"].endswith(".")
            assert alerts_of(panel) <= set(ALERTING)


def test_every_alert_is_linked_from_a_panel() -> None:
    assert set().union(*(alerts_of(panel) for board in BOARDS for panel in panels(board))) == set(ALERTING)


@each_row("path", RUNBOOKS, ids=lambda path: path.stem)
def test_a_runbook_names_settings_panels_dashboards_and_runbooks_that_exist(path: Path) -> None:
    text = path.read_text()
    for section, key in re.findall(r"`([a-z_]+)\.([a-z_]+)(?:: \w+)?`", text):
        assert key in Deployment.model_fields[section].annotation.model_fields
    italic = set(re.findall(r"\*([A-Z][^*]+)\*", text)) - {"Error"}
    titles = {board["title"].removeprefix("Inflight / ") for board in BOARDS}
    titles |= {panel["title"] for board in BOARDS for panel in board["panels"]}
    assert italic <= titles
    for target in re.findall(r"\]\((\w+\.md)\)", text):
        assert (path.parent / target).is_file()
