"""The beginning of a GGUF file: its metadata, and which tensors follow.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian. Files come from
anywhere, so nothing in one is believed: every count and length is held against what the file still has, and against
more than any model needs, before memory is taken for it. Whatever is wrong is one ``DeploymentError`` that names the
file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight.errors import DeploymentError, readable
from inflight.gguf.types import TENSOR_TYPES, TensorType

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_ALIGNMENT = 32
"""Of tensors, in bytes, where ``general.alignment`` does not say."""
_MOST_DIMENSIONS = 4
_MOST_ENTRIES, _MOST_TENSORS, _LONGEST_LIST, _LONGEST_STRING = 1 << 14, 1 << 17, 1 << 21, 1 << 24
_LENGTH = struct.Struct("<Q")
_SCALARS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""NumPy's names of the types of metadata, by GGUF's numbers."""
_FLOAT, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_SMALLEST_ENTRY, _SMALLEST_TENSOR, _SMALLEST_STRING = 13, 24, 8
"""Bytes of an entry of metadata, of a tensor's description, with an empty name and the smallest value; of a string."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file, without its values."""

    name: str
    shape: tuple[int, ...]
    """As PyTorch has it: rows come before columns."""
    type: TensorType
    first: int
    """Where the file has its first byte."""

    @property
    def rows(self) -> int:
        """All dimensions but the last are rows."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.type.bytes_of(self.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes


class FileHeader:
    """What one file says of itself."""

    def __init__(
        self, path: Path, beginning: memoryview, size: int, more: Callable[[int], memoryview] | None = None
    ) -> None:
        """Read a file's header.

        Args:
            path: what the file is called in errors.
            beginning: its first bytes, or all of it.
            size: the bytes of the whole file.
            more: returns the beginning of the file, of at least so many bytes; None: all of it is at hand.

        Raises:
            DeploymentError: it is not what it should be; it is named.
        """
        self.path, self._buffer, self._size, self._more, self._at = path, beginning, size, more, 0
        try:
            self._read()
        except _Broken as error:
            raise DeploymentError(f"{path}: {readable(str(error))}") from None

    def _read(self) -> None:
        if self._size < len(_MAGIC) or bytes(self._take("the file", len(_MAGIC))) != _MAGIC:
            raise _Broken("not a GGUF file: it does not begin with GGUF")
        version = self._number("version", "<I")
        if version not in _VERSIONS:
            order = "; it is big endian" if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS else ""
            raise _Broken(f"GGUF version {version} is not supported; supported: 2 and 3, little endian{order}")
        tensors = self._count("tensors", _SMALLEST_TENSOR, _MOST_TENSORS)
        entries = self._count("entries of metadata", _SMALLEST_ENTRY, _MOST_ENTRIES)
        self.metadata: dict[str, Any] = {}
        """Arrays of numbers are NumPy's, those of strings are lists."""
        for _ in range(entries):
            key = self._string("a key")
            if key in self.metadata:
                raise _Broken(f"key {key!r:.200} is there twice")
            self.metadata[key] = self._value(f"{key:.200}", self._number(key, "<I"))
        self.tensors = self._locate([self._description() for _ in range(tensors)])
        """By name."""

    def _take(self, what: str, size: int) -> memoryview:
        """Return the next ``size`` bytes."""
        end = self._at + size
        if end > self._size:
            raise _Broken(f"{what}: the file ends before it does")
        if end > len(self._buffer) and self._more is not None:
            self._buffer = self._more(end)
        taken, self._at = self._buffer[self._at : end], end
        return taken

    def _number(self, what: str, form: str) -> int:
        return int(struct.unpack(form, self._take(what, struct.calcsize(form)))[0])

    def _count(self, what: str, smallest: int, most: int | None = None) -> int:
        """Return a count of things that take at least ``smallest`` bytes each, and of which ``most`` may be there."""
        count, left = self._number(what, "<Q"), self._size - self._at
        if count * smallest > left:
            raise _Broken(f"{what}: {count} are announced, and the file has only {left} bytes left")
        if most is not None and count > most:
            raise _Broken(f"{what}: {count} are announced; no more than {most} are read")
        return count

    def _string(self, what: str) -> str:
        raw = bytes(self._take(what, self._count(what, 1, _LONGEST_STRING)))
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
            return self._strings(key)
        if kind not in _SCALARS:
            raise _Broken(f"{key}: an array of type {kind} of metadata is not supported")
        size = np.dtype(_SCALARS[kind]).itemsize
        # A boolean is any byte that is not zero.
        taken = self._take(key, size * self._count(key, size, _LONGEST_LIST))
        raw = np.frombuffer(taken, "u1" if kind == _BOOL else _SCALARS[kind])
        return raw != 0 if kind == _BOOL else raw

    def _strings(self, key: str) -> list[str]:
        """Return a list of strings: those at hand at once, since a vocabulary has hundreds of thousands."""
        found, count = list[str](), self._count(key, _SMALLEST_STRING, _LONGEST_LIST)
        while len(found) < count:
            buffer, at = self._buffer, self._at
            with suppress(struct.error, UnicodeDecodeError):
                while len(found) < count:
                    end = at + _SMALLEST_STRING + _LENGTH.unpack_from(buffer, at)[0]
                    if end > min(len(buffer), at + _LONGEST_STRING):
                        break
                    found.append(str(buffer[at + _SMALLEST_STRING : end], "utf-8"))
                    self._at = at = end
            if len(found) < count:  # more of the file is needed, or something is wrong, which this says
                found.append(self._string(key))
        return found

    def _description(self) -> TensorInfo:
        """Return a tensor, with ``first`` counted from where tensors begin."""
        name = self._string("a tensor's name")
        what = f"tensor {name!r:.200}"
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
        return TensorInfo(name, shape, kind, offset)

    def _locate(self, described: list[TensorInfo]) -> dict[str, TensorInfo]:
        """Return the tensors where they are: each must lie within the file and apart from the others."""
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & alignment - 1:
            raise _Broken(f"general.alignment is {alignment!r:.200}; it must be a power of two from 8 to 2^20")
        begin = -(-self._at // alignment) * alignment
        tensors, free = dict[str, TensorInfo](), begin
        for tensor in sorted(described, key=lambda one: one.first):
            what, first = f"tensor {tensor.name!r:.200}", begin + tensor.first
            if tensor.first % alignment or first + tensor.nbytes > self._size:
                raise _Broken(
                    f"{what} begins at {tensor.first} and takes {tensor.nbytes} bytes; it must begin at a multiple of "
                    f"{alignment} and end within the {max(0, self._size - begin)} bytes of tensors"
                )
            if first < free:
                raise _Broken(f"{what} lies partly where another one does")
            if tensor.name in tensors:
                raise _Broken(f"{what} is there twice")
            free = first + tensor.nbytes
            tensors[tensor.name] = TensorInfo(tensor.name, tensor.shape, tensor.type, first)
        return tensors


class _Broken(Exception):
    """What is wrong with a file, without its name."""
