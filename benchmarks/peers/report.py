"""The tables and pictures: the best of each contender, and our slowest round over the peers' fastest."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.figures import bars, panels
from benchmarks.peers.checkpoints import SHAPES
from benchmarks.peers.choice import Ratio, best, ratio
from benchmarks.peers.measure import MOST_OTHERS, figure_names, figures_of
from benchmarks.peers.record import Record
from benchmarks.peers.serving import OUTPUT, STREAMS, WORDS, speed_name
from benchmarks.peers.variants import CLASSES, GRID, OURS, SERVED, WORKERS, Class, Part, Variant
from benchmarks.peers.workers.work import Cell
from benchmarks.result import Result, Row
from inflight.errors import InflightError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NONE = "-"
"""In a table: there is none."""
_KL_CAVEAT = (
    "KL is in nats, the mean over the demo model's held-out text, to transformers in float32. vLLM's, llama.cpp's and "
    "ours are of the timed engine; OpenVINO's are of the model with its plain cache, since its pipeline returns none. "
    "llama.cpp samples no tokens, as in its own llama-batched-bench; the others choose greedily."
)
_KL_OF_EXPERTS = (
    "KL is in nats, the mean over random prompts of this checkpoint, to ours in 16 bits: it says that all compute the "
    "same model. With random weights a token's experts are nearly tied, so that a peer that rounds activations to 8 "
    "bits chooses others for some tokens. llama.cpp samples no tokens, as in its own llama-batched-bench; ours chooses "
    "greedily."
)


def results(record: Record, part: Part, rounds: int, cells: Sequence[Cell], suffix: str) -> list[Result]:
    """Return the results of one part.

    Raises:
        InflightError: there are not so many whole rounds in the record.
    """
    found = [figures_of(one) for one in record.rounds(part, rounds)[:rounds]]
    whole = set.intersection(*map(set, found))
    if not whole:
        raise InflightError(f"{record.path} has no {rounds} rounds of {part}")
    done = [{key: figures for key, figures in one.items() if key in whole} for one in found]
    if part == "http":
        return [_over_http(record, done, suffix)]
    return [_ratios(record, done, cells, suffix), _engines(record, done, cells, suffix)]


def _of(kind: Class, variants: Iterable[Variant], contender: str | None = None) -> list[Variant]:
    return [one for one in variants if one.kind == kind and contender in (None, one.contender)]


def _bests(
    variants: Iterable[Variant], rounds: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> Iterator[tuple[Class, str, Variant]]:
    """Yield each class and figure with each contender's best variant."""
    every = list(variants)
    for kind in CLASSES:
        for name in names:
            for contender in WORKERS:
                if (found := best(_of(kind, every, contender), rounds, name)) is not None:
                    yield kind, name, found


def _ratios(record: Record, rounds: Sequence[Mapping[str, Any]], cells: Sequence[Cell], suffix: str) -> Result:
    names = figure_names("engine", cells)
    found = {(kind, name): one for kind in CLASSES for name in names if (one := ratio(_of(kind, GRID), rounds, name))}
    rows: list[Row] = [_ratio_row(kind, name, one) for (kind, name), one in found.items()]
    return Result(
        f"ratios-{suffix}",
        f"The engine beside its peers, {_heading(suffix)}",
        f"{_summary(found)} {_measured(record, 'engine', rounds)}",
        rows or [{"class": _NONE, "tokens/s": _NONE}],
        _picture(rounds, names, GRID),
        _missing(record, "engine", rounds),
    )


def _ratio_row(kind: Class, name: str, one: Ratio) -> Row:
    return {
        "class": kind,
        "tokens/s": name,
        "ours": one.ours.name,
        "slowest": one.slowest,
        "peer": one.theirs.key,
        "fastest": one.fastest,
        "ratio": round(one.value, 2),
    }


def _summary(found: Mapping[tuple[Class, str], Ratio]) -> str:
    parts = []
    for kind in CLASSES:
        for phase in ("decode", "prefill"):
            values = [one.value for (of, name), one in found.items() if of == kind and name.startswith(phase)]
            if values:
                parts.append(f"{kind} weights, {phase}: {min(values):.2f} to {max(values):.2f}")
    return (
        f"Our slowest round over the fastest of any peer: {'; '.join(parts)}."
        if parts
        else "There is nothing to compare."
    )


def _engines(record: Record, rounds: Sequence[Mapping[str, Any]], cells: Sequence[Cell], suffix: str) -> Result:
    reference, caveat = ("ours", _KL_OF_EXPERTS) if SHAPES[record.content["shape"]].experts else ("float32", _KL_CAVEAT)
    rows: list[Row] = [
        {
            "class": kind,
            "tokens/s": name,
            "contender": one.contender,
            "variant": one.name,
            **_spread(rounds, one, name),
            "CPU ms per token": _cpu(record, one, name),
            f"KL to {reference}": record.content["kl"].get(one.key, _NONE),
        }
        for kind, name, one in _bests(GRID, rounds, figure_names("engine", cells))
    ]
    chosen = all(key in record.grid for key in rounds[0])
    of = "the best of each contender's grid" if chosen else "the variants that were asked for"
    title = f"The engines alone, {_heading(suffix)}: {of}"
    lead = "`decode, 8 x 128` is of 8 streams behind prompts of 128 tokens."
    return Result(f"engine-{suffix}", title, f"{lead} {_measured(record, 'engine', rounds)}", rows, None, caveat)


def _spread(rounds: Sequence[Mapping[str, Any]], variant: Variant, name: str) -> Row:
    values = [measured[variant.key][name] for measured in rounds if variant.key in measured]
    return {"median": round(statistics.median(values), 1), "lowest": min(values), "highest": max(values)}


