"""A scenario that is wrong is refused in one line, by the key's name, with what is allowed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inflight.load.scenario import ScenarioError, load_scenario, validate_scenario
from tests.load.support.scenarios import fixed, request_class, scenario
from tests.support.tables import each_row

Change = Callable[[dict[str, Any]], object]
FAULTS: dict[str, Change] = {
    r"unknown key `phasse` \(did you mean 'phases'\?\)": lambda s: s.update(phasse=1),
    r"unknown key `phases.0.burstyness` \(did you mean 'burstiness'\?\)": lambda s: s["phases"][0].update(burstyness=1),
    r"unknown key `classes.0.prompt_tokens.fixed.valeu` \(did you mean 'value'\?\)": lambda s: s["classes"][0][
        "prompt_tokens"
    ].update(valeu=1),
    r"phases.0: `burstiness` needs `arrivals`: gamma": lambda s: s["phases"][0].update(burstiness=2.0),
    r"phases.0: a phase needs `rate` or `concurrency`, and not both": lambda s: s["phases"][0].update(concurrency=2),
    r"phases.0: `to_concurrency` needs `concurrency`": lambda s: s["phases"][0].update(to_concurrency=2),
    r"`phases.0.duration_s` is 0: input should be greater than 0": lambda s: s["phases"][0].update(duration_s=0),
    r"`phases.0.duration_s` is inf: input should be a finite number": lambda s: s["phases"][0].update(
        duration_s=math.inf
    ),
    r"`phases.0.rate` is nan: input should be a finite number": lambda s: s["phases"][0].update(rate=math.nan),
    r"`classes.0.weight` is inf: input should be a finite number": lambda s: s["classes"][0].update(weight=math.inf),
    r"all `phases` must have a `rate`, or all a `concurrency`": lambda s: s["phases"].append(
        {"duration_s": 1, "concurrency": 1}
    ),
    r"that are `steady` must be one or more in a row": lambda s: s["phases"][0].update(steady=False),
    r"`classes` is missing; a scenario has `phases` and `classes`, or a `trace`": lambda s: s.pop("classes"),
    r"two classes are called 'a'": lambda s: s["classes"].append(request_class()),
    r"do.* not match any of the expected tags: 'fixed', 'uniform', 'normal'": lambda s: s["classes"][0].update(
        output_tokens={"distribution": "norml"}
    ),
    r"`min` is 9: it must not be above `max` \(3\)": lambda s: s["classes"][0].update(
        output_tokens={"distribution": "uniform", "min": 9, "max": 3}
    ),
    r"`per_request` is 3: there are only 2 documents": lambda s: s["classes"][0].update(
        documents={"count": 2, "per_request": 3, "tokens": fixed(4)}
    ),
    r"cancellations need `after_tokens` or `after_ms`, and not both": lambda s: s["classes"][0].update(
        cancellations={"share": 0.5}
    ),
    r"`file` is 'none.json': there is no such file": lambda s: s["classes"][0].update(
        conversations={"file": "none.json"}
    ),
    r"a class needs `prompt_tokens` and `output_tokens`, or `conversations`": lambda s: s["classes"][0].pop(
        "output_tokens"
    ),
    r"`classes.0.format` is 'chat': input should be 'text' or 'messages'": lambda s: s["classes"][0].update(
        format="chat"
    ),
}


@each_row("reason", FAULTS)
def test_what_is_wrong_is_named(reason: str) -> None:
    data: dict[str, Any] = {"phases": [{"duration_s": 5, "rate": 3}], "classes": [request_class()]}
    validate_scenario(data, Path(), "s.toml")
    FAULTS[reason](data)
    with pytest.raises(ScenarioError, match=reason) as caught:
        validate_scenario(data, Path(), "s.toml")
    assert str(caught.value).startswith("s.toml: ")
    assert "\n" not in str(caught.value)


def test_a_trace_takes_the_place_of_phases_and_classes(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").touch()
    data = {"trace": {"file": "t.jsonl"}, "phases": [{"duration_s": 5, "rate": 3}]}
    with pytest.raises(ScenarioError, match="`phases` and `trace` exclude each other"):
        validate_scenario(data, tmp_path, "s.toml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"no scenario 'posson' \(did you mean 'poisson'\?\); known: bursty, "):
        load_scenario(Path("posson"))
    bad = tmp_path / "bad.toml"
    bad.write_text("phases = [")
    with pytest.raises(ScenarioError, match="not valid TOML"):
        load_scenario(bad)


def test_the_window_and_the_limits() -> None:
    phases = [
        {"duration_s": 2, "rate": 1, "steady": False},
        {"duration_s": 3, "rate": 1},
        {"duration_s": 4, "rate": 2},
        {"duration_s": 5, "rate": 1, "steady": False},
    ]
    made = scenario(request_class("a"), request_class("b", slo={"e2e_ms": 7}), phases=phases, slo={"ttft_ms": 9})
    assert made.steady == (2, 9)
    assert made.scaled(0.5).steady == (1, 4.5)
    assert made.slo_of("a").ttft_ms == 9
    assert (made.slo_of("b").ttft_ms, made.slo_of("b").e2e_ms) == (None, 7)


@each_row("factor", [math.inf, math.nan, 0.0, -1.0])
def test_durations_are_scaled_by_numbers(factor: float) -> None:
    with pytest.raises(ScenarioError, match="a positive, finite number can"):
        scenario().scaled(factor)


def test_files_are_known_by_what_was_in_them(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("3\n5\n")
    (tmp_path / "c.json").write_text("[]")
    lengths = {"distribution": "file", "file": "lengths.txt"}
    classes = [request_class() | {"output_tokens": lengths}, {"name": "b", "conversations": {"file": "c.json"}}]
    data = {"phases": [{"duration_s": 1, "rate": 1}], "classes": classes}
    made = validate_scenario(data, tmp_path, "s.toml").scaled(2)
    (tmp_path / "c.json").write_text("changed since")
    assert made.files == {
        "lengths.txt": hashlib.sha256(b"3\n5\n").hexdigest(),
        "c.json": hashlib.sha256(b"[]").hexdigest(),
    }
    (tmp_path / "lengths.txt").write_bytes(b"\xff")
    with pytest.raises(ScenarioError, match=r"lengths.txt: not UTF-8 text"):
        validate_scenario(data, tmp_path, "s.toml")
