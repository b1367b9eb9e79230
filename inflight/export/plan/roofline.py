"""Rooflines: how long a step of the engine takes, from what it must move and what it must compute.

A step reads the weights once, whatever its size, so a small batch is bound by the memory's bandwidth and a large one by
arithmetic (Williams et al., "Roofline", CACM 52(4), 2009). Real kernels reach a share of a datasheet's peak; the shares
and the overheads are `Efficiency`: assumed, or fitted to measurements (see ``calibration``). The native step on a CPU
has no datasheet: its rooflines are what it was measured to do (``native_speed``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from inflight.export.plan.gpus import Arithmetic, Gpu
from inflight.export.plan.native_speed import NativeSpeed
from inflight.export.plan.shape import Parallel
from inflight.export.plan.stage import Stage


@dataclass(frozen=True)
class Efficiency:
    """Shares of the datasheet's peaks that are reached, and what a step costs besides. Times in seconds."""

    bandwidth: float
    """The share of the memory's bandwidth at which weights are read."""
    kv_bandwidth: float
    """The share of the memory's bandwidth at which keys and values are read."""
    compute: float
    """The share of the dense TFLOP/s."""
    step_overhead_s: float
    """The time that each step takes besides: scheduling, kernel launches."""
    sequence_overhead_s: float
    """The time for each sequence that a step samples for: sampling, bookkeeping, output."""
    interconnect: float = 0.7
    """The share of the bandwidth between GPUs."""
    collective_latency_s: float = 10e-6
    """The time that an all-reduce or hand-over takes, whatever its size."""


ASSUMED_GPU = Efficiency(bandwidth=0.8, kv_bandwidth=0.7, compute=0.6, step_overhead_s=0.5e-3, sequence_overhead_s=5e-6)
"""For TensorRT-LLM with CUDA graphs, until a measurement says better. Matrix-vector kernels reach 75 to 85 % of the
bandwidth, large matrix products 55 to 70 % of the dense peak."""
AS_MEASURED = Efficiency(bandwidth=1, kv_bandwidth=1, compute=1, step_overhead_s=2.3e-3, sequence_overhead_s=1.1e-3)
"""For the portable engine with its own kernels, whose speeds are measured on the machine itself. The overheads are
those of a server whose stages, like its clients, share two cores with the threads that compute: a sequence's token
passes the detokenizer, the gateway and HTTP (docs/results/planned). With more cores they are less, by how much was not
measured."""
ASSUMED_PYTORCH = replace(AS_MEASURED, bandwidth=0.43, kv_bandwidth=0.45, compute=0.63)
"""For the portable engine where PyTorch computes the steps: docs/adapter.md has it decode at 0.47 to 0.66 of the speed
of the kernels, and compute prompts as fast."""


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
        return sum(vars(self).values())

    @property
    def binds(self) -> str:
        """What most of the time goes to: bandwidth, compute, overhead or communication."""
        return max(("bandwidth", "compute", "overhead", "communication"), key=lambda name: getattr(self, name))


