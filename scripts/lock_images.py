"""Writes the lock files of the images, docker/requirements/*.txt: every package at one version, with its files' hashes.

    python3 scripts/lock_images.py --torch FOLDER_OR_URL

It asks uv, which it installs into an environment of its own for this, and which asks the package index for the hashes.
The versions are those of pyproject.toml and constraints.txt. ``--torch`` is where the CPU build of PyTorch is found.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "docker/requirements"
UV = "uv==0.13.9"
TOOLS = LOCKS / "tools.in"
SERVER = ("engine", "door")
"""The optional dependencies of the image of the profile ``cpu``, beside Triton: of its wheel only the server is used,
so what its Python package needs is left out."""
REPORTS = "matplotlib"
"""Only the image of the profile ``load`` draws."""
TORCH = "torch==2.13.0+cpu"
TORCH_HASHES = {
    "cp311": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
    "cp312": "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
}
"""Of its wheels for x86-64, as PyTorch's index of CPU builds lists them."""
_COMPILE = (
    *("pip", "compile", "--quiet", "--no-header", "--no-annotate", "--generate-hashes", "--only-binary", ":all:"),
    *("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_35"),
)
_HEADER = "# Written by scripts/lock_images.py from {source}.\n"
_ENTRY = re.compile(r"^(?=\S+==)", re.MULTILINE)


def main(torch: str) -> None:
    """Write every lock file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    served = [one for one in project["dependencies"] if not one.startswith(REPORTS)]
    served += [one for name in SERVER for one in extras[name]]
    with tempfile.TemporaryDirectory() as folder:
        uv = _Uv(Path(folder), torch)
        server = uv.compiled(served) | uv.compiled(extras["serve"], "--no-deps")
        server[_name(TORCH)] = _with_hashes(TORCH, TORCH_HASHES.values())
        both = uv.compiled([*served, *project["dependencies"], *extras["load"]])
        _write("server", server, "pyproject.toml")
        _write("load", {name: both[name] for name in both if name not in server}, "pyproject.toml: what load adds")
        _write("tools", uv.compiled(TOOLS.read_text().splitlines(), bound=False), TOOLS.name)


class _Uv:
    """uv in an environment of its own."""

    def __init__(self, folder: Path, torch: str) -> None:
        venv.create(folder, with_pip=True)
        subprocess.run([f"{folder}/bin/pip", "install", "--quiet", UV], check=True)
        self._folder, self._torch = folder, torch
        (folder / "constraints.txt").write_text(f"{(ROOT / 'constraints.txt').read_text()}\n{TORCH}\n")

    def compiled(self, requirements: list[str], *options: str, bound: bool = True) -> dict[str, str]:
        """Return the lines of each package by its name; with ``bound`` at the versions of constraints.txt."""
        wanted = self._folder / "requirements.in"
        wanted.write_text("\n".join(requirements))
        bounds = ["--constraint", str(self._folder / "constraints.txt"), "--find-links", self._torch] if bound else []
        command = [f"{self._folder}/bin/uv", *_COMPILE, *bounds, *options, str(wanted)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit("no lock file is written: uv says above why")
        return {_name(entry): entry for entry in _ENTRY.split(done.stdout) if "==" in entry}


def _name(entry: str) -> str:
    return entry.partition("==")[0]


def _with_hashes(pin: str, hashes: Iterable[str]) -> str:
    return " \\\n".join([pin, *(f"    --hash=sha256:{one}" for one in hashes)]) + "\n"


def _write(name: str, entries: dict[str, str], source: str) -> None:
    lines = [_HEADER.format(source=source), *(entries[one] for one in sorted(entries))]
    (LOCKS / f"{name}.txt").write_text("".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", required=True, help="folder or index page with the CPU build of PyTorch")
    main(parser.parse_args().torch)
