"""The `inflight` commands in README and docs are ones that the program takes, parsed, not run; links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from inflight.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "deployments").rglob("*.md")),
]


def _commands() -> list[tuple[str, str]]:
    """Return (page, command) of every shell block; what the shell makes of it afterwards is left out."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if re.match(r"(\$ )?(\.venv/bin/)?inflight ", line):
                    found.append((page.name, re.split(r" [|>&]|  #| # ", line)[0].removeprefix("$ ")))
    return found


COMMANDS = _commands()


def test_there_are_some() -> None:
    assert len(COMMANDS) > 10


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_parses(page: str, command: str) -> None:
    _, *words = shlex.split(command)
    context = typer.main.get_command(app).make_context("inflight", words)
    while words := [*getattr(context, "_protected_args", ()), *context.args]:
        name, inner, rest = context.command.resolve_command(context, words)
        context = inner.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_command_can_be_typed_as_it_stands(page: Path) -> None:
    """The set-up puts programs into .venv/bin, which is on nobody's path."""
    text = page.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^ {4}\S.*", text, re.MULTILINE)
    lines = [line.strip() for block in [*blocks, *indented] for line in block.splitlines()]
    assert not [line for line in lines if re.match(r"(\$ )?(inflight|locust|pytest|hf) ", line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]
