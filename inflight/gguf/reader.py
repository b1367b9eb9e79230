"""A GGUF model: the metadata and tensors of one file, or of the files that it is split into."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight.errors import DeploymentError
from inflight.gguf.files import SUFFIX, parts_of, require_contents
from inflight.gguf.header import FileHeader, TensorInfo

Bytes = npt.NDArray[np.uint8]
_UNRESERVED = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's number; Python has the name from 3.13 on."""


@dataclass(frozen=True)
class GgufTensor(TensorInfo):
    """A tensor as a file has it."""

    data: Bytes
    """A view of the mapped file, ``[rows, bytes of a row]``."""


class GgufModel:
    """The metadata and tensors of a model."""

    def __init__(self, path: Path) -> None:
        """Read the file ``path``, and what it is split into where its name says so.

        Raises:
            DeploymentError: a file is missing or is not what it should be; it is named.
        """
        paths = parts_of(path)
        maps = [_mapped(one) for one in paths]
        files = [FileHeader(one, data, len(data)) for one, data in zip(paths, maps, strict=True)]
        self.path = paths[0]
        self.metadata: Mapping[str, Any] = files[0].metadata
        """The first file's, which has all of the model's."""
        self.tensors: dict[str, GgufTensor] = {}
        """By name, of all files."""
        for file, data in zip(files, maps, strict=True):
            if twice := self.tensors.keys() & file.tensors.keys():
                raise DeploymentError(f"{file.path}: tensor {min(twice)!r:.200} is in another part of the model too")
            for name, tensor in file.tensors.items():
                self.tensors[name] = GgufTensor(**vars(tensor), data=_values(tensor, data))
        self._check_parts(files)

    def _check_parts(self, files: Sequence[FileHeader]) -> None:
        """Require that the files say of themselves what their names say."""
        for index, file in enumerate(files):
            count, number = _number(file, "split.count"), _number(file, "split.no")
            if count not in ({0, 1} if len(files) == 1 else {len(files)}):
                raise DeploymentError(
                    f"{file.path}: split.count is {count}, and the name stands for {len(files)}; a model in parts must "
                    f"be named like model-00001-of-00002{SUFFIX}"
                )
            if number != index:
                raise DeploymentError(f"{file.path}: split.no is {number}; by its name the file is number {index}")
        if "split.tensors.count" not in self.metadata:
            return
        total = _number(files[0], "split.tensors.count")
        if total != len(self.tensors):
            raise DeploymentError(
                f"{self.path}: its parts have {len(self.tensors)} tensors; split.tensors.count is {total}"
            )


def _mapped(path: Path) -> memoryview:
    try:
        # A private mapping, since PyTorch warns of memory that cannot be written. Nothing is written, so that memory
        # need not be reserved: a file may be larger than it.
        flags, access = mmap.MAP_PRIVATE | _UNRESERVED, mmap.PROT_READ | mmap.PROT_WRITE
        require_contents(path)
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, flags=flags, prot=access))
    except ValueError:  # an empty file cannot be mapped
        raise DeploymentError(f"{path}: not a GGUF file: it is empty") from None
    except OSError as error:
        raise DeploymentError(f"{path}: cannot be read: {error.strerror}") from None


def _values(tensor: TensorInfo, data: memoryview) -> Bytes:
    values = np.frombuffer(data[tensor.first : tensor.first + tensor.nbytes], np.uint8)
    return values.reshape(tensor.rows, tensor.row_bytes)


def _number(file: FileHeader, key: str) -> int:
    """Return a number of a part; 0: it does not say."""
    value = file.metadata.get(key, 0)
    if type(value) is not int:
        raise DeploymentError(f"{file.path}: {key} is {value!r:.200}; it must be a number")
    return value
