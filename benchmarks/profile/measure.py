"""Runs the portable engine under a load with PyTorch's profiler, and reads off where a step's time goes."""

from __future__ import annotations

import gzip
import itertools
import random
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent, Kernel
from torch.profiler import ProfilerActivity, profile

from benchmarks.profile.ranges import PHASES, named
from inflight.engine.engine import Engine
from inflight.engine.model_runner import ModelRunner
from inflight.engine.request import Request
from inflight.errors import ShuttingDown
from inflight.sampling import SamplingParams

Progress = Callable[[str, int, int], object]
"""Called with what is being done, how many steps are done, and how many there are."""
_PHASE_OF_NATIVE = {
    "embed": "embed", "norm": "norm", "qkv": "projections", "rotate_store": "projections", "attention": "attention",
    "attended": "projections", "output": "projections", "gate_up": "mlp", "down": "mlp", "logits": "logits",
}  # fmt: skip
"""What each phase of the native step is called here; drawing tokens is a call of its own, which the profiler sees."""
_OPERATORS = 12
"""How many operators and kernels a profile has."""


@dataclass(frozen=True)
class Load:
    """Streams that each send one request after the other, with prompts of random tokens."""

    streams: int
    prompt_tokens: int
    output_tokens: int
    shared_prefix: int
    """The first so many tokens of all prompts are the same."""
    staggered: bool = True
    """Whether the first ``streams`` are of all lengths up to ``output_tokens``: else all begin and end together."""

    def requests(self, vocab_size: int) -> Iterator[Request]:
        """Yield requests without end, the same ones each time."""
        draw = random.Random(0)
        shared = [draw.randrange(vocab_size) for _ in range(self.shared_prefix)]
        for index in itertools.count():
            own = [draw.randrange(vocab_size) for _ in range(self.prompt_tokens - self.shared_prefix)]
            share = min(1.0, (index + 1) / self.streams) if self.staggered else 1.0
            yield Request(shared + own, SamplingParams(max(1, round(self.output_tokens * share)), ignore_eos=True))


@dataclass(frozen=True)
class PhaseTime:
    """One row of the table of phases."""

    phase: str
    ms_per_step: float
    """The time of the engine's thread, without the phases within it."""
    share: float
    """Its share of the step."""
    device_ms_per_step: float
    """The time of the GPU's kernels that it started; 0 without a GPU."""
    calls_per_step: float


@dataclass(frozen=True)
class NativePhaseTime:
    """One row of the table of the native step's phases."""

    phase: str
    ms_per_step: float
    share: float
    """Its share of the native step."""


@dataclass(frozen=True)
class OperatorTime:
    """One row of the table of operators."""

    operator: str
    phase: str
    """The phase that called it."""
    ms_per_step: float
    """Its time, without the operators that it calls."""
    share: float
    """Its share of the step."""
    device_ms_per_step: float
    calls_per_step: float


@dataclass(frozen=True)
class KernelTime:
    """One row of the table of a GPU's kernels."""

    kernel: str
    phase: str
    """The phase that launched it, or the graph that it is part of."""
    device_ms_per_step: float
    share: float
    """Its share of the time of all kernels."""
    calls_per_step: float


@dataclass(frozen=True)
class Profile:
    """What a profile says."""

    steps: int
    device: str
    threads: int
    plain_ms_per_step: float
    """The same steps without the profiler."""
    profiled_ms_per_step: float
    slowdown: float
    """How many times as long a step takes under the profiler: the median of the steps, each with its like."""
    sequences_per_step: float
    prefill_tokens_per_step: float
    decode_tokens_per_step: float
    phases: list[PhaseTime]
    native: list[NativePhaseTime]
    """Empty where PyTorch computes the steps."""
    operators: list[OperatorTime]
    kernels: list[KernelTime]
    """Empty without a GPU."""


