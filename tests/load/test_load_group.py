"""`inflight load`: a scenario's name in place of a command runs it."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from inflight.load.group import load


@pytest.mark.parametrize("words", [["smokee"], ["run", "smokee"]])
def test_what_is_no_command_is_a_scenario(words: list[str]) -> None:
    done = CliRunner().invoke(load, words)
    assert done.exit_code == 1
    assert "no scenario 'smokee' (did you mean 'smoke'?)" in " ".join(done.stderr.split())


def test_help_names_the_commands() -> None:
    done = CliRunner().invoke(load, ["--help"])
    assert done.exit_code == 0
    assert {"run", "sweep", "compare"} <= set(re.findall(r"\w+", done.output))
