"""Downloads files of a repository into a staging directory, several at once; what is there already is kept.

A file there is a prefix of what the hub has, whole or not: its bytes are hashed again, then the rest is asked for from
the next byte on. A file is done when its size and hash are those that the hub has listed for the commit.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from inflight.errors import DeploymentError
from inflight.hub.model_manifest import ModelFile
from inflight.hub.remote import Hub, RemoteFile, Repository, TryLater, Unreachable, waiting
from inflight.hub.staging import in_units

_CONNECTIONS = 4
_TRIES = 5
"""How often a file is asked for in a row without that one byte more comes."""
_CHUNK = 1 << 20
_LONGEST_STOP_S = 2.0
"""How long threads that wait for the network are waited for, when all is to stop."""

Advance = Callable[[int], None]
"""Is told how many bytes more are done; less than 0 where some were in vain."""


class Stopped(Exception):
    """The download is to stop, because another file has failed or someone has asked for it."""


class Downloader:
    """Files on their way from one repository into one directory."""

    def __init__(self, hub: Hub, repository: Repository, staging: Path, stop: threading.Event, advance: Advance):
        """``stop`` ends what the hub's own ``wait`` waits for, too."""
        self._hub, self._repository, self._staging = hub, repository, staging
        self._stop, self._advance = stop, advance

    def fetch_all(self, files: Sequence[RemoteFile]) -> dict[str, ModelFile]:
        """Fetch files, the largest first, and return their sizes and SHA-256.

        Raises:
            DeploymentError: one could not be had, or was not what the hub had listed; the first that failed is told.
            OSError: the disk is full, say.
        """
        waiting_files: SimpleQueue[RemoteFile] = SimpleQueue()
        for file in sorted(files, key=lambda file: -file.bytes):
            waiting_files.put(file)
        done: dict[str, ModelFile] = {}
        failures: list[Exception] = []

        def work() -> None:
            try:
                while not self._stop.is_set():
                    file = waiting_files.get_nowait()
                    done[file.path] = self._fetch(file)
            except (Empty, Stopped):
                return
            except Exception as error:
                failures.append(error)
                self._stop.set()

        # A thread that waits for the network must not hold up the end of the process: what it has written stays good.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_CONNECTIONS, len(files)))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self._stop.set()
            for thread in threads:
                if thread.is_alive():  # a signal may come before one has started
                    thread.join(_LONGEST_STOP_S)
        if failures:
            raise failures[0]
        return done

    def _fetch(self, file: RemoteFile) -> ModelFile:
        path = self._staging / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as target:
            writer = _Writer(file, target, self._advance)
            try:
                writer.keep(self._stop)
                self._complete_kept(file, writer)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise DeploymentError(_full(error, path, file.bytes - writer.size)) from None
                raise
            except _Wrong as error:
                writer.clear()
                raise DeploymentError(f"{self._repository.repo}: {file.path} {error}; it was removed") from None
            return ModelFile(bytes=file.bytes, sha256=writer.sha256)

    def _complete_kept(self, file: RemoteFile, writer: _Writer) -> None:
        """Complete a file; where what was kept of it turns out to be something else, from the beginning."""
        if writer.size:
            try:
                self._complete(file, writer)
                return
            except _Wrong:
                writer.clear()
        self._complete(file, writer)

    def _complete(self, file: RemoteFile, writer: _Writer) -> None:
        """Get what a file lacks, over as many connections as it takes."""
        failed = 0
        while writer.size < file.bytes:
            before = writer.size
            try:
                with self._hub.stream(self._repository, file, writer.size) as (start, chunks):
                    if start == 0:
                        writer.clear()
                    for chunk in chunks:
                        self._require_going()
                        writer.write(chunk)
                problem = TryLater(f"the hub ended after {writer.size} of {file.bytes} bytes")
            except TryLater as error:
                problem = error
            if writer.size >= file.bytes:
                break
            failed = 0 if writer.size > before else failed + 1
            if failed >= _TRIES:
                raise Unreachable(
                    f"{self._hub.endpoint}: {file.path}: no byte more in {failed} tries: {problem}; "
                    "the same command goes on from there"
                )
            self._stop.wait(waiting(failed, problem.wait))
            self._require_going()
        writer.finish()

    def _require_going(self) -> None:
        if self._stop.is_set():
            raise Stopped


class _Wrong(Exception):
    """The bytes are not those that the hub has listed."""


class _Writer:
    """A file that grows at its end, and the hashes of what it holds."""

    def __init__(self, file: RemoteFile, target: Any, advance: Advance) -> None:
        self._file, self._target, self._advance = file, target, advance
        self.size = 0
        self._start_hashes()

    @property
    def sha256(self) -> str:
        """Of all bytes so far."""
        return self._sha256.hexdigest()

    def keep(self, stop: threading.Event) -> None:
        """Take what is in the file already as its beginning."""
        if os.fstat(self._target.fileno()).st_size > self._file.bytes:
            self._target.truncate(0)
        for chunk in _read(Path(self._target.name)):
            if stop.is_set():
                raise Stopped
            self._take(chunk)

    def write(self, chunk: bytes) -> None:
        """Append bytes.

        Raises:
            _Wrong: they are more than the file has.
        """
        if self.size + len(chunk) > self._file.bytes:
            raise _Wrong(f"has {self._file.bytes} bytes by the hub's list, and it sends more")
        left = memoryview(chunk)
        while left:
            left = left[self._target.write(left) :]
        self._take(chunk)

    def clear(self) -> None:
        """Forget all bytes."""
        self._target.truncate(0)
        self._advance(-self.size)
        self.size = 0
        self._start_hashes()

    def finish(self) -> None:
        """Require the listed hash, and have the bytes on the disk.

        Raises:
            _Wrong: it is another.
        """
        wanted = self._file.sha256 or self._file.git_sha1
        found = self.sha256 if self._file.sha256 else self._blob.hexdigest()
        if found != wanted:
            kind = "SHA-256" if self._file.sha256 else "git hash"
            raise _Wrong(f"has the {kind} {found}, and the hub has listed {wanted}")
        os.fsync(self._target.fileno())

    def _take(self, chunk: bytes) -> None:
        self._sha256.update(chunk)
        if self._file.sha256 is None:
            self._blob.update(chunk)
        self.size += len(chunk)
        self._advance(len(chunk))

    def _start_hashes(self) -> None:
        self._sha256 = hashlib.sha256()
        # What git calls a blob is the hash of this header and the bytes.
        self._blob = hashlib.sha1(b"blob %d\0" % self._file.bytes, usedforsecurity=False)


def _read(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _full(error: OSError, path: Path, missing: int) -> str:
    return (
        f"{path}: {error.strerror}, and {in_units(missing)} of this file are missing; "
        "make room, and the same command goes on from there"
    )
