"""StageMetrics, what a stage counts, and the export of ``inflight.metrics``'s families to Triton's own endpoint.

A call into Triton's metric API is a round trip to the server's process, so none is made per token or step: the stages
count in plain numbers, and a thread copies those that have changed (docs/decisions/0007). A wrong call (a counter set,
a histogram incremented) can abort the whole server, so one class makes all calls, and they are increments.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import triton_python_backend_utils as pb_utils

from inflight.contract import ENGINE
from inflight.engine.request import FinishReason, Output
from inflight.engine.stats import Histogram
from inflight.errors import (
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    QueueFull,
    ShuttingDown,
    UnsupportedFeature,
    as_told,
    readable,
)
from inflight.metrics import FAMILIES, REQUESTS, RESTART_CAUSES, SHORT_SECONDS, UPSTREAM, MetricFamily
from inflight.settings.deployment import Deployment
from inflight.settings.observability import METRICS_VARIABLE, RESTARTS_VARIABLE
from inflight.triton import process

log = logging.getLogger(__name__)

LIVE_S = 0.2
"""The greatest age of the gauges in ``LIVE``."""
COMPLETE_S = 2.0
"""How often the engine stage exports all that has changed. It also does so once nothing was counted for ``LIVE_S``."""
TEXT_S = 1.0
"""How often the other stages export what has changed."""
CLOSE_S = 2.0
"""How long the end of a stage waits for the last round."""
ACTIVITY, OUTCOMES = UPSTREAM[0].name, REQUESTS[0].name
LIVE = (
    ACTIVITY,
    "nv_trt_llm_kv_cache_block_metrics",
    "nv_trt_llm_inflight_batcher_metrics",
    "inflight_running_requests",
    "inflight_waiting_requests",
    "inflight_kv_cache_blocks",
    "inflight_kv_cache_reserved_blocks",
)
"""The families that say what the engine does now. They are exported every ``LIVE_S``: at longer intervals the values
of an idle engine, which are exported at once, would stay on show while it works again."""
PULSE = (OUTCOMES, "inflight_steps_total", "inflight_responses_total")
"""Whenever the engine stage counts anything, one of these families grows."""
_STEPS = 3
_ERRORS = (InvalidRequest, UnsupportedFeature, EngineFailure)
_ENGINE_ERRORS = (QueueFull, ShuttingDown, DeadlineExceeded)

Values = dict[str, Any]
"""The value of each family by its name: a number, or a histogram's cumulative counts and its sum. A family with labels
of its own has such a value for each combination of theirs."""


class _Series:
    """A gauge or a counter, moved by differences; a counter only rises.

    Triton's stub keeps Python's lock while it sets a gauge, not while it adds to one (2.51): a set would hold up the
    engine for its round trip, and freeze a stage whose server is gone. Triton adds the same floats, so the value it
    shows is known to the last bit, and a second difference adds what the rounding of the first has lost.
    """

    def __init__(self, family: Any, labels: dict[str, str], falls: bool = False) -> None:
        self._metric, self._shown, self._falls = family.Metric(labels=labels), 0.0, falls

    def show(self, value: float) -> int:
        """Make the endpoint show the value; return the calls that it took: none if it does already."""
        for calls in range(_STEPS):
            difference = value - self._shown
            if difference == 0 or (difference < 0 and not self._falls):
                return calls
            self._metric.increment(difference)
            self._shown += difference
        return _STEPS


class _Family:
    """One family and its series. Triton drops both with their Python objects, so these are kept."""

    def __init__(self, family: MetricFamily, labels: dict[str, str]) -> None:
        self._family, self._labels = family, labels
        parts = [(family.name, family.kind)]
        if family.kind == "histogram":
            parts = [(f"{family.name}_{part}", "counter") for part in ("bucket", "sum", "count")]
        made = pb_utils.MetricFamily
        self._made = [
            made(name=name, description=family.help, kind=getattr(made, kind.upper())) for name, kind in parts
        ]
        self._series: dict[tuple[str, ...], _Series | _Buckets] = {}
        self._shown: Any = None

    def show(self, value: Any) -> int:
        """Make the endpoint show the family's values; return the calls that it took."""
        if value == self._shown:  # one comparison in place of one per series: most families do not change
            return 0
        own, calls = self._family.labels, 0
        for key, one in value.items() if own else [((), value)]:
            names = key if isinstance(key, tuple) else (key,)
            if names not in self._series:
                self._series[names] = self._new_series(self._labels | dict(zip(own, names, strict=True)))
            calls += self._series[names].show(one)
        self._shown = value
        return calls

    def _new_series(self, labels: dict[str, str]) -> _Series | _Buckets:
        if self._family.kind == "histogram":
            return _Buckets(self._made, labels, self._family.buckets)
        return _Series(self._made[0], labels, falls=self._family.kind == "gauge")


