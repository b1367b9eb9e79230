"""Where GGUF models are: in a file, in the parts of one that was split, or alone in a directory."""

from __future__ import annotations

import re
import stat
from pathlib import Path

from inflight.errors import DeploymentError

SUFFIX = ".gguf"
SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""Matches the name of a part of a model: its title, the part's number from 1 on, and how many there are."""
_OF_IMAGES = "mmproj"
"""What names of files begin with that hold projections for images, and no models."""
LARGEST_FILE = 256 << 20
"""Bytes of a file beside weights: a tokenizer's."""
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""How a file begins that stands for another one, which `git clone` without Git LFS has not fetched."""
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def is_gguf(model: Path) -> bool:
    """Whether a model's path is that of a GGUF file."""
    return model.suffix == SUFFIX and not model.is_dir()


def is_of_images(path: str) -> bool:
    """Whether a file of that name holds projections for images, and no model."""
    return path.rpartition("/")[2].lower().startswith(_OF_IMAGES)


def whole_path(model: Path) -> Path:
    """Return a model's path from the root on, without links; a GGUF file keeps its name.

    The name says that it is one, and where the other parts are. In the Hub's own cache it is a link to a file that is
    named after its hash.
    """
    return model.parent.resolve() / model.name if is_gguf(model) else model.resolve()


def locate_model(path: Path) -> Path:
    """Return where a model is: ``path``, or the only GGUF model of a directory that has no other weights.

    Raises:
        DeploymentError: the directory has several GGUF models, or lacks a part of one.
    """
    if not path.is_dir() or any((path / name).is_file() for name in _WEIGHTS):
        return path
    found = [file for file in sorted(path.glob(f"*{SUFFIX}")) if not is_of_images(file.name)]
    models = {parts_of(file)[0] for file in found}
    if len(models) > 1:
        names = ", ".join(sorted(model.name for model in models))
        raise DeploymentError(f"{path}: it has several models, {names}; name the one to serve")
    return models.pop() if models else path


def title_of(path: Path) -> str:
    """Return what a model is called by the name of one of its files."""
    match = SPLIT_NAME.fullmatch(path.name)
    return match[1] if match else path.stem


def parts_of(path: Path) -> list[Path]:
    """Return the files of the model that ``path`` is a file of, the first one first.

    Raises:
        DeploymentError: one is missing.
    """
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match[1], int(match[3])
    paths = [path.with_name(f"{stem}-{number:05}-of-{match[3]}{SUFFIX}") for number in range(1, count + 1)]
    for one in paths:
        if not one.is_file():
            raise DeploymentError(f"{one}: missing; the model is in {count} files")
    if path not in paths:
        raise DeploymentError(f"{path}: the name counts the parts of a model, and it is none of {count}")
    return paths


def require_contents(path: Path) -> None:
    """Require a plain file that holds what it is called after: a pipe would be waited for.

    Raises:
        DeploymentError: it is no plain file, or a pointer of Git LFS.
        OSError: it cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise DeploymentError(f"{path}: is no plain file")
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise DeploymentError(f"{path}: is a Git LFS pointer; fetch the file with `git lfs pull`")


def read_whole(path: Path, largest: int = LARGEST_FILE) -> bytes | None:
    """Return what a file holds; None: there is none.

    Raises:
        DeploymentError: it cannot be read, is no plain file or a pointer, or has more than ``largest`` bytes.
    """
    try:
        require_contents(path)
        size = path.stat().st_size
        if size > largest:
            raise DeploymentError(f"{path}: has {size} bytes; a file of at most {largest} bytes is expected")
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DeploymentError(f"{path}: cannot be read: {error.strerror}") from None
