"""What all tests of plans and builds share: this machine measured once, one tiny checkpoint, one FP8 build of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from inflight.export.build.request import BuildRequest, DataRequest
from inflight.export.data import Source
from inflight.export.plan.plan import PlanRequest
from tests.export.support.building import LENIENT, Built, run
from tests.export.support.tiny import make_checkpoint, make_data
from tests.support.measured_once import this_machine_measured_once


@pytest.fixture(scope="session", autouse=True)
def _this_machine_is_measured_once() -> Iterator[None]:
    with this_machine_measured_once():
        yield


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, data and lenient thresholds, for all tests of builds."""
    directory = tmp_path_factory.mktemp("build")
    make_checkpoint(directory / "tiny")
    make_data(directory / "data.jsonl")
    (directory / "settings.yaml").write_text(yaml.safe_dump({"engine": {"dtype": "float32"}, "quality": LENIENT}))
    return directory


@pytest.fixture(scope="session")
def request_of(ground: Path) -> Callable[..., BuildRequest]:
    """Make requests; ``changes`` are fields of BuildRequest."""

    def make(**changes: Any) -> BuildRequest:
        data = DataRequest((Source(ground / "data.jsonl"),), 12, 64, (Source(ground / "data.jsonl"),), 12, 3, 256)
        fields: dict[str, Any] = {
            "model": ground / "tiny",
            "gpu": "cpu",
            "precision": "fp8",
            "command": "inflight build --model tiny --gpu cpu --precision fp8",
            "output": ground / "out",
            "work": ground / "work",
            "plan": PlanRequest(input_tokens=64, output_tokens=32),
            "data": data,
            "settings": ground / "settings.yaml",
        }
        return BuildRequest(**fields | changes)

    return make


@pytest.fixture(scope="session")
def built(request_of: Callable[..., BuildRequest]) -> Built:
    """The FP8 build that several tests look at."""
    return run(request_of())[0]
