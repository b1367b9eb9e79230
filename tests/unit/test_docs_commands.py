"""The commands in README and docs are ones that `inflight` and `make` take, parsed, not run; links lead somewhere."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import typer
from typer.testing import CliRunner

from benchmarks.__main__ import bench
from inflight.cli import app
from tests.support.tables import each_row

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "model_repository/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "deployments").rglob("*.md")),
]


def _lines() -> Iterator[tuple[str, str]]:
    """Yield (page, line) of every shell block; what the shell makes of a line afterwards is left out."""
    for page in PAGES:
        for block in re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                yield page.name, re.split(r" [|>&]|  #| # ", line)[0].removeprefix("$ ")


def _inline() -> Iterator[tuple[str, str]]:
    """Yield (page, command) of every `make bench` within a sentence."""
    for page in PAGES:
        yield from (
            (page.name, " ".join(found.split())) for found in re.findall(r"`(make bench [^`]+)`", page.read_text())
        )


COMMANDS = [(page, line) for page, line in _lines() if re.match(r"(\.venv/bin/)?inflight ", line)]
MADE = [(page, line) for page, line in [*_lines(), *_inline()] if line.startswith("make ")]
BENCHMARKS = [(page, line) for page, line in MADE if line.startswith("make bench")]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


_command = functools.cache(typer.main.get_command)


def _parse(program: typer.Typer, name: str, words: list[str]) -> None:
    context = _command(program).make_context(name, words)
    while words := [*getattr(context, "_protected_args", ()), *context.args]:
        name, inner, rest = context.command.resolve_command(context, words)
        context = inner.make_context(name, rest, parent=context)


def test_docs_have_inflight_and_bench_commands() -> None:
    assert len(COMMANDS) > 10
    assert len(BENCHMARKS) > 10


@each_row(("page", "command"), COMMANDS)
def test_inflight_commands_of_docs_parse(page: str, command: str) -> None:
    _parse(app, "inflight", shlex.split(command)[1:])


@each_row(("page", "command"), BENCHMARKS)
def test_make_bench_commands_of_docs_parse(page: str, command: str) -> None:
    _, _, arguments = shlex.split(command)
    name, words = arguments.split("=", 1)
    assert name == "ARGS"
    _parse(bench, "bench", shlex.split(words))


def test_page_of_benchmarks_names_each_command() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text().split("| command |")[1].split("\n\n")[0]
    names = set(re.findall(r"^\| \[?([a-z-]+)(?:\]\(#[a-z-]+\))? \|", page, re.MULTILINE))
    assert names == set(_command(bench).commands)
    listed = CliRunner().invoke(bench, ["--help"])
    assert all(name in listed.output for name in names)


def test_make_targets_of_docs_exist() -> None:
    assert not [(page, line) for page, line in MADE if line.split()[1] not in TARGETS]


@each_row("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_docs_name_venv_programs(page: Path) -> None:
    """The set-up puts programs into .venv/bin, which is on nobody's path."""
    text = page.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^ {4}\S.*", text, re.MULTILINE)
    lines = [line.strip() for block in [*blocks, *indented] for line in block.splitlines()]
    assert not [line for line in lines if re.match(r"(\$ )?(inflight|locust|pytest|hf) ", line)]


@each_row("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_docs_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


def test_readme_serves_in_a_container() -> None:
    """`tests/docker/test_compose.py` runs this, and a change of the page alone does not run that."""
    assert re.search(r"\bdocker compose --profile cpu up\b", (ROOT / "README.md").read_text())
