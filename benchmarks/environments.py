"""Environments for programs of others, each below ``artifacts`` with pinned versions of its own.

What is there already stays as it is; what fails is one line, and the other environments are still made.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from inflight.errors import InflightError

_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
_RECORD = "made.json"
_NO_REGISTRY = b"WARNING: Retrying (Retry(total=0,"
"""What pip says when its last try to connect begins."""


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
    """The folder of one environment."""

    name: str
    folder: Path
    recipe: Recipe
    """How it is made today."""

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
        """Run our pip, which may be newer, for the environment; PIP_FLAGS has more of its options.

        Raises:
            InflightError: it failed; if no try reached the package registry, the error says so.
        """
        flags = shlex.split(os.environ.get("PIP_FLAGS", "")) if words[0] in ("install", "download") else []
        said = self.log.stat().st_size if self.log.exists() else 0
        try:
            self.run(*_PIP, "--python", self.python, *words, *flags, environment=environment)
        except InflightError:
            if _NO_REGISTRY not in self.log.read_bytes()[said:]:
                raise
            raise InflightError(f"{self.name}: pip cannot reach a package registry; {self.log} says why") from None

    def find_library(self, pattern: str) -> Path | None:
        """Return the file below the folder that a pattern finds, if there is one."""
        return next((path.resolve() for path in sorted(self.folder.glob(pattern))), None)

    @property
    def is_made(self) -> bool:
        """Whether it is there, as today's recipe makes it."""
        try:
            return bool(json.loads((self.folder / _RECORD).read_text()) == _record(self.recipe))
        except (OSError, ValueError):
            return False


def _record(recipe: Recipe) -> dict[str, list[str]]:
    return {"packages": [*recipe.packages, *recipe.of_steps], "steps": [step.__name__ for step in recipe.steps]}


@dataclass(frozen=True)
class Environments:
    """The environments of one folder, which one verb of the Makefile makes."""

    verb: str
    """As ``make peers``."""
    folder: Path
    recipes: Mapping[str, Recipe]

    def home(self, name: str, folder: Path | None = None) -> Home:
        """Return an environment, made or not; ``folder`` is the folder of all of them."""
        return Home(name, (folder or self.folder) / name, self.recipes[name])

    def home_of(self, name: str, folder: Path | None = None) -> Home:
        """Return an environment that is there.

        Raises:
            InflightError: it has not been made.
        """
        home = self.home(name, folder)
        if not home.is_made:
            raise InflightError(f"{name}: its environment is not in {home.folder}; {self.verb} ARGS={name} makes it")
        return home

    def make(self, name: str, folder: Path | None = None) -> Home:
        """Make an environment, unless it is there, and return it; another process that makes it is waited for.

        Raises:
            InflightError: a program that makes it failed.
        """
        home = self.home(name, folder)
        home.folder.mkdir(parents=True, exist_ok=True)
        with _locked(home.folder.with_name(f"{name}.lock")):
            if home.is_made:
                print(f"{name}: {home.folder} is there", flush=True)
            else:
                _make(home)
        return home

    def main(self, names: Sequence[str]) -> int:
        """Make the environments that are named, or all; return 1 if one of them could not be made."""
        unknown = [name for name in names if name not in self.recipes]
        if unknown:
            print(f"{unknown[0]!r} is not one of {', '.join(self.recipes)}", file=sys.stderr)
            return 2
        failed = False
        for name in names or self.recipes:
            try:
                self.make(name)
            except (InflightError, OSError) as error:
                failed = True
                print(f"{self.verb.removeprefix('make ')}: {error}", file=sys.stderr, flush=True)
        return int(failed)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which ends with the process too."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(home: Home) -> None:
    begun, recipe = time.monotonic(), home.recipe
    print(f"{home.name}: making {home.folder}; {home.log} has the details", flush=True)
    home.run(sys.executable, "-m", "venv", "--clear", "venv")
    if recipe.packages:
        print(f"    installing {', '.join(recipe.packages)}", flush=True)
        home.pip("install", "--no-compile", *recipe.packages)
    for step in recipe.steps:
        print(f"    {step.__name__.strip('_').replace('_', ' ')}", flush=True)
        step(home)
    (home.folder / _RECORD).write_text(json.dumps(_record(recipe)) + "\n")
    print(f"    made in {time.monotonic() - begun:.0f} s", flush=True)
