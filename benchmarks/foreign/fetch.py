"""Where the suites come from: the source distributions of two packages of PyPI, which bring the tests of the servers.

Only the tests are unpacked, below the environment that they run in, which git ignores.
"""

from __future__ import annotations

import tarfile
from pathlib import PurePosixPath

from benchmarks.environments import Home
from benchmarks.peers.environments import LLAMA

VLLM = "0.33.0"
VLLM_TESTS = f"vllm-{VLLM}"
_LLAMA_TREE = f"llama_cpp_python-{LLAMA}/vendor/llama.cpp"
LLAMA_TESTS = f"{_LLAMA_TREE}/tools/server/tests"
_STAND_IN = {
    "torch/__init__.py": "class version:\n    hip = xpu = cuda = None\n",
    "torch/utils/__init__.py": "",
    "torch/utils/cpp_extension.py": "CUDA_HOME = ROCM_HOME = None\n",
}
"""What vLLM's setup.py asks PyTorch, for a package without kernels."""


def fetch_llama_tests(home: Home) -> None:
    """Unpack llama.cpp's tests of its server."""
    home.pip("download", "--no-deps", "--no-binary", ":all:", "-d", ".", f"llama-cpp-python=={LLAMA}")
    for part in (LLAMA_TESTS, f"{_LLAMA_TREE}/models/templates"):  # the tests look whether their templates are there
        _unpack(home, f"llama_cpp_python-{LLAMA}.tar.gz", part)


def fetch_vllm_tests(home: Home) -> None:
    """Unpack vLLM's tests of its server: pip reads the package's metadata on the way, and builds nothing."""
    for name, text in _STAND_IN.items():
        path = home.folder / "stand-in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {
        "PYTHONPATH": str((home.folder / "stand-in").resolve()),
        "VLLM_TARGET_DEVICE": "empty",
        "VLLM_VERSION_OVERRIDE": VLLM,
    }
    words = ("download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", ".", f"vllm=={VLLM}")
    home.pip(*words, environment=environment)
    for part in ("entrypoints", "tool_use"):
        _unpack(home, f"{VLLM_TESTS}.tar.gz", f"{VLLM_TESTS}/tests/{part}")
    (home.folder / VLLM_TESTS / "tests/__init__.py").touch()


def _unpack(home: Home, archive: str, folder: str) -> None:
    """Unpack one folder of an archive."""
    with tarfile.open(home.folder / archive) as file:
        wanted = [member for member in file if PurePosixPath(member.name).is_relative_to(folder)]
        file.extractall(home.folder, wanted, filter="data")
