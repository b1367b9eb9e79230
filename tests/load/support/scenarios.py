"""Scenarios for the tests, in as few words as they need."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from inflight.load.scenario import Scenario, validate_scenario
from inflight.load.workload import PromptWriter, Workload
from inflight.resources import DEMO


def fixed(value: int) -> dict[str, Any]:
    return {"distribution": "fixed", "value": value}


def request_class(name: str = "a", prompt: int = 20, output: int = 8, **more: Any) -> dict[str, Any]:
    return {"name": name, "prompt_tokens": fixed(prompt), "output_tokens": fixed(output)} | more


def scenario(*classes: dict[str, Any], phases: list[dict[str, Any]] | None = None, **more: Any) -> Scenario:
    """Return a scenario; without phases, one second with two requests at any time."""
    data = {
        "name": "test",
        "phases": phases or [{"duration_s": 1, "concurrency": 2}],
        "classes": list(classes) or [request_class()],
    }
    return validate_scenario(data | more, Path(), "test.toml")


@cache
def demo_writer() -> PromptWriter:
    return PromptWriter.of_checkpoint(DEMO / "model")


def workload(*classes: dict[str, Any], seed: int | None = None, **more: Any) -> Workload:
    return Workload(scenario(*classes, **more), demo_writer(), seed)
