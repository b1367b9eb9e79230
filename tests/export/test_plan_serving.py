"""Rooflines, the steady state under a load, fleets, and the ranking."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from inflight.export.plan.gpus import find_gpu, known_gpus
from inflight.export.plan.plan import Plan, PlanRequest
from inflight.export.plan.planner import make_plan, rank
from inflight.export.plan.precision import PRECISIONS
from inflight.export.plan.roofline import ASSUMED_GPU, Efficiency, Roofline, Step
from inflight.export.plan.serving import Serving, steady_batch
from inflight.export.plan.shape import Parallel, Shape
from tests.export.support.planning import shape

IDEAL = Efficiency(1, 1, 1, step_overhead_s=0, sequence_overhead_s=0, interconnect=1, collective_latency_s=0)


ONE = Parallel()


def _roofline(gpu: str, precision: str = "bf16", parallel: Parallel = ONE, efficiency: Efficiency = IDEAL) -> Roofline:
    stages = Shape(shape("llama-3.1-8b"), PRECISIONS[precision], "bf16", 2).stages(parallel)
    return Roofline(stages, find_gpu(gpu), parallel, efficiency)


def _plan(gpu: str = "h100", **request: Any) -> Plan:
    return make_plan(shape("llama-3.1-8b"), find_gpu(gpu), PlanRequest(**({"precision": "fp8"} | request)))


def test_one_stream_reads_all_weights_but_the_embedding_per_token() -> None:
    time = _roofline("a100-80").time(Step(decodes=1, context=1024))
    moved = 2 * (8_030_261_248 - 128_256 * 4096) + 1025 * 131_072
    assert time.total == pytest.approx(moved / 2039e9)
    assert time.binds == "bandwidth"


def test_a_long_prompt_takes_two_operations_per_weight_and_token() -> None:
    time = _roofline("a100-80").time(Step(0, prefill_tokens=4096, prefill_context=2048))
    linear = 2 * (8_030_261_248 - 2 * 128_256 * 4096 - 65 * 4096) * 4096
    attention = 32 * 4 * 4096 * 2048 * 4096
    assert time.total == pytest.approx((linear + attention) / 312e12, rel=1e-6)
    assert time.binds == "compute"


def test_fp8_halves_the_prefill_and_int4_only_the_decode() -> None:
    prefill, decode = Step(0, prefill_tokens=4096), Step(1)
    times = {
        name: [_roofline("h100", name).time(step).total for step in (prefill, decode)]
        for name in ("bf16", "fp8", "int4-awq")
    }
    assert times["fp8"][0] == pytest.approx(times["bf16"][0] / 2, rel=0.01)
    assert times["int4-awq"][0] == pytest.approx(times["bf16"][0])
    assert times["int4-awq"][1] < 0.4 * times["bf16"][1]


def test_tensor_parallelism_pays_with_all_reduces() -> None:
    step = Step(decodes=16, context=1024)
    one, four = _roofline("h100").time(step), _roofline("h100", parallel=Parallel(4)).time(step)
    assert four.bandwidth == pytest.approx(one.bandwidth / 4, rel=1e-3)
    # Two all-reduces per layer; each link carries 2 x 3/4 of 16 hidden states of 8 KiB.
    assert four.communication == pytest.approx(2 * 32 * 1.5 * 16 * 8192 / 450e9)
    slow = _roofline("l4", parallel=Parallel(4)).time(step)
    assert slow.communication > 10 * four.communication


def test_a_pipeline_keeps_its_stages_busy_and_the_latency_long() -> None:
    one, two = _roofline("h100"), _roofline("h100", parallel=Parallel(1, 2))
    alone, empty, full = Step(decodes=2), Step(decodes=256), Step(decodes=256, context=1024)
    # A token passes all the weights on either; the second stage, which has lm_head too, sets the pace.
    head = 2 * 128_256 * 4096 / 3350e9
    assert two.time(alone).bandwidth == pytest.approx(one.time(alone).bandwidth + head, rel=1e-3)
    # Each GPU reads the keys and values of its own layers, for the half of the sequences that is with it.
    reading = [roofline.time(full).bandwidth - roofline.time(empty).bandwidth for roofline in (one, two)]
    assert reading[1] == pytest.approx(reading[0] / 2, rel=1e-3)


def test_the_steady_state_obeys_little_s_law() -> None:
    request = PlanRequest(rate=5, input_tokens=1000, output_tokens=200)
    serving = Serving(_roofline("h100", efficiency=ASSUMED_GPU), request, 2048)
    point = serving.at_rate(5, 256)
    assert point is not None
    assert point.requests_per_second == pytest.approx(5)
    assert point.batch == pytest.approx(5 * 200 * point.itl_ms / 1000)
    assert point.tokens_per_second == pytest.approx(1000)
    assert serving.at_rate(1000, 256) is None


def test_latency_rises_with_the_rate_and_falls_with_the_hit_rate() -> None:
    points = [_plan(rate=rate, gpus=1).load for rate in (1, 10, 30)]
    ttft, itl = ([getattr(point, name) for point in points] for name in ("ttft_ms", "itl_ms"))
    assert ttft == sorted(ttft)
    assert itl == sorted(itl)
    cached = _plan(rate=30, gpus=1, cache_hit_rate=0.8).load
    assert cached is not None
    assert cached.ttft_ms < 0.6 * ttft[-1]


def test_more_than_the_gpus_can_hold_is_called_saturated() -> None:
    plan = _plan(rate=1000, gpus=2)
    assert plan.fleet.saturated
    assert plan.load is None
    assert plan.fleet.gpus == 2
    free = _plan(rate=1000)
    assert not free.fleet.saturated
    assert free.fleet.replicas == -(-1000 // free.capacity.requests_per_second)


def test_room_is_left_for_fluctuation() -> None:
    for most in (1, 10, 100):
        mean = steady_batch(most)
        assert mean + 1.645 * mean**0.5 == pytest.approx(most)


def test_objectives_are_kept_at_every_point_of_operation() -> None:
    plan = _plan(rate=20, slo_itl_ms=10, slo_ttft_ms=60)
    assert plan.batch_limit == "slo"
    assert plan.load is not None
    for point in (plan.capacity, plan.load):
        assert point.itl_ms <= 10
        assert point.ttft_ms <= 60
    assert plan.max_batch_size < _plan().max_batch_size


def test_an_objective_that_one_gpu_misses_takes_more_of_them() -> None:
    alone = _plan("l4", precision="bf16").unloaded.itl_ms
    plan = _plan("l4", precision="bf16", slo_itl_ms=alone / 1.5)
    assert plan.tensor_parallel_size > 1
    assert plan.unloaded.itl_ms < alone / 1.5


def test_the_price_is_that_of_all_gpus() -> None:
    plan = _plan(rate=100, price=2.0)
    assert plan.fleet.usd_per_hour == 2.0 * plan.fleet.gpus
    assert plan.fleet.usd_per_million_tokens == pytest.approx(plan.fleet.usd_per_hour / (100 * 256 * 3600) * 1e6)
    assert _plan(rate=100, price=0).fleet.usd_per_million_tokens is None


def test_the_ranking_has_the_named_gpu_as_it_was_planned() -> None:
    """With its own price, its own efficiencies and its own peaks; the others have the table's and the assumed ones."""
    config, request = shape("llama-3.1-8b"), PlanRequest(precision="fp8", price=0.01)
    fitted = make_plan(config, find_gpu("h100"), request, replace(ASSUMED_GPU, bandwidth=0.3))
    (first, *others), _ = rank(config, request, [fitted])
    assert first is fitted
    assert first.fleet.usd_per_hour == 0.01
    assert "h100" not in [plan.gpu.name for plan in others]
    assert all(plan.fleet.usd_per_hour == plan.gpu.usd_per_hour and not plan.calibrated for plan in others)


