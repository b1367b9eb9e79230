"""Which step computes on a CPU: the native library or PyTorch, and what the log and the errors say of it."""

from __future__ import annotations

import itertools
import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch

from inflight.engine.attention.torch_backend import QueryRange
from inflight.engine.config import EngineConfig
from inflight.engine.native import bindings, prepare
from inflight.engine.native.model import NativeModel
from inflight.errors import DeploymentError
from inflight.settings.deployment import EngineSettings
from tests.engine.support.checkpoints import checkpoint
from tests.engine.support.driving import ask, load, run
from tests.engine.support.native import (
    CPU,
    SETS,
    by_pytorch,
    each_set,
    make_pool,
    random_decoder,
)


@each_set
def test_the_engine_serves_with_it(instruction_set: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    engine = load(checkpoint("llama"), cpu_step=instruction_set, threads=3)
    assert f"kernels for {instruction_set} compute the steps, with 3 threads" in caplog.text
    assert "PyTorch computes" not in caplog.text
    request = ask([1, 2, 3], 5)
    by_pytorch_ = load(checkpoint("llama"), cpu_step="pytorch")
    assert run(engine, [request])[request.key].tokens == run(by_pytorch_, [request])[request.key].tokens


@pytest.mark.skipif(not SETS, reason="no kernels run here")
@pytest.mark.parametrize("name", ["_take", "use"])
def test_what_the_library_refuses_too_late_for_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that the library has are PyTorch's no more."""
    original = getattr(NativeModel, name)
    calls = itertools.count()

    def refuse_second(*arguments: Any) -> None:
        if name == "use" or next(calls):
            raise bindings.NativeError("weight 1 is odd")
        original(*arguments)

    monkeypatch.setattr(NativeModel, name, refuse_second)
    words = "the native step cannot compute this model: weight 1 is odd; `engine.cpu_step: pytorch` computes it"
    with pytest.raises(DeploymentError, match=words):
        load(checkpoint("llama"))


@pytest.mark.parametrize(
    ("settings", "threads", "words"),
    [
        pytest.param({}, 3, "kernels share a step", marks=pytest.mark.skipif(not SETS, reason="no kernels run here")),
        ({"cpu_step": "pytorch"}, 2, "PyTorch waits for its slowest thread"),
        ({"threads": 1}, 1, "the deployment says so"),
    ],
    ids=["kernels", "PyTorch", "as told"],
)
def test_the_log_says_how_many_threads_compute_and_why(
    settings: dict[str, Any],
    threads: int,
    words: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    before = torch.get_num_threads()
    try:
        load(checkpoint("llama"), **settings)
    finally:
        torch.set_num_threads(before)
    [line] = [one for one in caplog.messages if one.startswith("engine.threads is ")]
    assert line.startswith(f"engine.threads is {threads}: ")
    assert words in line


@pytest.mark.parametrize(
    ("reason", "spoil"),
    [
        ("the native step was not built", lambda patch: patch.setattr(bindings, "LIBRARY", Path("missing.so"))),
        ("this processor has no avx2", lambda patch: patch.setattr(prepare, "instruction_sets", list)),
    ],
    ids=["no library", "an old processor"],
)
def test_pytorch_computes_where_there_are_no_kernels(
    reason: str, spoil: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bindings.load_library.cache_clear()
    assert callable(spoil)
    spoil(monkeypatch)
    caplog.set_level("INFO")
    engine = load(checkpoint("llama"))
    assert f"PyTorch computes the steps: {reason}" in caplog.text
    request = ask([1, 2, 3], 5)
    assert len(run(engine, [request])[request.key].tokens) == 5
    with pytest.raises(DeploymentError, match=f"engine.cpu_step is avx2: {reason}"):
        load(checkpoint("llama"), cpu_step="avx2")
    bindings.load_library.cache_clear()


@pytest.mark.skipif(not SETS, reason="no kernels run here")
def test_pytorch_computes_what_the_kernels_do_not(caplog: pytest.LogCaptureFixture) -> None:
    """More heads than a task has rows share one head of keys; the model keeps its weights."""
    caplog.set_level("INFO")
    model = random_decoder("many heads")
    assert prepare.native_model(model, CPU, "auto", 1) is None
    assert "PyTorch computes the steps: 100 heads share 1 heads of keys" in caplog.text
    pool = make_pool(model, "float32", 4, 16)
    assert by_pytorch(model, pool, 16, [1, 2, 3], [QueryRange(0, 0, 3, [0])]).isfinite().all()
    with pytest.raises(DeploymentError, match=f"engine.cpu_step is {SETS[0]}: 100 heads"):
        prepare.native_model(model, CPU, SETS[0], 1)


def test_the_kernels_of_this_checkout_are_built_where_they_can_be() -> None:
    """Else all tests of them would be skipped, and nobody would see it."""
    build = runpy.run_path(str(Path(__file__).parents[2] / "native/build.py"))
    if build["find_compiler"]() is None:
        pytest.skip("no C++ compiler is installed")
    assert build["is_built"]()
    assert bool(SETS) == torch.cpu._is_avx2_supported()


@pytest.mark.skipif(not SETS or shutil.which("nm") is None, reason="it needs the kernels and nm")
def test_no_kernel_calls_a_function_for_each_vector() -> None:
    """A function of ``Isa`` that the compiler did not inline is a symbol; a call per vector once cost a third."""
    symbols = subprocess.run(["nm", "-C", bindings.LIBRARY], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"::Isa::(\w+)\(", symbols)) <= {"transpose"}


@pytest.mark.parametrize(("gain", "first"), [(0.5, "avx512_vnni"), (1.0, "avx512_bf16")])
def test_products_of_bfloat16_are_left_out_where_they_are_slow(
    gain: float, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = SimpleNamespace(inflight_has=lambda _: 1, inflight_bf16_gain=lambda _: gain)
    monkeypatch.setattr(bindings, "load_library", lambda: there)
    bindings.bf16_gain.cache_clear()
    found = bindings.instruction_sets()
    bindings.bf16_gain.cache_clear()
    assert (found[0], found[-1], set(found)) == (first, "amx", {*bindings.INSTRUCTION_SETS})


@pytest.mark.skipif("avx512_bf16" not in SETS, reason="this processor has no products of bfloat16")
def test_the_gain_of_bfloat16_is_measured_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert 0.25 < bindings.bf16_gain() < 5
    monkeypatch.setattr(bindings, "bf16_gain", lambda: 0.5)
    monkeypatch.setattr(prepare, "bf16_gain", lambda: 0.5)
    caplog.set_level("INFO")
    prepare.native_model(random_decoder("llama"), CPU, "auto", 1)
    assert "kernels for avx512_vnni compute the steps, with 1 threads; this processor's products of " in caplog.text
    assert "bfloat16 are 0.50 times as fast as those of float32" in caplog.text


def test_the_setting_names_the_instruction_sets() -> None:
    of_engine = get_args(get_type_hints(EngineConfig)["cpu_step"])
    assert of_engine == get_args(EngineSettings.model_fields["cpu_step"].annotation)
    assert set(of_engine) == {"auto", "pytorch", *bindings.INSTRUCTION_SETS}


@pytest.mark.parametrize(
    ("device", "cpu_step", "reason"),
    [
        (torch.device("cuda:0"), "auto", "the engine runs on cuda:0"),
        (CPU, "pytorch", "engine.cpu_step is pytorch"),
    ],
    ids=["on a GPU", "by PyTorch"],
)
def test_weights_in_int8_need_the_kernels(device: torch.device, cpu_step: str, reason: str) -> None:
    with pytest.raises(DeploymentError, match=re.escape(f"engine.weights is int8: {reason}")):
        prepare.native_model(random_decoder("llama"), device, cpu_step, 1, "int8")


def test_an_instruction_set_needs_a_cpu() -> None:
    with pytest.raises(DeploymentError, match=re.escape("engine.cpu_step is avx2: the engine runs on cuda:0")):
        prepare.native_model(random_decoder("llama"), torch.device("cuda:0"), "avx2", 1)
    assert prepare.native_model(random_decoder("llama"), torch.device("cuda:0"), "auto", 1) is None


@pytest.mark.skipif(not SETS, reason="no kernels run here")
def test_a_model_gives_up_its_weights() -> None:
    """They are in memory once: what PyTorch had is freed."""
    model = random_decoder("biases")
    assert prepare.native_model(model, CPU, "auto", 1) is not None
    assert not model.model.layers[0].self_attn.qkv_proj.weight.numel()
    assert model.lm_head.weight is model.model.embed_tokens.weight