@dataclass(frozen=True)
class Roofline:
    """Times the steps of a group of GPUs."""

    stages: Sequence[Stage]
    """One GPU's part of each pipeline stage."""
    gpu: Gpu
    parallel: Parallel
    efficiency: Efficiency

    def time(self, step: Step) -> StepTime:
        """Return how long a step takes.

        With a pipeline, the step's sequences are split over as many micro-batches as stages, all in flight; every one
        passes every stage, and the slowest stage sets the pace.
        """
        count = len(self.stages)
        part = replace(
            step,
            decodes=step.decodes / count,
            prefill_tokens=step.prefill_tokens / count,
            prefill_ends=step.prefill_ends / count,
        )
        slowest = max((self._stage_time(stage, part) for stage in self.stages), key=lambda time: time.total)
        return StepTime(**{name: seconds * count for name, seconds in vars(slowest).items()})

    def _stage_time(self, stage: Stage, step: Step) -> StepTime:
        """Linear layers, attention and lm_head follow one another: each is bound by bandwidth or by arithmetic."""
        efficiency, samples = self.efficiency, step.decodes + step.prefill_ends
        native = self.gpu.native if stage.head_packed is not None else None
        parts = self._by_datasheet(stage, step) if native is None else self._as_measured(native, stage, step)
        return StepTime(
            overhead=efficiency.step_overhead_s + efficiency.sequence_overhead_s * samples,
            bandwidth=sum(move for move, _ in parts),
            compute=sum(compute for _, compute in parts),
            communication=self._communication(stage, step.decodes + step.prefill_tokens),
        )

    def _by_datasheet(self, stage: Stage, step: Step) -> list[tuple[float, float]]:
        """Return the seconds of each part by what binds it: bandwidth, or arithmetic.

        Decodes read their whole context; a prefill's keys and values stay on the chip while its queries pass.
        """
        efficiency, samples = self.efficiency, step.decodes + step.prefill_ends
        tokens = step.decodes + step.prefill_tokens
        peak = self.gpu.bandwidth_gb_s * 1e9
        weight_rate, kv_rate = peak * efficiency.bandwidth, peak * efficiency.kv_bandwidth
        plain_rate = self._flop_rate(stage.head_arithmetic)
        linear_seconds = sum(one.flops / self._flop_rate(one.arithmetic) for one in stage.linears)
        read = step.decodes * stage.attended_bytes(step.context)
        kv_bytes = read + tokens * stage.kv_token_bytes  # read and written
        work = step.decodes * stage.attention_flops(step.context)
        work += step.prefill_tokens * stage.attention_flops(step.prefill_context)
        parts = [  # seconds to move and to compute
            (stage.read_bytes(tokens) / weight_rate, tokens * linear_seconds),
            (kv_bytes / kv_rate, work / plain_rate),
            (stage.head_bytes / weight_rate if samples else 0.0, samples * stage.head_flops / plain_rate),
        ]
        return [(move, 0.0) if move >= compute else (0.0, compute) for move, compute in parts]

    def _as_measured(self, native: NativeSpeed, stage: Stage, step: Step) -> list[tuple[float, float]]:
        """Return the seconds of each part: those that one token would take too, and those of more tokens.

        An expert multiplies its share of the tokens, of those steps that read it.
        """
        samples, tokens = step.decodes + step.prefill_ends, step.decodes + step.prefill_tokens
        products = [
            (one.packed, one.bytes * read, tokens * one.share / read)
            for one in stage.linears
            if tokens and (read := one.read_share(tokens))
        ]
        if samples:
            products.append((stage.head_packed, stage.head_bytes, samples))
        attention = native.attention[stage.kv_cache]
        read = step.decodes * stage.attended_bytes(step.context)
        work = step.prefill_tokens * stage.attention_flops(step.prefill_context)
        seconds = [(read / (attention.read_gb_s * 1e9) / self.efficiency.kv_bandwidth, 0.0)]
        seconds.append((0.0, work / (attention.tflops * 1e12) / self.efficiency.compute))
        for packed, size, rows in products:
            assert packed is not None
            once = native.seconds(packed, size, 1)
            more = native.seconds(packed, size, rows) - once
            seconds.append((once / self.efficiency.bandwidth, more / self.efficiency.compute))
        return seconds

    def _communication(self, stage: Stage, tokens: float) -> float:
        """Two all-reduces per layer, and a hand-over per stage.

        A ring all-reduce over n GPUs sends ``2 (n - 1) / n`` of the data over each link (Patarasuk and Yuan, JPDC 69,
        2009).
        """
        parallel, latency = self.parallel, self.efficiency.collective_latency_s
        if parallel.gpus == 1:
            return 0.0
        once = tokens * stage.hidden_bytes / (self.gpu.interconnect_gb_s * 1e9 * self.efficiency.interconnect)
        seconds = 0.0
        if parallel.tensor > 1:
            seconds += 2 * len(stage.layers) * (latency + 2 * (parallel.tensor - 1) / parallel.tensor * once)
        if parallel.pipeline > 1:
            seconds += latency + once
        return seconds

    def _flop_rate(self, kind: Arithmetic) -> float:
        return self.gpu.dense_tflops[kind] * 1e12 * self.efficiency.compute
