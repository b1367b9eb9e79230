"""The table of GPUs: what it says, what it refuses, and which precisions a chip can compute."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from inflight.errors import DeploymentError
from inflight.export.plan import gpus
from inflight.export.plan.gpus import GPUS, cpu_gpu, find_gpu, known_gpus, measure_cpu
from inflight.export.plan.precision import PRECISIONS, resolve_kv_cache, resolve_precision
from inflight.machine import Machine, Versions
from inflight.manifest import MINIMUM_COMPUTE_CAPABILITY
from tests.support.tables import each_row

NAMES = "a10g l4 a100-40 a100-80 l40s h100 h100-pcie h200 gh200 b200 gb200 rtx4090 rtx5090 rtxpro6000".split()


def test_the_table_has_the_gpus_that_are_promised() -> None:
    assert list(known_gpus()) == NAMES


def test_every_figure_of_the_table_has_its_source_and_is_dense() -> None:
    for gpu in known_gpus().values():
        assert set(gpu.sources) == {"memory", "dense_tflops", "interconnect", "price"}
        assert re.match(r"assumption, 202\d-\d\d: ", gpu.sources["price"]), gpu.name
        # The driver never reports more than the datasheet promises, and keeps back less than a tenth.
        assert 0.9 * gpu.marketed_gb * 1e9 < gpu.memory_bytes < 1.08 * gpu.marketed_gb * 1e9, gpu.name
        for wide, narrow in (("fp16", "fp8"), ("fp8", "nvfp4")):
            if narrow in gpu.dense_tflops:
                ratio = gpu.dense_tflops[narrow] / gpu.dense_tflops[wide]
                assert 1.9 < ratio < 4.1, f"{gpu.name}: {narrow} is {ratio:.2f} times {wide}"


@each_row(
    ("name", "arithmetic", "sparse"),
    [
        ("l4", "fp8", 485),
        ("l40s", "fp8", 1466),
        ("a100-80", "fp16", 624),
        ("h100", "fp8", 3958),
        ("h100-pcie", "fp16", 1513),
        ("h200", "fp16", 1979),
        ("b200", "nvfp4", 18_000),
        ("gb200", "fp8", 10_000),
        ("rtx5090", "nvfp4", 3352),
    ],
)
def test_datasheets_print_twice_the_dense_figure(name: str, arithmetic: str, sparse: float) -> None:
    assert known_gpus()[name].dense_tflops[arithmetic] == pytest.approx(sparse / 2, rel=0.005)


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(DeploymentError, match=r"GPU 'h10' is not in gpus.toml \(did you mean 'h100'\?\); known: a10g"):
        find_gpu("h10")


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('price = "assumption, 2025-06: Amazon EC2 g6.xlarge"', "", "l4: sources has no entry for price"),
        ("memory_mib = 23034", "memory_mib = -1", "l4.memory_mib: Input should be greater than 0"),
        ("memory_mib = 23034", "memory_gib = 22.5", "l4.memory_mib: Field required"),
        ('compute_capability = "8.9"', 'compute_capability = "8.0"', "l4: dense_tflops has fp8, which begins with"),
        ("fp16 = 121, fp8", "fp17 = 121, fp8", "l4.dense_tflops.fp17"),
        ("[l4]", "[l4", "not valid TOML"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, old: str, new: str, fault: str) -> None:
    text = GPUS.read_text()
    table = text[text.index("[l4]") : text.index("[a100-40]")]
    assert old in table
    (tmp_path / "gpus.toml").write_text(table.replace(old, new))
    with pytest.raises(DeploymentError) as caught:
        known_gpus(tmp_path / "gpus.toml")
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value) or "TOML" in fault


@each_row(
    ("name", "precision", "instead"),
    [
        ("a100-80", "fp8", "int8 or int4-awq"),
        ("a10g", "w4a8-awq", "int4-awq"),
        ("h100", "nvfp4", "fp8"),
        ("l4", "nvfp4", "int4-awq"),
        ("h100", "float32", "bf16 or fp16"),
        ("h100", "fp9", "did you mean 'fp8'"),
    ],
)
def test_a_precision_that_a_chip_cannot_compute_is_refused(name: str, precision: str, instead: str) -> None:
    with pytest.raises(DeploymentError, match=f"precision .?{precision}") as caught:
        resolve_precision(precision, find_gpu(name), "bfloat16")
    assert instead in str(caught.value)


def test_precisions_begin_where_deployments_are_served() -> None:
    """What ``inflight build`` makes for a chip, ``inflight serve`` takes there."""
    for precision in PRECISIONS.values():
        if precision.name in MINIMUM_COMPUTE_CAPABILITY:
            assert precision.first_capability == MINIMUM_COMPUTE_CAPABILITY[precision.name]
        else:
            assert precision.first_capability <= (8, 0)


def test_precisions_begin_where_the_chips_do() -> None:
    first = {
        precision: [gpu.name for gpu in known_gpus().values() if _computes(precision, gpu.name)]
        for precision in PRECISIONS
    }
    assert first["nvfp4"] == ["b200", "gb200", "rtx5090", "rtxpro6000"]
    assert set(NAMES) - set(first["fp8"]) == {"a10g", "a100-40", "a100-80"}
    assert first["int4-awq"] == first["int8"] == first["bf16"] == NAMES
    assert first["float32"] == []


def _computes(precision: str, gpu: str) -> bool:
    try:
        resolve_precision(precision, find_gpu(gpu), "bfloat16")
    except DeploymentError:
        return False
    return True


def test_the_kv_cache_is_fp8_where_the_precision_is_calibrated_for_it() -> None:
    h100, a100 = find_gpu("h100"), find_gpu("a100-80")
    assert resolve_kv_cache("auto", h100, PRECISIONS["fp8"]) == ("fp8", 1)
    assert resolve_kv_cache("auto", h100, PRECISIONS["int4-awq"]) == ("bf16", 2)
    assert resolve_kv_cache("bf16", h100, PRECISIONS["fp8"]) == ("bf16", 2)
    cpu, quantized = cpu_gpu(80_000, 20, {"float32": 0.1}), replace(PRECISIONS["int4-awq"], base=4)
    for computed in (PRECISIONS["float32"], quantized):
        assert resolve_kv_cache("auto", cpu, computed) == ("float32", 4)
        assert resolve_kv_cache("bf16", cpu, computed) == ("bf16", 2)
    assert resolve_kv_cache("auto", h100, PRECISIONS["fp16"]) == ("fp16", 2)
    with pytest.raises(DeploymentError, match="kv_cache fp8: a100-80 has compute capability 8.0.*use bf16"):
        resolve_kv_cache("fp8", a100, PRECISIONS["bf16"])


def _gpu_here(monkeypatch: pytest.MonkeyPatch, *names: str) -> str:
    """Return what a machine is found to have whose driver tells these names."""
    monkeypatch.setattr(Machine, "detect", classmethod(lambda cls: cls(Versions(), names, ((8, 9),) * len(names))))
    return gpus.gpu_here()


def test_auto_is_the_gpu_here_or_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _gpu_here(monkeypatch) == "cpu"
    assert find_gpu(gpus.gpu_here()).is_cpu
    assert find_gpu(_gpu_here(monkeypatch, "NVIDIA L4")).name == "l4"
    assert _gpu_here(monkeypatch, "NVIDIA A100-SXM4-40GB") == "a100-40"
    assert _gpu_here(monkeypatch, "NVIDIA H100 80GB HBM3") == "h100"
    assert _gpu_here(monkeypatch, "NVIDIA RTX PRO 6000 Blackwell Workstation Edition") == "rtxpro6000"
    with pytest.raises(DeploymentError, match="'Tesla K80', is not in gpus.toml.*--gpu"):
        _gpu_here(monkeypatch, "Tesla K80")


@each_row("name", ["NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA RTX PRO 6000 Blackwell Server Edition"])
def test_a_card_of_other_figures_is_not_taken_for_its_sister(name: str) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(DeploymentError, match=f"{name!r}, is not in gpus.toml; name a similar one with --gpu"),
    ):
        _gpu_here(patch, name)


@pytest.mark.proof
def test_this_machine_is_measured_in_a_moment() -> None:
    started = time.process_time()
    gpu = measure_cpu()
    assert time.process_time() - started < 60
    assert gpu.is_cpu
    assert 0.5 < gpu.bandwidth_gb_s < 2000
    assert 1e-3 < gpu.dense_tflops["float32"] < 50
    assert gpu.memory_mib > 100
