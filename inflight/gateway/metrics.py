"""GatewayMetrics: what the gateway counts, by the table ``inflight.metrics.GATEWAY``, on a page of Prometheus."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

import numpy as np
import prometheus_client
from prometheus_client import Counter, Gauge, Histogram

from inflight.gateway.fields import INDEX
from inflight.metrics import GATEWAY, MetricFamily

CONTENT_TYPE: str = prometheus_client.CONTENT_TYPE_LATEST
"""The type of the page."""
OTHER = "other"
"""The label of fields beyond ``MOST_FIELDS`` names, and of names that are no words: clients choose them."""
MOST_FIELDS = 100
_FIELD = re.compile(r"\w+(\[\]|\.\w+)*", re.ASCII)
_MOST_CHARACTERS = 64


class GatewayMetrics:
    """The gateway's counters. Only the event loop's thread changes them."""

    def __init__(self) -> None:
        self._registry = prometheus_client.CollectorRegistry()
        self._families = {family.name: _metric(family, self._registry) for family in GATEWAY}
        self._fields: set[str] = set()

        for family in GATEWAY:  # a rate misses what a counter begins with, unless it begins at zero
            if family.labels and all(family.labels.values()):
                for values in itertools.product(*family.labels.values()):
                    self._families[family.name].labels(*values)

    def expect(self, routes: Iterable[str]) -> None:
        """Begin what is counted of each of these routes alone at zero."""
        for family in GATEWAY:
            if family.kind == "counter" and set(family.labels) == {"route"}:
                for route in routes:
                    self._families[family.name].labels(route)

    def page(self) -> bytes:
        """Return the page, in Prometheus' text format."""
        return prometheus_client.generate_latest(self._registry)

    def begin(self, route: str) -> None:
        """Count a request that begins; ``route`` is the path of the routes table, or ``other``."""
        self._of("running_requests").labels(route).inc()

    def end(self, route: str, status: int, seconds: float) -> None:
        """Count the request that has ended, with the status of its answer, after ``seconds``."""
        self._of("running_requests").labels(route).dec()
        self._of("requests_total").labels(route, str(status)).inc()
        self._of("request_duration_seconds").labels(route).observe(seconds)

    def disconnected(self, route: str) -> None:
        """Count a client that left before the end of its answer."""
        self._of("disconnects_total").labels(route).inc()

    def slow_client(self, route: str) -> None:
        """Count a client that was disconnected because it read too slowly."""
        self._of("slow_clients_total").labels(route).inc()

    def first_token(self, route: str, seconds: float) -> None:
        """Count the first token of a request, ``seconds`` after its arrival."""
        self._of("time_to_first_token_seconds").labels(route).observe(seconds)

    def output_tokens(self, route: str, count: int) -> None:
        """Count tokens of an answer."""
        self._of("output_tokens_total").labels(route).inc(count)

    def ignored_fields(self, names: Sequence[str]) -> None:
        """Count unknown fields of a request; each name once, and those beyond ``MOST_FIELDS`` without their names."""
        for name in set(names[:MOST_FIELDS]):
            self._of("ignored_fields_total").labels(self._field(name)).inc()
        if len(names) > MOST_FIELDS:
            self._of("ignored_fields_total").labels(OTHER).inc(len(names) - MOST_FIELDS)

    def resumed(self, outcome: str) -> None:
        """Count a request whose engine broke away: how it went on, or why it did not."""
        self._of("resumed_total").labels(outcome).inc()

    def quality_answer(self, outcome: str) -> None:
        """Count an answer that was to be scored by the reference."""
        self._of("quality_answers_total").labels(outcome).inc()

    def quality_compared(self, mode: str, differences: np.ndarray, agreeing: int) -> None:
        """Count an answer that the reference has scored.

        Args:
            mode: how its tokens were chosen.
            differences: of each token's log-prob as served from the reference's, in nats.
            agreeing: how many of its tokens are the reference's likeliest.
        """
        self.quality_answer("compared")
        self._of("quality_tokens_total").labels(mode).inc(differences.size)
        self._of("quality_agreeing_tokens_total").labels(mode).inc(agreeing)
        self._of("quality_above_nats_total").labels(mode).inc(float(np.maximum(differences, 0).sum()))
        self._of("quality_below_nats_total").labels(mode).inc(float(np.maximum(-differences, 0).sum()))
        self._of("quality_answer_difference_nats").labels(mode).observe(float(np.abs(differences).mean()))

    def engine_ready(self, ready: bool) -> None:
        """Show whether the engine can be called."""
        self._of("engine_ready").set(int(ready))

    def _field(self, name: str) -> str:
        name = INDEX.sub("[]", name)
        if name in self._fields:
            return name
        if len(self._fields) == MOST_FIELDS or len(name) > _MOST_CHARACTERS or not _FIELD.fullmatch(name):
            return OTHER
        self._fields.add(name)
        return name

    def _of(self, name: str) -> Counter | Gauge | Histogram:
        return self._families[f"inflight_gateway_{name}"]


def _metric(family: MetricFamily, registry: prometheus_client.CollectorRegistry) -> Counter | Gauge | Histogram:
    labels = tuple(family.labels)
    match family.kind:
        case "counter":
            return Counter(family.name, family.help, labels, registry=registry)
        case "histogram":
            return Histogram(family.name, family.help, labels, buckets=family.buckets, registry=registry)
    return Gauge(family.name, family.help, labels, registry=registry)
