"""Measures the native step: small models of each kind of weights, whose steps the library times by their phases.

All layers have the same random weights: speed depends on numbers only where they are too small or too large.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from inflight.engine.native.bindings import (
    Cache,
    Layer,
    LayerCache,
    Packed,
    Range,
    Spec,
    Step,
    Weight,
    call,
    load_library,
    phase_seconds,
)
from inflight.export.plan.native_speed import AttentionSpeed, NativeSpeed
from inflight.export.plan.stopwatch import Stopwatch

TOKENS = (1, 4, 8, 32)
"""Tokens of the steps that are timed: from four to eight, few rows become many, and from 32 on the rate stays."""
_WEIGHT_BYTES = 128 << 20
"""Bytes of a model's weights: far more than most caches hold."""
_REPEATS = 3
"""Times that each step is timed; the fastest counts, as what disturbs a machine only ever makes it slower."""
_PRODUCTS = ("qkv", "output", "gate_up", "down")
_NORMS = (0, 2)
"""The library's numbers for the norms in front of attention and of the feed-forward."""
_HEADS, _KV_HEADS, _HEAD_DIM = 16, 4, 64
_HIDDEN, _INNER = 1024, 2816
_VOCABULARY = 64
_BLOCK = 16
_SEQUENCES, _CONTEXT = 8, 512
"""The sequences that decode while attention is timed, and the tokens of each."""
_PROMPT = 256
_DRAWN = 4099
"""Numbers that are drawn: no multiple of a row."""
_SCALE, _MXFP4_SCALE = 2.0**-10, 127 - 5
"""The scale of all weights, such that no number grows from layer to layer; of MXFP4 an exponent, with its offset."""


class _Kind(NamedTuple):
    """How weights are given to the library."""

    packed: Packed
    source: Packed
    """Their type before they are packed."""
    bits: int
    group: int = 0
    """Inputs that share a scale."""
    rounds_inputs: bool = False


_KINDS = (
    _Kind(Packed.FLOAT32, Packed.FLOAT32, 32),
    _Kind(Packed.BFLOAT16, Packed.BFLOAT16, 16),
    _Kind(Packed.E4M3, Packed.E4M3, 8, rounds_inputs=True),
    _Kind(Packed.E4M3_GROUPS, Packed.E4M3, 8, group=128),
    _Kind(Packed.INT8_SUMS, Packed.INT8, 8, rounds_inputs=True),
    _Kind(Packed.INT8_COLUMNS, Packed.INT8, 8),
    _Kind(Packed.INT8_MINIMUMS, Packed.INT8, 8, group=128),
    _Kind(Packed.INT4, Packed.INT4, 4, group=128),
    _Kind(Packed.INT4_MINIMUMS, Packed.INT4, 4, group=128),
    _Kind(Packed.MXFP4, Packed.MXFP4, 4, group=32),
)
_CACHES = {"float32": (Packed.FLOAT32, 4), "bf16": (Packed.BFLOAT16, 2), "fp8": (Packed.E4M3, 1)}
"""Maps a plan's KV cache to its type in the library, and its bytes per number."""


def measure_native(
    instruction_set: str, threads: int, progress: Callable[[str, int, int], object] = lambda *_: None
) -> NativeSpeed:
    """Return how fast the library computes with an instruction set, in some seconds.

    Raises:
        NativeError: this processor has not the instruction set.
    """
    weights, attention, total = {}, {}, len(_KINDS) + len(_CACHES)
    for done, kind in enumerate(_KINDS):
        progress("measuring this machine", done, total)
        weights[kind.packed.name] = _time_products(instruction_set, threads, kind)
    for done, (name, (stored, size)) in enumerate(_CACHES.items(), len(_KINDS)):
        progress("measuring this machine", done, total)
        attention[name] = _time_attention(instruction_set, threads, stored, size)
    progress("measuring this machine", total, total)
    return NativeSpeed(instruction_set=instruction_set, threads=threads, weights=weights, attention=attention)


