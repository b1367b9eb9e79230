"""What has been measured of one shape so far: a JSON file that grows measurement by measurement, so that a run goes on.

The grid's measurements choose the variants; the rounds' are the result.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.variants import Part
from benchmarks.peers.workers.work import Cell
from inflight.errors import InflightError
from inflight.report.provenance import provenance


@dataclass
class Record:
    """The file and what is in it."""

    path: Path
    content: dict[str, Any]

    @classmethod
    def open(cls, path: Path, shape: str, cells: Sequence[Cell], threads: int) -> Record:
        """Read the file, or begin a new one.

        Raises:
            InflightError: the file is of other cells or another machine, or cannot be read.
        """
        machine = provenance()["machine"]
        subject = {"shape": shape, "cells": [asdict(cell) for cell in cells], "threads": threads, "machine": machine}
        begun = {**subject, "grid": {}, "engine": [], "http": [], "kl": {}}
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            return cls(path, json.loads(json.dumps(begun)))
        except ValueError:
            raise InflightError(f"{path} is not valid JSON; remove it to begin again") from None
        for name, value in subject.items():
            if content.get(name) != value:
                raise InflightError(
                    f"{path} has {name} {content.get(name)!r}, and this run {value!r}; remove it to begin again"
                )
        return cls(path, content)

    @property
    def grid(self) -> dict[str, Any]:
        """The measurements of the engines' grid by the variant's key; one that failed has ``failed``."""
        return self.content["grid"]

    def rounds(self, part: Part, count: int) -> list[dict[str, Any]]:
        """Return at least ``count`` rounds, the measurements of each by the variant's key."""
        found: list[dict[str, Any]] = self.content[part]
        found += [{} for _ in range(count - len(found))]
        return found

    def put(self, where: dict[str, Any], key: str, measured: Mapping[str, Any]) -> None:
        """Note a measurement, with the commit and the date, and write the file."""
        made = provenance()
        where[key] = {**measured, "commit": made["commit"], "date": made["date"]}
        self.save()

    def save(self) -> None:
        """Write the file, at once or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(new, self.path)
