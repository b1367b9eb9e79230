"""Stages of a build: each has its own directory, named by a hash of its inputs, which is whole or not there.

A stage that was interrupted, by a signal or a full disk, leaves nothing that a later run could take for a result; what
was finished before it is found again. A long stage keeps the results of its steps in a journal, and goes on from there.
This module does not know what the stages do.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
from safetensors import SafetensorError

from inflight.errors import DeploymentError

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[str, int, int], object]
"""Called with what is being done, how many steps are done, and how many there are."""
RECORD = "stage.json"
_NO_SPACE = ("No space left on device", "os error 28", "File too large", "os error 27")


@dataclass
class Stages:
    """Runs stages under one directory, and remembers what it did."""

    root: Path
    show: Callable[[str, str], object]
    """Called with a stage's name and one line about it: what it did, or that there was nothing to do."""
    results: dict[str, Path] = field(default_factory=dict)
    """The directories of the stages' results, by the stages' names."""
    ran: list[str] = field(default_factory=list)
    """The stages among them that no earlier run had finished."""

    def journal(self, name: str, inputs: Mapping[str, Any]) -> Journal:
        """Return what a stage with these inputs has kept of its steps; it is removed when the stage is done."""
        return Journal(self._journal(self.directory(name, inputs)))

    @staticmethod
    def _journal(directory: Path) -> Path:
        return directory.with_name(f".{directory.name}.journal")

    def run(self, name: str, inputs: Mapping[str, Any], work: Callable[[Path], str], needed_bytes: int = 0) -> Path:
        """Return the directory of a stage's results; ``work`` fills it, unless an earlier run did.

        Args:
            inputs: all that the results depend on; JSON.
            work: fills the directory that it is given, and returns a line about it.
            needed_bytes: space that it will take.

        Raises:
            DeploymentError: the stage failed; nothing is left of it.
        """
        directory = self.results[name] = self.directory(name, inputs)
        if (directory / RECORD).is_file():
            try:
                done = json.loads((directory / RECORD).read_text())["line"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                fault = f"cannot be read ({error}); remove {directory}"
                raise DeploymentError(f"{directory / RECORD}: {fault}") from None
            self.show(name, f"nothing to do: {done}")
            return directory
        require_space(self.root, needed_bytes)
        started = time.monotonic()
        with fresh_directory(directory) as partial:
            line = work(partial)
            seconds = round(time.monotonic() - started, 1)
            record = {"stage": name, "inputs": dict(inputs), "line": line, "seconds": seconds}
            (partial / RECORD).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        self._journal(directory).unlink(missing_ok=True)
        self.ran.append(name)
        self.show(name, f"{line} ({seconds:g} s)")
        return directory

    def directory(self, name: str, inputs: Mapping[str, Any]) -> Path:
        """Return where the results of a stage with these inputs are, or will be."""
        return self.root / f"{name}-{digest(inputs)[:16]}"


class Journal:
    """The results of a stage's steps, by their names, each written as soon as it is known."""

    def __init__(self, path: Path | None = None) -> None:
        """Read what an earlier run has left in the file ``path``; a line that it did not finish is dropped.

        Without a file nothing is kept.
        """
        self._path, self._known = path, dict[str, Any]()
        if path is not None and path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):
                    name, result = json.loads(line)
                    self._known[name] = result

    def step(self, name: str, work: Callable[[], Result]) -> Result:
        """Return the result of a step, JSON, from an earlier run or from ``work``."""
        if name not in self._known:
            result = self._known[name] = work()
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    file.write("\n" * bool(file.tell()) + json.dumps([name, result]))
        return self._known[name]  # type: ignore[no-any-return]


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextmanager
def fresh_directory(target: Path) -> Iterator[Path]:
    """Give an empty directory that becomes ``target`` at the end; if it fails, what was there before is still there.

    Raises:
        DeploymentError: the disk is full, or the place cannot be written.
    """
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        partial.mkdir()
        yield partial
        _replace(partial, target)
    except (OSError, SafetensorError) as error:
        raise DeploymentError(_explain(error, target)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_writable(parent: Path) -> None:
    """Raise DeploymentError where nothing can be written to ``parent``, before hours of work; it is made."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=".probe-"):
            pass
    except OSError as error:
        raise DeploymentError(_explain(error, parent)) from None


def require_space(directory: Path, needed_bytes: int) -> None:
    """Raise DeploymentError where the disk of ``directory`` has less than ``needed_bytes`` free, before work begins."""
    present = next(one for one in (directory, *directory.absolute().parents) if one.exists())
    free = shutil.disk_usage(present).free
    if free < needed_bytes:
        raise DeploymentError(
            f"{directory}: {needed_bytes / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free on this disk"
        )


def _sweep(target: Path) -> None:
    """Put right what runs left that were killed: half-made directories, and an older result that was moved aside."""
    ours = re.compile(rf"\.{re.escape(target.name)}\.(partial|old)-(\d+)")
    for left in list(target.parent.iterdir()):
        match = ours.fullmatch(left.name)
        if match is None:
            continue
        process = int(match[2])
        if process != os.getpid() and psutil.pid_exists(process):
            continue
        if match[1] == "old" and not target.exists():
            left.rename(target)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _replace(partial: Path, target: Path) -> None:
    """Put a finished directory in its place; an older one is moved aside first, and back if that fails."""
    aside = target.with_name(f".{target.name}.old-{os.getpid()}")
    if target.exists():
        target.rename(aside)
    try:
        partial.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _explain(error: Exception, target: Path) -> str:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if full or any(text in str(error) for text in _NO_SPACE):
        return f"{target.parent}: the disk is full; nothing was written to {target.name}"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
    place = Path(error.filename) if isinstance(error, OSError) and error.filename else target
    what = "cannot be written" if target.parent in (place, *place.parents) else "failed"
    return f"{place}: {what}: {reason}"


def is_linked(source: Path, target_device: int) -> bool:
    """Whether a file gets a second name in place of a copy: weights and engines, which nobody edits in place."""
    return source.suffix in (".safetensors", ".engine") and source.stat().st_dev == target_device


def link_or_copy(source: Path, target: Path) -> None:
    """Give weights and engines a second name where the disk can; copy the rest."""
    if is_linked(source.resolve(), target.parent.stat().st_dev):
        os.link(source.resolve(), target)
    else:
        shutil.copyfile(source, target)


def link_files(sources: Iterable[Path], target: Path) -> None:
    """Give files, by their own names, a place in ``target``, which is made."""
    target.mkdir(parents=True)
    for source in sources:
        link_or_copy(source, target / source.name)


def tracked(items: Iterable[Item], what: str, progress: Progress) -> Iterator[Item]:
    """Yield ``items``, saying how many are done; they must have a length."""
    assert isinstance(items, Sized)
    for done, item in enumerate(items):
        progress(what, done, len(items))
        yield item
    progress(what, len(items), len(items))