def test_the_ranking_goes_by_price_and_says_why_a_gpu_cannot() -> None:
    request = PlanRequest(precision="nvfp4", rate=100, slo_itl_ms=20, slo_ttft_ms=500, gpus=1)
    ranked, reasons = rank(shape("llama-3.1-70b"), request)
    prices = [plan.fleet.usd_per_hour for plan in ranked]
    assert prices == sorted(prices)
    assert len(ranked) + len(reasons) == len(known_gpus())
    assert "begins with 10.0" in reasons["h100"]
    assert "do not fit" in reasons["rtx5090"]
    assert "meets the objectives" in reasons["rtxpro6000"] or "do not hold" in reasons["rtxpro6000"]
    assert "hold 100 requests/s" in reasons["b200"]
    ranked, _ = rank(shape("llama-3.1-70b"), replace(request, gpus=None))
    assert "b200" in [plan.gpu.name for plan in ranked]


def test_a_chunk_bounds_the_gap_and_lets_prompts_wait() -> None:
    """Where prompts come in smaller chunks beside decodes, fewer decode at once, and a first token takes longer."""
    roofline, request = _roofline("h100"), PlanRequest(input_tokens=1024, output_tokens=128)
    whole, chunked = Serving(roofline, request, 2048), Serving(roofline, request, 2048, chunk=64)
    assert chunked.budget_batch == 64 * 128 / 1024 < whole.budget_batch
    assert chunked.alone() == whole.alone(), "nobody decodes beside it"
    assert chunked.point(4).itl_ms == pytest.approx(whole.point(4).itl_ms)
    assert chunked.point(4).ttft_ms > 2 * whole.point(4).ttft_ms


def test_a_prompt_waits_for_all_of_those_before_it() -> None:
    """In half-full steps, those before it take on average half of what one takes (M/D/1), besides the running step."""
    roofline, request = _roofline("h100"), PlanRequest(input_tokens=1000, output_tokens=100)
    serving = Serving(roofline, request, 1000, chunk=500)
    batch = 25.0
    point = serving.point(batch)
    full = roofline.time(Step(batch, 1050, 500, 500, 0.5)).total
    share = point.requests_per_second * 2 * full
    own = 2 * full
    wait = share / (2 * (1 - share)) * 2 * full
    assert point.ttft_ms == pytest.approx(1000 * (wait + own) + point.itl_ms / 2, rel=1e-6)
