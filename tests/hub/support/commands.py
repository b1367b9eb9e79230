"""Runs `inflight` within the test's process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from inflight.cli import app


def inflight(*words: str) -> Result:
    """Run a command that has to succeed."""
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done


def refused(*words: str) -> str:
    """Run a command that has to fail with one line, and return what that says."""
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 1, done.output
    last = done.stderr.splitlines()[-1]
    assert last.startswith("inflight: "), done.output
    assert "Traceback" not in done.output
    return last.removeprefix("inflight: ")