def _time_products(instruction_set: str, threads: int, kind: _Kind) -> dict[int, float]:
    """Return the GB/s of the weights by the tokens of a step."""
    shapes = _shapes(_HIDDEN, _INNER)
    of_a_layer = sum(outputs * inputs for outputs, inputs in shapes) * kind.bits // 8
    layers = -(-_WEIGHT_BYTES // of_a_layer)
    model = _Model(instruction_set, threads, layers, shapes, kind)
    model.use_cache(Packed.BFLOAT16, 2, max(TOKENS))
    seconds = {tokens: model.fastest([(tokens, 0)], _PRODUCTS) for tokens in TOKENS}
    return {tokens: layers * of_a_layer / time / 1e9 for tokens, time in seconds.items()}


def _time_attention(instruction_set: str, threads: int, stored: Packed, size: int) -> AttentionSpeed:
    """Return the speed of attention with a KV cache of a type of ``size`` bytes, in a model of tiny products."""
    layers = 16
    model = _Model(instruction_set, threads, layers, _shapes(_BLOCK, _BLOCK), _KINDS[0])
    model.use_cache(stored, size, _SEQUENCES * (_CONTEXT + _BLOCK) + _PROMPT)
    decoding = model.fastest([(1, _CONTEXT)] * _SEQUENCES, ("attention",))
    prompt = model.fastest([(_PROMPT, 0)], ("attention",))
    read = layers * _SEQUENCES * _CONTEXT * 2 * _KV_HEADS * _HEAD_DIM * size
    pairs = _PROMPT * (_PROMPT + 1) / 2
    return AttentionSpeed(
        read_gb_s=read / decoding / 1e9, tflops=layers * pairs * 4 * _HEADS * _HEAD_DIM / prompt / 1e12
    )


def _shapes(hidden: int, inner: int) -> list[tuple[int, int]]:
    """Return outputs and inputs of a layer's linears, in the order of the library's numbers for them."""
    attended = _HEADS * _HEAD_DIM
    return [
        ((_HEADS + 2 * _KV_HEADS) * _HEAD_DIM, hidden), (hidden, attended), (2 * inner, hidden), (hidden, inner)
    ]  # fmt: skip


class _Model:
    """A model of the library, all of whose layers have the same weights."""

    def __init__(
        self, instruction_set: str, threads: int, layers: int, shapes: Sequence[tuple[int, int]], kind: _Kind
    ) -> None:
        self._layers, hidden = layers, shapes[0][1]
        inner = shapes[3][1]
        self._embedding = np.random.default_rng(0).normal(size=(_VOCABULARY, hidden)).astype(np.float32)
        layer = Layer(_HEADS, _KV_HEADS, _HEAD_DIM, inner, rope=-1, scale=_HEAD_DIM**-0.5)
        self._layer = (Layer * layers)(*[layer] * layers)
        spec = Spec(layers, hidden, _VOCABULARY, 0, 1e-5, 1.0, 0.0, Packed.FLOAT32, self._embedding.ctypes.data)
        spec.layer = self._layer
        self._handle = ctypes.c_void_p(call("inflight_create", spec, instruction_set.encode(), threads))
        weakref.finalize(self, load_library().inflight_destroy, self._handle)
        gains = np.ones(hidden, np.float32)
        for layer_index, norm in itertools.product(range(layers), _NORMS):
            call("inflight_set_vector", self._handle, layer_index, norm, gains.ctypes.data)
        for which, (outputs, inputs) in enumerate(shapes):
            _set_weight(self._handle, layers, which, outputs, inputs, kind)
        head = Weight(Packed.FLOAT32, Packed.FLOAT32, self._embedding.ctypes.data, _VOCABULARY, hidden)
        call("inflight_set_weight", self._handle, 0, len(shapes), 0, head)

    def use_cache(self, stored: Packed, size: int, tokens: int) -> None:
        """Keep keys and values of ``tokens``, in numbers of ``size`` bytes."""
        slots = -(-tokens // _BLOCK) * _BLOCK
        self._cache = np.zeros((self._layers, 2, _KV_HEADS * slots * _HEAD_DIM * size), np.uint8)
        self._scale = np.ones(1, np.float32)
        scales = (self._scale.ctypes.data,) * 2
        caches = [LayerCache(*(part.ctypes.data for part in pair), *scales) for pair in self._cache]
        call("inflight_set_cache", self._handle, Cache(stored, _BLOCK, slots, (LayerCache * self._layers)(*caches)))

    def fastest(self, ranges: Sequence[tuple[int, int]], phases: Sequence[str]) -> float:
        """Return the seconds of some phases in the fastest step of ranges: tokens, and how many are before them."""
        self._step(ranges)
        times = []
        for _ in range(_REPEATS):
            before, watch = phase_seconds(self._handle), Stopwatch()
            self._step(ranges)
            own = watch.own_share
            after = phase_seconds(self._handle)
            times.append(own * sum(after[name] - before[name] for name in phases))
        return min(times)

    def _step(self, ranges: Sequence[tuple[int, int]]) -> None:
        parts, held, first = [], [], 0
        for count, start in ranges:
            blocks = np.arange(first, first + -(-(start + count) // _BLOCK), dtype=np.int32)
            first += len(blocks)
            held.append(blocks)
            parts.append(Range(count, start, start, blocks.ctypes.data, len(blocks)))
        ids = np.arange(sum(count for count, _ in ranges), dtype=np.int32) % _VOCABULARY
        given = (Range * len(parts))(*parts)
        call("inflight_step", self._handle, Step(len(ids), ids.ctypes.data, len(parts), given, 0, None, None))


def _set_weight(handle: ctypes.c_void_p, layers: int, which: int, outputs: int, inputs: int, kind: _Kind) -> None:
    """Give all layers one weight."""
    weight = _numbers(outputs * inputs, kind)
    groups = inputs // kind.group if kind.group else 1
    is_mxfp4, minimums = kind.packed is Packed.MXFP4, np.zeros((outputs, groups), np.float32)
    scales = np.full_like(minimums, _MXFP4_SCALE, np.uint8) if is_mxfp4 else np.full_like(minimums, _SCALE)
    has_minimums = kind.packed in (Packed.INT4_MINIMUMS, Packed.INT8_MINIMUMS)
    given = Weight(
        kind.source, kind.packed, weight.ctypes.data, outputs, inputs, None,
        scales.ctypes.data if kind.bits < 16 else None, None, 0.0, kind.group,
        minimums.ctypes.data if has_minimums else None, inputs if kind.rounds_inputs else 0,
    )  # fmt: skip
    for layer in range(layers):
        call("inflight_set_weight", handle, layer, which, 0, given)


def _numbers(count: int, kind: _Kind) -> np.ndarray:
    """Return random weights as bytes; a few that repeat."""
    drawn = np.random.default_rng(0)
    few: np.ndarray
    if kind.source is Packed.E4M3:
        few = drawn.integers(0, 0x50, _DRAWN, np.uint8) | drawn.integers(0, 2, _DRAWN, np.uint8) << 7  # up to 16
    elif kind.bits < 16:
        few = drawn.integers(0, 256, _DRAWN, np.uint8)
    else:
        numbers = drawn.normal(0, 0.03, _DRAWN).astype(np.float32).view(np.uint8)
        few = numbers.reshape(_DRAWN, 4)[:, 4 - kind.bits // 8 :].reshape(-1)  # of bfloat16 the upper half
    return np.resize(few, count * kind.bits // 8)
