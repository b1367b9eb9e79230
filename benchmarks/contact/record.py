"""Results of a first contact: a line of JSON each, on the disk as soon as it is known."""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Recorder:
    """Writes the results of one stage."""

    def __init__(self, path: Path, call: str, stage: str) -> None:
        """
        Args:
            path: the file; lines are appended.
            call: A, B or C.
            stage: its name.
        """
        self._path, self._call, self._stage = path, call, stage
        self.failures = 0
        """How many attempts failed, and how many results are not good."""

    def add(
        self, name: str, value: float | str, unit: str = "", *, good: bool | None = None, note: str = "", **more: Any
    ) -> None:
        """Write one result.

        Args:
            name: of what was measured.
            value: what came out.
            unit: of the value.
            good: whether it is as it must be; None: nothing is demanded.
            note: in words.
            more: what else is known.
        """
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)
        line = {"call": self._call, "stage": self._stage, "result": name, "value": value, "unit": unit}
        if good is not None:
            line["good"] = good
            self.failures += not good
        self._write(line | ({"note": note} if note else {}) | more)

    def outcome(self, outcome: str, seconds: float, note: str = "") -> None:
        """Write how the stage ended."""
        line = {"call": self._call, "stage": self._stage, "outcome": outcome, "seconds": round(seconds, 1)}
        self._write(line | ({"note": note} if note else {}))

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Go on after an error in here, which is written as the result called ``name``."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.add(name, "failed", good=False, note=f"{type(error).__name__}: {error}".partition("\n")[0][:300])

    def _write(self, line: dict[str, Any]) -> None:
        data = json.dumps(line | {"at": round(time.time(), 2)}, allow_nan=False, default=str) + "\n"
        place = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            end = os.lseek(place, 0, os.SEEK_END)
            if end and os.pread(place, 1, end - 1) != b"\n":  # who was killed has left half a line
                data = "\n" + data
            os.write(place, data.encode())
            os.fsync(place)
        finally:
            os.close(place)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return what a file holds; a line that was not finished is left out."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found
