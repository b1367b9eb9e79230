"""Rooflines: how long a step of the engine takes, from what it must move and what it must compute.

A step reads the weights once, whatever its size, so a small batch is bound by the memory's bandwidth and a large one by
arithmetic (Williams et al., "Roofline", CACM 52(4), 2009). Real kernels reach a share of a datasheet's peak; the shares
and the overheads are `Efficiency`: assumed, or fitted to measurements (see ``calibration``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight.export.plan.gpus import Gpu
from inflight.export.plan.placement import Parallel, Stage


@dataclass(frozen=True)
class Efficiency:
    """Shares of the datasheet's peaks that are reached, and what a step costs besides. Times in seconds."""

    bandwidth: float
    """Of the memory's bandwidth, reading weights."""
    kv_bandwidth: float
    """Of the memory's bandwidth, reading keys and values."""
    compute: float
    """Of the dense TFLOP/s."""
    step_overhead_s: float
    """Per step: scheduling, kernel launches."""
    sequence_overhead_s: float
    """Per sequence that a step samples for: sampling, books, output."""
    interconnect: float = 0.7
    """Of the bandwidth between GPUs."""
    collective_latency_s: float = 10e-6
    """Of one all-reduce or hand-over, whatever its size."""


ASSUMED_GPU = Efficiency(bandwidth=0.8, kv_bandwidth=0.7, compute=0.6, step_overhead_s=0.5e-3, sequence_overhead_s=5e-6)
"""For TensorRT-LLM with CUDA graphs, until a measurement says better. Matrix-vector kernels reach 75 to 85 % of the
bandwidth, large matrix products 55 to 70 % of the dense peak."""
ASSUMED_CPU = Efficiency(bandwidth=0.8, kv_bandwidth=0.1, compute=0.65, step_overhead_s=3e-3, sequence_overhead_s=60e-6)
"""For the portable engine, close to what docs/results/plan has measured: it lays out keys and values anew for every
step."""


@dataclass(frozen=True)
class Step:
    """The work of one engine step."""

    decodes: float
    """Sequences that get one token each."""
    context: float = 0
    """Mean tokens that each of them attends to."""
    prefill_tokens: float = 0
    """Prompt tokens computed."""
    prefill_context: float = 0
    """Mean tokens that each of those attends to."""
    prefill_ends: float = 0
    """Prompts that end in this step, and so sample."""

    @property
    def tokens(self) -> float:
        """All tokens of the step."""
        return self.decodes + self.prefill_tokens


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they are spent on. Parts that move and compute at once count as what takes longer."""

    overhead: float
    bandwidth: float
    compute: float
    communication: float

    @property
    def total(self) -> float:
        """The step."""
        return self.overhead + self.bandwidth + self.compute + self.communication

    @property
    def binds(self) -> str:
        """What most of the time goes to."""
        parts = {
            "bandwidth": self.bandwidth,
            "compute": self.compute,
            "overhead": self.overhead,
            "communication": self.communication,
        }
        return max(parts, key=lambda name: parts[name])


class Roofline:
    """Times the steps of a group of GPUs."""

    def __init__(
        self, stages: Sequence[Stage], gpu: Gpu, parallel: Parallel, efficiency: Efficiency, hidden_bytes: int
    ) -> None:
        """
        Args:
            stages: one GPU's part of each pipeline stage.
            gpu: each of them.
            parallel: the group.
            efficiency: shares and overheads.
            hidden_bytes: of one token's hidden state, which the GPUs exchange.
        """
        self._stages, self._gpu, self._parallel = stages, gpu, parallel
        self._efficiency, self._hidden_bytes = efficiency, hidden_bytes

    def time(self, step: Step) -> StepTime:
        """Return how long a step takes.

        With a pipeline, the step's sequences are split over as many micro-batches as stages, all in flight; every one
        passes every stage, and the slowest stage sets the pace.
        """
        count = len(self._stages)
        part = Step(
            step.decodes / count, step.context, step.prefill_tokens / count, step.prefill_context,
            step.prefill_ends / count,
        )  # fmt: skip
        slowest = max((self._stage_time(stage, part) for stage in self._stages), key=lambda time: time.total)
        return StepTime(
            overhead=slowest.overhead * count,
            bandwidth=slowest.bandwidth * count,
            compute=slowest.compute * count,
            communication=slowest.communication * count,
        )

    def _stage_time(self, stage: Stage, step: Step) -> StepTime:
        """Linear layers, attention and lm_head follow one another: each is bound by bandwidth or by arithmetic."""
        efficiency, samples = self._efficiency, step.decodes + step.prefill_ends
        moving = computing = 0.0
        for move, compute in (self._linears(stage, step), self._attention(stage, step), self._head(stage, samples)):
            if move >= compute:
                moving += move
            else:
                computing += compute
        return StepTime(
            overhead=efficiency.step_overhead_s + efficiency.sequence_overhead_s * samples,
            bandwidth=moving,
            compute=computing,
            communication=self._communication(stage, step.tokens),
        )

    def _linears(self, stage: Stage, step: Step) -> tuple[float, float]:
        compute = sum(flops / self._flop_rate(kind) for kind, flops in stage.flops_per_token.items())
        return stage.linear_bytes / self._byte_rate(self._efficiency.bandwidth), step.tokens * compute

    def _attention(self, stage: Stage, step: Step) -> tuple[float, float]:
        """Decodes read their whole context; a prefill's keys and values stay on the chip while its queries pass."""
        attended = step.decodes * stage.attended(step.context)
        prefilled = step.prefill_tokens * stage.attended(step.prefill_context)
        written = step.tokens * len(stage.windows)
        move = (attended + written) * stage.kv_layer_bytes / self._byte_rate(self._efficiency.kv_bandwidth)
        return move, (attended + prefilled) * stage.attention_flops / self._flop_rate(stage.head_arithmetic)

    def _head(self, stage: Stage, samples: float) -> tuple[float, float]:
        if samples == 0:
            return 0.0, 0.0
        move = stage.head_bytes / self._byte_rate(self._efficiency.bandwidth)
        return move, samples * stage.head_flops / self._flop_rate(stage.head_arithmetic)

    def _communication(self, stage: Stage, tokens: float) -> float:
        """Two all-reduces per layer, and a hand-over per stage.

        A ring all-reduce over n GPUs sends ``2 (n - 1) / n`` of the data over each link (Patarasuk and Yuan, JPDC 69,
        2009).
        """
        parallel, efficiency = self._parallel, self._efficiency
        if parallel.gpus == 1:
            return 0.0
        rate = self._gpu.interconnect_gb_s * 1e9 * efficiency.interconnect
        seconds = 0.0
        if parallel.tensor > 1:
            share = 2 * (parallel.tensor - 1) / parallel.tensor
            reduce = efficiency.collective_latency_s + share * tokens * self._hidden_bytes / rate
            seconds += 2 * len(stage.windows) * reduce
        if parallel.pipeline > 1:
            seconds += efficiency.collective_latency_s + tokens * self._hidden_bytes / rate
        return seconds

    def _byte_rate(self, share: float) -> float:
        return self._gpu.bandwidth_gb_s * 1e9 * share

    def _flop_rate(self, kind: str) -> float:
        return self._gpu.dense_tflops[kind] * 1e12 * self._efficiency.compute  # type: ignore[index]
