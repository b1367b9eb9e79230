"""Reads the files of a checkpoint directory; a GGUF file, in place of the directory, stands for the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inflight.errors import DeploymentError
from inflight.gguf.checkpoint import open_gguf
from inflight.gguf.files import LARGEST_FILE, is_gguf, read_whole

LARGEST_JSON = 8 << 20
"""Bytes of a file of settings, which takes up to 30 times as much memory while it is read."""


def read_file(path: Path, largest: int = LARGEST_FILE) -> bytes | None:
    """Return a checkpoint's file, or what a GGUF file, in place of its directory, says instead; None: there is none.

    Raises:
        DeploymentError: it cannot be read, or has more than ``largest`` bytes, or the GGUF file says what is not
            supported.
    """
    for directory in (path.parent, path.parent.parent):
        if is_gguf(directory):
            return open_gguf(directory).read(path.relative_to(directory).as_posix(), largest)
    return read_whole(path, largest)


def read_json(path: Path, optional: bool = False, largest: int = LARGEST_JSON) -> dict[str, Any]:
    """Read a JSON object from ``path``, of ``largest`` bytes at most; {} if it is ``optional`` and missing.

    Raises:
        DeploymentError: in one line, naming the file.
    """
    content = read_file(path, largest)
    if content is None:
        if optional:
            return {}
        raise DeploymentError(f"{path}: missing; the model must be a Hugging Face checkpoint directory or a GGUF file")
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DeploymentError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise DeploymentError(f"{path}: a JSON object is expected")
    return value
