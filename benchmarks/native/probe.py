"""What this machine can do at the most, in the native step's own instructions: the roofs of its phases.

``probe.cpp`` is compiled for one instruction set with the headers of the kernels. Products are of registers alone, so
that nothing but the multipliers limits them; reads are of memory that is larger than the caches.
"""

from __future__ import annotations

import ctypes
import runpy
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from inflight.errors import InflightError
from inflight.resources import ROOT

Number = Literal["float32", "bfloat16", "int8"]
NUMBERS: tuple[Number, ...] = ("float32", "bfloat16", "int8")
"""In the order of the library's ``Type``."""
_BUILD = ROOT / "native/build.py"
_SOURCE = Path(__file__).with_name("probe.cpp")
_STREAM_BYTES = 1 << 28
"""More than the last cache of any processor with a few cores."""


@dataclass(frozen=True)
class Roofs:
    """What the machine can do at the most, now."""

    bytes_per_s: float
    products_per_s: dict[Number, float]
    """Multiply-adds, by what is multiplied; 0: there are no such instructions."""

    def mean(self, other: Roofs) -> Roofs:
        """Return the mean of two measurements."""
        products = {number: (one + other.products_per_s[number]) / 2 for number, one in self.products_per_s.items()}
        return Roofs((self.bytes_per_s + other.bytes_per_s) / 2, products)


class Probe:
    """Measures the roofs of one instruction set with so many threads."""

    def __init__(self, instruction_set: str, threads: int, folder: Path, stream_bytes: int = _STREAM_BYTES) -> None:
        """Compile the probe to ``folder``.

        Raises:
            InflightError: there is no compiler, or it failed.
        """
        self._library = ctypes.CDLL(str(_compiled(instruction_set, folder)))
        self._threads = threads
        self._stream = np.ones(stream_bytes, np.uint8)
        for name, result, arguments in (
            ("probe_products", ctypes.c_double, [ctypes.c_int, ctypes.c_int, ctypes.c_double]),
            ("probe_reads", ctypes.c_double, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double]),
            ("probe_packed_bytes", ctypes.c_int64, [ctypes.c_int] * 3),
        ):
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments

    def measure(self, seconds: float) -> Roofs:
        """Measure each roof for so long."""
        reads = self._library.probe_reads(self._stream.ctypes.data, self._stream.nbytes, self._threads, seconds)
        products = {
            number: self._library.probe_products(place, self._threads, seconds) for place, number in enumerate(NUMBERS)
        }
        return Roofs(reads, products)

    def packed_bytes(self, number: Number, inputs: int, outputs: int) -> int:
        """Return the bytes of a weight ``[outputs, inputs]``, as it is packed for the kernels."""
        return self._library.probe_packed_bytes(NUMBERS.index(number), inputs, outputs)


def _compiled(instruction_set: str, folder: Path) -> Path:
    """Return the library of the probe, compiled as the kernels of an instruction set are."""
    build = runpy.run_path(str(_BUILD))
    compiler = build["find_compiler"]()
    if compiler is None:
        raise InflightError("no C++ compiler is installed; the machine's roofs are measured in C++")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder.resolve() / f"probe-{instruction_set}.so"
    header = f"isa_{instruction_set.partition('_')[0]}.h"
    options = [*build["_FLAGS"], *build["_TARGETS"][f"{instruction_set}.cpp"], *build["_LINK"]]
    command = [compiler, *options, "-I", str(_BUILD.parent), "-include", header, str(_SOURCE), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InflightError(f"{compiler} failed:\n{done.stderr}")
    return library
