"""What all commands of the benchmarks have in common."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import get_type_hints

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import bench


def test_every_output_is_a_file_or_a_folder_and_nothing_else() -> None:
    callbacks = [one.callback for one in bench.registered_commands if one.callback is not None]
    outputs = {
        callback.__name__: get_type_hints(callback, include_extras=True)["output"].__metadata__[0]
        for callback in callbacks
        if "output" in inspect.signature(callback).parameters
    }
    assert len(outputs) > 10
    for name, option in outputs.items():
        assert option.file_okay != option.dir_okay, (
            f"{name}: the wrong one is refused only after everything is measured"
        )


def test_a_folder_in_place_of_a_file_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a short name, so that the message is one line
    done = CliRunner().invoke(bench, ["tokenizer", "--seconds", "0.1", "--output", "."])
    assert done.exit_code == 2
    assert "is a directory" in done.output
