"""Removes from an environment's packages what no server loads: tests, headers, compilers' parts, other Pythons' stubs.

    python3 docker/trim.py /opt/inflight/.venv/lib/python3.11/site-packages

docs/container.md says what is removed. A test imports every module of the image afterwards.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

REMOVED = (
    # PyTorch: programs and libraries of its own tests, protobuf's compiler, and what extensions in C++ are built with.
    "torch/test",
    "torch/bin/test_*",
    "torch/bin/*Test",
    "torch/bin/protoc*",
    "torch/bin/*.pt",
    "torch/bin/*.ptl",
    "torch/bin/upgrader_models",
    "torch/include",
    "torch/share/cmake",
    "torch/lib/libtorchbind_test.so",
    "torch/lib/libjitbackend_test.so",
    "torch/lib/libbackend_with_compiler.so",
    "torch/testing/_internal/generated",
    # Tests that packages bring along.
    "gevent/tests",
    "greenlet/tests",
    "matplotlib/tests",
    "mpl_toolkits/*/tests",
    "mpmath/tests",
    "networkx/**/tests",
    "numpy/**/tests",
    "psutil/tests",
    "sympy/**/tests",
    "zope/**/tests",
    # Headers and static libraries.
    "**/*.h",
    "**/*.hpp",
    "**/*.cuh",
    "**/*.a",
    "../../../include",
)
"""Patterns of files and folders below the environment's packages."""
STUBS = "pytriton/tritonserver/python_backend_stubs"
"""Has a stub of Triton's Python backend for each version of Python."""


def main(packages: Path) -> None:
    """Remove it, and what is then empty."""
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    doomed = [path for pattern in REMOVED for path in packages.glob(pattern)]
    doomed += [path for path in packages.glob(f"{STUBS}/*") if path.name != own]
    doomed += packages.glob("nvidia_pytriton.libs/libpython3-*.13.so*")  # which the stub of 3.13 alone loads
    for path in doomed:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
