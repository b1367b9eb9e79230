"""Plans held to calculations by hand, and to what they promise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import DeploymentError
from inflight.export.plan.gpus import find_gpu, known_gpus
from inflight.export.plan.memory import activation_bytes
from inflight.export.plan.plan import Plan, PlanRequest
from inflight.export.plan.planner import make_plan
from tests.export.support.planning import GIB, shape
from tests.support.tables import each_row

GOLDEN = Path(__file__).with_name("plans")


def _plan(model: str, gpu: str, **request: Any) -> Plan:
    return make_plan(shape(model), find_gpu(gpu), PlanRequest(**request))


@each_row(
    ("gpu", "precision", "weights_gib", "kv_kib", "thousand_tokens"),
    [
        # (GiB of the GPU - weights - activations - 1 GiB of runtime) x 0.9 / KiB per token
        ("l4", "bf16", 14.958, 128, 43.62),  # (22.494 - 14.958 - 0.619 - 1) x 0.9 / 128 KiB
        ("a100-80", "bf16", 14.958, 128, 469.9),  # (80.000 - 14.958 - 0.310 - 1) x 0.9 / 128 KiB
        ("h100", "fp8", 8.458, 64, 1016.7),  # (79.647 - 8.458 - 1.239 - 1) x 0.9 / 64 KiB
        ("b200", "nvfp4", 5.614, 64, 2524.3),  # (179.062 - 5.614 - 1.254 - 1) x 0.9 / 64 KiB
    ],
)
def test_llama_8b_by_hand(gpu: str, precision: str, weights_gib: float, kv_kib: int, thousand_tokens: float) -> None:
    plan = _plan("llama-3.1-8b", gpu, precision=precision)
    assert (plan.tensor_parallel_size, plan.pipeline_parallel_size) == (1, 1)
    assert plan.weight_bytes / GIB == pytest.approx(weights_gib, abs=0.001)
    assert plan.memory.kv_bytes_per_token == kv_kib * 1024
    assert plan.kv_cache_tokens / 1000 == pytest.approx(thousand_tokens, rel=0.001)


def test_llama_70b_on_four_h100_by_hand() -> None:
    plan = _plan("llama-3.1-70b", "h100", precision="bf16", tensor_parallel_size=4)
    memory = plan.memory
    # A quarter of 141.1 GB, and all the norms on each GPU; 2 of 8 KV heads x 128 x key and value x 2 bytes x 80 layers.
    norms = (2 * 80 + 1) * 8192
    assert memory.weights == (2 * (70_553_706_496 - norms)) // 4 + 2 * norms
    assert memory.kv_bytes_per_token == 2 * 2 * 128 * 2 * 80
    assert memory.runtime == 1.25 * GIB
    left = 81_559 * 2**20 - memory.weights - memory.activations - memory.runtime
    assert memory.kv_cache == int(0.9 * left)
    assert plan.kv_cache_tokens == memory.kv_cache // memory.kv_bytes_per_token // 16 * 16


@each_row("gpu", [name for name, gpu in known_gpus().items() if "fp8" in gpu.dense_tflops])
def test_the_parts_of_the_memory_are_all_of_it(gpu: str) -> None:
    plan = _plan("qwen3-8b", gpu, precision="fp8")
    memory = plan.memory
    parts = (memory.weights, memory.activations, memory.runtime, memory.kv_cache, memory.reserve, memory.free)
    assert sum(parts) == memory.total == known_gpus()[gpu].memory_bytes
    assert plan.kv_cache_blocks * 16 == plan.kv_cache_tokens
    assert plan.kv_cache_tokens * memory.kv_bytes_per_token <= memory.kv_cache
    assert plan.max_batch_size <= plan.fitting_sequences
    assert plan.max_batch_size <= plan.max_tokens_per_step


def test_activations_are_the_largest_of_three_moments() -> None:
    config = shape("llama-3.1-8b")
    # The feed-forward layer: the residual and its normalized copy, gate, up and their product.
    assert activation_bytes(config, 1, 1000, 1, 2) == 1000 * 2 * (2 * 4096 + 3 * 14_336)
    assert activation_bytes(config, 2, 1000, 1, 2) == 1000 * 2 * (2 * 4096 + 3 * 14_336 // 2)
    # Few tokens that all sample: logits in 16 bits, in float32 and sorted.
    assert activation_bytes(config, 1, 100, 100, 2) == 100 * (2 * 2 * 4096 + 128_256 * 10)


def test_the_smallest_tensor_parallelism_that_fits_is_taken() -> None:
    assert _plan("llama-3.1-70b", "h200", precision="fp8").tensor_parallel_size == 1
    assert _plan("llama-3.1-70b", "h100", precision="bf16").tensor_parallel_size == 2
    assert _plan("llama-3.1-70b", "a100-40", precision="bf16").tensor_parallel_size == 4
    assert _plan("llama-3.1-70b", "l4", precision="int4-awq").tensor_parallel_size == 2


def test_pipeline_parallelism_comes_where_tensor_parallelism_ends() -> None:
    plan = _plan("llama-3.1-70b", "l4", precision="bf16")  # 141 GB; eight L4 have 189 GB
    assert (plan.tensor_parallel_size, plan.pipeline_parallel_size) == (8, 1)
    plan = _plan("llama-3.1-70b", "l4", precision="bf16", tensor_parallel_size=4)
    assert (plan.tensor_parallel_size, plan.pipeline_parallel_size) == (4, 2)
    assert plan.max_batch_size >= 1
    with pytest.raises(DeploymentError, match="do not fit into 4 GPUs of 22.5 GiB; use a smaller precision"):
        _plan("llama-3.1-70b", "l4", precision="bf16", gpus=4)
    with pytest.raises(DeploymentError, match="tensor_parallel_size is 3; .* can be shared by 1, 2, 4, 8"):
        _plan("llama-3.1-70b", "l4", precision="bf16", tensor_parallel_size=3)


def test_a_window_lets_more_sequences_fit_only_where_the_engine_frees_them() -> None:
    long = {"precision": "bf16", "input_tokens": 16_000, "output_tokens": 500}
    kept, llama = _plan("mistral-7b-v0.1", "l40s", **long), _plan("llama-3.1-8b", "l40s", **long)
    assert kept.fitting_sequences == kept.memory.kv_cache // (16_512 * 128 * 1024)  # 16,500 tokens, in whole blocks
    mistral = _plan("mistral-7b-v0.1", "l40s", **long, free_windows=True)
    assert mistral.memory.kv_bytes_per_token == llama.memory.kv_bytes_per_token
    assert mistral.fitting_sequences == mistral.memory.kv_cache // (4096 * 128 * 1024)
    assert mistral.fitting_sequences > 4 * llama.fitting_sequences


@pytest.mark.proof
@each_row(
    ("request_", "fault"),
    [
        ({"input_tokens": 0}, "input_tokens is 0; it must be at least 1"),
        ({"p95_input_tokens": 512}, "p95_input_tokens is 512; it must be at least the mean, 1024"),
        ({"cache_hit_rate": 1.0}, "cache_hit_rate is 1.0"),
        ({"rate": 0}, "rate is 0; it must be above 0"),
        ({"gpus": 0}, "gpus is 0"),
        ({"price": -1}, "price is -1"),
        ({"input_tokens": 200_000}, "a mean prompt and a mean answer have 200256 tokens; the model's longest sequence"),
        ({"p95_input_tokens": 200_000}, "a P95 prompt and a mean answer have 200256 tokens"),
        ({"excluded": ("*",), "precision": "bf16"}, "exclude: precision bf16 quantizes nothing"),
        ({"excluded": ("lm_tail",), "precision": "fp8"}, "exclude 'lm_tail' matches no linear layer"),
        ({"slo_itl_ms": 0.01}, "no group of up to 32 GPUs meets the objectives"),
        ({"kv_cache": "fp16"}, r"kv_cache 'fp16' is unknown \(did you mean 'bf16'\?\)"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(request_: dict[str, Any], fault: str) -> None:
    with pytest.raises(DeploymentError, match=fault) as caught:
        _plan("llama-3.1-8b", "h100", **request_)
    assert "\n" not in str(caught.value)


def test_a_plan_is_always_the_same_json() -> None:
    plan = _plan(
        "llama-3.1-8b", "h100", precision="fp8", rate=10, p95_input_tokens=4096, slo_itl_ms=50, slo_ttft_ms=500
    )  # fmt: skip
    text = json.dumps(plan.as_dict(), indent=1) + "\n"
    assert text == (GOLDEN / "llama-3.1-8b-h100-fp8.json").read_text()
