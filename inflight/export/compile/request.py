"""What is to be compiled: a checkpoint, the sizes of the plan, the settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from inflight.export.compile.flows import PRECISIONS, Flow, Precision, choose_flow
from inflight.machine import ComputeCapability
from inflight.speculation import SpeculationSettings

EXAMPLES = Path("/app/examples")
"""Where the image has TensorRT-LLM's example scripts."""


@dataclass(frozen=True)
class CompileRequest:
    """One engine to compile.

    Raises:
        DeploymentError: on construction; the precision is unknown, or not in the flow or the chip.
    """

    checkpoint: Path
    """Hugging Face checkpoint; the plain one for an engine."""
    output_dir: Path
    """Where the engine goes."""
    precision: str
    compute_capability: ComputeCapability
    max_batch_size: int
    max_tokens_per_step: int
    max_sequence_length: int
    kv_dtype: Literal["auto", "fp8"] = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_beam_width: int = 1
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    calibration: Path | None = None
    """JSON lines with a ``text`` each, alone in its directory; None: upstream's own data set, from the network."""
    flow: Flow | None = None
    """None: the first that the precision has."""
    workers: int = 1
    """Ranks that are converted and compiled at once."""
    build_flags: dict[str, str] = field(default_factory=dict)
    """Flags of trtllm-build that take the place of what follows from the rest."""
    converted_dir: Path = Path()
    """Where the TensorRT-LLM checkpoint goes that lies between the two; beside ``output_dir`` by default."""
    examples: Path = EXAMPLES
    python: str = "python3"
    """TensorRT-LLM's interpreter, which runs the scripts."""
    trtllm_build: str = "trtllm-build"
    model_dir: Path = Path()
    """What the tools read in place of ``checkpoint``, once it is there: the same with another ``config.json``."""

    def __post_init__(self) -> None:
        if self.converted_dir == Path():
            object.__setattr__(self, "converted_dir", self.output_dir.with_name(f"{self.output_dir.name}.checkpoint"))
        if self.model_dir == Path():
            object.__setattr__(self, "model_dir", self.checkpoint)
        object.__setattr__(self, "flow", choose_flow(self.precision, self.compute_capability, self.flow))

    @property
    def format(self) -> Precision:
        """What the tools call the precision."""
        return PRECISIONS[self.precision]

    @property
    def ranks(self) -> int:
        """GPUs that the engine is for."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
