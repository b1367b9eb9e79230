"""Plans by the measured native step: each scheme by its own speed, batches and lengths as `inflight serve` has them."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from inflight.engine.models.reading import read_model_config
from inflight.engine.native.bindings import Packed
from inflight.engine.quant.config import LayerQuantization
from inflight.errors import DeploymentError
from inflight.export.model_shape import read_shape, stored_weights
from inflight.export.plan.calibration import predicted_seconds
from inflight.export.plan.gpus import Gpu, measure_cpu, native_step
from inflight.export.plan.measure import measure
from inflight.export.plan.native_measure import TOKENS, measure_native
from inflight.export.plan.native_speed import NativeSpeed
from inflight.export.plan.plan import Plan, PlanRequest
from inflight.export.plan.planner import make_plan
from inflight.export.plan.precision import PRECISIONS, resolve_kv_cache, resolve_precision
from inflight.export.plan.roofline import AS_MEASURED, Roofline, Step
from inflight.export.plan.shape import Parallel, Shape
from inflight.export.plan.stored import packed_as
from inflight.export.quantize.modelopt import SCHEMES
from inflight.resources import DEMO, ROOT
from inflight.settings.batching import ON_CPU, SMALLEST_CHUNK
from inflight.settings.kv_cache import TOKENS_PER_SEQUENCE
from inflight.text.files import read_json
from tests.engine.support.packed_models import published
from tests.export.support.planning import NATIVE, cpu, shape
from tests.support.tables import each_row

_PLANNED_WITHIN = 2.0
"""How many times as long, or as short, a step may be as it was planned."""


def _faster(packed: Packed, times: float) -> Gpu:
    """Return the made-up machine with one kind of weights multiplied so many times as fast."""
    weights = dict(NATIVE.weights) | {packed.name: {n: times * rate for n, rate in NATIVE.weights[packed.name].items()}}
    return cpu(native=NATIVE.model_copy(update={"weights": weights}))


def _plan(gpu: Gpu, name: str = "llama-3.1-8b", **request: Any) -> Plan:
    return make_plan(shape(name), gpu, PlanRequest(**request))


def test_times_lie_between_those_that_were_measured() -> None:
    rates = {1: 40.0, 4: 20.0, 8: 10.0, 32: 4.0}
    speed = NativeSpeed(instruction_set="avx2", threads=1, weights={"INT8_SUMS": rates}, attention={})
    seconds = [speed.seconds(Packed.INT8_SUMS, 1e9, tokens) for tokens in (1, 4, 6, 8, 32, 64, 512)]
    assert seconds == pytest.approx([1 / 40, 1 / 20, 0.075, 1 / 10, 1 / 4, 1 / 2, 4])


@each_row(
    ("precision", "packed"),
    [
        ("float32", Packed.FLOAT32),
        ("bf16", Packed.BFLOAT16),
        ("fp8", Packed.E4M3),
        ("int8", Packed.INT8_COLUMNS),
        ("int4-awq", Packed.INT4),
        ("w4a8-awq", Packed.E4M3),
    ],
)
def test_a_precision_is_as_fast_as_its_own_weights(precision: str, packed: Packed) -> None:
    plain, other = _plan(cpu(), precision=precision), Packed.MXFP4
    assert _plan(_faster(other, 3), precision=precision).unloaded == plain.unloaded
    fast = _plan(_faster(packed, 3), precision=precision).unloaded
    assert 1.5 < plain.unloaded.itl_ms / fast.itl_ms < 3
    assert 1.5 < plain.unloaded.ttft_ms / fast.ttft_ms < 3


def test_precisions_are_packed_as_the_engine_packs_what_a_build_writes() -> None:
    for name, scheme in SCHEMES.items():
        held = LayerQuantization(scheme.algorithm, PRECISIONS[name].group)
        assert packed_as(held, 1024, 1024) == PRECISIONS[name].packed, name


@each_row(
    ("name", "packed"),
    [
        ("awq", Packed.INT4_MINIMUMS),
        ("mxfp4", Packed.MXFP4),
        ("int8", Packed.INT8_COLUMNS),
        ("int8, inputs", Packed.INT8_SUMS),
    ],
)
def test_a_quantized_checkpoint_is_as_fast_as_what_it_is_packed_as(name: str, packed: Packed) -> None:
    directory = published(name).directory
    config = read_shape(directory)
    stored, request = stored_weights(directory, config), PlanRequest(input_tokens=100, output_tokens=20)
    plain, fast, other = (
        make_plan(config, gpu, request, stored=stored).unloaded.ttft_ms
        for gpu in (cpu(), _faster(packed, 3), _faster(Packed.INT8_MINIMUMS, 3))
    )
    assert fast < plain == other


def test_each_linear_of_a_checkpoint_has_its_own_speed() -> None:
    directory = published("awq").directory
    config = read_shape(directory)
    stored = stored_weights(directory, config)
    assert stored is not None
    mixed = replace(
        stored, packed={name: Packed.MXFP4 if "mlp" in name else kind for name, kind in stored.packed.items()}
    )
    request = PlanRequest(input_tokens=100, output_tokens=20)
    plain, one, other = (
        make_plan(config, gpu, request, stored=mixed).unloaded.ttft_ms
        for gpu in (cpu(), _faster(Packed.MXFP4, 3), _faster(Packed.INT4_MINIMUMS, 3))
    )
    assert one < plain
    assert other < plain


def test_what_is_not_quantized_has_the_checkpoint_s_own_type() -> None:
    for dtype, base in (("bfloat16", 2), ("float16", 4), ("float32", 4)):
        precision = resolve_precision("int8", cpu(), dtype)
        assert precision.base == base
        assert resolve_kv_cache("auto", cpu(), precision)[1] == base


def test_without_the_native_step_quantized_weights_have_no_speed() -> None:
    plan = _plan(cpu(native=None), precision="int8")
    assert "PyTorch computes this model's steps" in str(plan.unpredicted)
    assert _plan(cpu(), precision="int8").predicted


def test_an_expert_is_multiplied_by_the_tokens_that_are_routed_to_it() -> None:
    file = ROOT / "tests/facts/published_configs/Qwen3MoeForCausalLM.json"
    config = read_model_config(json.loads(file.read_text())["config"])
    [stage] = Shape(config, PRECISIONS["bf16"], "bf16", 2).stages(Parallel())
    roofline = Roofline([stage], cpu(), Parallel(), AS_MEASURED)
    one, many = roofline.time(Step(1)), roofline.time(Step(16))
    assert one.compute == pytest.approx(0), "one row of each expert that is read"
    assert one.bandwidth == pytest.approx((stage.read_bytes(1) + stage.head_bytes) / 40e9)
    assert many.compute < many.bandwidth, "most experts have one or two of the tokens"


@each_row("precision", ["float32", "bf16", "int8", "fp8", "int4-awq"])
def test_a_cpu_runs_as_many_as_serve_does_as_long_as_the_model_takes(precision: str) -> None:
    plan = _plan(cpu(), precision=precision)
    assert plan.max_batch_size == ON_CPU.sequences
    assert plan.max_tokens_per_step == ON_CPU.tokens
    assert plan.prefill_chunk_tokens is not None
    assert SMALLEST_CHUNK <= plan.prefill_chunk_tokens <= ON_CPU.tokens
    assert plan.max_sequence_length == shape("llama-3.1-8b").max_position_embeddings
    assert plan.kv_cache_tokens >= ON_CPU.sequences * TOKENS_PER_SEQUENCE
    assert plan.memory.free > 0, "a machine has others that need memory"


def test_short_requests_do_not_make_the_context_short() -> None:
    plan = _plan(cpu(), "gemma-3-1b", precision="bf16", input_tokens=16, output_tokens=16)
    assert plan.max_sequence_length == shape("gemma-3-1b").max_position_embeddings


def test_where_memory_is_short_the_context_is_what_fits() -> None:
    plan = _plan(cpu(20_000), precision="bf16")
    assert plan.max_sequence_length == plan.kv_cache_tokens < shape("llama-3.1-8b").max_position_embeddings
    assert plan.memory.free < 2**20 * plan.memory.kv_bytes_per_token


def test_an_objective_makes_the_batch_smaller() -> None:
    free = _plan(cpu(), precision="int8")
    slo = free.curve[1].itl_ms
    plan = _plan(cpu(), precision="int8", slo_itl_ms=slo)
    assert plan.max_batch_size < free.max_batch_size
    assert plan.capacity.itl_ms <= slo
    assert _plan(cpu(), precision="int8", rate=free.capacity.requests_per_second / 2).batch_limit == "throughput"


def test_an_instruction_set_that_is_not_here_is_refused() -> None:
    with pytest.raises(DeploymentError, match="engine.cpu_step is sse9: no kernels for it are here"):
        native_step("sse9")
    assert native_step("pytorch") is None


@pytest.fixture
def one_core() -> Iterator[None]:
    """One core, so that one thread computes: its processor time does not depend on who else uses the machine."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.proof
