"""The bench of plans: a deployment that a build has written, served to one stream and to several."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.planned import _shared, measure
from inflight.export.build.request import BuildRequest
from inflight.export.plan.plan import PlanRequest
from inflight.manifest import read_manifest
from inflight.resources import DEMO
from tests.export.support.building import run


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


def test_a_full_batch_is_the_point_at_which_as_many_ask() -> None:
    """Of two that decode in steps of 10 ms and one that waits 50 ms for its first token, three ask."""
    point = {"batch": 2.0, "requests_per_second": 20.0, "ttft_ms": 50.0, "itl_ms": 10.0, "tokens_per_second": 200.0}
    more = {"batch": 4.0, "requests_per_second": 30.0, "ttft_ms": 100.0, "itl_ms": 12.0, "tokens_per_second": 330.0}
    assert _shared([point, more], 3) == {name: point[name] for name in ("ttft_ms", "itl_ms", "tokens_per_second")}
    assert _shared([point, more], 5) == {"ttft_ms": 75.0, "itl_ms": 11.0, "tokens_per_second": 265.0}