class _Buckets:
    """The series of a histogram as counters, because Triton's histograms take one value per call."""

    def __init__(self, families: list[Any], labels: dict[str, str], bounds: tuple[float, ...]) -> None:
        buckets, total, count = families
        limits = [f"{bound:g}" for bound in bounds] + ["+Inf"]
        self._buckets = [_Series(buckets, labels | {"le": bound}) for bound in limits]
        self._sum, self._count = _Series(total, labels), _Series(count, labels)

    def show(self, value: tuple[list[int], float]) -> int:
        counts, total = value
        calls = self._count.show(counts[-1]) + self._sum.show(total)
        # The last bucket is first, so that a reader in between sees counts that rise with the bounds.
        pairs = zip(reversed(self._buckets), reversed(counts), strict=True)
        return calls + sum(bucket.show(count) for bucket, count in pairs)


class Exporter:
    """The families of one stage, and the thread that updates them."""

    def __init__(self, stage: str, version: str, engine: str, owners: Mapping[str, object]) -> None:
        """Make the families of ``stage`` beside this kind of ``engine``; ``owners`` are what their sources name.

        The exporter itself is one of them. Owners are read while they change: the values of one family belong together,
        but those of several families may be of different moments.
        """
        labels = {"model": stage, "version": version}
        self._owners = {**owners, "exporter": self}
        families = [family for family in FAMILIES.values() if family.exported_by(stage, engine)]
        self._sources = {family.name: family.source.split(".") for family in families}
        # These two are last: with a request's outcome, or an idle engine, a reader sees all other counts of it as well.
        self._complete = sorted(self._sources, key=lambda name: (name == ACTIVITY, name == OUTCOMES))
        self._live = [name for name in LIVE if name in self._sources]
        self._made = {family.name: _Family(family, labels) for family in families}
        self.metrics_export_cpu = 0.0
        """Seconds."""
        self.metrics_export_calls = 0
        self._looked_at = [*(name for name in PULSE if name in self._sources), ACTIVITY]
        self._pulse: Values = {}
        """The values of ``PULSE`` in the last round."""
        self._next_complete = 0.0
        self._rests = False
        """Whether everything was exported after the last count."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Export all values now, and what changes from here on."""
        self._round()
        self._thread.start()

    def close(self) -> None:
        """End the thread; if it waits for an answer of a server that hangs, leave it after ``CLOSE_S``."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        # Only the engine stage has families of LIVE: the others need not wake so often.
        while not self._closing.wait(LIVE_S if self._live else TEXT_S):
            try:
                self._round()
            except Exception:
                log.exception("the metrics could not be exported")

    def _round(self) -> None:
        began = time.thread_time()
        names = self._names_to_show() if self._live else self._complete
        values = self._read(names)
        if names is self._live and not values[ACTIVITY]["active"]:  # it has just become idle: see _names_to_show
            names = ()
        self.metrics_export_calls += sum(self._made[name].show(values[name]) for name in names)
        self.metrics_export_cpu += time.thread_time() - began

    def _names_to_show(self) -> Sequence[str]:
        """Return the families that this round of the engine's stage shows, in this order."""
        now, before = time.monotonic(), self._pulse
        values = self._read(self._looked_at)
        idle = not values.pop(ACTIVITY)["active"]
        self._pulse, quiet = values, values == before
        if now >= self._next_complete or (quiet and not self._rests):
            self._rests, self._next_complete = quiet, now + COMPLETE_S
            return self._complete
        self._rests = quiet
        # An engine that has just become idle is shown by the next round, with all that it has counted.
        return () if idle and not quiet else self._live

    def _read(self, names: Sequence[str]) -> Values:
        """Return copies of the families' values.

        What is shown last is read first: a request's other figures are counted before its outcome and the activity.
        """
        values = {}
        for name in sorted(names, key=lambda name: name not in (OUTCOMES, ACTIVITY)):
            owner, attribute = self._sources[name]
            values[name] = _copy(getattr(self._owners[owner], attribute))
        return values


