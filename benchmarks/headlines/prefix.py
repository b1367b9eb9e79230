"""Prefix reuse: what a shared prompt saves, and what one changed word takes away."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from benchmarks.checkpoints import LARGE, TINY, VOCAB
from benchmarks.drive import Driver, Stream, ask
from benchmarks.figures import columns, curves, panels
from benchmarks.result import Result, Row
from benchmarks.setting import Setting

_QUESTION = 24
"""Tokens that each request adds."""
_SHARED = 1000
_KINDS = {"no reuse": False, "reuse": True, "reuse, first word changed": True}


def prefix(setting: Setting) -> Result:
    """Ask many questions behind one prompt, one after the other: with reuse, without, and with a changed word."""
    shape = setting.pick(LARGE, TINY)
    engines = {reuse: setting.engine(shape, 16 * 1024, prefix_reuse=reuse) for reuse in (False, True)}
    rows: list[Row] = []
    for shared in setting.pick((250, 500, _SHARED, 2000), (64, _SHARED)):
        for kind, reuse in _KINDS.items():
            setting.say(f"prefix: {shared:,} shared tokens, {kind}")
            changed = 0 if "changed" in kind else None
            streams = _ask(Driver(engines[reuse]), shared, changed, setting.pick(5, 3))
            rows.append({"shared_tokens": shared, "kind": kind, **_figures(streams)})
    positions = []
    for share in setting.pick((0.0, 0.25, 0.5, 0.75, 1.0), (0.0, 0.5)):
        setting.say(f"prefix: a word changed at {share:.0%}")
        streams = _ask(Driver(engines[True]), _SHARED, int(share * _SHARED), setting.pick(5, 2))
        positions.append((share, _figures(streams)))
        kind = f"reuse, word changed at {share:.0%}"
        rows.append({"shared_tokens": _SHARED, "kind": kind, **positions[-1][1]})
    none, whole, changed_row = ([row for row in rows if row["shared_tokens"] == _SHARED][place] for place in range(3))
    finding = (
        f"Behind a shared prompt of {_SHARED:,} tokens, reuse computes {whole['computed_tokens']:g} of "
        f"{_SHARED + _QUESTION:,} prompt tokens, {whole['saved_%']} % less, and the first token comes after "
        f"{whole['ttft_ms']} ms in place of {none['ttft_ms']}. One word changed at the prompt's start leaves "
        f"{changed_row['saved_%']} % saved and the first token at {changed_row['ttft_ms']} ms: what differs from "
        "request to request (a date, a name) belongs behind what they share. Reuse never costs a recomputation, but "
        "a prefix that nobody asks for again holds room until it is evicted."
    )
    figure, (left, right) = panels(2)
    lines = {kind: columns(rows, "shared_tokens", "ttft_ms", kind) for kind in _KINDS}
    curves(left, lines, "shared tokens", "TTFT, ms")
    saved = {100 * share: float(figures["saved_%"]) for share, figures in positions}
    curves(right, {"saved": saved}, "where one word differs, % of the prompt", "prefill work saved, %")
    right.set_ylim(0, 100)
    return Result("prefix", "Prefix reuse", finding, rows, figure)


def _ask(driver: Driver, shared: int, changed: int | None, count: int) -> list[Stream]:
    """Return what was seen of ``count`` questions behind one new prompt, after a first one that is not counted."""
    generator = np.random.default_rng()
    beginning = generator.integers(1, VOCAB, shared).tolist()
    streams = []
    for number in range(count + 1):
        prompt = [*beginning, *generator.integers(1, VOCAB, _QUESTION).tolist()]
        if changed is not None:
            prompt[changed] = (prompt[changed] + number) % VOCAB
        streams += driver.run([ask(prompt, 1)])
    return streams[1:]


def _figures(streams: Sequence[Stream]) -> dict[str, float]:
    metrics = [stream.metrics for stream in streams]
    prompt = sum(one.prompt_tokens for one in metrics)
    cached = sum(one.cached_tokens for one in metrics)
    return {
        "computed_tokens": round((prompt - cached) / len(streams), 1),
        "saved_%": round(100 * cached / prompt, 1),
        "ttft_ms": round(1000 * statistics.median(stream.ttft_s for stream in streams), 1),
    }
