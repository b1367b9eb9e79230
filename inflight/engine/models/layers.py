"""Layers that the architectures share. Activations are packed: ``[tokens, ...]``, all sequences of a step in a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from inflight.engine.models.config import AttentionConfig, ModelConfig
from inflight.engine.models.rope import Positions, rotate

_Kind = TypeVar("_Kind", bound=nn.Module)


class AttentionOptions(NamedTuple):
    """How a layer attends; the fields are those of ``config.AttentionConfig``."""

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    """The score of each head that takes a share and gives nothing ``[heads]``; None: there are none."""


class Attend(Protocol):
    """Stores the step's keys and values in the cache, and attends."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, options: AttentionOptions
    ) -> Tensor:
        """Return ``[tokens, heads, size of a value]``.

        Args:
            layer: index of the layer.
            query: ``[tokens, heads, head_dim]``.
            key: ``[tokens, kv_heads, head_dim]``; None: the layer attends to what another has stored in this step.
            value: ``[tokens, kv_heads, size of a value]``; in latent attention the beginning of ``key``.
            options: of the layer.
        """


class FusedLinear(nn.Linear):
    """Projections of one input as one matrix."""

    def __init__(self, inputs: int, parts: Mapping[str, int], bias: bool) -> None:
        """``parts``: the checkpoint's names for the projections, and their rows, in the order that they have here."""
        super().__init__(inputs, sum(parts.values()), bias)
        self.parts = parts


class RmsNorm(nn.Module):
    """Root-mean-square norm, computed in float32 (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        if x.dtype == self.weight.dtype == torch.float32:
            return functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return self.weight * self._normalized(x).to(x.dtype)

    def gain(self) -> Tensor:
        """Return what each normalized value is multiplied by, float32."""
        return self.weight.float()

    def _normalized(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], eps=self.eps)


class UnitNorm(nn.Module):
    """Root-mean-square norm without a weight, computed in float32."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return functional.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)


class WideRmsNorm(RmsNorm):
    """An RMS norm whose weight is applied before the result is rounded."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return (self._normalized(x) * self.gain()).to(x.dtype)


class GemmaRmsNorm(WideRmsNorm):
    """Gemma's RMS norm: the weight is an offset from one."""

    def gain(self) -> Tensor:
        """Return what each normalized value is multiplied by, float32."""
        return 1.0 + self.weight.float()


class Activation(NamedTuple):
    """The activation of a gated feed-forward."""

    gelu: bool
    """Else SiLU."""
    clamp: float | None = None
    """``ExpertsConfig.clamp``, and ``clamped_slope``."""
    slope: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the activation of the first half of ``x [tokens, 2 * inner]`` times the second."""
        gate, up = x.chunk(2, dim=-1)
        if self.clamp is not None:
            gate, up = gate.clamp(max=self.clamp), up.clamp(-self.clamp, self.clamp)
            return gate * torch.sigmoid(gate * self.slope) * (up + 1)
        return (functional.gelu(gate, approximate="tanh") if self.gelu else functional.silu(gate)).mul_(up)


class GatedMlp(nn.Module):
    """The gated feed-forward layer; gate and up projection are one matrix."""

    def __init__(self, hidden: int, inner: int, bias: bool, activation: Activation) -> None:
        """``hidden``, ``inner``: sizes of what it takes and gives, and of what lies between."""
        super().__init__()
        self.gate_up_proj = FusedLinear(hidden, {"gate_proj": inner, "up_proj": inner}, bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, hidden]``."""
        return self.down_proj(self.activation(self.gate_up_proj(x)))


class Attention(nn.Module):
    """Grouped-query attention; query, key and value projection are one matrix."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        config = model.attention[layer]
        self.layer, self.config = layer, config
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        own = [name for name in ("k_proj", "v_proj") if config.kv_donor is None]
        rows = {"q_proj": width * (1 + config.output_gate)}
        rows |= dict.fromkeys(own[:1] if config.values_are_keys else own, kv_width)
        self.qkv_proj = FusedLinear(model.hidden_size, rows, config.qkv_bias)
        self.o_proj = nn.Linear(width, model.hidden_size, bias=config.output_bias)
        self.q_norm = _head_norm(model, config, width)
        self.k_norm = _head_norm(model, config, kv_width) if own else nn.Identity()
        self.v_norm = UnitNorm(model.rms_norm_eps) if config.unit_values else nn.Identity()
        if config.sinks:
            self.sinks = nn.Parameter(torch.empty(self.heads))

    @property
    def options(self) -> AttentionOptions:
        """How this layer attends."""
        config = self.config
        sinks = self.sinks if config.sinks else None
        return AttentionOptions(config.scale, config.window, config.chunk, config.softcap, sinks)

    def forward(self, x: Tensor, positions: Positions, attend: Attend) -> Tensor:
        """Return ``[tokens, hidden]``."""
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        heads, gate = self._split_gate(heads)
        query = self._rotated(self._normalized(heads[:, : self.heads], self.q_norm), positions)
        if positions.query_scale is not None:
            query = (query * positions.query_scale).to(x.dtype)
        key = value = None
        if self.config.kv_donor is None:
            key, value = heads[:, self.heads :][:, : self.kv_heads], self.v_norm(heads[:, -self.kv_heads :])
            key = self._rotated(self._normalized(key, self.k_norm), positions)
        out = attend(self.layer, query, key, value, self.options)
        return self.o_proj((out if gate is None else out * torch.sigmoid(gate)).reshape(len(x), -1))

    def _split_gate(self, heads: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the heads without the gates, each of which lies behind its query, and the gates; None: none."""
        if not self.config.output_gate:
            return heads, None
        query, gate = heads[:, : 2 * self.heads].unflatten(1, (self.heads, 2)).unbind(2)
        return torch.cat((query, heads[:, 2 * self.heads :]), dim=1), gate

    def _rotated(self, heads: Tensor, positions: Positions) -> Tensor:
        if positions.rotation is None:
            return heads
        return rotate(heads, *positions.rotation, self.config.interleaved)

    def _normalized(self, heads: Tensor, norm: nn.Module) -> Tensor:
        if self.config.qk_norm == "width":
            return norm(heads.flatten(1)).view(heads.shape)
        return norm(heads)


def _head_norm(model: ModelConfig, config: AttentionConfig, width: int) -> nn.Module:
    """Return what normalizes queries, or keys; ``width``: of all heads of a token."""
    if config.qk_norm == "none":
        return nn.Identity()
    if config.qk_norm == "unit":
        return UnitNorm(model.rms_norm_eps)
    return norm_of(model, width if config.qk_norm == "width" else config.head_dim)


def norm_of(model: ModelConfig, size: int | None = None) -> RmsNorm:
    """Return a norm of the model's kind; ``size``: of its weight, the model's own if not given."""
    kind = {"plain": RmsNorm, "wide": WideRmsNorm, "offset": GemmaRmsNorm}[model.norm_kind]
    return kind(model.hidden_size if size is None else size, model.rms_norm_eps)


def each_of(model: nn.Module, kind: type[_Kind]) -> Iterator[tuple[str, _Kind]]:
    """Yield a model's present modules of a kind, each with its name; none may lie within another one.

    Only names are kept meanwhile. A list of the modules would hold the weights of all that were replaced, and take as
    much memory as the model once more.
    """
    for name in [name for name, module in model.named_modules() if isinstance(module, kind)]:
        yield name, cast(_Kind, model.get_submodule(name))
