"""What a dashboard consists of, for whoever draws it: Grafana, or `inflight dashboards` without it.

Queries hold the variables ``$instance`` and ``$model``, and ``$__rate_interval`` for the window of a rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from inflight.contract import ENGINE
from inflight.metrics import FAMILIES

Unit = Literal["s", "percentunit", "reqps", "tokens/s", "ops", "short"]
Kind = Literal["timeseries", "stat", "heatmap", "table", "bargauge"]
COLUMNS = 24
"""Columns of Grafana's grid."""
_SUFFIXES = ("_bucket", "_sum", "_count")


@dataclass(frozen=True)
class Query:
    """One expression of PromQL and what its series are called; ``{{label}}`` stands for a label's value."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel of a dashboard."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: Unit = "short"
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    limit: float | None = None
    """A line to stay below: an objective or the threshold of an alert."""
    alerts: tuple[str, ...] = ()
    """Alerts that this panel shows the cause of; it links to their runbooks."""


@dataclass(frozen=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """One dashboard: the question that it answers, and its rows."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels in order."""
        return tuple(panel for row in self.rows for panel in row.panels)


def selector(name: str, **labels: str) -> str:
    """Return the selector of a series: ``name{instance=~"$instance", ...}``.

    A label's value that begins with ``~`` is a regular expression. The model's variable is the engine's, so families of
    the other stages are not filtered by it.
    """
    family = FAMILIES.get(name) or next(
        (FAMILIES.get(name.removesuffix(one)) for one in _SUFFIXES if name.endswith(one)), None
    )
    matchers = ['instance=~"$instance"']
    if family is not None and family.stages == (ENGINE,):
        matchers.append('model=~"$model"')
    matchers += [f'{key}=~"{value[1:]}"' if value[:1] == "~" else f'{key}="{value}"' for key, value in labels.items()]
    return f"{name}{{{', '.join(matchers)}}}"


def rate(name: str, by: str = "", **labels: str) -> str:
    """Return the rate of a counter, summed by the labels ``by``."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({selector(name, **labels)}[$__rate_interval]))"


def per_server(name: str, by: str = "") -> str:
    """Return the rate of a counter of each server, in the mean: what is a share of its time stays a share."""
    grouping = f" by ({by})" if by else ""
    return f"avg{grouping} ({rate(name, ', '.join(filter(None, ('instance', by))))})"


def total(name: str, by: str = "", **labels: str) -> str:
    """Return a gauge, summed by the labels ``by``."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} ({selector(name, **labels)})"


def mean(histogram: str) -> str:
    """Return the mean of a histogram's observations."""
    return f"{rate(histogram + '_sum')} / {rate(histogram + '_count')}"


def quantiles(histogram: str, *names: str) -> tuple[Query, ...]:
    """Return queries of a histogram's quantiles, named ``p50``, ``p99``, ..."""
    return tuple(
        Query(f"histogram_quantile({int(name[1:]) / 100:g}, {rate(histogram + '_bucket', 'le')})", name)
        for name in names
    )


def heat_map(title: str, description: str, histogram: str, width: int = 12) -> Panel:
    """Return the heat map of a histogram of seconds: how many observations per second fell between two bounds."""
    return Panel(
        title,
        description,
        (Query(rate(histogram + "_bucket", "le"), "{{le}}"),),
        "s",
        "heatmap",
        width,
        9,
    )
