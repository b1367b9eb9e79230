"""What a stage counts of itself, in plain numbers, and its exporter; where metrics are off, there is none."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from inflight.contract import ENGINE
from inflight.deployment import Deployment
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
from inflight.metrics import RESTART_CAUSES, SHORT_SECONDS
from inflight.observability import METRICS_VARIABLE, RESTARTS_VARIABLE
from inflight.triton.metrics import Exporter

_ERRORS = (InvalidRequest, UnsupportedFeature, EngineFailure)
_ENGINE_ERRORS = (QueueFull, ShuttingDown, DeadlineExceeded)


class StageMetrics:
    """The figures of one stage; what a metric family shows is the attribute of that name (``Family.attribute``)."""

    def __init__(self, deployment: Deployment, args: dict[str, str]) -> None:
        """
        Args:
            deployment: what is served.
            args: of ``initialize``, Triton's.
        """
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
        self.responses = 0
        self.startup = {"import": _age_of_this_process()}
        self.start_time = 0.0
        self.restarts = dict.fromkeys(RESTART_CAUSES, 0) | json.loads(os.environ.get(RESTARTS_VARIABLE, "{}"))

    @property
    def heartbeat_time(self) -> float:
        """Seconds since the epoch: whoever asks is alive."""
        return time.time()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the stage's start."""
        started = time.perf_counter()
        yield
        self.startup[name] = time.perf_counter() - started

    def start(self, figures: Callable[[], Sequence[object]] = lambda: ()) -> None:
        """Say that the stage is ready, and export, if the deployment has metrics.

        Args:
            figures: returns what else has attributes of the stage's families.
        """
        self.start_time = time.time()
        if self._deployment.observability.metrics and os.environ.get(METRICS_VARIABLE) != "off":
            engine = self._deployment.engine.kind
            self._exporter = Exporter(self._model, self._version, engine, lambda: (self, *figures()))
            self._exporter.start()

    def count_refusal(self, error: Exception, sequences: int = 1) -> None:
        """Count a request of so many sequences that ends with an error before the engine has it, or behind it."""
        self._count_outcome(as_told(error).label, sequences)

    def count_end(self, output: Output) -> None:
        """Count a sequence that ends with ``output``."""
        reason = output.finish_reason
        self._count_outcome(reason.value if reason is not None else (output.error or EngineFailure).label)

    def count_response(self) -> None:
        """Count a response; called by the one thread that sends them."""
        self.responses += 1

    def close(self) -> None:
        """Stop exporting."""
        if self._exporter is not None:
            self._exporter.close()

    def _count_outcome(self, label: str, sequences: int = 1) -> None:
        with self._outcomes:  # Triton's thread refuses, the engine's ends
            self.requests[label] = self.requests.get(label, 0) + sequences


def _age_of_this_process() -> float:
    """Return the seconds since this process began (field 22 of proc_pid_stat(5), in clock ticks after boot)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
