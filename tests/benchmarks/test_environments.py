"""Environments of programs that nobody here wrote: each is made once, by one process, or one line says why not."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import clients
from benchmarks.environments import Environments, Home, Recipe
from benchmarks.peers.environments import PEERS
from inflight.errors import InflightError
from inflight.serve.server import free_ports


def greet(home: Home) -> None:
    """Leave a line that tells how often this was done."""
    home.run("sh", "-c", "echo made >> times")


def fail(home: Home) -> None:
    """Run a program that fails."""
    home.run("false")


@pytest.mark.proof
def test_an_environment_is_made_once_and_a_failed_program_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    recipes = {"good": Recipe((), (greet,)), "bad": Recipe((), (fail,))}
    made = Environments("make friends", tmp_path, recipes)
    for _ in range(2):
        made.make("good")
    assert (tmp_path / "good/times").read_text() == "made\n"
    assert "is there" in capsys.readouterr().out
    assert made.home_of("good").python.exists()
    recipes["good"] = Recipe((), (greet,), ("a-package==2",))
    with pytest.raises(InflightError, match="make friends ARGS=good makes it"):
        made.home_of("good")
    with pytest.raises(InflightError, match=r"bad: false ended with code 1; .*log says why"):
        made.make("bad")
    assert not made.home("bad").is_made
    assert made.main(["bad", "good"]) == 1
    assert "friends: bad: false ended with code 1" in capsys.readouterr().err
    assert made.main(["ugly"]) == 2
    assert "'ugly' is not one of good, bad" in capsys.readouterr().err


@pytest.mark.proof
def test_a_process_waits_while_another_makes_the_same_environment(tmp_path: Path) -> None:
    made = Environments("make friends", tmp_path, {"good": Recipe((), (greet,))})
    code = (
        "from pathlib import Path; from benchmarks.environments import *; from tests.benchmarks.test_environments "
        f"import greet; Environments('make friends', Path({str(tmp_path)!r}), {{'good': Recipe((), (greet,))}})"
        ".make('good')"
    )
    with (tmp_path / "good.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = subprocess.Popen([sys.executable, "-c", code])
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(2)
        (tmp_path / "good").mkdir(exist_ok=True)
    assert other.wait(240) == 0
    assert made.home_of("good").python.exists()


@pytest.mark.proof
def test_a_registry_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [port] = free_ports(1)
    settings = {"CONFIG_FILE": os.devnull, "FIND_LINKS": "", "EXTRA_INDEX_URL": "", "NO_CACHE_DIR": "1", "RETRIES": "1"}
    for name, value in (settings | {"INDEX_URL": f"http://127.0.0.1:{port}/simple"}).items():
        monkeypatch.setenv(f"PIP_{name}", value)
    made = Environments("make friends", tmp_path, {"good": Recipe(("idna==3.20",))})
    with pytest.raises(InflightError, match=r"good: pip cannot reach a package registry; .*log says why"):
        made.make("good")
    with pytest.raises(InflightError, match=r"good: .* ended with code 1; .*log says why"):
        made.home("good").pip("install", "idna=3.20")


@pytest.mark.parametrize("environments", [clients.CLIENTS, PEERS], ids=["clients", "peers"])
def test_every_package_is_pinned(environments: Environments) -> None:
    for recipe in environments.recipes.values():
        loose = [package for package in recipe.packages if "==" not in package and "<" not in package]
        assert not loose, "what is not pinned is another program next month"
