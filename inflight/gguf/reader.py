"""The GGUF container: metadata and tensors of one file, or of the files that a model is split into.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian. Files come from
anywhere, so nothing in one is believed: every count and length is held against what the file still has before memory
is taken for it, and whatever is wrong is one ``DeploymentError`` that names the file.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight.errors import DeploymentError, readable
from inflight.gguf.files import SUFFIX, parts_of
from inflight.gguf.types import TENSOR_TYPES, TensorType

Bytes = npt.NDArray[np.uint8]
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_ALIGNMENT = 32
"""Of tensors, in bytes, where ``general.alignment`` does not say."""
_MOST_DIMENSIONS, _LONGEST_NAME = 4, 1 << 16
_SCALARS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""NumPy's names of the types of metadata, by GGUF's numbers."""
_FLOAT, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_SMALLEST_ENTRY, _SMALLEST_TENSOR = 13, 24
"""Bytes of an entry of metadata, and of a tensor's description, with an empty name and the smallest value."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as a file has it."""

    name: str
    shape: tuple[int, ...]
    """As PyTorch has it: rows come before columns."""
    type: TensorType
    data: Bytes
    """A view of the mapped file, ``[rows, bytes of a row]``; all dimensions but the last are rows."""


class GgufModel:
    """The metadata and tensors of a GGUF model."""

    def __init__(self, path: Path) -> None:
        """Read the file ``path``, and what it is split into where its name says so.

        Raises:
            DeploymentError: a file is missing or is not what it should be; it is named.
        """
        paths = parts_of(path)
        self.path = paths[0]
        files = [_File(one) for one in paths]
        self.metadata: Mapping[str, Any] = files[0].metadata
        """The first file's, which has all of the model's; arrays of numbers are NumPy's, those of strings are lists."""
        self.tensors: dict[str, GgufTensor] = {}
        for file in files:
            if twice := self.tensors.keys() & file.tensors.keys():
                raise DeploymentError(f"{file.path}: tensor {min(twice)!r} is in another part of the model too")
            self.tensors |= file.tensors
        self._check_parts(files)

    def _check_parts(self, files: list[_File]) -> None:
        """Require that the files say of themselves what their names say."""
        for index, file in enumerate(files):
            count, number = file.metadata.get("split.count", 0), file.metadata.get("split.no", 0)
            if count not in ({0, 1} if len(files) == 1 else {len(files)}):
                raise DeploymentError(
                    f"{file.path}: split.count is {count}, and the name stands for {len(files)}; a model in parts must "
                    f"be named like model-00001-of-00002{SUFFIX}"
                )
            if number != index:
                raise DeploymentError(f"{file.path}: split.no is {number}; by its name the file is number {index}")
        total = self.metadata.get("split.tensors.count", len(self.tensors))
        if total != len(self.tensors):
            raise DeploymentError(
                f"{self.path}: its parts have {len(self.tensors)} tensors; split.tensors.count is {total}"
            )


