"""Every kernel once at real size against float64, by the norm of the error; each case runs in a process of its own."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.checkpoints import Shape
from benchmarks.contact.plan import KERNELS
from benchmarks.contact.sizes import LARGE, TINY
from benchmarks.contact.stage import Contact
from benchmarks.contact.steps import BLOCK_SIZE, AttentionStep, poisoned
from benchmarks.contact.timing import graph_seconds_of
from benchmarks.random_weights import RandomShards, write_config
from inflight.engine.attention.store import store
from inflight.engine.attention.torch_backend import QueryRange, TorchAttention
from inflight.engine.checkpoint import LoadedModel, load_config, load_model, outline_model
from inflight.engine.cuda import fp8
from inflight.engine.cuda.forward import CudaForward
from inflight.engine.cuda.layers import fuse_layers
from inflight.engine.device import FP8
from inflight.engine.kvcache.memory_pool import KvPool
from inflight.engine.quant.formats import to_e4m3
from inflight.engine.sampler import sample_async
from inflight.engine.transfer import TokenIds
from inflight.sampling import SamplingParams

LIMITS = {torch.bfloat16: 6e-3, torch.float16: 2e-3, torch.float32: 2e-6}
"""Of attention: an output is rounded once, weights are rounded before they are summed."""
_LAYER_LIMIT = 3e-2
"""Of a whole layer in bfloat16: some ten roundings, one after the other, and a norm."""
Lengths = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Scale:
    """How large the cases are."""

    shape: Shape
    dtype: torch.dtype
    decode: Lengths
    """The start and the count of each query range."""
    long: Lengths
    chunks: Lengths
    late_chunk: Lengths
    mixed: Lengths
    sampled: tuple[int, int]
    """Rows of logits, and the vocabulary."""


REAL = Scale(
    shape=LARGE,
    dtype=torch.bfloat16,
    decode=[(1 + 8191 * row // 63, 1) for row in range(64)],
    long=[(32_767, 1)],
    chunks=[(0, 512)] * 16,
    late_chunk=[(32_000, 700)],
    mixed=[*[(575, 1)] * 8, (0, 100), (8000, 77)],
    sampled=(64, 128_256),
)
SMALL = Scale(
    shape=replace(TINY, hidden=64, heads=4, kv_heads=2),
    dtype=torch.float16,  # Triton's interpreter cannot multiply bfloat16
    decode=[(1, 1), (300, 1)],
    long=[(400, 1)],
    chunks=[(0, 3), (0, 18)],
    late_chunk=[(100, 5)],
    mixed=[(40, 1), (0, 5), (70, 3)],
    sampled=(4, 400),
)


def one(contact: Contact, case: str) -> None:
    """Run one case, the cache's and the output's memory filled with NaN before."""
    scale = SMALL if contact.dry else REAL
    if "FP8" in case and not contact.dry and torch.cuda.get_device_capability() < FP8:
        contact.recorder.add(case, "skipped", note="the device has no FP8")
        return
    CASES[case](contact, scale, case)


def small(contact: Contact, _case: str) -> None:
    """Run what stores and attends at small sizes, for a checker of memory accesses."""
    scale = replace(SMALL, dtype=SMALL.dtype if contact.dry else torch.bfloat16)
    for case in KERNELS[:9]:
        with contact.recorder.attempt(case):
            CASES[case](contact, scale, case)


def counted(contact: Contact, _case: str) -> None:
    """Run attention and a layer once at real size, for a profiler that counts."""
    scale = SMALL if contact.dry else REAL
    AttentionStep.make(scale.shape, scale.decode, "", scale.dtype, contact.device).seen()
    AttentionStep.make(scale.shape, scale.chunks, "", scale.dtype, contact.device).seen()
    _Layer(contact, scale).by_kernels(scale.chunks)
    contact.recorder.add("kernels run under the profiler", 3, note="its table is in contact.log")


def _attention(contact: Contact, scale: Scale, case: str, lengths: Callable[[Scale], Lengths], kind: str = "") -> None:
    step = AttentionStep.make(scale.shape, lengths(scale), kind, scale.dtype, contact.device)
    with poisoned():
        seen = step.seen()
    error, limit = step.error(seen), LIMITS[scale.dtype]
    micros = round(1e6 * graph_seconds_of(contact, step.planned()), 1)
    contact.recorder.add(case, error, "error by norm", good=error <= limit, note=f"{micros} us with its store")


def _store(contact: Contact, scale: Scale, case: str) -> None:
    """Hold what is stored to what plain PyTorch stores, byte by byte."""
    for kind in ("", "int8", "fp8"):
        if kind == "fp8" and not contact.dry and torch.cuda.get_device_capability() < FP8:
            continue
        ours, theirs = (
            AttentionStep.make(scale.shape, scale.chunks, kind, scale.dtype, contact.device) for _ in range(2)
        )
        slots = torch.randperm(ours.tensors.slots, generator=torch.Generator().manual_seed(0))
        slots = slots[: len(ours.key)].to(contact.device)
        key, value = ((_as_stored(part, kind) if contact.dry else part) for part in (ours.key, ours.value))
        store(key, value, slots.int(), ours.tensors.layers[0])
        theirs.tensors.write(0, slots, key, value)
        pairs = zip(ours.tensors.parts, theirs.tensors.parts, strict=True)
        wrong = sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs)
        name = f"{case}, {kind or scale.dtype}".replace("torch.", "")
        contact.recorder.add(name, wrong, "bytes differ", good=wrong == 0)


def _as_stored(x: Tensor, kind: str) -> Tensor:
    """Return numbers that a cache holds as they are, for the interpreter, which cuts where hardware rounds."""
    if kind == "fp8":
        return (x * 32).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / 32
    if kind == "int8":
        return torch.cat((torch.full_like(x[..., :1], 127 / 32), (x[..., 1:] * 32).round() / 32), -1)
    return x


def _split_and_chunk(contact: Contact, scale: Scale, case: str) -> None:
    """A token alone, and the same as one of a chunk, at several lengths: how many of its values differ."""
    for start, _ in (*scale.decode[-1:], *scale.long):
        step = AttentionStep.make(scale.shape, [(start - 3, 4)], "", scale.dtype, contact.device)
        together = step.seen()[-1:]
        [query_range] = step.ranges
        alone = step.seen([QueryRange(0, start, 1, query_range.blocks)], slice(3, 4))
        differ = int((alone != together).sum())
        note = f"of {alone.numel()}, at {start + 1} tokens"
        contact.recorder.add(f"{case}, {start + 1}", differ, "values differ", good=differ == 0, note=note)


class _Layer:
    """A model of one layer of real size, by our kernels, and in float64 by PyTorch."""

    def __init__(self, contact: Contact, scale: Scale, in_fp8: bool = False) -> None:
        device = contact.device
        shape = replace(scale.shape, layers=1, vocab=4096)
        with tempfile.TemporaryDirectory() as folder:
            directory, shards = write_config(shape, Path(folder), in_fp8), RandomShards(shape, in_fp8, device)
            config = load_config(directory)

            def load(dtype: torch.dtype) -> LoadedModel:
                outline = outline_model(directory, config, dtype, device, 1 << 16, "auto", open_shards=lambda _: shards)
                return load_model(outline, device)

            loaded, self._exact = load(scale.dtype), copy.deepcopy(load(torch.float32)).model.double()
        self.products = fp8.use_scaled_mm(loaded.model) if in_fp8 and not contact.dry else 0
        fuse_layers(loaded.model)
        self._loaded, self._device = loaded, device

    def by_kernels(self, lengths: Lengths) -> Tensor:
        """Return hidden states of prompts of such lengths."""
        ranges, blocks = self._ranges(lengths)
        tensors = self._loaded.make_kv_pool(blocks, BLOCK_SIZE)
        forward = CudaForward(self._loaded.model, tensors, BLOCK_SIZE, len(ranges), blocks * BLOCK_SIZE)
        with torch.inference_mode():
            return forward(TokenIds(self._tokens(lengths).tolist()), ranges)

    def exactly(self, lengths: Lengths) -> Tensor:
        """Return the same in float64."""
        ranges, blocks = self._ranges(lengths)
        tensors = KvPool(self._exact.config, blocks, BLOCK_SIZE, torch.float64, self._device)
        attend = TorchAttention(tensors, ranges, BLOCK_SIZE)
        with torch.inference_mode():
            return self._exact(self._tokens(lengths).to(self._device), attend.positions, attend)

    @staticmethod
    def _tokens(lengths: Lengths) -> Tensor:
        return torch.arange(sum(count for _, count in lengths)) * 7 % 4096

    @staticmethod
    def _ranges(lengths: Lengths) -> tuple[list[QueryRange], int]:
        ranges, first, block = [], 0, 0
        for _, count in lengths:
            width = -(-count // BLOCK_SIZE)
            ranges.append(QueryRange(first, 0, count, list(range(block, block + width))))
            first, block = first + count, block + width
        return ranges, block


def _layer(contact: Contact, scale: Scale, case: str, in_fp8: bool = False) -> None:
    layer = _Layer(contact, scale, in_fp8)
    for name, lengths in (("prefill", scale.chunks), ("first tokens", [(0, 1)] * 8)):
        with poisoned():
            seen = layer.by_kernels(lengths).double()
        expected = layer.exactly(lengths)
        error = float((seen - expected).norm() / expected.norm())
        limit = _LAYER_LIMIT * (4 if in_fp8 else 1)
        note = f"{layer.products} products are FP8" if in_fp8 else "of a layer and a norm"
        contact.recorder.add(f"{case}, {name}", error, "error by norm", good=error <= limit, note=note)


def _fp8_products(contact: Contact, scale: Scale, case: str) -> None:
    x = torch.randn(37, scale.shape.hidden, device=contact.device).to(scale.dtype)
    scales = torch.tensor(0.03125, device=contact.device)
    if contact.dry:
        x = _as_stored(x, "fp8")
    wrong = int((fp8.quantize(x, scales).view(torch.uint8) != to_e4m3(x, scales).view(torch.uint8)).sum())
    contact.recorder.add(f"{case}, rounding", wrong, "bytes differ", good=wrong == 0)
    _layer(contact, scale, f"{case}, layer", in_fp8=True)


def _sampling(contact: Contact, scale: Scale, case: str) -> None:
    """Tokens drawn on the device, and drawn from the same logits on the CPU."""
    rows, vocabulary = scale.sampled
    logits = 4 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))
    for settings in ({"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "top_k": 40}):
        asked = SamplingParams(8, **settings)  # type: ignore[arg-type]
        drawn = [_row(asked, seed) for seed in range(rows)]
        ours, theirs = (sample_async(part, drawn).tokens.tolist() for part in (logits.to(contact.device), logits))
        equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
        name = ", ".join(f"{key} {value}" for key, value in settings.items())
        contact.recorder.add(f"{case}, {name}", equal, f"of {rows} as on the CPU", good=equal >= 0.98 * rows)


def _row(asked: SamplingParams, seed: int) -> SimpleNamespace:
    return SimpleNamespace(request=SimpleNamespace(sampling=asked, prompt=[1]), seed=seed, tokens=[1], generated=0)


CASES: dict[str, Callable[[Contact, Scale, str], None]] = {
    "store": _store,
    "decode": functools.partial(_attention, lengths=lambda scale: scale.decode),
    "decode, one long": functools.partial(_attention, lengths=lambda scale: scale.long),
    "decode, FP8 cache": functools.partial(_attention, lengths=lambda scale: scale.decode, kind="fp8"),
    "decode, INT8 cache": functools.partial(_attention, lengths=lambda scale: scale.decode, kind="int8"),
    "chunks": functools.partial(_attention, lengths=lambda scale: scale.chunks),
    "chunk, long context": functools.partial(_attention, lengths=lambda scale: scale.late_chunk),
    "mixed": functools.partial(_attention, lengths=lambda scale: scale.mixed),
    "split and chunk": _split_and_chunk,
    "between products": _layer,
    "FP8 products": _fp8_products,
    "sampling": _sampling,
}
