"""A decoder model whose steps are computed by the native library.

The library packs the weights into an order of its own and keeps them; the PyTorch model gives its weights up. Keys and
values stay where the KV cache has them.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from inflight.engine.attention.torch_backend import QueryRange
from inflight.engine.kvcache.memory_pool import Fp8KvPool, Int8KvPool, KvPool
from inflight.engine.models.config import ModelConfig
from inflight.engine.models.decoder import DecoderModel
from inflight.engine.models.layers import GatedMlp, RmsNorm
from inflight.engine.native.bindings import (
    SAMPLE,
    Cache,
    NativeError,
    Range,
    Rope,
    Spec,
    Step,
    call,
    load_library,
)
from inflight.engine.native.weights import TYPES, give_up, plain_source, quantized_parts, quantized_source
from inflight.engine.sampler import Draw
from inflight.errors import DeploymentError

_QKV, _OUTPUT, _GATE_UP, _DOWN, _HEAD = range(5)
_INPUT_NORM, _ATTENTION_NORM, _MLP_NORM, _MLP_OUTPUT_NORM, _QUERY_NORM, _KEY_NORM, _LAST_NORM = range(7)


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
        self._dtype = model.model.norm.weight.dtype
        self._vocab_size = model.config.vocab_size
        self._embedding = model.model.embed_tokens.weight
        spec, _held = _spec(model)
        self._handle = ctypes.c_void_p(call("inflight_create", spec, instruction_set.encode(), threads))
        weakref.finalize(self, load_library().inflight_destroy, self._handle)
        for layer, which, norm in _norms(model):
            gain = norm.gain().contiguous()
            call("inflight_set_norm", self._handle, layer, which, gain.data_ptr())
        for number, (layer, which, linear) in enumerate(_linears(model)):
            try:
                self._take(layer, which, linear, weights == "int8")
            except NativeError as error:
                if number == 0:
                    raise
                # PyTorch cannot compute a model that has given up a part of its weights.
                raise DeploymentError(f"{error}; engine.cpu_step: pytorch can") from None

    def use(self, kv_pool: KvPool, block_size: int) -> None:
        """Keep keys and values in this memory from now on."""
        scales: list[Tensor | None] = [None] * 4
        keys, values, *slot_scales = kv_pool.parts  # of all layers, whose heads are of one number and size
        if isinstance(kv_pool, Int8KvPool):
            scales[:2] = slot_scales
        elif isinstance(kv_pool, Fp8KvPool):
            scales[2:] = [kv_pool.layer_scales.keys, kv_pool.layer_scales.values]
        self._cache = keys, values, scales
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in (keys, values, *scales)]
        call("inflight_set_cache", self._handle, Cache(TYPES[keys.dtype], block_size, keys.shape[2], *pointers))

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
        library, most = load_library(), 32
        seconds = (ctypes.c_double * most)()
        count = library.inflight_phases(self._handle, seconds, most)
        return {library.inflight_phase_name(phase).decode(): seconds[phase] for phase in range(count)}

    def _take(self, layer: int, which: int, linear: nn.Module, rounded: bool) -> None:
        """Have the library pack a weight, and give up the memory of the original."""
        parts = quantized_parts("", linear)
        if parts:
            source = quantized_source(parts, self._dtype)
        else:
            assert isinstance(linear, nn.Linear)
            source = plain_source(linear, TYPES[torch.int8] if rounded else None)
        call("inflight_set_weight", self._handle, layer, which, source.structure())
        give_up(linear, self._embedding)


def _schemes(model: DecoderModel) -> list[str]:
    """Check that the library takes a model and its weights; return the names of their schemes. Raises NativeError."""
    if unknown := _unknown_to_library(model.config):
        raise NativeError(f"the kernels have no {unknown}")
    names, schemes = {module: name for name, module in model.named_modules()}, set[str]()
    for _, _, linear in _linears(model):
        schemes |= {part.quant_algo for part in quantized_parts(names[linear], linear)}
    return sorted(schemes)


def _unknown_to_library(config: ModelConfig) -> str:
    """Return what a model has that the library does not compute; empty: nothing."""
    attention = [layer.attention for layer in config.layers]
    asked = {
        "layers of Gemma 4": config.gemma4 is not None,
        "experts": any(layer.experts is not None for layer in config.layers),
        "latent attention": any(one.latent is not None for one in attention),
        "attention sinks": any(one.sinks for one in attention),
        "soft caps": any(one.softcap is not None for one in attention) or config.logit_softcap is not None,
        "attention within chunks": any(one.chunk is not None for one in attention),
        "layers without rotary embedding": any(one.rope is None for one in attention),
        "interleaved rotary embedding": any(one.interleaved for one in attention),
        "scaling of queries by position": any(one.query_scaling is not None for one in attention),
        "norm of all queries of a token as one": any(one.qk_norm in ("width", "unit") for one in attention),
        "layers without a norm in front": config.norms == "behind",
        "layers of different shapes": not config.is_uniform,
    }
    return ", no ".join(name for name, is_asked in asked.items() if is_asked)


def _spec(model: DecoderModel) -> tuple[Spec, list[object]]:
    """Return a model's shape, and what must stay in memory with it."""
    config, embedding = model.config, model.model.embed_tokens.weight
    scale = torch.tensor(config.embedding_scale, dtype=embedding.dtype).item()
    frequencies = [rope.frequencies.contiguous() for rope in model.ropes]
    ropes = (Rope * len(model.ropes))(*(
        Rope(rope.dim, rope.scale, one.data_ptr()) for rope, one in zip(model.ropes, frequencies, strict=True)
    ))  # fmt: skip
    rope_of_layer = np.array(model.rope_of_layer, np.int32)
    windows = np.array([window or 0 for window in config.windows], np.int32)
    spec = Spec(
        config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
        config.layers[0].intermediate_size, config.vocab_size, config.activation != "silu",
        config.layers[0].attention.qk_norm == "head", config.norms == "around",
        config.rms_norm_eps, config.attention_scale, scale, TYPES[embedding.dtype], embedding.data_ptr(),
        len(ropes), ropes, rope_of_layer.ctypes.data, windows.ctypes.data,
    )  # fmt: skip
    return spec, [frequencies, ropes, rope_of_layer, windows]


def _linears(model: DecoderModel) -> Iterator[tuple[int, int, nn.Module]]:
    """Yield every linear with its layer and the library's number for it."""
    for index, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(mlp, GatedMlp)  # `_schemes` has refused experts
        yield index, _QKV, attention.qkv_proj
        yield index, _OUTPUT, attention.o_proj
        yield index, _GATE_UP, mlp.gate_up_proj
        yield index, _DOWN, mlp.down_proj
    yield 0, _HEAD, model.lm_head


def _norms(model: DecoderModel) -> Iterator[tuple[int, int, RmsNorm]]:
    """Yield every norm with its layer and the library's number for it."""
    for index, layer in enumerate(model.model.layers):
        found = {
            _INPUT_NORM: layer.attention_norm,
            _ATTENTION_NORM: layer.attention_output_norm,
            _MLP_NORM: layer.mlp_norm,
            _MLP_OUTPUT_NORM: layer.mlp_output_norm,
            _QUERY_NORM: layer.self_attn.q_norm,
            _KEY_NORM: layer.self_attn.k_norm,
        }
        for which, norm in found.items():
            if isinstance(norm, RmsNorm):
                yield index, which, norm
    yield 0, _LAST_NORM, model.model.norm


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
