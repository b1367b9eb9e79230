"""Builds the native step of the CPU engine with the C++ compiler that is there; scripts/setup.py and the wheel call it.

    python3 native/build.py

One library has the kernels of every instruction set: each lies in a file of its own, compiled for that alone, and is
chosen when the engine starts. A library of these sources stays as it is, and what was compiled once is copied from the
user's cache, e.g. for a second checkout.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

SOURCES = Path(__file__).resolve().parent
LIBRARY = SOURCES.parent / "inflight/engine/native/libinflight_step.so"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "inflight/native")
"""Compiled libraries, by a digest of all that goes into them."""
_KEPT = 16
_COMPILERS = ("g++", "clang++", "c++")
# -ffast-math would flush denormals for the whole process; -ffp-contract would let the compiler choose what is rounded.
# Without -falign-loops a loop is up to 5 % slower or faster after a change somewhere else.
_FLAGS = (
    "-std=c++20 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -fno-trapping-math "
    "-falign-loops=32 -Wall -Wextra -Wno-unused-function"
).split()
_LINK = "-shared -pthread -static-libstdc++ -static-libgcc -Wl,--exclude-libs,ALL".split()
_AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c".split()
_AVX512_VNNI = [*_AVX512, "-mavx512vnni"]
_AVX512_BF16 = [*_AVX512_VNNI, "-mavx512bf16"]
_TARGETS = {
    "avx2.cpp": "-mavx2 -mfma -mf16c".split(),
    "avx512.cpp": _AVX512,
    "avx512_vnni.cpp": _AVX512_VNNI,
    "avx512_bf16.cpp": _AVX512_BF16,
    "amx.cpp": [*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
}


def find_compiler() -> str | None:
    """Return the C++ compiler: the one that CXX names, or the first that is installed; None: it is not there."""
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [named] if named else _COMPILERS)), None)


def digest() -> str:
    """Return a digest of the sources."""
    files = sorted(file for file in SOURCES.iterdir() if file.suffix in (".cpp", ".h") or file.name == "build.py")
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()


def is_built() -> bool:
    """Whether the library of these sources is there."""
    return LIBRARY.is_file() and digest().encode() in LIBRARY.read_bytes()


def build(
    library: Path = LIBRARY, more: tuple[str, ...] = (), instead: Mapping[str, Path] = MappingProxyType({})
) -> str | None:
    """Build the library; return None, or why it cannot be built.

    ``more`` are options of the compiler and of the linker, such as those of a sanitizer; ``instead`` has files that are
    compiled in place of sources, by the names of these.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"there are kernels for x86-64 only; this machine is {platform.machine()}"
    compiler = find_compiler()
    if compiler is None:
        return f"no C++ compiler is installed ({', '.join(_COMPILERS)})"
    kept = CACHE / f"{_digest_of_all(compiler, more, instead)}.so"
    if _copy(kept, library):
        return None
    with tempfile.TemporaryDirectory(prefix="inflight-native-") as folder:

        def compiled(source: Path) -> Path:
            target = Path(folder, source.stem + ".o")
            options = [*_FLAGS, *_TARGETS.get(source.name, []), f'-DINFLIGHT_SOURCES="{digest()}"', *more]
            file = instead.get(source.name, source)
            _run([compiler, *options, "-I", str(SOURCES), "-c", str(file), "-o", str(target)])
            return target

        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(compiled, sorted(SOURCES.glob("*.cpp"))))
            made = Path(folder, library.name)
            _run([compiler, *_LINK, *more, *map(str, objects), "-o", str(made)])
        except subprocess.CalledProcessError as error:
            return f"{compiler} failed:\n{error.stderr}"
        if not _copy(made, library):
            return f"{library} cannot be written"
        _keep(made, kept)
    return None


def _digest_of_all(compiler: str, more: tuple[str, ...], instead: Mapping[str, Path]) -> str:
    """Return a digest of sources, options, compiler and C library."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    words = [digest(), compiler, version, *more, *platform.libc_ver()]
    words += [f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for name, file in sorted(instead.items())]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def _copy(source: Path, target: Path) -> bool:
    """Copy a library into place at once: an engine that starts meanwhile finds a whole one, or none."""
    made = target.with_suffix(f".{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, made)
        made.replace(target)
    except OSError:
        with suppress(OSError):
            made.unlink()
        return False
    return True


def _keep(made: Path, kept: Path) -> None:
    """Copy a library into the cache, and remove the oldest; a cache that cannot be written is left as it is."""
    if CACHE.is_absolute() and _copy(made, kept):  # a user without a home has none
        for old in sorted(CACHE.glob("*.so"), key=lambda file: -file.stat().st_mtime)[_KEPT:]:
            old.unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(None if is_built() else build())
