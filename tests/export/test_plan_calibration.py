"""Calibration: fitted to made-up measurements of known efficiencies, to the engine, and to the committed files."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from inflight.errors import DeploymentError
from inflight.export.plan.calibration import FITTED, Measured, Measurement, compare, fit, read_measurement
from inflight.export.plan.gpus import Gpu, cpu_gpu, find_gpu
from inflight.export.plan.measure import STREAMS, loads, measure
from inflight.export.plan.plan import PlanRequest
from inflight.export.plan.planner import make_plan
from inflight.export.plan.roofline import ASSUMED_GPU, ASSUMED_PYTORCH, Efficiency
from inflight.resources import ROOT
from tests.engine.support.checkpoints import checkpoint
from tests.export.support.planning import SHAPES, shape

RESULTS = ROOT / "docs/results/plan"
CPU = cpu_gpu(16_384, 30.0, {"float32": 0.1, "fp16": 0.2})
TRUTHS = [
    Efficiency(0.4, 0.3, 0.9, step_overhead_s=6e-3, sequence_overhead_s=2e-4),
    Efficiency(0.9, 0.05, 0.8, step_overhead_s=1e-3, sequence_overhead_s=3e-5),
    Efficiency(0.5, 0.3, 0.3, step_overhead_s=0.5e-3, sequence_overhead_s=4e-4),
]


def _made_up(truth: Efficiency, gpu: Gpu, precision: str, rows: list[Measured], model: str) -> Measurement:
    """Return the measurement that an engine with these efficiencies would give."""
    config = json.loads((SHAPES / model / "config.json").read_text())
    about = {"command": "", "commit": "", "machine": "", "date": "", "model": model}
    blank = Measurement.model_validate(about | {"config": config, "precision": precision, "gpu": gpu, "rows": rows})
    times = [one.predicted_ms for one in compare(blank, truth, gpu)]
    timed = [row.model_copy(update={"step_ms": ms}) for row, ms in zip(rows, times, strict=True)]
    return blank.model_copy(update={"rows": tuple(timed)})


def _row(streams: int, context: int = 0, prompt: int = 0) -> Measured:
    return Measured(
        streams=streams, context=context, prompt_tokens=prompt, prompt_steps=1 if prompt else 0, step_ms=1.0
    )


CALIBRATION_ROWS = [_row(load.streams, load.context, load.prompt) for load in loads(2048)]
OTHER_ROWS = [_row(24, 300), _row(48, 1500), _row(3, 1000), _row(12, 200, 100), _row(0, 0, 900)]


@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize(("gpu", "precision"), [(CPU, "float32"), (find_gpu("l4"), "fp8")])
def test_known_efficiencies_are_recovered(truth: Efficiency, gpu: Gpu, precision: str) -> None:
    found = fit(_made_up(truth, gpu, precision, CALIBRATION_ROWS, "gemma-3-1b"))
    for name in FITTED:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.05), name


@pytest.mark.proof
@pytest.mark.parametrize("truth", TRUTHS)
def test_what_is_fitted_holds_for_other_loads_and_through_noise(truth: Efficiency) -> None:
    measured = _made_up(truth, CPU, "float32", CALIBRATION_ROWS, "gemma-3-1b")
    noise = random.Random(1)
    rows = tuple(row.model_copy(update={"step_ms": row.step_ms * noise.uniform(0.93, 1.07)}) for row in measured.rows)
    found = fit(measured.model_copy(update={"rows": rows}))
    other = _made_up(truth, CPU, "float32", OTHER_ROWS, "llama-3.1-8b")
    assert all(abs(one.error) < 0.1 for one in compare(other, found, CPU))
    assumed = compare(other, ASSUMED_PYTORCH, CPU)
    assert any(abs(one.error) > 0.2 for one in assumed), "without a calibration the prediction would do as well"


def test_a_share_never_exceeds_the_peak() -> None:
    cached = Efficiency(4.0, 0.1, 0.5, step_overhead_s=3e-3, sequence_overhead_s=1e-4)
    found = fit(_made_up(cached, CPU, "float32", CALIBRATION_ROWS, "gemma-3-1b"))
    assert found.bandwidth == pytest.approx(1.0)


def test_a_plan_takes_the_fitted_efficiencies() -> None:
    slow = replace(ASSUMED_GPU, bandwidth=0.4)
    config, gpu, request = shape("llama-3.1-8b"), find_gpu("l4"), PlanRequest()
    assumed, fitted = make_plan(config, gpu, request), make_plan(config, gpu, request, slow)
    assert (assumed.calibrated, fitted.calibrated) == (False, True)
    assert fitted.unloaded.itl_ms > 1.9 * assumed.unloaded.itl_ms


def test_the_engine_is_measured() -> None:
    rows = measure(checkpoint("llama"), "float32", rounds=1)
    decodes = [row for row in rows if not row.prompt_tokens]
    assert [row.streams for row in decodes] == list(STREAMS)
    assert {row.prompt_tokens for row in rows} == {0, 64, 128, 256, 480}
    # More streams take less per token. That they take longer per step is too little to see on a busy machine.
    assert decodes[-1].tokens_per_second > decodes[0].tokens_per_second


def test_a_model_of_short_sequences_is_not_measured(tmp_path: Path) -> None:
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 127}))
    with pytest.raises(DeploymentError, match="longest sequence has 127 tokens; 128 are needed"):
        measure(tmp_path, "float32", rounds=1)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('"streams": 1', '"streams": -1', "rows.0.streams"),
        ('"streams": 1', '"streams": 0', "neither streams nor a prompt"),
        ('"prompt_tokens": 0', '"prompt_tokens": 64', "prompt_steps is 0, and there is a prompt"),
        ('"precision"', '"precisoin"', "precision: Field required"),
        ("{", "", "not a measurement of `inflight plan --measure`"),
    ],
)
def test_a_wrong_measurement_is_refused(tmp_path: Path, old: str, new: str, fault: str) -> None:
    path = tmp_path / "measured.json"
    path.write_text((RESULTS / "calibration.json").read_text().replace(old, new, 1))
    with pytest.raises(DeploymentError) as caught:
        read_measurement(path)
    assert fault in str(caught.value)
    with pytest.raises(DeploymentError, match="cannot be read"):
        read_measurement(tmp_path / "missing.json")


def test_the_committed_measurements_hold_the_promise() -> None:
    """Decode throughput within 25 % at 1, 8 and 32 streams, calibrated on one run and checked with another."""
    calibration, check = read_measurement(RESULTS / "calibration.json"), read_measurement(RESULTS / "check.json")
    assert calibration.rows != check.rows
    compared = compare(check, fit(calibration), calibration.gpu)
    decodes = {(one.row.streams, one.row.context): one.error for one in compared if not one.row.prompt_tokens}
    assert {streams for streams, _ in decodes} == set(STREAMS)
    assert all(abs(error) < 0.25 for error in decodes.values()), decodes
