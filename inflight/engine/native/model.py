"""A decoder model whose steps are computed by the native library.

The library packs the weights into an order of its own and keeps them; the PyTorch model gives its weights up. Keys and
values stay where the KV cache has them.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from inflight.engine.attention.torch_backend import QueryRange
from inflight.engine.kvcache.memory_pool import KvPool, StoredKv
from inflight.engine.models.decoder import DecoderModel
from inflight.engine.models.limits import why_not_native
from inflight.engine.native.bindings import (
    SAMPLE,
    Cache,
    LayerCache,
    NativeError,
    Packed,
    Range,
    Step,
    call,
    load_library,
    phase_seconds,
)
from inflight.engine.native.outline import LinearPlace, linears_of, spec_of, vectors_of
from inflight.engine.native.weights import (
    TYPES,
    Packing,
    give_up,
    packing_of,
    plain_source,
    quantized_parts,
    quantized_source,
)
from inflight.engine.sampler import Draw
from inflight.errors import DeploymentError


class NativeModel:
    """Computes steps of a model; one thread at a time may call it."""

    def __init__(self, model: DecoderModel, instruction_set: str, threads: int, weights: str = "checkpoint") -> None:
        """Take over the weights of ``model``, which is loaded; ``weights``: ``engine.weights`` of the deployment.

        Raises:
            NativeError: the library cannot compute it; the model has its weights then.
            DeploymentError: the library refuses a weight, when the model has given up others.
        """
        self.schemes = _schemes(model)
        """The names of the schemes that weights are in, where they are quantized."""
        self._dtype = model.dtype
        self._vocab_size, self._hidden_size = model.config.vocab_size, model.config.hidden_size
        self._embedding = model.model.embed_tokens.weight
        spec, _held = spec_of(model)
        self._handle = ctypes.c_void_p(call("inflight_create", spec, instruction_set.encode(), threads))
        weakref.finalize(self, load_library().inflight_destroy, self._handle)
        for layer, which, vector in vectors_of(model):
            call("inflight_set_vector", self._handle, layer, which, vector.data_ptr())
        for number, place in enumerate(linears_of(model)):
            try:
                self._take(place, weights == "int8")
            except NativeError as error:
                if number == 0:
                    raise
                # PyTorch cannot compute a model that has given up a part of its weights.
                raise DeploymentError(error.refusal) from None

    def use(self, kv_pool: KvPool, block_size: int) -> None:
        """Keep keys and values in this memory from now on."""
        self._cache = kv_pool
        layers = [LayerCache(*(part.data_ptr() for part in _parts(stored))) for stored in kv_pool.layers.values()]
        cache = Cache(TYPES[kv_pool.stored], block_size, kv_pool.slots, (LayerCache * len(layers))(*layers))
        call("inflight_set_cache", self._handle, cache)

    def __call__(self, tokens: np.ndarray, ranges: Sequence[QueryRange], rows: Sequence[int]) -> Tensor:
        """Compute a step, and return the float32 logits ``[rows, vocab]`` of some of its tokens.

        Args:
            tokens: of the step, packed, integers ``[tokens]``.
            ranges: whose they are.
            rows: indices of the tokens whose logits are wanted.

        Raises:
            NativeError: a token, a block or a row is not there.
        """
        ids, wanted = tokens.astype(np.int32), np.array(rows, np.int32)
        logits = torch.empty(len(rows), self._vocab_size)
        parts, _held = _ranges(ranges)
        pointers = ids.ctypes.data, len(parts), parts, len(wanted), wanted.ctypes.data, logits.data_ptr()
        call("inflight_step", self._handle, Step(len(ids), *pointers))
        return logits

    def logits(self, rows: Sequence[int]) -> Tensor:
        """Return the float32 logits ``[rows, vocab]`` of some of the last step's tokens, as the step gives them.

        Raises:
            NativeError: a row is not there.
        """
        return self._of_step("inflight_logits", rows, self._vocab_size)

    def hidden(self, rows: Sequence[int]) -> Tensor:
        """Return the float32 hidden states ``[rows, hidden]`` of some of the last step's tokens, as ``logits``."""
        return self._of_step("inflight_hidden", rows, self._hidden_size)

    def _of_step(self, function: str, rows: Sequence[int], width: int) -> Tensor:
        wanted, made = np.array(rows, np.int32), torch.empty(len(rows), width)
        call(function, self._handle, len(wanted), wanted.ctypes.data, made.data_ptr())
        return made

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        """Draw a token from each row of ``logits [rows, vocab]``, float32; see ``sampler.DrawTokens``.

        Raises:
            NativeError: a row is drawn by what cannot be.
        """
        samples = np.zeros(len(draws), SAMPLE)
        for name in Draw._fields:
            samples[name] = [getattr(one, name) for one in draws]
        drawn, rows = np.empty(len(draws), np.int32), logits.contiguous()
        pointers = rows.data_ptr(), samples.ctypes.data, drawn.ctypes.data
        call("inflight_draw", self._handle, len(draws), *pointers)
        return torch.from_numpy(drawn.astype(np.int64))

    def phases(self) -> dict[str, float]:
        """Return the seconds that each phase of the steps has taken so far, by its name."""
        return phase_seconds(self._handle)

    def _take(self, place: LinearPlace, rounded: bool) -> None:
        """Have the library pack a weight, and give up the memory of the original."""
        parts = quantized_parts("", place.linear)
        if parts:
            source = quantized_source(parts, self._dtype)
        else:
            assert isinstance(place.linear, nn.Linear)
            packed_type = Packed.INT8 if rounded and place.is_rounded else None
            source = plain_source(place.weight(), place.linear.bias, packed_type)
        call("inflight_set_weight", self._handle, place.layer, place.which, place.expert, source.structure())
        give_up(place.linear, self._embedding)


def _parts(stored: StoredKv) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return stored.keys, stored.values, stored.key_scales, stored.value_scales


def _schemes(model: DecoderModel) -> list[str]:
    """Check that the library takes a model and its weights; return the names of their schemes. Raises NativeError."""
    if (why := why_not_native(model.config)) is not None:
        raise NativeError(why)
    names, schemes = {module: name for name, module in model.named_modules()}, set[str]()
    of_experts = dict[tuple[int, int], Packing]()
    for place in linears_of(model):
        name = names[place.linear]
        parts = quantized_parts(name, place.linear)
        schemes |= {part.quant_algo for part in parts}
        if of_experts.setdefault((place.layer, place.which), packing_of(parts)) != packing_of(parts):
            raise NativeError(f"{name} is quantized in another way than the same of the layer's first expert")
    return sorted(schemes)


def _ranges(ranges: Sequence[QueryRange]) -> tuple[ctypes.Array[Range], list[np.ndarray]]:
    """Return the ranges as the library takes them, and what must stay in memory with them.

    Each draft in a tree is a range of its own, since its keys do not lie in a row.
    """
    parts, held = list[Range](), list[np.ndarray]()
    for one in ranges:
        blocks = np.array(one.blocks, np.int32)
        held.append(blocks)
        place, chain = (blocks.ctypes.data, len(blocks)), one.count - len(one.paths)
        if chain:
            parts.append(Range(chain, one.start, one.start, *place))
        for node, ancestors in enumerate(one.paths):
            path = np.array(ancestors, np.int32) + one.trunk
            held.append(path)
            last = one.trunk + len(path) - 1
            parts.append(Range(1, last, one.trunk + node, *place, one.trunk, path.ctypes.data))
    return (Range * len(parts))(*parts), held