def _cpu(record: Record, variant: Variant, name: str) -> float:
    measured = [one[variant.key] for one in record.rounds("engine", 0) if variant.key in one]
    return round(statistics.median(one["cpu_ms_per_token"][name] for one in measured), 3)


def _heading(suffix: str) -> str:
    """Return what a title says of the end of a result's name, such as ``125M-context-1024``."""
    shape, _, context = suffix.partition("-context-")
    return f"{shape}, contexts of {int(context):,} tokens" if context else shape


def _over_http(record: Record, rounds: Sequence[Mapping[str, Any]], suffix: str) -> Result:
    rows: list[Row] = []
    for streams in STREAMS:
        for kind, name, one in _bests(SERVED, rounds, [speed_name(streams)]):
            compared = ratio(_of(kind, SERVED), rounds, name) if one.contender == OURS else None
            rows.append(
                {
                    "class": kind,
                    "streams": streams,
                    "contender": one.contender,
                    "variant": one.name,
                    **_spread(rounds, one, name),
                    **_served(record, one, streams),
                    "lowest / peers' highest": round(compared.value, 2) if compared else _NONE,
                }
            )
    shape = record.content["shape"]
    names = [speed_name(streams) for streams in STREAMS]
    lead = (
        f"Tokens per second of the wall clock, prefill within it: prompts of {WORDS} words, {OUTPUT} tokens out, the "
        "client on the same cores. Times are medians over the rounds, of milliseconds."
    )
    title = f"Over HTTP, {shape}: the best of each contender's servers"
    finding = f"{lead} {_measured(record, 'http', rounds)}"
    caveat = f"OpenVINO GenAI brings no server. {_missing(record, 'http', rounds)}".strip()
    return Result(f"http-{suffix}", title, finding, rows, _picture(rounds, names, SERVED), caveat)


def _served(record: Record, variant: Variant, streams: int) -> Row:
    loads = [one[variant.key]["loads"][str(streams)] for one in record.rounds("http", 0) if variant.key in one]
    columns = {
        "TTFT p50": "ttft_p50_ms",
        "gap p50": "gap_p50_ms",
        "gap p99": "gap_p99_ms",
        "longest gap": "gap_longest_ms",
        "CPU ms per token": "cpu_ms_per_token",
        "tokens per chunk": "tokens_per_chunk",
    }
    return {column: round(statistics.median(load[key] for load in loads), 2) for column, key in columns.items()}


def _picture(rounds: Sequence[Mapping[str, Any]], names: Sequence[str], variants: Iterable[Variant]) -> Figure | None:
    """Draw each contender's best median of its class of 16 bits, a panel for each kind of speed; None: of none."""
    sixteen: tuple[Class, ...] = ("16-bit", "MXFP4, 16-bit")
    every = [one for one in variants if one.kind in sixteen and one.key in rounds[0]]
    if not every:
        return None
    of = every[0].kind
    kinds = list(dict.fromkeys(name.partition(",")[0] for name in names))
    figure, axes = panels(len(kinds))
    for axis, kind in zip(axes, kinds, strict=True):
        groups: dict[str, dict[str, float]] = {}
        for name in (one for one in names if one.startswith(kind)):
            groups[name.partition(", ")[2]] = {
                contender: float(_spread(rounds, found, name)["median"])
                for contender in dict.fromkeys(one.contender for one in every)
                if (found := best(_of(of, every, contender), rounds, name))
            }
        speed = kind if kind == "tokens/s" else f"{kind} tokens/s"
        bars(axis, groups, f"{speed}, {of}, medians")
    return figure


def _measured(record: Record, part: Part, rounds: Sequence[Mapping[str, Any]]) -> str:
    """Say how it was measured, and at which commits."""
    entries = [one for done in record.rounds(part, 0) for key, one in done.items() if key in rounds[0]]
    commits, dates = sorted({one["commit"] for one in entries}), sorted({one["date"] for one in entries})
    count = f"{len(rounds)} interleaved round{'s' * (len(rounds) > 1)}"
    text = f"{count}, {record.content['threads']} threads for each, measured at commit {' and '.join(commits)}"
    times = sorted({one["times"] for one in entries if "times" in one})
    counts = " or ".join(map(str, times))
    median = f" A round has the median of {counts} measurements of each load." if times and times != [1] else ""
    others = max(one["others"] for one in entries)
    beside = f"Beside no measurement did others take more than {100 * others:.1f} % of the processors."
    versions = {key: one for entry in entries for key, one in entry.get("versions", {}).items() if key != "inflight"}
    named = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    listed = f" Versions: {named}." if named else ""
    return f"{text}, {' and '.join(dates)}.{median} {beside}{listed}"


def _missing(record: Record, part: Part, rounds: Sequence[Mapping[str, Any]]) -> str:
    failed = [f"Not measured: {key}." for key, one in record.grid.items() if "failed" in one]
    begun = {key for one in record.rounds(part, 0) for key in one} - rounds[0].keys()
    return " ".join(
        [*failed, *(f"Not measured in every round: {key}." for key in sorted(begun)), *_disturbed(record, part, rounds)]
    )


def _disturbed(record: Record, part: Part, rounds: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence on each measurement beside which others took more of the processors than they may."""
    for number, done in enumerate(record.rounds(part, 0)[: len(rounds)], 1):
        for key in (one for one in rounds[0] if done.get(one, {}).get("others", 0.0) > MOST_OTHERS):
            share = 100 * done[key]["others"]
            yield f"Disturbed in round {number}, so slower than on a quiet machine: {key} (others {share:.0f} %)."
