"""Where the time of the engine's steps goes: by its own count, and by the phases that a profiler sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.checkpoints import Shape
from benchmarks.figures import bars, level, panels, stacks, streams_of
from benchmarks.profile.measure import Load, Profile, take_profile
from benchmarks.result import Result, Row
from benchmarks.setting import BLOCK_SIZE, Setting
from inflight.engine.engine import Engine
from inflight.engine.model_runner import ModelRunner
from inflight.errors import EngineFailure

TOKENS_PER_STEP = 512
_STEPS = 16
"""That are profiled."""
_SCHEDULING_PERCENT = 2.0
"""Of a step, what the scheduler may take at 32 streams."""
_GROUPS = {
    "attention": ("attention",),
    "projections": ("projections",),
    "mlp": ("mlp",),
    "logits": ("logits",),
    "norms, sums": ("norm", "residual", "rope", "embed"),
    "prepare": ("prepare", "native"),
    "sample": ("sample",),
    "schedule": ("schedule",),
    "finish, rest": ("finish", "draft", "other"),
}
"""Phases that are one part of the picture."""


@dataclass(frozen=True)
class Steps:
    """The steps of one shape with one number of streams."""

    shape: Shape
    streams: int
    parts_ms: Mapping[str, float]
    """The mean time of a step by the engine's parts, prefill and decode together."""
    profile: Profile
    """The profile of steps that decode and do nothing else."""

    @classmethod
    def take(cls, setting: Setting, shape: Shape, streams: int, prompt: int, parts_ms: Mapping[str, float]) -> Steps:
        """Profile steps in which all streams decode, in float32.

        Args:
            setting: of the run.
            shape: of the model.
            streams: at once.
            prompt: tokens that each has before.
            parts_ms: as they were measured.

        Raises:
            EngineFailure: prompts were computed in those steps too.
        """
        setting.say(f"{shape.name}, {streams} streams, profile")
        warm_up = -(-streams * prompt // TOKENS_PER_STEP) + 4
        output = warm_up + _STEPS
        config = setting.config(
            shape,
            streams * -(-(prompt + output) // BLOCK_SIZE) * BLOCK_SIZE,
            max_batch_size=streams,
            max_tokens_per_step=TOKENS_PER_STEP + streams,  # so that streams that decode leave so many to prompts
        )
        runner = ModelRunner(config)
        engine = Engine(runner, tokenizer=None)
        engine.warm_up()
        load = Load(streams, prompt, output, shared_prefix=0, staggered=False)
        trace = setting.folder / f"trace-{shape.name}-{streams}.json.gz"
        found = take_profile(engine, runner, load, warm_up, _STEPS, trace, lambda *_: None)
        if found.prefill_tokens_per_step:
            raise EngineFailure(
                f"{shape.name}, {streams} streams: prompts were still computed after {warm_up} steps, in steps that "
                "were to decode and do nothing else"
            )
        return cls(shape, streams, parts_ms, found)

    @property
    def name(self) -> str:
        """The name of its bars."""
        return f"{self.shape.name}\n{streams_of(self.streams)}"

    def share(self, names: Sequence[str]) -> float:
        """Return what phases take of a step, in percent."""
        return 100 * sum(phase.share for phase in self.profile.phases if phase.phase in names)


def profile(steps: Sequence[Steps]) -> Result:
    """Return the parts of a step."""
    rows: list[Row] = []
    for one in steps:
        whole = sum(one.parts_ms.values())
        row: dict[str, float | str] = {"model": one.shape.name, "streams": one.streams, "step, ms": round(whole, 3)}
        for part, spent in one.parts_ms.items():
            if part == "draft":  # nothing speculates here
                continue
            row |= {f"{part}, ms": round(spent, 3), f"{part}, %": round(100 * spent / whole, 1)}
        rows.append(row)
    largest = max(one.streams for one in steps)
    scheduling = [f"{row['schedule, %']} % with {row['model']}" for row in rows if row["streams"] == largest]
    finding = (
        "Mean time of the steps of the engine in float32 in the same runs, by its parts: schedule chooses what to "
        "compute, run computes the model and samples, finish books the results. At "
        f"{largest} streams scheduling is {' and '.join(scheduling)} of a step; the limit at 32 streams is "
        f"{_SCHEDULING_PERCENT:g} %."
    )
    figure, [axes] = panels(1)
    shares = {"schedule": "schedule, %", "finish": "finish, %"}
    groups = {
        one.name: {name: float(row[column]) for name, column in shares.items()}
        for one, row in zip(steps, rows, strict=True)
    }
    bars(axes, groups, "share of a step, %")
    level(axes, _SCHEDULING_PERCENT, "what scheduling may take", len(shares))
    return Result("step", "The parts of a step", finding, rows, figure)


def phases(steps: Sequence[Steps]) -> Result:
    """Return the phases of steps that decode."""
    names = [phase.phase for phase in steps[0].profile.phases if phase.phase != "draft"]
    rows: list[Row] = [
        {
            "model": one.shape.name,
            "streams": one.streams,
            "step, ms": round(one.profile.plain_ms_per_step, 3),
            "under the profiler, times": round(one.profile.slowdown, 2),
            **{f"{name}, %": round(one.share([name]), 1) for name in names},
        }
        for one in steps
    ]
    largest = max(one.streams for one in steps)
    told = [
        f"{one.share(('projections', 'mlp', 'logits')):.0f} % with {one.shape.name}, and attention "
        f"{one.share(('attention',)):.0f} %"
        for one in steps
        if one.streams == largest
    ]
    finding = (
        f"{_STEPS} steps in which all streams decode, in float32, by the phases of the benchmark `profile`. At "
        f"{largest} streams projections, feed-forward parts and logits, which are products with the weights but for "
        f"little, take {'; '.join(told)}. Shares are of steps under the profiler, which takes as many times as "
        "long as is said; it adds to each operator alike, so that phases of many small ones look larger than they are, "
        "above all with few streams."
    )
    figure, [axes] = panels(1)
    groups = {one.name: {name: one.share(group) for name, group in _GROUPS.items()} for one in steps}
    stacks(axes, groups, "share of a step that decodes, %")
    return Result("phases", "The profile of a step", finding, rows, figure)
