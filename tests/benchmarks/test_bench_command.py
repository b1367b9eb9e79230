"""What all commands of the benchmarks have in common."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.__main__ import bench


def test_every_output_is_a_file_or_a_folder_and_nothing_else() -> None:
    group = typer.main.get_command(bench)
    assert isinstance(group, click.Group)
    outputs = {
        name: option.type
        for name, command in group.commands.items()
        for option in command.params
        if option.name == "output"
    }
    assert len(outputs) > 10
    for name, kind in outputs.items():
        assert isinstance(kind, click.Path), name
        assert kind.file_okay != kind.dir_okay, f"{name}: the wrong one is refused only after everything is measured"


def test_a_folder_in_place_of_a_file_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a short name, so that the message is one line
    done = CliRunner().invoke(bench, ["tokenizer", "--seconds", "0.01", "--output", "."])
    assert done.exit_code == 2
    assert "is a directory" in done.output