@pytest.mark.usefixtures("one_core")
def test_the_demo_s_steps_take_as_long_as_a_measured_machine_says() -> None:
    gpu = measure_cpu()
    assert gpu.native is not None
    assert gpu.native.threads == 1
    config = read_model_config(read_json(DEMO / "model/config.json"))
    for name, dtype in (("float32", "float32"), ("bf16", "bfloat16")):
        precision = resolve_precision(name, gpu, config.dtype)
        planned = Shape(config, precision, *resolve_kv_cache("auto", gpu, precision))
        rows = measure(DEMO / "model", dtype, rounds=2)
        alone = replace(AS_MEASURED, step_overhead_s=5e-4, sequence_overhead_s=5e-5)  # without a server's stages
        times = predicted_seconds(alone, gpu, planned, [row.step for row in rows])
        ratios = [1000 * time / row.step_ms for time, row in zip(times, rows, strict=True)]
        assert 1 / _PLANNED_WITHIN < statistics.median(ratios) < _PLANNED_WITHIN, dict(zip(rows, ratios, strict=True))


@pytest.mark.proof
@pytest.mark.usefixtures("one_core")
def test_all_kinds_of_weights_are_measured() -> None:
    step = native_step()
    assert step is not None
    parts = list[int]()
    speed = measure_native(step, 1, lambda _what, done, _all: parts.append(done))
    assert set(speed.weights) == {packed.name for packed in Packed} - {"INT8"}, "no plan is in engine.weights: int8"
    assert all(list(rates) == list(TOKENS) for rates in speed.weights.values())
    assert parts == list(range(len(parts)))
    # By the byte of a weight, many tokens take longer than one.
    for name, rates in speed.weights.items():
        assert rates[1] > rates[TOKENS[-1]], name
    assert NativeSpeed.model_validate_json(speed.model_dump_json()) == speed
