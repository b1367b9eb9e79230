"""What all commands of the benchmarks have in common."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import bench


@pytest.mark.parametrize("command", ["pipeline", "tokenizer", "suite"])
def test_a_folder_in_place_of_a_file_is_refused_before_anything_is_measured(command: str) -> None:
    done = CliRunner().invoke(bench, [command, "--output", "."])
    assert done.exit_code == 2
    assert "is a directory" in done.output


@pytest.mark.parametrize("command", ["headlines", "native", "peers"])
def test_a_file_in_place_of_a_folder_is_refused_before_anything_is_measured(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a short name, so that the message is one line
    Path("file").touch()
    done = CliRunner().invoke(bench, [command, "--output", "file"])
    assert done.exit_code == 2
    assert "is a file" in done.output
