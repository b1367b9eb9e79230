"""The expressions that panels ask Prometheus for.

They hold Grafana's variables: ``$instance`` and ``$model``, which a reader chooses on the dashboard, and
``$__rate_interval`` for the window of a rate.
"""

from __future__ import annotations

from typing import NamedTuple

from inflight.contract import ENGINE
from inflight.metrics import FAMILIES

FAILURES_COUNTED = 2
"""The number of times that Triton 2.51 counts a request that fails in an ensemble in the ensemble's own
``nv_inference_request_failure``. A test holds a real server to it."""
_SUFFIXES = ("_bucket", "_sum", "_count")


class Query(NamedTuple):
    """One expression of PromQL and what its series are called; ``{{label}}`` stands for a label's value."""

    expr: str
    legend: str = ""


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
