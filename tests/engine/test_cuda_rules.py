"""The engine on a device that fails where CUDA's rules are broken, as they are where a protection is taken away."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from inflight.engine.attention.triton_backend import StepLayout
from inflight.engine.checkpoint import load_config
from inflight.engine.cuda import forward as forward_module
from inflight.engine.cuda import prepare
from inflight.engine.cuda.forward import CudaForward, CudaGraph
from inflight.engine.engine import Engine
from inflight.engine.kvcache import offload_pool as offload_pool_module
from inflight.engine.kvcache import offload_transfer
from inflight.engine.kvcache.blocks import BlockCopy
from inflight.engine.kvcache.memory_pool import KvPool
from inflight.engine.kvcache.offload_pool import HostMemory, MappedFile, OffloadPool, RestoreRule
from inflight.engine.models.layers import AttentionOptions
from inflight.engine.quant.linears import Int8WeightLinear, LinearShape
from inflight.engine.transfer import OwnStream, ToHost
from inflight.errors import DeploymentError
from tests.engine.support.checkpoints import checkpoint, greedy
from tests.engine.support.driving import ask, finish, load
from tests.engine.support.fake_cuda import fake_cuda
from tests.engine.support.fake_streams import CUDA, Cuda, Event, Misuse, Stream
from tests.engine.support.native import random_decoder

PROMPTS = [tuple(range(5, 25)), (3,), (20, 30, 40), tuple(range(60, 77))]
SMALL: dict[str, Any] = {"num_blocks": 12, "offload_bytes": 1 << 18, "offload_min_tokens": 1}


class PlainAttention:
    """In place of the kernels: the same memory and tables, by PyTorch, without a look at what they hold."""

    def __init__(self, layers: Any, layout: StepLayout, block_size: int, one_tile: bool = False) -> None:
        self._layers, self._layout, self._size = layers, layout, block_size

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Store, and attend."""
        layout, stored = self._layout, self._layers[layer]
        slots = layout.slots.long()
        kept = (slots >= 0)[:, None]
        target = torch.where(kept[:, 0], slots, slots[:1].clamp(min=0))  # padding does what the first token does
        for memory, new in ((stored.keys, key), (stored.values, value)):
            first = torch.where(kept[:1, :, None], new[:1], memory[:, target[:1]].transpose(0, 1))
            memory.index_copy_(1, target, torch.where(kept[:, :, None], new, first).transpose(0, 1))
        members = torch.cat((layout.short, layout.chunks)).long()
        first, start, count = layout.ranges[members, :3].long().unbind(1)
        tokens = torch.arange(len(query), device=query.device)
        owner = ((tokens >= first[:, None]) & (tokens < (first + count)[:, None])).int().argmax(0)
        blocks = layout.ranges[members[owner], 3:].long()
        seen = (blocks[:, :, None] * self._size + torch.arange(self._size, device=query.device)).flatten(1)
        last = (start[owner] + tokens - first[owner])[:, None]
        places = torch.arange(seen.shape[1], device=query.device)
        hidden = (places > last.clamp(min=0)) | (places <= last - (options.window or 1 << 20))
        group = query.shape[1] // len(stored.keys)
        keys, values = (memory[:, seen].repeat_interleave(group, 0) for memory in (stored.keys, stored.values))
        scores = torch.einsum("thd,htld->htl", query, keys) * options.scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("htl,htld->thd", weights, values)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """A device, where what is launched ahead must not wait."""
    monkeypatch.setattr(forward_module, "TritonAttention", PlainAttention)
    for prompt in PROMPTS:  # by transformers, which is not to compute there
        greedy("llama", prompt, 8)
    with fake_cuda() as device:
        yield device


def _engine(cuda: Cuda, **settings: Any) -> Engine:
    small = {"device": "cuda", "max_batch_size": 3, "max_tokens_per_step": 12, "max_sequence_length": 40}
    engine = load(checkpoint("llama"), **small | settings)
    runner, launch = engine._runner, engine._overlap.launch
    runner._kernels = CudaForward(runner._model, runner._kv_pool, 4, 3, runner.max_length)
    engine.warm_up()

    def watched(*arguments: Any) -> None:
        cuda.forbidden = settings.get("offload_to") != "file"  # its slots are read and written by the host
        try:
            launch(*arguments)
        finally:
            cuda.forbidden = False

    engine._overlap.launch = watched  # type: ignore[method-assign]
    engine._overlap.launches = 0
    return engine


