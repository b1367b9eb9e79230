"""Agents as npm has them, set up word for word as docs/gateway-agents.md says: an answer, and a round with a tool."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.clients import AGENTS, RECIPES
from tests.gateway.programs.acting import ANSWER, CODEX_MODEL, DONE, FILE, MADE, PATCHED, ActingEngine, acting
from tests.gateway.programs.conftest import ROOT, environment
from tests.gateway.support.gateways import Inside

pytestmark = [pytest.mark.programs, pytest.mark.timeout(600)]

PAGE = (ROOT / "docs/gateway-agents.md").read_text()
LIMIT_S = 240
FILES = {"Codex": ".codex/config.toml", "OpenCode": "opencode.json"}
"""Where an agent's block of settings belongs, in the home that is the project's folder too."""
NAMES = ("Claude Code", "Codex", "OpenCode", "Qwen Code")


class Agent(NamedTuple):
    """What the page says of one agent."""

    package: str
    settings: str
    exports: str
    question: str
    task: str


def agent_of(name: str) -> Agent:
    """Return what stands under an agent's heading."""
    section = PAGE.partition(f"### {name}\n")[2].partition("\n##")[0]
    blocks = dict(re.findall(r"^```(\w+)\n(.*?)^```", section, re.M | re.S))
    *exports, question, task = blocks.pop("sh").splitlines()
    package, version = re.findall(r"^`(\S+)` (\d[\d.]*\d)", section, re.M)[0]
    return Agent(f"{package}@{version}", "".join(blocks.values()), "\n".join(exports), question, task)


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Inside, ActingEngine]]:
    with acting() as running:
        yield running


@pytest.fixture
def served(shared: tuple[Inside, ActingEngine]) -> Iterator[tuple[Inside, ActingEngine]]:
    """A gateway that refuses nothing of what the test asks."""
    running, engine = shared
    before = refusals(running)
    engine.results.clear()
    yield running, engine
    assert refusals(running) == before


def refusals(running: Inside) -> dict[str, str]:
    """Return the counts of requests that the gateway has refused, by route and status."""
    with running.client() as client:
        page = client.get("/metrics").text
    answered = re.findall(r"^inflight_gateway_requests_total\{(.*)\} (\S+)$", page, re.M)
    return {
        labels: count
        for labels, count in answered
        if re.search('status="[45]', labels) and 'route="other"' not in labels
    }


def run(agent: Agent, command: str, name: str, running: Inside, home: Path) -> str:
    """Run a command of the page against the gateway, in a folder that is the agent's home too; return what it says."""
    programs = environment(AGENTS).folder.resolve()
    for file in filter(None, [FILES.get(name)]):
        (home / file).parent.mkdir(exist_ok=True)
        (home / file).write_text(agent.settings.replace("http://127.0.0.1:8080", running.url))
    script = f"{agent.exports}\n{command}".replace("http://127.0.0.1:8080", running.url)
    path = [programs / "node_modules/.bin", programs / "venv/bin", os.environ["PATH"]]
    variables = {"PATH": os.pathsep.join(map(str, path)), "HOME": str(home), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        ["bash", "-ec", script], cwd=home, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A folder that is left empty: agents keep caches there."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_the_page_has_the_versions_that_are_tried() -> None:
    assert tuple(agent_of(name).package for name in NAMES) == tuple(RECIPES[AGENTS].of_steps)


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_answers_a_question(name: str, served: tuple[Inside, ActingEngine], home: Path) -> None:
    running, _ = served
    agent = agent_of(name)
    assert ANSWER in run(agent, agent.question, name, running, home)


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_runs_a_tool_and_goes_on_with_its_result(
    name: str, served: tuple[Inside, ActingEngine], home: Path
) -> None:
    running, engine = served
    agent = agent_of(name)
    assert DONE in run(agent, agent.task, name, running, home)
    assert (home / FILE).read_text() == f"{MADE}\n"
    assert engine.results  # not what they say: the terminal of Qwen Code may lose what a short command prints


def test_codex_applies_a_patch(served: tuple[Inside, ActingEngine], home: Path) -> None:
    """A custom tool under a grammar in Lark."""
    running, _ = served
    agent = agent_of("Codex")
    task = f"{agent.task.replace(FILE, PATCHED)} --model {CODEX_MODEL}"
    assert DONE in run(agent, task, "Codex", running, home)
    assert (home / PATCHED).read_text() == f"{MADE}\n"
