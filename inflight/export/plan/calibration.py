"""Calibration: the efficiencies of the rooflines, fitted to measured steps, and checked against others.

The model of a step is ``roofline.Roofline``'s:

    step = step_overhead + samples x sequence_overhead + sum over linear layers, attention and lm_head of
           max(bytes / (bandwidth x share), flops / (peak x share))

with five unknowns: two overheads, and the shares of bandwidth for weights, of bandwidth for keys and values, and of the
peak. They are fitted by least squares on the relative error, so that a step of a millisecond counts as much as one of a
hundred. A share that no measured step depends on stays as assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from inflight.engine.models.reading import read_model_config
from inflight.errors import DeploymentError
from inflight.export.plan.gpus import Gpu
from inflight.export.plan.precision import resolve_kv_cache, resolve_precision
from inflight.export.plan.roofline import AS_MEASURED, ASSUMED_GPU, ASSUMED_PYTORCH, Efficiency, Roofline, Step
from inflight.export.plan.shape import Parallel, Shape

FITTED = ("step_overhead_s", "sequence_overhead_s", "bandwidth", "kv_bandwidth", "compute")
_LOWER = np.log(1e-9)
"""The lowest logarithm of a parameter; a parameter below is as good as none."""
_UPPER = np.array([np.inf, np.inf, 0.0, 0.0, 0.0])
"""Shares are at most 1: a small model's weights may come out of a cache, faster than memory, but a larger one's will
not."""


class Measured(BaseModel):
    """One row of a measurement: a kind of step, and its median time."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    streams: int = Field(ge=0)
    """Sequences that decode."""
    context: int = Field(ge=0)
    """Mean tokens of each."""
    prompt_tokens: int = Field(ge=0)
    """The length of a prompt that is computed meanwhile; 0: there is none."""
    prompt_steps: int = Field(ge=0)
    """Steps that it takes; the time is their mean."""
    step_ms: Annotated[float, Field(gt=0)]

    @model_validator(mode="after")
    def _steps_of_a_prompt(self) -> Measured:
        if self.prompt_tokens and not self.prompt_steps:
            raise ValueError("prompt_steps is 0, and there is a prompt")
        if not self.prompt_tokens and not self.streams:
            raise ValueError("neither streams nor a prompt")
        return self

    @property
    def step(self) -> Step:
        """The work of the step."""
        if not self.prompt_tokens:
            return Step(self.streams, self.context)
        return Step(
            decodes=self.streams,
            context=self.context,
            prefill_tokens=self.prompt_tokens / self.prompt_steps,
            prefill_context=self.prompt_tokens / 2,
            prefill_ends=1 / self.prompt_steps,
        )

    @property
    def tokens_per_second(self) -> float:
        """The tokens per second of all streams together; for a prompt alone, its own tokens."""
        tokens = self.streams or self.prompt_tokens / self.prompt_steps
        return tokens / self.step_ms * 1000


class Measurement(BaseModel):
    """A results file: measured steps, and with what they were measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str
    commit: str
    machine: str
    date: str
    model: str
    config: Mapping[str, Any]
    """The model's ``config.json``."""
    precision: str
    gpu: Gpu
    """The GPU, with the peaks that the shares refer to."""
    rows: tuple[Measured, ...] = Field(min_length=len(FITTED))

    @property
    def shape(self) -> Shape:
        """The model that was measured, in its precision."""
        config = read_model_config(self.config)
        precision = resolve_precision(self.precision, self.gpu, config.dtype)
        kv_cache, kv_bytes = resolve_kv_cache("auto", self.gpu, precision)
        return Shape(config, precision, kv_cache, kv_bytes)


def read_measurement(path: Path) -> Measurement:
    """Read a results file.

    Raises:
        DeploymentError: it cannot be read, or a key is wrong; the first is named.
    """
    try:
        return Measurement.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeploymentError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValidationError, UnicodeDecodeError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        fault = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else "not text"
        raise DeploymentError(f"{path}: not a measurement of `inflight plan --measure`: {fault}") from None


def fit(measurement: Measurement) -> Efficiency:
    """Return the efficiencies with which the rooflines come closest to a measurement.

    The unknowns are the parameters' logarithms.

    Raises:
        ModuleNotFoundError: SciPy is not installed.
    """
    from scipy.optimize import least_squares  # takes longer than the rest of a plan

    shape = measurement.shape
    steps = [row.step for row in measurement.rows]
    measured = np.array([row.step_ms / 1000 for row in measurement.rows])
    gpu = measurement.gpu
    start = AS_MEASURED if gpu.native else ASSUMED_PYTORCH if gpu.is_cpu else ASSUMED_GPU

    def errors(logs: np.ndarray) -> np.ndarray:
        return predicted_seconds(_efficiency(start, logs), measurement.gpu, shape, steps) / measured - 1

    logs = np.log([getattr(start, name) for name in FITTED])
    found = least_squares(errors, logs, bounds=(_LOWER, _UPPER), method="dogbox", x_scale="jac")
    return _efficiency(start, found.x)


def predicted_seconds(efficiency: Efficiency, gpu: Gpu, shape: Shape, steps: Sequence[Step]) -> np.ndarray:
    """Return the seconds of steps on one GPU."""
    roofline = Roofline(shape.stages(Parallel()), gpu, Parallel(), efficiency)
    return np.array([roofline.time(step).total for step in steps])


def _efficiency(start: Efficiency, logs: np.ndarray) -> Efficiency:
    return replace(start, **dict(zip(FITTED, map(float, np.exp(logs)), strict=True)))


@dataclass(frozen=True)
class Comparison:
    """A measured row beside what the plan says of it."""

    row: Measured
    predicted_ms: float

    @property
    def error(self) -> float:
        """The error of the predicted throughput, as a fraction of the measured one; above 0, it is too fast."""
        return self.row.step_ms / self.predicted_ms - 1


def compare(measurement: Measurement, efficiency: Efficiency, gpu: Gpu) -> list[Comparison]:
    """Return each row of a measurement beside what ``efficiency`` and the peaks of ``gpu`` predict of it."""
    seconds = predicted_seconds(efficiency, gpu, measurement.shape, [row.step for row in measurement.rows])
    return [Comparison(row, 1000 * float(time)) for row, time in zip(measurement.rows, seconds, strict=True)]
