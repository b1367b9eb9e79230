"""The bench of plans: a deployment that a build has written, served to one stream and to several."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planned import measure
from inflight.errors import InflightError
from inflight.export.build.request import BuildRequest
from inflight.export.plan.plan import PlanRequest
from inflight.machine import Versions
from inflight.manifest import Inputs, Manifest, read_manifest, write_manifest
from inflight.resources import DEMO
from tests.export.support.building import run


def test_a_plan_without_a_full_batch_is_named(tmp_path: Path) -> None:
    made: dict[str, Any] = {
        "created": datetime.now(UTC), "command": "", "engine": "pytorch", "flow": "portable", "model": "m",
        "precision": "float32", "inputs": Inputs(checkpoint="", settings=""), "versions": Versions(),
    }  # fmt: skip
    write_manifest(Manifest(**made, plan={"unloaded": {"ttft_ms": 1.0}}), tmp_path)
    with pytest.raises(InflightError, match="does not predict what a full batch meets; build it again for a CPU"):
        list(measure([tmp_path]))


@pytest.mark.proof
def test_a_build_is_served_to_as_many_as_its_plan_says(tmp_path: Path) -> None:
    plan = PlanRequest("float32", input_tokens=32, output_tokens=8)
    run(BuildRequest(DEMO / "model", "cpu", "float32", "", tmp_path / "demo", tmp_path / "work", plan=plan))
    [result] = measure([tmp_path / "demo"])
    planned_as = read_manifest(tmp_path / "demo").plan
    assert [row["streams"] for row in result.rows] == [1, planned_as["max_batch_size"]]
    for row in result.rows:
        assert all(float(row[f"{name} served, ms"]) > 0 for name in ("TTFT", "ITL"))
    assert result.rows[0]["TTFT planned, ms"] == pytest.approx(planned_as["unloaded"]["ttft_ms"], rel=0.01, abs=0.1)
    assert result.rows[1]["TTFT planned, ms"] == pytest.approx(planned_as["full"]["ttft_ms"], rel=0.01, abs=0.1)
