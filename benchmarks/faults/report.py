"""What the faults have shown: a table, and a picture of the chunks around each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.faults.run import Outcome
from benchmarks.faults.streams import OPENAI
from benchmarks.result import Result, Row
from inflight.report.drawing import WIDTH, new_figure
from inflight.report.plots import BAD, BLUE

_BEFORE_S, _AFTER_S, _BIN_S = 2.0, 20.0, 0.25
_ROW = 0.26


def broken_promises(outcome: Outcome, streams: int) -> list[str]:
    """Return what was not as promised, each in some words; empty: all was."""
    if outcome.failure:
        return [outcome.failure]
    broken = [f"{outcome.unequal} wrong texts"] if outcome.unequal else []
    openai_errors = sum(count for how, count in outcome.errors.items() if how.startswith(OPENAI))
    lost = outcome.errors.total() - (openai_errors if outcome.fault.ends_openai else 0)
    broken += [f"{lost} of {streams} streams lost"] if lost else []
    broken += [f"{outcome.endless} streams without an end"] if outcome.endless else []
    if outcome.good_s is None:
        broken.append("no good answer")
    elif outcome.good_s > outcome.fault.good_s:
        broken.append(f"a good answer after {outcome.good_s:.1f} s only")
    broken += [f"exit code {outcome.exit_code}"] if outcome.exit_code else []
    broken += [f"processes left: {', '.join(outcome.processes)}"] if outcome.processes else []
    broken += [f"files left: {', '.join(outcome.files)}"] if outcome.files else []
    return broken


def faults_result(outcomes: Sequence[Outcome], streams: int) -> Result:
    """Return the table of the faults, with their picture."""
    rows = [_row(outcome, streams) for outcome in outcomes]
    figure = new_figure(WIDTH, 1.2 + _ROW * len(outcomes))
    axes = figure.subplots()
    for place, outcome in enumerate(outcomes):
        counts, edges = np.histogram(outcome.chunks_s, np.arange(-_BEFORE_S, _AFTER_S + _BIN_S, _BIN_S))
        shades = counts / max(1, counts.max())
        spans = [(float(left), _BIN_S) for left, count in zip(edges, counts, strict=False) if count]
        colours = [(BLUE, 0.25 + 0.75 * float(shade)) for shade in shades if shade]
        axes.broken_barh(spans, (place - 0.4, 0.8), facecolors=colours)
    axes.axvline(0, color=BAD, linewidth=1.2)
    axes.set_yticks(range(len(outcomes)), [outcome.fault.title for outcome in outcomes])
    axes.set_ylim(len(outcomes) - 0.4, -0.6)
    axes.set_xlim(-_BEFORE_S, _AFTER_S)
    axes.set_xlabel("seconds from the fault; blue: chunks arrive, the darker the more")
    axes.grid(axis="y", visible=False)
    return Result("faults", "Faults under streams", _finding(outcomes, rows, streams), rows, figure)


def _row(outcome: Outcome, streams: int) -> Row:
    broken = broken_promises(outcome, streams)
    return {
        "fault": outcome.fault.name,
        "of": outcome.fault.process,
        "promised": outcome.fault.promise,
        "kept": "no" if broken else "yes",
        "next good answer, s": "none" if outcome.good_s is None else round(outcome.good_s, 1),
        "equal": outcome.equal,
        "lost": outcome.errors.total() + outcome.unequal + outcome.endless,
        "errors that clients saw": ", ".join(f"{count} {how}" for how, count in outcome.errors.items()) or "none",
        "processes left": len(outcome.processes),
        "files left": len(outcome.files),
        "the server said": outcome.said or "nothing",
        "not as promised": "; ".join(broken) or "nothing",
    }


def _finding(outcomes: Sequence[Outcome], rows: Sequence[Row], streams: int) -> str:
    kept = sum(row["kept"] == "yes" for row in rows)
    answered = [outcome.good_s for outcome in outcomes if outcome.good_s is not None]
    return (
        f"`inflight serve` with the demo and {streams} streams, half over gRPC from clients that resume, half of "
        f"OpenAI's through the gateway; each fault comes to a server of its own. {kept} "
        f"of {len(rows)} promises were kept. "
        f"A stream is lost that ends with an error, with another text than that of an unbroken run, or not at all: "
        f"{sum(int(row['lost']) for row in rows)} of {streams * len(rows)} were, and "
        f"{sum(outcome.unequal for outcome in outcomes)} had another text. A new client's question, for "
        f"which the batch has room beside the streams, waited for a good answer for {min(answered, default=0):.1f} to "
        f"{max(answered, default=0):.1f} s. A step of the clock changes what the server's processes read, and not what "
        "the kernel waits for at that moment. "
        f"{sum(int(row['processes left']) for row in rows)} processes and "
        f"{sum(int(row['files left']) for row in rows)} files were left."
    )