def take_profile(
    engine: Engine, runner: ModelRunner, load: Load, warm_up: int, steps: int, trace: Path, progress: Progress
) -> Profile:
    """Run the load twice from the same beginnings, without and with the profiler, and write the second's trace.

    Args:
        engine: idle; it has no request and an empty cache afterwards.
        runner: the engine's.
        load: what runs.
        warm_up: steps before those that are looked at.
        steps: so many.
        trace: file to write, in Chrome's format; gzipped where the name ends in ``.gz``.
        progress: called at each step.

    Raises:
        InvalidRequest: the load does not fit the model.
    """
    device = runner.device
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    plain = _Pass(engine, runner, load, lambda *at: progress("without the profiler", *at))
    plain_ms = plain.run(warm_up, steps, nullcontext())
    recorder = profile(activities=activities)
    profiled = _Pass(engine, runner, load, lambda *at: progress("with the profiler", *at))
    with named():
        profiled_ms = profiled.run(warm_up, steps, recorder)
    _write_trace(recorder, trace)
    slowdown = median(late / early for early, late in zip(plain_ms, profiled_ms, strict=True))
    events = list(recorder.events() or [])
    phases, operators = summarize(events, steps)
    native = _native_phases(profiled.native_s, steps)
    sequences, prefill, decode = (count / steps for count in profiled.computed)
    return Profile(
        steps=steps,
        device=str(device),
        threads=torch.get_num_threads(),
        plain_ms_per_step=mean(plain_ms),
        profiled_ms_per_step=mean(profiled_ms),
        slowdown=slowdown,
        sequences_per_step=sequences,
        prefill_tokens_per_step=prefill,
        decode_tokens_per_step=decode,
        phases=_with_native(phases, native),
        native=native,
        operators=operators[:_OPERATORS],
        kernels=summarize_kernels(events, steps)[:_OPERATORS],
    )


def _native_phases(seconds: dict[str, float], steps: int) -> list[NativePhaseTime]:
    total = sum(seconds.values())
    return [NativePhaseTime(phase, 1000 * one / steps, one / total) for phase, one in seconds.items()]


def _with_native(phases: list[PhaseTime], native: list[NativePhaseTime]) -> list[PhaseTime]:
    """Return the phases with the time of the native step's own, which the profiler cannot see, where it belongs."""
    if not native:
        return phases
    inner: defaultdict[str, float] = defaultdict(float)
    for row in native:
        if row.phase in _PHASE_OF_NATIVE:
            inner[_PHASE_OF_NATIVE[row.phase]] += row.ms_per_step
    inner["native"] -= sum(inner.values())
    total = sum(row.ms_per_step for row in phases)
    seen = {row.phase: row for row in phases}
    every = [seen.get(name, PhaseTime(name, 0.0, 0.0, 0.0, 1)) for name in PHASES if name in seen or name in inner]
    moved = [(row, row.ms_per_step + inner.get(row.phase, 0.0)) for row in every]
    return [replace(row, ms_per_step=spent, share=spent / total) for row, spent in moved]


def _write_trace(recorder: profile, trace: Path) -> None:
    """Write the trace; PyTorch's own way to gzip it goes line by line, and takes longer than the profile itself."""
    if trace.suffix != ".gz":
        recorder.export_chrome_trace(str(trace))
        return
    with tempfile.TemporaryDirectory(dir=trace.parent) as folder:
        plain = Path(folder, trace.stem)
        recorder.export_chrome_trace(str(plain))
        with plain.open("rb") as written, gzip.open(trace, "wb", compresslevel=6) as packed:
            shutil.copyfileobj(written, packed)


