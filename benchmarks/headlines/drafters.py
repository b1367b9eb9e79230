"""The drafters on real text: prompt lookup and the demo's draft model, on the demo's held-out questions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.drive import Driver, Stream, ask
from benchmarks.figures import bars, level, panels, streams_of
from benchmarks.medians import median_interval
from benchmarks.quality import Demo
from benchmarks.result import Result, Row
from benchmarks.setting import Setting
from inflight.errors import EngineFailure
from inflight.export.data import Example
from inflight.resources import DEMO
from inflight.settings.speculation import SpeculationSettings

_DRAFT = DEMO / "draft"
_SHORTEST = 16
"""Tokens of an answer that is asked for."""
_NONE = "none"


def drafters(setting: Setting) -> Result:
    """Answer the same questions with each drafter and without, for several batch sizes."""
    examples = [one for one in Demo(DEMO / "model", 240).examples if one.prompt and len(one.completion) >= _SHORTEST]
    drivers = {name: Driver(setting.engine(DEMO / "model", speculation=chosen)) for name, chosen in _methods().items()}
    rows: list[Row] = []
    for streams in setting.pick((1, 8), (2,)):
        chosen = examples[: setting.pick(max(16, 4 * streams), 2)]
        ratios: dict[str, list[float]] = {name: [] for name in drivers}
        seen: dict[str, list[Stream]] = {}
        for number in range(setting.pick(5, 1)):
            setting.say(f"drafters: {streams} streams, round {number + 1}")
            first = number % len(drivers)
            seconds = {}
            for name in [*drivers][first:] + [*drivers][:first]:
                seen[name], seconds[name] = _answer(drivers[name], chosen, streams)
            for name in drivers:
                ratios[name].append(seconds[_NONE] / seconds[name])
                if [stream.tokens for stream in seen[name]] != [stream.tokens for stream in seen[_NONE]]:
                    raise EngineFailure(f"{name}: speculation changed a token")
        rows += [_row(name, streams, ratios[name], seen[name]) for name in drivers]
    figure, [axes] = panels(1)
    groups = {
        streams_of(int(row["streams"])): {
            str(one["drafter"]): float(one["speed_up"])
            for one in rows
            if one["streams"] == row["streams"] and one["drafter"] != _NONE
        }
        for row in rows
    }
    bars(axes, groups, "speed-up of whole answers")
    level(axes, 1, "without drafts", len(drivers))
    return Result("drafters", "Drafters on real text", _finding(rows), rows, figure)


def _methods() -> dict[str, SpeculationSettings]:
    return {
        _NONE: SpeculationSettings(),
        "prompt lookup": SpeculationSettings(method="ngram"),
        "draft model": SpeculationSettings(method="draft_target", draft_model=_DRAFT),
    }


def _answer(driver: Driver, examples: Sequence[Example], streams: int) -> tuple[list[Stream], float]:
    """Answer all questions, so many at a time; return what was seen, and the seconds of all answers together."""
    found: list[Stream] = []
    for begin in range(0, len(examples), streams):
        group = examples[begin : begin + streams]
        found += driver.run(ask(example.prompt, len(example.completion)) for example in group)
    return found, sum(stream.arrivals_s[-1] - stream.submitted_s for stream in found)


def _row(name: str, streams: int, ratios: Sequence[float], seen: Sequence[Stream]) -> Row:
    drafted = sum(stream.metrics.draft_tokens for stream in seen)
    accepted = sum(stream.metrics.accepted_draft_tokens for stream in seen)
    steps = sum(stream.metrics.steps for stream in seen)
    low, high = median_interval(ratios)
    return {
        "drafter": name,
        "streams": streams,
        "drafted": drafted,
        "accepted_%": round(100 * accepted / drafted, 1) if drafted else 0.0,
        "tokens_per_step": round(sum(len(stream.tokens) for stream in seen) / steps, 2),
        "speed_up": round(statistics.median(ratios), 3),
        "95_%_interval": f"{low:.2f} to {high:.2f}",
    }


def _finding(rows: Sequence[Row]) -> str:
    counts = " and ".join(str(count) for count in dict.fromkeys(row["streams"] for row in rows))
    parts = [
        f"{row['drafter']} at {row['streams']}: {row['accepted_%']} % of the drafts accepted, {row['speed_up']} "
        f"times the speed ({row['95_%_interval']})"
        for row in rows
        if row["drafter"] != _NONE
    ]
    return (
        f"The demo's held-out questions, {counts} at a time, greedy, and the engine drafts only where it finds that "
        f"it pays. {'; '.join(parts)}. Prompt lookup pays where answers repeat what is there; a draft model where it "
        "is much smaller than the model and has learnt from it. Every answer is the one without speculation, which "
        "is checked."
    )
