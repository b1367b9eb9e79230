"""Writes the dashboards for Grafana: ``python -m inflight.monitoring.dashboards monitoring/dashboards``."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer
from grafana_foundation_sdk.builders import bargauge, common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heatmap_model
from grafana_foundation_sdk.models import prometheus as prometheus_model

from inflight.monitoring.boards.all import DASHBOARDS
from inflight.monitoring.panels import Dashboard, Panel, Query
from inflight.monitoring.rule import RUNBOOKS_PATH

_SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
_UNITS = {"tokens/s": "suffix: tokens/s"}
"""Units that Grafana calls otherwise, or does not know."""


def dashboard_files(runbooks: str = RUNBOOKS_PATH) -> dict[str, str]:
    """Return the JSON of each dashboard by its file's name; ``runbooks`` is the URL of the folder of runbooks."""
    return {
        f"{one.uid}.json": json.dumps(_dashboard(one, runbooks), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"
        for one in DASHBOARDS
    }


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write the JSON files.")],
    runbooks: Annotated[str, typer.Option(help="URL of the folder of runbooks.")] = RUNBOOKS_PATH,
) -> None:
    """Write the dashboards for Grafana."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in dashboard_files(runbooks).items():
        (folder / name).write_text(text, encoding="utf-8")


def _dashboard(board: Dashboard, runbooks: str) -> model.Dashboard:
    builder = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["inflight"])
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Inflight")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags(["inflight"])
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("instance", "Server", 'label_values(up{job="inflight"}, instance)'))
        .with_variable(_variable("model", "Engine model", "label_values(inflight_running_requests, model)"))
    )
    numbers = count(1)
    for row in board.rows:
        builder = builder.with_row(dashboard.Row(row.title).id(next(numbers)))
        for panel in row.panels:
            builder = builder.with_panel(_panel(panel, runbooks).id(next(numbers)))
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


def _panel(panel: Panel, runbooks: str) -> Any:
    builder = _KINDS[panel.kind](panel)
    builder = (
        builder.title(panel.title)
        .description(panel.description)
        .datasource(_SOURCE)
        .span(panel.width)
        .height(panel.height)
        .links([_link(alert, runbooks) for alert in panel.alerts])
    )
    for index, query in enumerate(panel.queries):
        builder = builder.with_target(_target(panel, query, "ABCDEFGH"[index]))
    return builder


def _link(alert: str, runbooks: str) -> dashboard.DashboardLink:
    link = dashboard.DashboardLink(f"Runbook: {alert}").type(model.DashboardLinkType.LINK)
    return link.url(f"{runbooks.rstrip('/')}/{alert}.md").target_blank(True)


def _target(panel: Panel, query: Query, name: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).ref_id(name).legend_format(query.legend or "__auto")
    if panel.kind == "table":
        return target.instant().format(prometheus_model.PromQueryFormat.TABLE)
    formats = {"heatmap": prometheus_model.PromQueryFormat.HEATMAP}
    return target.range().format(formats.get(panel.kind, prometheus_model.PromQueryFormat.TIME_SERIES))


def _unit(panel: Panel) -> str:
    return _UNITS.get(panel.unit, panel.unit)


def _time_series(panel: Panel) -> timeseries.Panel:
    builder = (
        timeseries.Panel()
        .unit(_unit(panel))
        .min(0)
        .fill_opacity(40 if panel.stacked else 8)
        .show_points(common_model.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_model.LegendDisplayMode.LIST)
            .placement(common_model.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI))
    )
    if panel.stacked:
        builder = builder.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL))
    if panel.limit is not None:
        builder = builder.thresholds(_thresholds(panel.limit)).thresholds_style(
            common.GraphThresholdsStyleConfig().mode(common_model.GraphTresholdsStyleMode.LINE)
        )
    return builder


def _thresholds(limit: float) -> dashboard.ThresholdsConfig:
    steps = [model.Threshold(value=None, color="green"), model.Threshold(value=limit, color="red")]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


def _stat(panel: Panel) -> stat.Panel:
    reduced = common.ReduceDataOptions().calcs(["lastNotNull"])
    return stat.Panel().unit(_unit(panel)).reduce_options(reduced).graph_mode(common_model.BigValueGraphMode.AREA)


def _bar_gauge(panel: Panel) -> bargauge.Panel:
    reduced = common.ReduceDataOptions().calcs(["lastNotNull"])
    horizontal = common_model.VizOrientation.HORIZONTAL
    return bargauge.Panel().unit(_unit(panel)).min(0).reduce_options(reduced).orientation(horizontal)


def _heat_map(panel: Panel) -> heatmap.Panel:
    return (
        heatmap.Panel()
        .calculate(False)
        .color(heatmap.HeatmapColorOptions().mode(heatmap_model.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
        .y_axis(heatmap.YAxisConfig().unit(_unit(panel)))
        .show_legend()
    )


def _table(_: Panel) -> table.Panel:
    hidden = dict.fromkeys(("Time", "Value", "__name__", "job"), True)
    organize = model.DataTransformerConfig(id_val="organize", options={"excludeByName": hidden})
    return table.Panel().with_transformation(organize)


_KINDS: dict[str, Any] = {
    "timeseries": _time_series,
    "stat": _stat,
    "bargauge": _bar_gauge,
    "heatmap": _heat_map,
    "table": _table,
}


if __name__ == "__main__":
    typer.run(main)