def _serve(engine: Engine, rounds: int = 1) -> bool:
    """Serve requests that come and go; return whether all get what they should."""
    right = []
    for _ in range(rounds):
        requests = [ask(prompt, 8) for prompt in PROMPTS]
        outputs = {}
        for request in requests:
            engine.submit(request)
            for output in engine.step():
                outputs.setdefault(output.key, []).append(output)
        gone = ask((9, 8, 7), 8)
        engine.submit(gone)
        engine.cancel(gone.key)
        for key, output in finish(engine).items():
            outputs.setdefault(key, []).append(output)
        for request in requests:
            tokens = [token for output in outputs[request.key] for token in output.tokens]
            right.append(tokens == greedy("llama", tuple(request.prompt), 8))
    return all(right)


def _replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    replays, replay = [], CudaGraph.__call__

    def counted(graph: CudaGraph) -> Tensor:
        replays.append(1)
        return replay(graph)

    monkeypatch.setattr(CudaGraph, "__call__", counted)
    return replays


def test_experts_that_stay_quantized_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, name = random_decoder("experts"), "model.layers.1.mlp.experts.5.down_proj"
    model.set_submodule(name, Int8WeightLinear(LinearShape(name, 64, 48, False, torch.float32, 16, False, True)))
    monkeypatch.setattr(prepare, "has_compiler", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    pool: Any = SimpleNamespace(device=torch.device("cuda"), stored=torch.float32)
    assert prepare.cuda_forward(model, pool, 16, 3, 40, False) is None
    assert "the experts' weights stay quantized, or their inputs are rounded" in caplog.text
    assert caplog.text.endswith("attention runs without kernels, and decode steps without graphs\n")
    with pytest.raises(DeploymentError, match="engine.batch_invariant needs the kernels: the experts' weights stay"):
        prepare.cuda_forward(model, pool, 16, 3, 40, True)


@pytest.mark.proof
def test_chunks_graphs_and_steps_ahead_keep_to_the_rules(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    replays, engine = _replays(monkeypatch), _engine(cuda)
    assert _serve(engine, 2)
    assert not cuda.found
    assert len(replays) > 10
    assert engine._overlap.launches > 20


@pytest.mark.proof
@pytest.mark.parametrize("to", ["host", "file"])
def test_the_second_tier_keeps_to_the_rules(cuda: Cuda, to: str) -> None:
    engine = _engine(cuda, offload_to=to, **SMALL)
    assert _serve(engine, 3)
    assert not cuda.found
    assert engine.stats.kv_cache_restored_tokens > 20
    assert engine._overlap.launches > 20


def _move(monkeypatch: pytest.MonkeyPatch, to: str, inert: tuple[str, str] | None = None) -> bool:
    """Save blocks, write over them at once, restore them; return whether they are what they were.

    Args:
        monkeypatch: the test's.
        to: where blocks are offloaded to.
        inert: buffers, and which of their events is never recorded.
    """
    for module in (offload_pool_module, offload_transfer):
        monkeypatch.setattr(module, "BLOCKS_AT_ONCE", 1)
    tensors = KvPool(load_config(checkpoint("llama")), 8, 4, torch.float32, CUDA)
    make = HostMemory if to == "host" else lambda blocks, nbytes: MappedFile(None, blocks, nbytes)
    pool = OffloadPool(tensors, 8, make(8, tensors.nbytes // 8), RestoreRule(1))
    for buffer in getattr(pool._transfer, inert[0]) if inert else ():
        setattr(buffer, inert[1], _Never())  # type: ignore[index]
    for part in tensors.parts:
        part.copy_(torch.arange(part.numel(), device=CUDA).view(part.shape))
    before = [part.tolist() for part in tensors.parts]
    for _ in range(2):
        pool.copy([BlockCopy(block, 8 + block) for block in range(8)])
        for part in tensors.parts:
            part.zero_()
        pool.copy([BlockCopy(8 + block, block) for block in range(8)])
    return [part.tolist() for part in tensors.parts] == before


@pytest.mark.parametrize("to", ["host", "file"])
def test_pages_come_back_as_they_left(cuda: Cuda, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _move(monkeypatch, to)
    assert not cuda.found


@pytest.mark.parametrize("to", ["host", "file"])
@pytest.mark.parametrize("event", ["rows_filled", "rows_emptied"])
@pytest.mark.parametrize("way", ["_save_buffers", "_load_buffers"])
def test_without_an_event_of_the_second_tier_it_is_found(
    cuda: Cuda, way: str, event: str, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Misuse):
        _move(monkeypatch, to, (way, event))


def test_pages_that_cannot_be_pinned_go_by_way_of_memory_that_is(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "check_error", lambda _: (_ for _ in ()).throw(RuntimeError("no room")))
    assert _move(monkeypatch, "host")
    assert not cuda.found


@pytest.mark.parametrize("to", ["host", "file"])
def test_the_device_says_what_restoring_took(cuda: Cuda, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each time, as soon as it is known; what is pinned is the tier, or the buffers on the way to it."""
    learnt: list[tuple[int, float]] = []
    monkeypatch.setattr(RestoreRule, "observe_restore", lambda _, *measured: learnt.append(measured))
    tensors = KvPool(load_config(checkpoint("llama")), 8, 4, torch.float32, CUDA)
    make = HostMemory if to == "host" else lambda blocks, nbytes: MappedFile(None, blocks, nbytes)
    pool = OffloadPool(tensors, 8, make(8, tensors.nbytes // 8), RestoreRule(None))
    pool.copy([BlockCopy(block, 8 + block) for block in range(8)])
    assert not learnt, "saving is not restoring"
    pool.copy([BlockCopy(8 + block, block) for block in range(6)])
    torch.cuda.synchronize()
    for _ in range(2):
        pool.copy([])
    [(tokens, seconds)] = learnt
    assert (tokens, seconds >= 1e-3) == (6 * 4, True), "the device's own millisecond is among them"
    nbytes = pool._storage.memory.nbytes
    block = nbytes // pool.capacity
    assert pool.pinned_bytes == (nbytes if to == "host" else 4 * offload_transfer.BLOCKS_AT_ONCE * block)


class _Never(Event):
    """An event that nobody records."""

    def record(self, stream: Stream | None = None) -> None:
        """Forget it."""


@pytest.mark.proof
def test_reading_tokens_before_they_have_come_is_found(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(cuda)
    monkeypatch.setattr(ToHost, "wait", lambda parts: [tensor.numpy() for tensor in parts._tensors])
    _serve(engine)
    assert set(cuda.found) == {"the host touches memory that the device may still write"}


@pytest.mark.proof
def test_a_copy_that_is_not_pinned_is_found(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(cuda)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    _serve(engine)
    assert set(cuda.found) == {"the host waits where it must not"}


@pytest.mark.proof
@pytest.mark.parametrize("shared", [False, True])
def test_an_engine_that_ends_leaves_the_graphs_of_others(
    cuda: Cuda, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shared:  # as PyTorch's captures are where nobody names a stream
        one = OwnStream(CUDA)
        monkeypatch.setattr(forward_module, "OwnStream", lambda _: one)
    engine, other = _engine(cuda), _engine(cuda)
    assert _serve(other)
    del other
    gc.collect()
    assert _serve(engine) != shared
    assert bool(cuda.found) == shared


def test_nobody_is_dealt_a_stream_that_another_one_owns(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has 32 for each device, and deals them out in turn."""
    dealt = itertools.cycle(range(32))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: next(dealt))
    first = OwnStream(CUDA)
    assert first.stream not in {OwnStream(CUDA).stream for _ in range(100)}
    others = [OwnStream(CUDA) for _ in range(31)]
    assert {one.stream for one in (first, *others)} == set(range(32))


def _captured(compute: Callable[[], Tensor], own: OwnStream | None = None) -> CudaGraph:
    return CudaGraph(compute, torch.cuda.graph_pool_handle(), own or OwnStream(CUDA))


def test_what_a_capture_must_not_do_is_found(cuda: Cuda) -> None:
    x = torch.arange(3.0, device=CUDA)
    graph = _captured(lambda: 2 * x)
    x += 1
    assert graph().tolist() == [2.0, 4.0, 6.0]
    with pytest.raises(Misuse, match="waits while a graph is captured"):
        _captured(lambda: x * x.sum().item())
    cuda.capturing, cuda.stream = None, cuda.default
    own = OwnStream(CUDA)
    own.stream = cuda.default  # type: ignore[assignment]
    with pytest.raises(Misuse, match="on the default stream"):
        _captured(lambda: 2 * x, own)


def test_a_graph_whose_input_was_freed_is_found(cuda: Cuda) -> None:
    x = torch.arange(3.0, device=CUDA)
    inputs = [x + 1]
    graph = _captured(lambda: 2 * inputs[0])
    assert graph().tolist() == [2.0, 4.0, 6.0]
    inputs.clear()
    gc.collect()
    with pytest.raises(Misuse, match="memory which was freed"):
        graph()


def test_streams_that_do_not_wait_for_each_other_are_found(cuda: Cuda) -> None:
    x, other = torch.zeros(3, device=CUDA), torch.cuda.Stream()
    with torch.cuda.stream(other), pytest.raises(Misuse, match="another one may still write"):
        x + 1
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        x + 1
    with pytest.raises(Misuse, match="another one may still read"):
        x.fill_(1)


def test_a_buffer_that_a_queued_copy_reads_is_not_written(cuda: Cuda) -> None:
    pinned, x = torch.zeros(3).pin_memory(), torch.zeros(3, device=CUDA)
    x.copy_(pinned, non_blocking=True)
    with pytest.raises(Misuse, match="the device may still read"):
        pinned.fill_(1)
    torch.cuda.synchronize()
    pinned.fill_(1)
