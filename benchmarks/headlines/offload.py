"""Offload: restoring an evicted prefix from a second tier, beside computing it again."""

from __future__ import annotations

import statistics
from typing import Any, Literal

import numpy as np

from benchmarks.checkpoints import LARGE, SMALL, Shape
from benchmarks.drive import Driver, ask, prompts
from benchmarks.figures import columns, curves, panels
from benchmarks.result import Result, Row
from benchmarks.setting import Setting

_QUESTION = 16
_BLOCK = 16
_ROOM = 64
"""Tokens that the cache has room for beside the prefix: another prompt as long drives it out."""
_CAVEAT = (
    "On a CPU the cache and the second tier both lie in the host's memory, and computing is slow, which favours "
    "restoring. On a GPU a block crosses PCIe, and computing is some hundred times faster; the crossing lies at longer "
    "prefixes."
)
Tier = Literal["none", "host", "file"]


def offload(setting: Setting) -> Result:
    """Ask again about a prompt that was evicted: it is computed, or it comes back from memory or from a file."""
    rows: list[Row] = []
    tiers: tuple[Tier, ...] = ("none", "host", "file")
    shapes = setting.pick((SMALL, LARGE), (SMALL,))
    for shape in shapes:
        for length in setting.pick((32, 128, 512, 2048), (32, 256)):
            for tier in tiers:
                setting.say(f"offload: {shape.name}, {length:,} tokens, {tier}")
                kind = f"{shape.name}, {'computed' if tier == 'none' else f'restored from {tier}'}"
                rows.append({"kind": kind, "prefix_tokens": length, **_ask(setting, shape, length, tier)})
    figure, axes = panels(len(shapes))
    for one, shape in zip(axes, shapes, strict=True):
        kinds = dict.fromkeys(str(row["kind"]) for row in rows if str(row["kind"]).startswith(shape.name))
        lines = {kind.partition(", ")[2]: columns(rows, "prefix_tokens", "ttft_ms", kind) for kind in kinds}
        curves(one, lines, f"tokens of the prefix ({shape.name})", "TTFT, ms", log_x=True)
    return Result("offload", "Offload", _finding(rows, shapes[-1].name), rows, figure, _CAVEAT)


def _ask(setting: Setting, shape: Shape, length: int, tier: Tier) -> dict[str, float]:
    """Return the TTFT of a question behind a prefix that the cache has no more, and what was restored of it."""
    more: dict[str, Any] = (
        {} if tier == "none" else {"offload_to": tier, "offload_bytes": 1 << 28, "offload_min_tokens": 1}
    )
    engine = setting.engine(shape, num_blocks=(length + _ROOM) // _BLOCK, block_size=_BLOCK, **more)
    driver, generator = Driver(engine), np.random.default_rng(length)
    waits, restored = [], []
    before = prompts(generator, 1, length)[0]
    for number in range(setting.pick(3, 1) + 1):
        [prefix] = prompts(generator, 1, length)
        # Each new prefix drives the one before it out of the cache.
        asked = [prefix] if tier == "none" else [prefix, before]
        for one in asked:
            [stream] = driver.run([ask([*one, *prompts(generator, 1, _QUESTION)[0]], 1)])
        before = prefix
        if number:
            waits.append(1000 * stream.ttft_s)
            restored.append(stream.metrics.cached_tokens)
    return {"restored_tokens": statistics.median(restored), "ttft_ms": round(statistics.median(waits), 2)}


def _finding(rows: list[Row], shape: str) -> str:
    def ttft(how: str) -> dict[int, float]:
        return {int(row["prefix_tokens"]): float(row["ttft_ms"]) for row in rows if row["kind"] == f"{shape}, {how}"}

    computed, restored = ttft("computed"), ttft("restored from file")
    longest = max(computed)
    paying = [length for length in sorted(computed) if restored[length] < computed[length]]
    begin = (
        f"restoring from a file is quicker at {', '.join(f'{length:,}' for length in paying)} tokens"
        if paying
        else "restoring from a file is never quicker here"
    )
    return (
        f"A prefix of {longest:,} tokens that was evicted ({shape}) takes {computed[longest]} ms to the first token "
        f"if it is computed again and {restored[longest]} ms if it comes back from a file; {begin}, of the lengths "
        "measured. Where it is not, or where nobody asks again, a second tier only costs the copies that fill it; the "
        "engine measures both ways while it runs and restores where that is the quicker one."
    )
