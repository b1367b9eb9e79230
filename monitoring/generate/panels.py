"""Panels and dashboards, as Grafana's own library for them builds them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import bargauge, common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heatmap_model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from monitoring.generate.promql import Query, rate
from monitoring.generate.rule import RUNBOOKS_PATH

TOKENS_PER_SECOND = "suffix: tokens/s"
"""A unit that Grafana does not have."""
_SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")


class Row(NamedTuple):
    """Panels under one heading."""

    title: str
    panels: Sequence[Any]
    """Builders of panels, which have no type in common."""


def time_series(
    title: str,
    description: str,
    queries: Sequence[Query],
    unit: str = "short",
    *,
    width: int = 8,
    height: int = 8,
    stacked: bool = False,
    limit: float | None = None,
    alerts: Sequence[str] = (),
) -> timeseries.Panel:
    """Return a panel of lines over time.

    Args:
        title: of the panel.
        description: what it shows, in a sentence.
        queries: its lines.
        unit: Grafana's name of the values' unit.
        width: of Grafana's 24 columns.
        height: in units of Grafana's grid.
        stacked: whether the lines are drawn one upon the other.
        limit: a line to stay below: an objective or the threshold of an alert.
        alerts: the alerts that this panel shows the cause of; it links to their runbooks.
    """
    shown = common_model.LegendDisplayMode.LIST
    panel = (
        timeseries.Panel()
        .unit(unit)
        .min(0)
        .fill_opacity(40 if stacked else 8)
        .show_points(common_model.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(shown)
            .placement(common_model.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI))
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL))
    if limit is not None:
        steps = [model.Threshold(value=None, color="green"), model.Threshold(value=limit, color="red")]
        panel = panel.thresholds(
            dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)
        ).thresholds_style(common.GraphThresholdsStyleConfig().mode(common_model.GraphTresholdsStyleMode.LINE))
    return _panel(panel, title, description, width, height, queries, alerts=alerts)


def number(
    title: str,
    description: str,
    query: Query,
    unit: str = "short",
    *,
    width: int = 8,
    height: int = 8,
    alerts: Sequence[str] = (),
) -> stat.Panel:
    """Return a panel of one number for each series, the last one, above its course."""
    panel = stat.Panel().unit(unit).reduce_options(_last()).graph_mode(common_model.BigValueGraphMode.AREA)
    return _panel(panel, title, description, width, height, [query], alerts=alerts)


def bar_gauge(title: str, description: str, query: Query, unit: str, *, width: int) -> bargauge.Panel:
    """Return a panel of one bar for each series, as long as its last value."""
    horizontal = common_model.VizOrientation.HORIZONTAL
    panel = bargauge.Panel().unit(unit).min(0).reduce_options(_last()).orientation(horizontal)
    return _panel(panel, title, description, width, 8, [query])


def heat_map(title: str, description: str, histogram: str, width: int = 12) -> heatmap.Panel:
    """Return the heat map of a histogram of seconds: how many observations per second fell between two bounds."""
    panel = (
        heatmap.Panel()
        .calculate(False)
        .color(heatmap.HeatmapColorOptions().mode(heatmap_model.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
        .y_axis(heatmap.YAxisConfig().unit("s"))
        .show_legend()
    )
    query = Query(rate(histogram + "_bucket", "le"), "{{le}}")
    return _panel(panel, title, description, width, 9, [query], PromQueryFormat.HEATMAP)


def label_table(title: str, description: str, query: Query, *, width: int, height: int) -> table.Panel:
    """Return a table of the labels of series, without their values."""
    hidden = dict.fromkeys(("Time", "Value", "__name__", "job"), True)
    organize = model.DataTransformerConfig(id_val="organize", options={"excludeByName": hidden})
    panel = table.Panel().with_transformation(organize)
    return _panel(panel, title, description, width, height, [query], PromQueryFormat.TABLE)


def board(uid: str, title: str, question: str, rows: Sequence[Row]) -> model.Dashboard:
    """Return a dashboard; ``question`` is what it answers."""
    links = dashboard.DashboardLink("Inflight").type(model.DashboardLinkType.DASHBOARDS).tags(["inflight"])
    builder = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(question)
        .tags(["inflight"])
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .link(links.keep_time(True).include_vars(True))
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("instance", "Server", 'label_values(up{job="inflight"}, instance)'))
        .with_variable(_variable("model", "Engine model", "label_values(inflight_running_requests, model)"))
    )
    ids = count(1)
    for row in rows:
        builder = builder.with_row(dashboard.Row(row.title).id(next(ids)))
        for panel in row.panels:
            builder = builder.with_panel(panel.id(next(ids)))
    return builder.build()


def _variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(_SOURCE)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(model.VariableOption(text="All", value="$__all", selected=True))
    )


def _panel(
    panel: Any,
    title: str,
    description: str,
    width: int,
    height: int,
    queries: Sequence[Query],
    form: PromQueryFormat = PromQueryFormat.TIME_SERIES,
    alerts: Sequence[str] = (),
) -> Any:
    """Set what panels of all kinds have."""
    panel = panel.title(title).description(description).datasource(_SOURCE).span(width).height(height)
    panel = panel.links([_link(alert) for alert in alerts])
    for place, query in enumerate(queries):
        target = (
            prometheus.Dataquery()
            .expr(query.expr)
            .ref_id(chr(ord("A") + place))
            .legend_format(query.legend or "__auto")
        )
        target = target.instant() if form is PromQueryFormat.TABLE else target.range()
        panel = panel.with_target(target.format(form))
    return panel


def _link(alert: str) -> dashboard.DashboardLink:
    link = dashboard.DashboardLink(f"Runbook: {alert}").type(model.DashboardLinkType.LINK)
    return link.url(f"{RUNBOOKS_PATH}/{alert}.md").target_blank(True)


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"])
