"""BuildRequest: what a build is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from inflight.export.compile.steps import EXAMPLES, Flow
from inflight.export.data import Source
from inflight.export.plan.plan import PlanRequest
from inflight.resources import CALIBRATION_DATA, CALIBRATION_PROSE, HELD_OUT_DATA, HELD_OUT_PROSE

EngineChoice = Literal["auto", "pytorch", "trtllm", "tensorrtllm"]


CALIBRATION = (Source(CALIBRATION_DATA), Source(CALIBRATION_PROSE))
HELD_OUT = (Source(HELD_OUT_DATA), Source(HELD_OUT_PROSE))
"""Inflight's own data: as many answers as pages, as far as there are."""


@dataclass(frozen=True)
class DataRequest:
    """Which data, and how much of it."""

    calibration: tuple[Source, ...] = CALIBRATION
    calibration_rows: int = 128
    calibration_length: int = 512
    """Tokens of a row, at most."""
    held_out: tuple[Source, ...] = HELD_OUT
    held_out_rows: int = 400
    recall_prompts: int = 48
    max_length: int = 2048
    """Tokens of a held-out row or a long prompt, at most; the model's own limit holds too."""

    @property
    def is_default(self) -> bool:
        """Whether any of it is Inflight's own, in place of the user's."""
        return bool({*self.calibration, *self.held_out} & {*CALIBRATION, *HELD_OUT})


@dataclass(frozen=True)
class BuildRequest:
    """One deployment to build."""

    model: Path
    gpu: str
    """A name of the table, or ``cpu``."""
    precision: str
    command: str
    """What rebuilds it."""
    output: Path
    work: Path
    """Where the stages keep their results."""
    engine: EngineChoice = "auto"
    flow: Flow | None = None
    """TensorRT-LLM's flow; None: the first that the precision has."""
    plan: PlanRequest = field(default_factory=PlanRequest)
    data: DataRequest = field(default_factory=DataRequest)
    settings: Path | None = None
    """A YAML file with keys of deployment.yaml that take the place of what the plan says."""
    keep: tuple[str, ...] = ()
    """Patterns of the names of linears that stay in 16 bit."""
    kl_budget: float | None = None
    """Mixed precision: the most sensitive layers stay in 16 bit until the others lose no more than this, in nats."""
    layer_costs: bool = False
    """Whether it is measured what each layer costs also where the build passes."""
    examples: Path = EXAMPLES
    """TensorRT-LLM's example scripts, for its TensorRT flow."""
    tensorrt_llm_python: Path | None = None
    """TensorRT-LLM's interpreter; None: it is looked for."""
    device: str = "auto"
    """Where quantization and measurement run: cpu, cuda, or auto."""
