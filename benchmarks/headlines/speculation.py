"""Speculative decoding: speed-up over acceptance and over batch size, and where it is lost (arXiv:2211.17192, 3.4).

Drafts come from a drafter that knows what the model will say and is wrong as often as it is told, at no cost: so
acceptance is what is set, and what remains is the cost of checking drafts that are rejected.
"""

from __future__ import annotations

import statistics
from collections import abc
from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from benchmarks.checkpoints import LARGE, TINY
from benchmarks.drive import Driver, Stream, ask, prompts
from benchmarks.figures import columns, curves, panels, streams_of
from benchmarks.result import Result, Row
from benchmarks.setting import Setting
from benchmarks.transformers_peers import Rates
from inflight.engine.sequence import Sequence
from inflight.errors import EngineFailure
from inflight.report.plots import INK
from inflight.settings.speculation import SpeculationSettings

_DRAFTS, _PROMPT, _OUTPUT = 4, 32, 32
_ALWAYS, _ADAPTIVE = "always 4 drafts", "adaptive"
_CAVEAT = (
    "On a CPU a step of several tokens takes nearly their number times as long as soon as computing, not reading "
    "the weights, is what takes the time; a GPU has room for some hundred tokens before that, and its crossing lies "
    "at larger batches."
)


class Foretelling:
    """A drafter that knows the outputs, and is wrong as often as is set."""

    def __init__(self, outputs: Mapping[int, abc.Sequence[int]], chance: float) -> None:
        """
        Args:
            outputs: what comes, by the request's key.
            chance: that a draft is right.
        """
        self._outputs, self._chance = outputs, chance
        self._generator = np.random.default_rng(0)

    def prepare(self, wanted: Mapping[Sequence, int]) -> None:
        """There is nothing to learn."""

    def draft(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[list[int]]]:
        """Return what comes, some of it wrong."""
        return {sequence: [self._guess(sequence, count)] for sequence, count in wanted.items()}

    def _guess(self, sequence: Sequence, count: int) -> list[int]:
        coming = self._outputs[sequence.request.key][sequence.generated : sequence.generated + count]
        wrong = self._generator.random(len(coming)) >= self._chance
        return [token ^ int(one) for token, one in zip(coming, wrong, strict=True)]  # a neighbour is a token too

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept."""

    def reset(self) -> None:
        """Nothing is kept."""

    def check_idle(self) -> None:
        """Nothing is kept."""


def speculation(setting: Setting) -> Result:
    """Decode with drafts that are right as often as is set, and without, for several batch sizes."""
    shape = setting.pick(LARGE, TINY)
    plain = Driver(setting.engine(shape))
    drivers = {
        kind: Driver(
            setting.engine(
                shape,
                speculation=SpeculationSettings(method="ngram", max_draft_tokens=_DRAFTS, adaptive=kind == _ADAPTIVE),
            )
        )
        for kind in (_ALWAYS, _ADAPTIVE)
    }
    rows: list[Row] = []
    for streams in setting.pick((1, 4, 16, 32), (1, 2)):
        given = prompts(np.random.default_rng(streams), streams, _PROMPT)
        known = [stream.tokens for stream in _decode(plain, given)[0]]
        for driver in drivers.values():
            _decode(driver, given, known)
        speeds: dict[tuple[str, float], list[float]] = {}
        accepted: dict[tuple[str, float], float] = {}
        for number in range(setting.pick(3, 1)):
            setting.say(f"speculation: {streams} streams, round {number + 1}")
            without = _decode(plain, given)
            for chance in setting.pick((0.0, 0.4, 0.6, 0.8, 1.0), (0.0, 1.0)):
                for kind, driver in drivers.items():
                    found = _decode(driver, given, known, chance)
                    speeds.setdefault((kind, chance), []).append(found[1] / without[1])
                    accepted[kind, chance] = _acceptance(found[0])
        rows += [
            {
                "kind": _kind(streams, kind),
                "streams": streams,
                "chance": chance,
                "accepted_%": round(accepted[kind, chance], 1),
                "speed_up": round(statistics.median(ratios), 3),
            }
            for (kind, chance), ratios in speeds.items()
        ]
    return Result("speculation", "Speculative decoding", _finding(rows), rows, _figure(rows), _CAVEAT)


def _decode(
    driver: Driver, given: abc.Sequence[list[int]], known: abc.Sequence[abc.Sequence[int]] = (), chance: float = 0.0
) -> tuple[list[Stream], float]:
    """Return what was seen of the streams, and their tokens per second once all of them decode."""
    requests = [ask(prompt, _OUTPUT) for prompt in given]
    if known:
        outputs = {request.key: tokens for request, tokens in zip(requests, known, strict=True)}
        assert driver.engine._speculator is not None
        driver.engine._speculator.draft_with(Foretelling(outputs, chance))
    streams = driver.run(requests)
    if known and [stream.tokens for stream in streams] != list(known):
        raise EngineFailure("speculation changed a token")
    if chance == 1 and any(one.metrics.accepted_draft_tokens < one.metrics.draft_tokens for one in streams):
        raise EngineFailure("speculation rejected drafts that are right")
    return streams, Rates.of(given, streams[0].submitted_s, [stream.arrivals_s for stream in streams]).decode


def _acceptance(streams: abc.Sequence[Stream]) -> float:
    """Return the share of the drafts that was accepted, in percent."""
    drafted = sum(stream.metrics.draft_tokens for stream in streams)
    return 100 * sum(stream.metrics.accepted_draft_tokens for stream in streams) / drafted if drafted else 0.0


def _crossing(rows: abc.Sequence[Row], streams: int) -> float | None:
    """Return the chance from which on drafting always pays, between two measurements on a line; None: never."""
    points = sorted(columns(rows, "chance", "speed_up", _kind(streams)).items())
    if points[-1][1] <= 1:
        return None
    below = [place for place, (_, speed) in enumerate(points) if speed <= 1]
    if not below:
        return points[0][0]
    (left, low), (right, high) = points[below[-1]], points[below[-1] + 1]
    return left + (right - left) * (1 - low) / (high - low)


def _kind(streams: int, which: str = _ALWAYS) -> str:
    return f"{streams_of(streams)}, {which}"


def _finding(rows: abc.Sequence[Row]) -> str:
    counts = sorted({int(row["streams"]) for row in rows})
    best = {count: max(float(row["speed_up"]) for row in rows if row["streams"] == count) for count in counts}
    crossings = []
    for count in counts:
        crossing = _crossing(rows, count)
        crossings.append(f"never at {count}" if crossing is None else f"from {100 * crossing:.0f} % at {count}")
    worst = min(float(row["speed_up"]) for row in rows if str(row["kind"]).endswith(_ALWAYS))
    kept = min(float(row["speed_up"]) for row in rows if str(row["kind"]).endswith(_ADAPTIVE))
    return (
        f"With {_DRAFTS} drafts per step that cost nothing, decoding is up to {best[counts[0]]} times as fast at "
        f"{counts[0]} stream and {best[counts[-1]]} times at {counts[-1]}. It pays {', '.join(crossings)} streams: "
        f"the larger the batch, the more a rejected draft takes from others. Always drafting falls to {worst} of the "
        f"speed without; the engine's own choice, which learns what drafts bring and cost, keeps {kept}. Every token "
        "is the one without speculation, which is checked."
    )


def _figure(rows: abc.Sequence[Row]) -> Figure:
    counts = sorted({int(row["streams"]) for row in rows})
    chances = sorted({float(row["chance"]) for row in rows})
    figure, (left, right) = panels(2)
    lines = {streams_of(count): columns(rows, "chance", "speed_up", _kind(count)) for count in counts}
    curves(left, lines, f"chance of a draft to be right ({_ALWAYS})", "speed-up")
    over = {}
    for which in (_ALWAYS, _ADAPTIVE):
        for chance in (chances[0], chances[-2]):
            over[f"{100 * chance:.0f} %, {which}"] = {
                float(row["streams"]): float(row["speed_up"])
                for row in rows
                if row["chance"] == chance and str(row["kind"]).endswith(which)
            }
    curves(right, over, "streams", "speed-up", log_x=True)
    for axes in (left, right):
        axes.axhline(1, color=INK, linewidth=1)
    return figure
