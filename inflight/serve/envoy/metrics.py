"""The door's own metrics: the few of Envoy's thousands that tell how it serves, by names of Inflight's."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True)
class DoorMetric:
    """One family: where it is in Envoy's page, and what it is called here."""

    name: str
    help: str
    theirs: str
    labels: tuple[tuple[str, str], ...] = ()
    """Pairs of a label of Envoy's and its name here; series that differ in other labels are added up."""
    of: str = ""
    """A regular expression that the first label's value matches."""

    @property
    def kind(self) -> str:
        """Prometheus' type."""
        return "counter" if self.name.endswith("_total") else "gauge"


_PROTOCOL = ("envoy_http_conn_manager_prefix", "protocol")
_SERVER = ("envoy_cluster_name", "server")
_HTTP = "http[12]"
RESTARTS = DoorMetric("inflight_door_restarts_total", "New starts of Envoy", "")
METRICS = (
    DoorMetric(
        "inflight_door_answers_total",
        "Answers to clients by the hundreds of their status",
        "envoy_http_downstream_rq_xx",
        (_PROTOCOL, ("envoy_response_code_class", "class")),
        _HTTP,
    ),
    DoorMetric("inflight_door_requests", "Requests that run", "envoy_http_downstream_rq_active", (_PROTOCOL,), _HTTP),
    DoorMetric("inflight_door_connections", "Open connections", "envoy_http_downstream_cx_active", (_PROTOCOL,), _HTTP),
    DoorMetric(
        "inflight_door_server_answers_total",
        "Answers of each server by their status; those of the second deployment's share (A/B) begin with variant_",
        "envoy_cluster_upstream_rq",
        (_SERVER, ("envoy_response_code", "code")),
    ),
    DoorMetric("inflight_door_retries_total", "Requests sent again", "envoy_cluster_upstream_rq_retry", (_SERVER,)),
    DoorMetric(
        "inflight_door_retries_given_up_total",
        "Requests that no more tries were left for",
        "envoy_cluster_upstream_rq_retry_limit_exceeded",
        (_SERVER,),
    ),
    DoorMetric(
        "inflight_door_rate_limited_total",
        "Requests beyond a client's limit",
        "envoy_http_local_rate_limit_rate_limited",
    ),
    DoorMetric(
        "inflight_door_refused_connections_total",
        "Connections beyond door.max_connections",
        "envoy_listener_downstream_global_cx_overflow",
    ),
)
_SERIES = re.compile(r"^(\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def metrics(page: str, restarts: int) -> str:
    """Return the door's page of metrics.

    Args:
        page: Envoy's own, in Prometheus' format.
        restarts: how often Envoy was started again.
    """
    series: defaultdict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    for name, labels, value in _SERIES.findall(page):
        series[name].append((dict(_LABEL.findall(labels)), float(value)))
    families = [(RESTARTS, {"": float(restarts)})]
    families += [(one, _summed(one, series[one.theirs])) for one in METRICS]
    return "".join(_family(one, values) for one, values in families)


def _summed(one: DoorMetric, series: list[tuple[dict[str, str], float]]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for labels, value in series:
        shown = [(ours, labels.get(theirs, "")) for theirs, ours in one.labels]
        if not one.of or re.fullmatch(one.of, shown[0][1]):
            sums[",".join(f'{name}="{text}"' for name, text in shown)] += value
    return sums or ({} if one.labels else {"": 0.0})


def _family(one: DoorMetric, values: dict[str, float]) -> str:
    lines = [f"# HELP {one.name} {one.help}", f"# TYPE {one.name} {one.kind}"]
    for labels, value in values.items():
        lines.append(f"{one.name}{{{labels}}} {value:.15g}" if labels else f"{one.name} {value:.15g}")
    return "\n".join(lines) + "\n"
