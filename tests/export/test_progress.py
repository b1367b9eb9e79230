"""A build shows how far a stage is while it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.export.build.commands import ProgressLog, _progress
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


def test_a_log_is_told_once_a_minute_how_far_it_is_and_what_is_left() -> None:
    said, now = list[str](), [0.0]
    log = ProgressLog(said.append, lambda: now[0])
    for done in range(0, 400, 10):
        log.step("comparing", done, 400)
        now[0] += 5.0
    log.step("writing", 0, 0)
    assert said == [
        "comparing, 400 steps",
        "comparing, 120 of 400 steps, 120 a minute, 2.33 min left",
        "comparing, 240 of 400 steps, 120 a minute, 80 s left",
        "comparing, 360 of 400 steps, 120 a minute, 20 s left",
    ]


def test_steps_of_an_earlier_run_do_not_count_as_fast_ones() -> None:
    said, now = list[str](), [0.0]
    log = ProgressLog(said.append, lambda: now[0])
    for done in range(301):
        log.step("comparing", done, 400)
    for done in range(301, 320):
        now[0] += 6.0
        log.step("comparing", done, 400)
    assert said == ["comparing, 400 steps", "comparing, 310 of 400 steps, 10 a minute, 9 min left"]
