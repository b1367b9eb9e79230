"""What all sections of a scenario are: strict, frozen, and, where they name a file, relative to the scenario's own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo, model_validator

DIRECTORY = "directory"
"""Key of the validation context: the directory that files are relative to."""


class Section(BaseModel):
    """A part of a scenario."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FileSection(Section):
    """A part of a scenario that is read from a file."""

    file: Path = Field(description="relative to the scenario's own directory")
    _path: Path = PrivateAttr()
    _sha256: str = PrivateAttr()

    @model_validator(mode="after")
    def _find(self, info: ValidationInfo) -> Any:
        directory = (info.context or {}).get(DIRECTORY, Path())
        self._path = directory / self.file
        if not self._path.is_file():
            raise ValueError(f"`file` is {str(self.file)!r}: there is no such file")
        try:
            self._sha256 = hashlib.sha256(self._path.read_bytes()).hexdigest()
        except OSError as error:
            raise ValueError(f"`file` is {str(self.file)!r}: cannot be read: {error.strerror}") from None
        return self

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self._path

    @property
    def sha256(self) -> str:
        """SHA-256 of the file as it was when the scenario was read, in hexadecimal digits."""
        return self._sha256


def file_sections(part: object) -> Iterator[FileSection]:
    """Yield the sections that name a file: ``part`` itself, or any inside of it."""
    if isinstance(part, FileSection):
        yield part
    inner = part.__dict__.values() if isinstance(part, Section) else part if isinstance(part, tuple) else ()
    for one in inner:
        yield from file_sections(one)