class _Pass:
    """One run of the load."""

    def __init__(self, engine: Engine, runner: ModelRunner, load: Load, progress: Callable[[int, int], object]) -> None:
        self._engine, self._runner = engine, runner
        self._streams = load.streams
        self._requests = load.requests(runner.vocab_size)
        self._progress = progress
        self._open = 0
        self.computed: tuple[int, ...] = (0, 0, 0)
        """Sequences, prefilled and decoded tokens of the steps that were looked at."""
        self.native_s: dict[str, float] = {}
        """Seconds of each phase of the native step in these steps."""

    def run(self, warm_up: int, steps: int, recorder: AbstractContextManager[object]) -> list[float]:
        """Do the steps, the last of them within ``recorder``; return the milliseconds of each of those.

        A step ends with tokens that the CPU has; on a GPU the next one may have been launched by then.

        Raises:
            InflightError: what a request ended with.
        """
        try:
            for index in range(warm_up):
                self._step(index, warm_up + steps)
            before, native = self._counts(), self._runner.native_phases()
            with recorder:
                times = [self._step(index, warm_up + steps) for index in range(warm_up, warm_up + steps)]
            self.computed = tuple(late - early for early, late in zip(before, self._counts(), strict=True))
            self.native_s = {name: late - native[name] for name, late in self._runner.native_phases().items()}
            return times
        finally:
            self._engine.fail_all(ShuttingDown("the profile is over"))

    def _step(self, index: int, total: int) -> float:
        started = time.perf_counter()
        for request in itertools.islice(self._requests, self._streams - self._open):
            self._engine.validate(request)
            self._engine.submit(request)
        self._open = self._streams
        for output in self._engine.step():
            if output.error is not None:
                raise output.error
            self._open -= output.finished
        milliseconds = 1000 * (time.perf_counter() - started)
        self._progress(index + 1, total)
        return milliseconds

    def _counts(self) -> tuple[int, ...]:
        stats = self._engine.stats
        return stats.step_sequences, stats.step_tokens["prefill"], stats.step_tokens["decode"]


def summarize(events: Iterable[FunctionEvent], steps: int) -> tuple[list[PhaseTime], list[OperatorTime]]:
    """Return the times of phases, in the order of a step, and of operators, the longest first.

    A phase's time is that of its ranges less that of the ranges within them, so that the phases add up to the step.
    """
    own_us: defaultdict[str, float] = defaultdict(float)
    device_us: defaultdict[str, float] = defaultdict(float)
    calls: defaultdict[str, int] = defaultdict(int)
    by_operator: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for event in events:
        if event.device_type != DeviceType.CPU:
            continue
        around = _phase_around(event)
        if _is_phase(event):
            device_us[event.name] += sum(kernel.duration for kernel in _kernels_of(event))
            elapsed = event.time_range.elapsed_us()
            own_us[event.name] += elapsed
            calls[event.name] += 1
            if around is not None:
                own_us[around] -= elapsed
        elif around is not None:
            device_us[around] += event.self_device_time_total
            row = by_operator[event.name, around]
            row[0] += event.self_cpu_time_total
            row[1] += event.self_device_time_total
            row[2] += 1
    total, scale = sum(own_us.values()) or 1.0, 1e-3 / steps
    phases = [
        PhaseTime(name, own_us[name] * scale, own_us[name] / total, device_us[name] * scale, calls[name] / steps)
        for name in PHASES
        if calls[name]
    ]
    operators = [
        OperatorTime(name, phase, cpu * scale, cpu / total, device * scale, count / steps)
        for (name, phase), (cpu, device, count) in by_operator.items()
    ]
    return phases, sorted(operators, key=lambda one: -max(one.ms_per_step, one.device_ms_per_step))


def summarize_kernels(events: Iterable[FunctionEvent], steps: int) -> list[KernelTime]:
    """Return the times of a GPU's kernels by name and phase, the longest first.

    A kernel's phase is that of what launched it: an operator, or the phase itself, for Triton's kernels and graphs.
    """
    rows: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in events:
        phase = event.name if _is_phase(event) else _phase_around(event)
        for kernel in _kernels_of(event) if phase is not None else []:
            row = rows[kernel.name, str(phase)]
            row[0] += kernel.duration
            row[1] += 1
    total = sum(microseconds for microseconds, _ in rows.values()) or 1.0
    times = [
        KernelTime(name, phase, microseconds * 1e-3 / steps, microseconds / total, count / steps)
        for (name, phase), (microseconds, count) in rows.items()
    ]
    return sorted(times, key=lambda one: -one.device_ms_per_step)


def _kernels_of(event: FunctionEvent) -> list[Kernel]:
    """Return the kernels that an event launched; a GPU's timeline has the ranges of phases beside them."""
    return [kernel for kernel in event.kernels if kernel.name not in PHASES]


def _is_phase(event: FunctionEvent) -> bool:
    return event.name in PHASES and bool(event.is_user_annotation)


def _phase_around(event: FunctionEvent) -> str | None:
    """Return the innermost phase that an event lies in."""
    above = event.cpu_parent
    while above is not None and not _is_phase(above):
        above = above.cpu_parent
    return None if above is None else str(above.name)