def _copy(value: Any) -> Any:
    if isinstance(value, Histogram):
        return value.cumulative, value.sum
    return {key: _copy(one) for key, one in value.items()} if isinstance(value, dict) else value


class StageMetrics:
    """What one stage counts: the sources called ``stage.*`` in the table of ``inflight.metrics``."""

    def __init__(self, deployment: Deployment, args: dict[str, str]) -> None:
        """``args`` are those that Triton gives a model's ``initialize``."""
        self._deployment = deployment
        self._model, self._version = args["model_name"], args["model_version"]
        self._exporter: Exporter | None = None
        self._outcomes = threading.Lock()
        labels = [error.label for error in _ERRORS]
        if self._model == ENGINE:
            labels += [*(error.label for error in _ENGINE_ERRORS), *(reason.value for reason in FinishReason)]
        self.requests = dict.fromkeys(labels, 0)
        self.tokenizer, self.detokenizer = Histogram(SHORT_SECONDS), Histogram(SHORT_SECONDS)
        self.queue_limit = deployment.batching.max_queue_size
        self.build_info = {(version("inflight"), deployment.engine.kind, readable(deployment.model.name)): 1}
        self.startup = {"import": process.age_s()}
        self.start_time = 0.0
        self.restarts = dict.fromkeys(RESTART_CAUSES, 0) | json.loads(os.environ.get(RESTARTS_VARIABLE, "{}"))

    @property
    def heartbeat_time(self) -> float:
        """Seconds since the epoch, as of now: a process that can be asked is alive."""
        return time.time()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the stage's start."""
        started = time.perf_counter()
        yield
        self.startup[name] = time.perf_counter() - started

    def start(self, **owners: object) -> None:
        """Record that the stage is ready, and start the export if the deployment has metrics.

        ``owners`` are the other objects that count for the stage, by the names that the sources of families begin with.
        """
        self.start_time = time.time()
        if self._deployment.observability.metrics and os.environ.get(METRICS_VARIABLE) != "off":
            engine = self._deployment.engine.kind
            self._exporter = Exporter(self._model, self._version, engine, {"stage": self, **owners})
            self._exporter.start()

    def count_refusal(self, error: Exception, sequences: int = 1) -> None:
        """Count the sequences of a request that ends with an error outside the engine."""
        self._count_outcome(as_told(error).label, sequences)

    def count_end(self, output: Output) -> None:
        """Count a sequence that ends with ``output``."""
        reason = output.finish_reason
        self._count_outcome(reason.value if reason is not None else (output.error or EngineFailure).label)

    def close(self) -> None:
        """Stop exporting."""
        if self._exporter is not None:
            self._exporter.close()

    def _count_outcome(self, label: str, sequences: int = 1) -> None:
        with self._outcomes:  # called by Triton's threads, the engine's and that of the responses
            self.requests[label] = self.requests.get(label, 0) + sequences
