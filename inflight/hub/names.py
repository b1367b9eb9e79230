"""Names of models: ``org/name``, ``org/name@revision``, ``org/name:Q4_K_M``; and names of files that may be written.

They come from a command line, from a hub and from archives: whatever is not plainly harmless is refused here.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from inflight.errors import DeploymentError, nearest

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(f"{_PART}/{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FORM = "org/name, org/name@revision or org/name:file.gguf"
_PATTERNS = ("*.safetensors", "*.gguf", "*.json", "*.jinja", "tokenizer.model")
_LICENSES = ("license*", "licence*", "notice*", "readme*", "use_policy*")
_TEXTS = ("", ".md", ".txt", ".rst")
_FILES = (".gguf", ".safetensors", ".json", ".yaml", ".yml", ".bin", ".pt", ".pth", ".tar", ".zip", ".gz")
"""How names end that are certainly those of files; a model may be called ``org/name-3.1``."""
_LONGEST_PATH, _LONGEST_NAME = 512, 255
"""Bytes of a path, and of a part of it, which no file system takes longer."""


@dataclass(frozen=True)
class ModelName:
    """What to get: a repository, at a branch, tag or commit, and of a GGUF repository which file."""

    repo: str
    revision: str | None = None
    """None: the repository's main branch; or, of what is here already, what was pulled last."""
    gguf: str | None = None
    """A path that ends in ``.gguf``, or a part of one such as ``Q4_K_M``; None: the safetensors checkpoint."""

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "") + (f":{self.gguf}" if self.gguf else "")

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a whole commit, which nobody can move."""
        return self.revision is not None and is_commit(self.revision)


def is_commit(revision: str) -> bool:
    """Return whether a revision is the whole hash of a commit."""
    return bool(_COMMIT.fullmatch(revision))


def is_model_name(text: str) -> bool:
    """Return whether a text may name a model of a hub, as against a directory or a file."""
    front = text.partition(":")[0].partition("@")[0]
    return bool(_REPOSITORY.fullmatch(front)) and not front.lower().endswith(_FILES)


def parse_typed_name(text: str) -> ModelName:
    """Return the parts of a model's name, typed where the path of a file may stand too.

    Raises:
        DeploymentError: it is not one; of the path of a file the message says that there is no such file.
    """
    if text.lower().endswith(_FILES) and not is_model_name(text):
        raise DeploymentError(no_such_path(Path(text)))
    return parse_model_name(text)


def no_such_path(path: Path) -> str:
    """Return what to say of a model's path where nothing is, or no model: with the nearest name in its folder."""
    if path.exists() or not path.name.lower().endswith(_FILES):
        return f"{path} is not a directory"
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    return f"there is no file {path}{nearest(path.name, names)}"


def parse_model_name(text: str) -> ModelName:
    """Return the parts of a model's name.

    Raises:
        DeploymentError: it is not one; the message has the form of one.
    """
    front, colon, gguf = text.partition(":")
    repo, at, revision = front.partition("@")
    if not _REPOSITORY.fullmatch(repo) or ".." in repo or "--" in repo:
        raise DeploymentError(f"{text!r} is not the name of a model; the form is {_FORM}")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise DeploymentError(f"{text!r}: {revision!r} is not a revision; the form is {_FORM}")
    if colon and (not gguf or (gguf.endswith(".gguf") and not is_safe_path(gguf))):
        raise DeploymentError(f"{text!r}: {gguf!r} is not the name of a GGUF file; the form is {_FORM}")
    return ModelName(repo, revision or None, gguf or None)


def is_safe_path(path: str) -> bool:
    """Return whether a file of that name stays in its directory: relative, without ``..``, not hidden."""
    parts = path.split("/")
    plain = path.isprintable() and "\\" not in path and len(path.encode("utf-8", "replace")) <= _LONGEST_PATH
    return plain and all(
        part and not part.startswith(".") and ":" not in part and len(part.encode()) <= _LONGEST_NAME for part in parts
    )


def is_hidden(path: str) -> bool:
    """Return whether a file is hidden, or in a hidden folder, such as ``.gitattributes``."""
    return any(part.startswith(".") and part.strip(".") for part in path.split("/"))


def is_model_file(path: str) -> bool:
    """Return whether a file of that name belongs to a model: weights, settings, tokenizer, licence.

    Code (``*.py``) and what loading may execute (``*.bin``, ``*.pt``) never do.
    """
    name = path.rpartition("/")[2]
    if any(fnmatchcase(name, pattern) for pattern in _PATTERNS):
        return True
    stem, dot, suffix = name.lower().partition(".")
    return (dot + suffix) in _TEXTS and any(fnmatchcase(stem, pattern) for pattern in _LICENSES)


def require_model_file(path: str, where: str) -> None:
    """Require that a file may be written into a model's directory.

    Raises:
        DeploymentError: its name leads elsewhere, or no model has such a file.
    """
    if not is_safe_path(path):
        raise DeploymentError(f"{where}: the file name {path!r} leads out of the model's directory")
    if not is_model_file(path):
        raise DeploymentError(f"{where}: {path!r} is no file of a model; weights, JSON, templates and licences are")
