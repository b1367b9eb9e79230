"""Programs that users write, with clients that nobody here wrote, each in its client's own environment.

A program runs once; each of its checks is a test. `harness.py` runs them there, and prints a line for each.
"""

from __future__ import annotations

import ast
import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients import LLAMA_INDEX, SDKS
from benchmarks.gateway.served import KEY, Served
from tests.gateway.programs.conftest import environment

HERE = Path(__file__).parent
PROGRAMS = {
    "openai_chat": SDKS,
    "openai_completions": SDKS,
    "openai_errors": SDKS,
    "openai_responses": SDKS,
    "openai_structured": SDKS,
    "openai_tools": SDKS,
    "anthropic_messages": SDKS,
    "langchain_openai_chat": SDKS,
    "litellm_chat": SDKS,
    "openai_agents": SDKS,
    "llama_index_chat": LLAMA_INDEX,
}
"""The programs, each with the environment that it runs in."""
LIMIT_S = 240

pytestmark = [pytest.mark.programs, pytest.mark.timeout(600)]


def checks_of(program: str) -> list[str]:
    """Return the names of a program's checks, without importing it: its client is not in this environment."""
    tree = ast.parse((HERE / f"{program}.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [node.name for node in functions if node.name.startswith("check_")]


@functools.cache
def outcomes(program: str, url: str) -> dict[str, Any]:
    """Run a program; return what it printed of each check, by name, and all that it said besides, by an empty name."""
    command = [environment(PROGRAMS[program]).python, f"{program}.py", url, KEY]
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=LIMIT_S)
        said, lines = done.stderr[-4000:], done.stdout
    except subprocess.TimeoutExpired as error:
        said, lines = f"the program ran for more than {LIMIT_S} s", (error.stdout or b"").decode()
    return {one["check"]: one for one in map(json.loads, lines.splitlines())} | {"": said}


@pytest.mark.parametrize(("program", "check"), [(one, check) for one in PROGRAMS for check in checks_of(one)])
def test_a_program_of_a_client_runs(program: str, check: str, demo_gateway: Served) -> None:
    found = outcomes(program, demo_gateway.url)
    assert check in found, found[""]
    assert not found[check]["error"], found[check]["error"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_has_checks(program: str) -> None:
    assert checks_of(program)


def test_the_gateway_has_shown_no_traceback(demo_gateway: Served) -> None:
    assert "Traceback" not in demo_gateway.gateway.log_path.read_text(errors="replace")
