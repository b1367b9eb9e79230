"""The benchmark `profile` on a GPU: its kernels told apart, from events as PyTorch's profiler makes them."""

from __future__ import annotations

import io
from collections import Counter

import pytest
from rich.console import Console
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from benchmarks.profile.command import show
from benchmarks.profile.measure import Profile, summarize, summarize_kernels
from benchmarks.profile.ranges import named
from inflight.engine.model_runner import ModelRunner
from tests.engine.support.checkpoints import checkpoint
from tests.engine.support.driving import ask, load, run

ATTEND, GEMM, COPY = "_attend_kernel", "void gemm<float[4]>(float*)", "Memcpy HtoD (Pinned -> Device)"


def _event(name: str, start: float, end: float, parent: FunctionEvent | None = None, **more: object) -> FunctionEvent:
    event = FunctionEvent(0, name, 1, start, end, use_device="cuda", **more)
    if parent is not None:
        event.set_cpu_parent(parent)
        parent.append_cpu_child(event)
    return event


def _events() -> list[FunctionEvent]:
    """Two steps: each a product by an operator, an attention launched by the phase itself, and a copy."""
    events = []
    for start in (0, 1000):
        step = _event("other", start, start + 900, is_user_annotation=True)
        prepare = _event("prepare", start + 10, start + 110, step, is_user_annotation=True)
        prepare.append_kernel(COPY, 0, 7)
        prepare.append_kernel("prepare", 0, 500)  # the range as the GPU's timeline has it
        attention = _event("attention", start + 200, start + 300, step, is_user_annotation=True)
        attention.append_kernel(ATTEND, 0, 40)
        attention.append_kernel(ATTEND, 0, 20)
        mlp = _event("mlp", start + 300, start + 400, step, is_user_annotation=True)
        product = _event("aten::mm", start + 310, start + 390, mlp)
        product.append_kernel(GEMM, 0, 133)
        on_gpu = _event(GEMM, start + 320, start + 453, device_type=DeviceType.CUDA)
        events += [step, prepare, attention, mlp, product, on_gpu]
    return events


def test_kernels_are_told_apart_by_name_and_phase() -> None:
    found = [(row.kernel, row.phase, row.calls_per_step) for row in summarize_kernels(_events(), 2)]
    assert found == [(GEMM, "mlp", 1), (ATTEND, "attention", 2), (COPY, "prepare", 1)]
    assert [row.device_ms_per_step for row in summarize_kernels(_events(), 2)] == pytest.approx([0.133, 0.06, 0.007])
    assert [row.share for row in summarize_kernels(_events(), 2)] == pytest.approx([0.665, 0.3, 0.035])


def test_a_phase_has_the_time_of_all_its_kernels() -> None:
    phases, operators = summarize(_events(), 2)
    on_gpu = {row.phase: row.device_ms_per_step for row in phases}
    assert on_gpu == pytest.approx({"prepare": 0.007, "attention": 0.06, "mlp": 0.133, "other": 0})
    assert [(row.operator, row.device_ms_per_step) for row in operators] == [("aten::mm", pytest.approx(0.133))]
    assert sum(row.ms_per_step for row in phases) == pytest.approx(0.9)


@pytest.mark.proof
def test_what_kernels_do_has_the_phases_too() -> None:
    module = pytest.importorskip("inflight.engine.attention.triton_backend", reason="needs Triton")
    from inflight.engine.cuda.forward import CudaForward
    from inflight.engine.cuda.layers import fuse_layers

    engine = load(checkpoint("llama"), cpu_step="pytorch")
    runner = engine._runner
    fuse_layers(runner._model)
    runner._kernels = CudaForward(runner._model, runner._kv_pool, 4, runner.config.max_batch_size, runner.max_length)
    with named(), profile(activities=[ProfilerActivity.CPU]) as recorder:
        run(engine, [ask([5, 6, 7], 2)])
    assert not hasattr(module.TritonAttention.attend, "__wrapped__")
    calls = Counter(event.name for event in recorder.events() or ())
    layers = runner._model.config.num_layers
    found = {phase: calls[phase] / 2 for phase in ("rope", "norm", "projections", "attention", "mlp", "logits")}
    assert found == {
        "rope": 1, "norm": 2 * layers + 1, "projections": layers, "attention": 2 * layers, "mlp": layers, "logits": 1,
    }  # fmt: skip


def test_a_step_ahead_is_sampled_in_the_phase_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "overlaps", True)
    before = ModelRunner.sample
    engine = load(checkpoint("llama"))
    with named(), profile(activities=[ProfilerActivity.CPU]) as recorder:
        run(engine, [ask([5, 6, 7], 6)])
    assert engine._overlap.launches
    sampled = [event for event in recorder.events() or () if event.name == "sample"]
    assert len(sampled) == 2 * 6  # each token is chosen and waited for
    assert ModelRunner.sample == before


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_table_of_kernels_is_shown_where_there_are_some(device: str) -> None:
    phases, operators = summarize(_events(), 2)
    kernels = summarize_kernels(_events(), 2) if device == "cuda" else []
    out = io.StringIO()
    show(
        Profile(2, device, 1, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, phases, [], operators, kernels),
        Console(file=out, width=120),
    )
    assert (GEMM in out.getvalue()) == (device == "cuda")
    assert ("Kernels" in out.getvalue()) == (device == "cuda")