class _File:
    """One file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:  # a private mapping: PyTorch warns of memory that cannot be written
                self._map = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        except ValueError:  # an empty file cannot be mapped
            raise DeploymentError(f"{path}: not a GGUF file: it is empty") from None
        except OSError as error:
            raise DeploymentError(f"{path}: cannot be read: {error.strerror}") from None
        self._at = 0
        try:
            self._read()
        except _Broken as error:
            raise DeploymentError(f"{path}: {readable(str(error))}") from None

    def _read(self) -> None:
        if bytes(self._map[:4]) != _MAGIC:
            raise _Broken("not a GGUF file: it does not begin with GGUF")
        self._at = 4
        version = self._number("version", "<I")
        if version not in _VERSIONS:
            order = "; it is big endian" if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS else ""
            raise _Broken(f"GGUF version {version} is not supported; supported: 2 and 3, little endian{order}")
        tensors = self._count("tensors", _SMALLEST_TENSOR)
        entries = self._count("entries of metadata", _SMALLEST_ENTRY)
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string("a key")
            if key in self.metadata:
                raise _Broken(f"key {key!r} is there twice")
            self.metadata[key] = self._value(key, self._number(key, "<I"))
        described = [self._description() for _ in range(tensors)]
        self.tensors = self._locate(described)

    def _take(self, what: str, size: int) -> memoryview:
        """Return the next ``size`` bytes."""
        if size > len(self._map) - self._at:
            raise _Broken(f"{what}: the file ends before it does")
        self._at += size
        return self._map[self._at - size : self._at]

    def _number(self, what: str, form: str) -> int:
        return int(struct.unpack(form, self._take(what, struct.calcsize(form)))[0])

    def _count(self, what: str, smallest: int) -> int:
        """Return a count of things that take at least ``smallest`` bytes each."""
        count = self._number(what, "<Q")
        if count * smallest > len(self._map) - self._at:
            raise _Broken(
                f"{what}: {count} are announced, and the file has only {len(self._map) - self._at} bytes left"
            )
        return count

    def _string(self, what: str) -> str:
        raw = bytes(self._take(what, self._count(what, 1)))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise _Broken(f"{what}: {raw[:40]!r} is not UTF-8") from None

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key, self._number(key, "<I"))
        if kind not in _SCALARS:
            raise _Broken(f"{key}: type {kind} of metadata is unknown")
        value = np.frombuffer(self._take(key, np.dtype(_SCALARS[kind]).itemsize), _SCALARS[kind])[0]
        # The shortest decimal fraction is what was meant: 1e-05, and not 9.999999747378752e-06.
        return float(str(value)) if kind == _FLOAT else value.item()

    def _array(self, key: str, kind: int) -> list[str] | npt.NDArray[Any]:
        if kind == _STRING:
            return [self._string(key) for _ in range(self._count(key, 8))]
        if kind not in _SCALARS:
            raise _Broken(f"{key}: an array of type {kind} of metadata is not supported")
        size = np.dtype(_SCALARS[kind]).itemsize
        # A boolean is any byte that is not zero.
        raw = np.frombuffer(self._take(key, size * self._count(key, size)), "u1" if kind == _BOOL else _SCALARS[kind])
        return raw != 0 if kind == _BOOL else raw

    def _description(self) -> tuple[str, tuple[int, ...], TensorType, int]:
        """Return a tensor's name, shape, type, and where it begins."""
        name = self._string("a tensor's name")
        if len(name) > _LONGEST_NAME:
            raise _Broken(f"the name of a tensor has {len(name)} characters")
        what = f"tensor {name!r}"
        dimensions = self._number(what, "<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise _Broken(f"{what} has {dimensions} dimensions; it must have 1 to {_MOST_DIMENSIONS}")
        shape = tuple(self._number(what, "<Q") for _ in range(dimensions))[::-1]
        number, offset = self._number(what, "<I"), self._number(what, "<Q")
        if number not in TENSOR_TYPES:
            raise _Broken(f"{what}: type {number} is unknown; known: {', '.join(map(str, TENSOR_TYPES))}")
        kind = TENSOR_TYPES[number]
        if 0 in shape or shape[-1] % kind.block:
            raise _Broken(f"{what} is {list(shape)}; {kind.name} has rows of whole blocks of {kind.block}")
        return name, shape, kind, offset

    def _locate(self, described: list[tuple[str, tuple[int, ...], TensorType, int]]) -> dict[str, GgufTensor]:
        """Return the tensors, each of which must lie within the file and apart from the others."""
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & alignment - 1:
            raise _Broken(f"general.alignment is {alignment!r}; it must be a power of two from 8 to 2^20")
        begin = -(-self._at // alignment) * alignment
        tensors, free = dict[str, GgufTensor](), begin
        for name, shape, kind, offset in sorted(described, key=lambda one: one[3]):
            row, rows = kind.bytes_of(shape[-1]), _product(shape[:-1])
            first = begin + offset
            if offset % alignment or first + row * rows > len(self._map):
                raise _Broken(
                    f"tensor {name!r} begins at {offset} and takes {row * rows} bytes; it must begin at a multiple of "
                    f"{alignment} and end within the {max(0, len(self._map) - begin)} bytes of tensors"
                )
            if first < free:
                raise _Broken(f"tensor {name!r} lies partly where another one does")
            if name in tensors:
                raise _Broken(f"tensor {name!r} is there twice")
            free = first + row * rows
            data = np.frombuffer(self._map[first:free], np.uint8).reshape(rows, row)
            tensors[name] = GgufTensor(name, shape, kind, data)
        return tensors


class _Broken(Exception):
    """What is wrong with a file, without its name."""


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
