"""Errors of commands: one line, code 1."""

from __future__ import annotations

import io

import pytest
import typer
from rich.console import Console

from inflight.errors import DeploymentError, InflightError
from inflight.report.failures import one_line_errors


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InflightError("no [such] thing"), "no [such] thing"),
        (
            ModuleNotFoundError(name="modelopt.torch"),
            "modelopt.torch is not installed; it comes with: make setup EXTRAS=build",
        ),
        (ModuleNotFoundError(name="nothing"), "nothing is not installed"),
        (FileNotFoundError(2, "No such file or directory", "there"), "there: No such file or directory"),
        (OSError("the pipe is closed"), "the pipe is closed"),
    ],
)
def test_an_error_is_a_line_and_ends_with_1(error: Exception, line: str) -> None:
    written = io.StringIO()
    with pytest.raises(typer.Exit) as ended, one_line_errors(Console(file=written, width=20)):
        raise error
    assert ended.value.exit_code == 1
    assert written.getvalue() == f"inflight: {line}\n"


def test_a_reader_that_has_gone_is_not_told() -> None:
    written = io.StringIO()
    with pytest.raises(BrokenPipeError), one_line_errors(Console(file=written)):
        raise BrokenPipeError(32, "Broken pipe")
    assert not written.getvalue()


def test_our_own_faults_are_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), one_line_errors(Console()):
        _ = 1 // 0


@pytest.mark.parametrize(
    ("text", "shown"),
    [("mod\udcc3\udca9l", "modél"), ("\udcff", "\\xff"), ("\ud800 é", "\\ud800 é"), ("é", "é")],
)
def test_file_names_in_errors_can_be_read(text: str, shown: str) -> None:
    """As of a stage, whose Python decodes file names from ASCII."""
    assert str(DeploymentError(text)) == shown
