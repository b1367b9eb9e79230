"""What a build shows while a stage runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.export.build.commands import _progress
from inflight.export.quantize.modelopt import quiet


def test_progress_is_seen_while_the_tools_are_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "modelopt.log"
    with _progress() as progress:
        progress("loading", 0, 0)
        with quiet(log):
            print("what ModelOpt prints")
            for done in range(3):
                progress("calibrating", done, 512)
        progress("comparing", 0, 7)
    assert capsys.readouterr().err.split("\n")[:2] == ["  calibrating, 512 steps", "  comparing, 7 steps"]
    assert log.read_text() == "what ModelOpt prints\n"
