"""Every metric that a rule, a panel or a runbook names exists: in the table of families, or among Triton's own.

The runbooks' queries are also evaluated, in test_live.py; so are rules and panels.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inflight.deployment import Deployment
from inflight.engine.request import FinishReason
from inflight.errors import InflightError
from inflight.metrics import FAMILIES
from inflight.monitoring.alerts import alerts
from inflight.monitoring.boards.all import DASHBOARDS
from inflight.monitoring.dashboards import dashboard_files
from inflight.monitoring.objectives import Objectives
from inflight.monitoring.panels import COLUMNS
from inflight.monitoring.recording import recordings
from inflight.monitoring.timescale import Timescale
from tests.monitoring.runbooks import RUNBOOKS, queries

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
FUNCTIONS = set(
    "sum max avg count rate increase changes histogram_quantile predict_linear deriv min_over_time time vector absent "
    "by on group_left offset and or unless".split()
)
RECORDED = {rule.record: rule.expr for group in recordings(Objectives(), Timescale()).values() for rule in group}
ALERTING = {rule.name: rule.expr for group in alerts(Objectives(), Timescale()).values() for rule in group}
PANELS = {
    f"{board.uid}: {panel.title}: {query.legend}": query.expr
    for board in DASHBOARDS
    for panel in board.panels
    for query in panel.queries
}
RUNBOOK_QUERIES = {f"{path.stem}: {query}": query for path in RUNBOOKS for query in queries(path)}
SERIES = {
    f"{name}{suffix}"
    for name, family in FAMILIES.items()
    for suffix in (("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",))
}


def names(expr: str) -> set[str]:
    """Return the identifiers of an expression that are neither labels nor functions."""
    bare = re.sub(r'"[^"]*"|\[[^]]*\]', "", expr)
    bare = re.sub(r"\{[^}]*\}", "", bare)
    bare = re.sub(r"\b(by|on|group_left) \([^)]*\)", "", bare)
    bare = re.sub(r"\boffset \w+|\b\d[\w.]*", "", bare)
    return set(re.findall(r"[A-Za-z_][\w:]*", bare)) - FUNCTIONS


@pytest.mark.parametrize("expr", [*RECORDED.values(), *ALERTING.values(), *PANELS.values(), *RUNBOOK_QUERIES.values()])
def test_every_metric_exists(expr: str) -> None:
    found = names(expr)
    assert found <= SERIES | TRITONS | PROMETHEUS | set(RECORDED)
    assert found or expr == "time()"


@pytest.mark.parametrize("expr", [*RECORDED.values(), *ALERTING.values(), *PANELS.values(), *RUNBOOK_QUERIES.values()])
def test_every_label_value_exists(expr: str) -> None:
    assert not unknown(expr)


@pytest.mark.parametrize(
    ("expr", "said"),
    [
        ('inflight_requests_total{outcome="ended"}', "outcome ended"),
        ('rate(inflight_requests_total{outcome!~"stop|queuefull"}[5m])', "outcome queuefull"),
        ('instance_outcome:inflight_requests:rate5m{outcome=~"internal|late"}', "outcome late"),
        ('instance:inflight_requests:rate5m{outcome="stop"}', "label outcome"),
        ('inflight_kv_cache_blocks{state="taken"}', "state taken"),
    ],
)
def test_a_label_or_value_that_does_not_exist_is_found(expr: str, said: str) -> None:
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
    family = FAMILIES.get(name) or FAMILIES[re.sub("_(bucket|sum|count)$", "", name)]
    known = {"model": family.stages, "le": tuple(f"{bound:g}" for bound in family.buckets)} | dict(family.labels)
    return known | ({"outcome": tuple(OUTCOMES)} if "outcome" in known else {}) | {"instance": ()}


@pytest.mark.parametrize("name", dashboard_files())
def test_the_committed_dashboards_are_the_generators(name: str) -> None:
    assert (ROOT / "monitoring/dashboards" / name).read_text() == dashboard_files()[name], "make dashboards"


def test_no_dashboard_is_left_over() -> None:
    assert {path.name for path in (ROOT / "monitoring/dashboards").iterdir()} == set(dashboard_files())


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.uid)
def test_panels_say_what_they_show_link_to_runbooks_that_exist_and_fill_the_grid(board) -> None:
    for row in board.rows:
        assert sum(panel.width for panel in row.panels) % COLUMNS == 0
        for panel in row.panels:
            assert panel.description.endswith(".")
            assert set(panel.alerts) <= set(ALERTING)


def test_every_alert_is_linked_from_a_panel() -> None:
    assert {alert for board in DASHBOARDS for panel in board.panels for alert in panel.alerts} == set(ALERTING)


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda path: path.stem)
def test_a_runbook_names_settings_panels_dashboards_and_runbooks_that_exist(path: Path) -> None:
    text = path.read_text()
    for section, key in re.findall(r"`([a-z_]+)\.([a-z_]+)(?:: \w+)?`", text):
        assert key in Deployment.model_fields[section].annotation.model_fields
    italic = set(re.findall(r"\*([A-Z][^*]+)\*", text)) - {"Error"}
    titles = {board.title.removeprefix("Inflight / ") for board in DASHBOARDS}
    titles |= {row.title for board in DASHBOARDS for row in board.rows}
    titles |= {panel.title for board in DASHBOARDS for panel in board.panels}
    assert italic <= titles
    for target in re.findall(r"\]\((\w+\.md)\)", text):
        assert (path.parent / target).is_file()
