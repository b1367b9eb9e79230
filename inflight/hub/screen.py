"""What `inflight pull` shows: what a model is and needs, and how far its download is."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from inflight.hub.model_manifest import is_weights
from inflight.hub.names import ModelName
from inflight.hub.remote import RemoteFile, Repository
from inflight.hub.staging import free_disk, in_units
from inflight.hub.verdict import Verdict

_LINE_EVERY_S = 30.0


def tell(console: Console, line: str) -> None:
    """Print one line as it is: paths are not broken, brackets mean nothing."""
    console.print(f"inflight: {line}", markup=False, highlight=False, soft_wrap=True)


def show_model(
    console: Console,
    name: ModelName,
    repository: Repository,
    files: Sequence[RemoteFile],
    verdict: Verdict,
    target: Path,
) -> None:
    """Print what is about to be downloaded, and what it needs."""
    size = sum(file.bytes for file in files)
    weights = verdict.cpu_bytes or sum(file.bytes for file in files if is_weights(file.path))
    rows = {
        "commit": f"{repository.commit} ({name.revision or 'main'})",
        "licence": repository.license or "none is named",
        "architecture": verdict.line,
        "files": f"{len(files)}, {in_units(size)}",
        "memory": f"{in_units(weights)} of weights; {in_units(psutil.virtual_memory().available)} are free",
        "disk": f"{in_units(free_disk(target))} are free",
        "goes to": str(target),
    }
    tell(console, f"{name}")
    for label, text in rows.items():
        console.print(f"  {label:<14}{text}", markup=False, highlight=False, soft_wrap=True)


class Transfer:
    """How far a download is: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, console: Console, total: int, kept: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._console, self._total, self._kept = console, total, kept
        self._progress = Progress(
            *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._progress.add_task(self._verb(0), total=total)
        self._lock, self._done, self._told = threading.Lock(), 0, time.monotonic()
        self._progress.start()

    def advance(self, count: int) -> None:
        """Show so many bytes more; any thread may."""
        with self._lock:
            self._done += count
            verb = self._verb(self._done)
            if not self._console.is_terminal and time.monotonic() - self._told >= _LINE_EVERY_S:
                self._told = time.monotonic()
                tell(self._console, f"{verb}: {in_units(self._done)} of {in_units(self._total)}")
        self._progress.update(self._task, advance=count, description=verb)

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()

    def _verb(self, done: int) -> str:
        return "checking" if done < self._kept else "writing"
