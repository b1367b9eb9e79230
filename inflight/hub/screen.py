"""What `inflight pull` shows: what a model is and needs, and how far its download is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from inflight.engine.models.config import read_model_config
from inflight.errors import DeploymentError
from inflight.hub.model_manifest import decode_object, is_weights
from inflight.hub.names import ModelName
from inflight.hub.remote import RemoteFile, Repository
from inflight.hub.staging import free_disk, in_units


def tell(console: Console, line: str) -> None:
    """Print one line as it is: paths are not broken, brackets mean nothing."""
    console.print(f"inflight: {line}", markup=False, highlight=False, soft_wrap=True)


def show_model(
    console: Console,
    name: ModelName,
    repository: Repository,
    files: Sequence[RemoteFile],
    architecture: str | None,
    config: bytes | None,
    target: Path,
) -> None:
    """Print what is about to be downloaded, and what it needs."""
    size = sum(file.bytes for file in files)
    weights = sum(file.bytes for file in files if is_weights(file.path))
    rows = {
        "commit": f"{repository.commit} ({name.revision or 'main'})",
        "licence": repository.license or "none is named",
        "architecture": f"{architecture or 'as the file says'}{_judgement(config)}",
        "files": f"{len(files)}, {in_units(size)}",
        "memory": f"{in_units(weights)} of weights; {in_units(psutil.virtual_memory().available)} are free",
        "disk": f"{in_units(free_disk(target))} are free",
        "goes to": str(target),
    }
    tell(console, f"{name}")
    for label, text in rows.items():
        console.print(f"  {label:<14}{text}", markup=False, highlight=False, soft_wrap=True)


def why_not_served(config: bytes) -> str | None:
    """Return why the engine does not serve a model, by the bytes of its config.json; None: it does."""
    try:
        read_model_config(decode_object(config, "config.json"))
    except DeploymentError as error:
        return str(error)
    return None


def _judgement(config: bytes | None) -> str:
    problem = why_not_served(config) if config is not None else None
    return f"; the portable engine does not serve it: {problem}" if problem else ""


class Transfer:
    """A bar of bytes on a terminal; elsewhere nothing."""

    def __init__(self, console: Console, total: int, kept: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._progress = Progress(
            *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._progress.add_task("checking" if kept else "downloading", total=total)
        self._kept, self._done = kept, 0
        self._progress.start()

    def advance(self, count: int) -> None:
        """Show so many bytes more."""
        self._done += count
        description = "checking" if self._done < self._kept else "downloading"
        self._progress.update(self._task, advance=count, description=description)

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()
