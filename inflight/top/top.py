"""``inflight top``: a live view of a running server in the terminal, or one frame of it."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from inflight.errors import InflightError
from inflight.report.failures import one_line_errors
from inflight.top.frame import frame, missing
from inflight.top.history import Figures, History
from inflight.top.poller import ONCE_PATIENCE_S, Poll, ServerPoller

_PICTURE_COLUMNS = 110
_errors = Console(stderr=True, highlight=False)


def top(
    url: Annotated[
        str, typer.Option(envvar="INFLIGHT_URL", help="host:port is gRPC (grpcs:// with TLS); http:// is HTTP.")
    ] = "localhost:8001",
    metrics: Annotated[
        str | None, typer.Option(help="host:port of the metrics; by default port 8002 of the same host.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two polls.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    after: Annotated[
        float | None, typer.Option(min=0.1, help="With --once: seconds to watch before; by default one interval.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(dir_okay=False, help="With --once: write the frame to this file, as a picture.")
    ] = None,
) -> None:
    """Show what a server is doing, live: throughput, latency, batch, queue, KV cache, requests. `q` ends it."""
    for name, given in (("--after", after), ("--svg", svg)):
        if given is not None and not once:
            raise typer.BadParameter(f"{name} goes with --once")
    if svg is not None and not os.access(svg.parent, os.W_OK):  # not after all the watching
        raise typer.BadParameter(f"--svg {svg}: {svg.parent} is not a folder that can be written to")
    if not once and not sys.stdout.isatty():
        raise typer.BadParameter("standard output is not a terminal: use --once")
    with suppress(KeyboardInterrupt), one_line_errors(_errors):
        asyncio.run(_once(url, metrics, interval, after or interval, svg) if once else _live(url, metrics, interval))


async def _once(url: str, metrics: str | None, interval: float, after: float, svg: Path | None) -> None:
    """Watch for some seconds and print a frame. Raises InflightError: the server tells nothing."""
    poller, history = ServerPoller(url, metrics, ONCE_PATIENCE_S), History()
    console = Console(record=svg is not None, highlight=False, width=_PICTURE_COLUMNS if svg else None)
    try:
        poll = await poller.poll()
        history.add(poll)
        end = poll.at_s + after
        while not poll.failed and poll.at_s < end:
            await asyncio.sleep(min(interval, after))
            poll = await poller.poll()
            history.add(poll)
    finally:
        await poller.close()
    if isinstance(poll.snapshot, InflightError) and poll.failed:
        raise poll.snapshot
    console.print(_screen(poller, poll, history.figures(poll), missing(poll), console.width, rows=20))
    if svg is not None:
        # Without rich's fonts, which the reader's browser would load from elsewhere.
        picture = console.export_svg(title="inflight top")
        plain = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
        svg.write_text(plain.replace(">", ">\n<title>inflight top: what a server does</title>", 1))


async def _live(url: str, metrics: str | None, interval: float) -> None:
    poller, history, console, ended = ServerPoller(url, metrics), History(), Console(highlight=False), asyncio.Event()
    shown: Poll | None = None
    try:
        with _keys(ended), Live(console=console, screen=True, auto_refresh=False) as live:
            while not ended.is_set():
                poll = await poller.poll()
                history.add(poll)
                notes = missing(poll)
                if poll.failed:  # what was last seen stays, and is said to be old
                    age = f"; last seen {poll.at_s - shown.at_s:.0f} s ago" if shown else ""
                    notes = [f"the server does not answer{age}: {poll.snapshot}"]
                else:
                    shown = poll
                seen = shown or poll
                live.update(_fitted(console, poller, seen, history.figures(seen), notes), refresh=True)
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(ended.wait(), interval)
    finally:
        await poller.close()


def _fitted(console: Console, poller: ServerPoller, poll: Poll, figures: Figures, notes: list[str]) -> RenderableType:
    """Return the frame with as many requests as the terminal has lines for, which is half of them or more."""
    width, height = console.size

    def above(low: bool) -> int:
        return len(console.render_lines(_screen(poller, poll, figures, notes, width, 0, low)))

    low = above(low=False) > height / 2
    return _screen(poller, poll, figures, notes, width, max(0, height - above(low)), low)


def _screen(
    poller: ServerPoller, poll: Poll, figures: Figures, notes: list[str], width: int, rows: int, low: bool = False
) -> RenderableType:
    engine = "" if isinstance(poll.snapshot, InflightError) else f"  engine {poll.snapshot.engine}"
    title = Text.assemble(("inflight top", "bold"), f"  {poller.url}{engine}  metrics {poller.metrics}", style="dim")
    return Group(title, frame(poll, figures, notes, width, rows, low))


@contextmanager
def _keys(ended: asyncio.Event) -> Iterator[None]:
    """Set ``ended`` when `q` is pressed; the terminal is as before afterwards."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(descriptor)

    def pressed() -> None:
        if set(os.read(descriptor, 64)) & set(b"qQ"):
            ended.set()

    try:
        tty.setcbreak(descriptor)
        loop.add_reader(descriptor, pressed)
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
