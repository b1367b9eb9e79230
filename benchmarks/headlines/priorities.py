"""Priorities: how soon an interactive request begins while a flood of batch requests waits."""

from __future__ import annotations

import numpy as np

from benchmarks.checkpoints import SMALL, TINY
from benchmarks.drive import Driver, ask, prompts
from benchmarks.figures import columns, curves, panels
from benchmarks.result import Result
from benchmarks.setting import Setting

_SLOTS = 8
_EVERY = 12
"""Steps from one interactive request to the next: steps, so that a slow machine gets the same load."""


def priorities(setting: Setting) -> Result:
    """Flood the queue with batch requests, send interactive ones one by one; all of one class, and of two."""
    rows = []
    for flood in setting.pick((0, 16, 32, 64, 128), (0, 16)):
        for kind, priority in (("one class", 0), ("interactive first", 1)):
            setting.say(f"priorities: a flood of {flood}, {kind}")
            rows.append({"flood": flood, "kind": kind} | _serve(setting, flood, priority))
    one, first = rows[-2:]
    finding = (
        f"Behind {one['flood']} batch requests, with {_SLOTS} that run at once, interactive requests of the same "
        f"class have their first token after {one['ttft_median_ms']:,} ms (p99 {one['ttft_p99_ms']:,}); served "
        f"first, after {first['ttft_median_ms']:,} ms (p99 {first['ttft_p99_ms']:,}). The batch's output is "
        f"{first['batch_tokens_per_s']:,} tokens/s in place of {one['batch_tokens_per_s']:,}. A priority is a place "
        "in the queue: an interactive request still waits until a running one ends, so outputs of batch requests "
        "should be short or slots many; and where everything is urgent nothing is."
    )
    figure, (left, right) = panels(2)
    kinds = ("one class", "interactive first")
    for axes, column, label in (
        (left, "ttft_median_ms", "interactive TTFT, median, ms"),
        (right, "ttft_p99_ms", "interactive TTFT, p99, ms"),
    ):
        lines = {kind: columns(rows, "flood", column, kind) for kind in kinds}
        curves(axes, lines, "batch requests in the flood", label)
    return Result("priorities", "Priorities", finding, rows, figure)


def _serve(setting: Setting, flood: int, priority: int) -> dict[str, float]:
    engine = setting.engine(setting.pick(SMALL, TINY), max_batch_size=_SLOTS, prefix_reuse=False)
    driver, generator = Driver(engine), np.random.default_rng(0)
    batch = [driver.submit(ask(prompt, int(generator.integers(16, 64)))) for prompt in prompts(generator, flood, 64)]
    interactive = []
    for prompt in prompts(generator, setting.pick(12, 3), 32):
        interactive.append(driver.submit(ask(prompt, 8, priority)))
        for _ in range(_EVERY):
            driver.step()
    driver.finish()
    waits = [1000 * stream.ttft_s for stream in interactive]
    taken = max((stream.arrivals_s[-1] for stream in batch), default=0) - batch[0].submitted_s if batch else 1.0
    return {
        "ttft_median_ms": round(float(np.median(waits)), 1),
        "ttft_p99_ms": round(float(np.percentile(waits, 99)), 1),
        "batch_tokens_per_s": round(sum(len(stream.tokens) for stream in batch) / taken),
    }
