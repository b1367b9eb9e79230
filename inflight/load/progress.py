"""Shows a load test while it runs: how far it is, requests, tokens per second, TTFT."""

from __future__ import annotations

import asyncio
import statistics

from rich.console import Console
from rich.live import Live
from rich.text import Text

from inflight.load.runner import Runner

_LIVE_S, _LOG_S = 0.5, 10.0
"""Seconds between two updates of a terminal, and between two lines elsewhere."""


async def show_progress(runner: Runner, console: Console) -> None:
    """Show the state of ``runner`` until cancelled."""
    period = _LIVE_S if console.is_terminal else _LOG_S
    before = 0
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.sleep(period)
            line = progress_line(runner, (runner.progress.tokens - before) / period)
            before = runner.progress.tokens
            if console.is_terminal:
                live.update(Text(line), refresh=True)
            else:
                console.print(line, markup=False, soft_wrap=True)


def progress_line(runner: Runner, tokens_per_second: float) -> str:
    """Return the state of a test in one line."""
    progress, duration = runner.progress, runner.workload.duration_s
    parts = [
        f"{min(runner.clock(), duration):.0f} of {duration:.0f} s"
        if runner.clock() < duration
        else "waiting for the rest",
        f"{progress.running} running",
        *(f"{count:,} {outcome}" for outcome, count in sorted(progress.ended.items())),
        f"{tokens_per_second:,.0f} tokens/s",
    ]
    if progress.recent_ttft_s:
        parts.append(f"TTFT {1000 * statistics.median(progress.recent_ttft_s):,.0f} ms")
    return ", ".join(parts)
