"""What the library needs to know of a model: its shape, its vectors, and its linears, as ``native/step.h`` has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from inflight.engine.models.config import ExpertsConfig, LayerConfig
from inflight.engine.models.decoder import DecoderLayer, DecoderModel
from inflight.engine.models.experts import MoeBlock
from inflight.engine.models.layers import GatedMlp, RmsNorm, UnitNorm
from inflight.engine.native.bindings import Experts, Layer, NativeError, Rope, Spec
from inflight.engine.native.weights import TYPES
from inflight.engine.quant.linears import QuantizedLinear

_QKV, _OUTPUT, _GATE_UP, _DOWN, _HEAD, _ROUTER, _EXPERT_GATE_UP, _EXPERT_DOWN = range(8)
(
    _INPUT_NORM, _ATTENTION_NORM, _MLP_NORM, _MLP_OUTPUT_NORM, _QUERY_NORM, _KEY_NORM, _SINKS, _CORRECTION, _LAST_NORM,
) = range(9)  # fmt: skip
_ROUTINGS = {"softmax": 0, "chosen_softmax": 1, "sigmoid": 2, "input_sigmoid": 3}


class LinearPlace(NamedTuple):
    """A linear, and where the library has its weight."""

    layer: int
    which: int
    expert: int
    linear: nn.Module
    gate: nn.Module | None = None
    """Of the shared expert: its one output is the router's last."""

    @property
    def is_rounded(self) -> bool:
        """Whether its weight may be rounded to INT8; which experts a token has should not depend on it."""
        return self.which != _ROUTER

    def weight(self) -> Tensor:
        """Return the weight of a linear that is not quantized; routers are packed in float32."""
        parts = [one.weight.detach() for one in (self.linear, self.gate) if isinstance(one, nn.Linear)]
        return torch.cat([part.float() for part in parts]) if self.which == _ROUTER else parts[0]


def spec_of(model: DecoderModel) -> tuple[Spec, list[object]]:
    """Return a model's shape, and what must stay in memory with it."""
    config, embedding = model.config, model.model.embed_tokens.weight
    scale = torch.tensor(config.embedding_scale, dtype=embedding.dtype).item()
    frequencies = [rope.frequencies.contiguous() for rope in model.ropes]
    ropes = (Rope * len(model.ropes))(*(
        Rope(rope.dim, rope.scale, one.data_ptr()) for rope, one in zip(model.ropes, frequencies, strict=True)
    ))  # fmt: skip
    layers = (Layer * config.num_layers)(*map(_layer, config.layers, model.rope_of_layer))
    spec = Spec(
        config.num_layers, config.hidden_size, config.vocab_size, config.activation != "silu", config.rms_norm_eps,
        scale, config.logit_softcap or 0.0, TYPES[embedding.dtype], embedding.data_ptr(), len(ropes), ropes, layers,
    )  # fmt: skip
    return spec, [frequencies, ropes, layers]


def _layer(config: LayerConfig, rope: int | None) -> Layer:
    one, experts = config.attention, config.experts
    assert one is not None  # `limits` names recurrent layers
    scaling = one.query_scaling
    return Layer(
        one.num_heads, one.num_kv_heads, one.head_dim, experts.shared_size if experts else config.intermediate_size,
        -1 if rope is None else rope, one.interleaved, one.window or 0, one.chunk or 0, one.qk_norm == "width",
        one.scale, one.softcap or 0.0,
        *((scaling.beta, scaling.length, scaling.offset) if scaling else (0.0, 0, 0)),
        _experts(experts) if experts else Experts(),
    )  # fmt: skip


def _experts(config: ExpertsConfig) -> Experts:
    return Experts(
        config.num_experts, config.per_token, config.intermediate_size, _ROUTINGS[config.routing], config.normalized,
        config.scale, config.groups, config.groups_per_token, config.group_best, config.shared_gate,
        config.clamp or 0.0, config.clamped_slope,
    )  # fmt: skip


def linears_of(model: DecoderModel) -> Iterator[LinearPlace]:
    """Yield every linear.

    Raises:
        NativeError: a router is quantized.
    """
    for index, layer in enumerate(model.model.layers):
        yield LinearPlace(index, _QKV, 0, layer.self_attn.qkv_proj)
        yield LinearPlace(index, _OUTPUT, 0, layer.self_attn.o_proj)
        assert isinstance(layer.mlp, MoeBlock | GatedMlp)  # `limits` names all others
        if isinstance(layer.mlp, MoeBlock):
            yield from _linears_of_experts(index, layer.mlp)
        else:
            yield LinearPlace(index, _GATE_UP, 0, layer.mlp.gate_up_proj)
            yield LinearPlace(index, _DOWN, 0, layer.mlp.down_proj)
    yield LinearPlace(0, _HEAD, 0, model.lm_head)


def _linears_of_experts(index: int, block: MoeBlock) -> Iterator[LinearPlace]:
    gate = block.shared_expert_gate if block.config.shared_gate else None
    for router in (block.gate, gate):
        if isinstance(router, QuantizedLinear):
            raise NativeError(f"the router of layer {index} is quantized")
    yield LinearPlace(index, _ROUTER, 0, block.gate, gate)
    if block.config.shared_size:
        yield LinearPlace(index, _GATE_UP, 0, block.shared_expert.gate_up_proj)
        yield LinearPlace(index, _DOWN, 0, block.shared_expert.down_proj)
    for number, expert in enumerate(block.experts):
        yield LinearPlace(index, _EXPERT_GATE_UP, number, expert.gate_up_proj)
        yield LinearPlace(index, _EXPERT_DOWN, number, expert.down_proj)


def vectors_of(model: DecoderModel) -> Iterator[tuple[int, int, Tensor]]:
    """Yield every vector with its layer and the library's number for it, float32."""
    for index, layer in enumerate(model.model.layers):
        for which, vector in _vectors(layer).items():
            if vector is not None:
                yield index, which, vector.detach().float().contiguous()
    yield 0, _LAST_NORM, model.model.norm.gain().contiguous()


def _vectors(layer: DecoderLayer) -> dict[int, Tensor | None]:
    attention, dim = layer.self_attn, layer.self_attn.head_dim
    return {
        _INPUT_NORM: _gain(layer.attention_norm, dim),
        _ATTENTION_NORM: _gain(layer.attention_output_norm, dim),
        _MLP_NORM: _gain(layer.mlp_norm, dim),
        _MLP_OUTPUT_NORM: _gain(layer.mlp_output_norm, dim),
        _QUERY_NORM: _gain(attention.q_norm, dim),
        _KEY_NORM: _gain(attention.k_norm, dim),
        _SINKS: attention.sinks if attention.config.sinks else None,
        _CORRECTION: layer.mlp.correction if isinstance(layer.mlp, MoeBlock) else None,
    }


def _gain(norm: nn.Module, head_dim: int) -> Tensor | None:
    """Return what each normalized value is multiplied by; None: nothing is normalized."""
    if isinstance(norm, UnitNorm):
        return torch.ones(head_dim)
    return norm.gain() if isinstance(norm, RmsNorm) else None
