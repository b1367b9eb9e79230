"""Layers that the architectures share. Activations are packed: ``[tokens, ...]``, all sequences of a step in a row.

Rotary position embeddings and their scalings for long contexts: RoPE (Su et al. 2021, arXiv:2104.09864); linear
(position interpolation, arXiv:2306.15595); llama3 (Llama 3.1's bands, arXiv:2407.21783); yarn (arXiv:2309.00071);
longrope (arXiv:2402.13753). Parameter names are those of transformers' ``config.json``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from inflight.engine.models.config import ModelConfig
from inflight.errors import DeploymentError

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the step's positions."""
_Kind = TypeVar("_Kind", bound=nn.Module)
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


class Attend(Protocol):
    """Stores the step's keys and values in the cache, and attends."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float
    ) -> Tensor:
        """Return ``[tokens, heads, head_dim]``.

        Args:
            layer: index of the layer.
            query: ``[tokens, heads, head_dim]``.
            key: ``[tokens, kv_heads, head_dim]``.
            value: like ``key``.
            window: how many tokens back attention reaches, itself included; None: all.
            scale: of the scores.
        """


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


class GemmaRmsNorm(RmsNorm):
    """Gemma's RMS norm: the weight is an offset from one, and is applied before the result is rounded."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return (self._normalized(x) * self.gain()).to(x.dtype)

    def gain(self) -> Tensor:
        """Return what each normalized value is multiplied by, float32."""
        return 1.0 + self.weight.float()


class GatedMlp(nn.Module):
    """The gated feed-forward layer; gate and up projection are one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(hidden, 2 * inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=config.mlp_bias)
        self.gelu = config.activation == "gelu_pytorch_tanh"

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, hidden]``."""
        return self.down_proj(gated(self.gate_up_proj(x), self.gelu))


def gated(x: Tensor, gelu: bool) -> Tensor:
    """Return the activation of the first half of ``x [tokens, 2 * inner]`` times the second."""
    gate, up = x.chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)).mul_(up)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; query, key and value projection are one matrix."""

    def __init__(self, config: ModelConfig, layer: int, norm: type[RmsNorm]) -> None:
        super().__init__()
        self.layer, self.window, self.scale = layer, config.windows[layer], config.attention_scale
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        width = self.heads * self.head_dim
        rows = width + 2 * self.kv_heads * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, rows, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.output_bias)
        self.q_norm = norm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = norm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Return ``[tokens, hidden]``."""
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        query, key, value = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        query = rotate(self.q_norm(query), *rotation)
        key = rotate(self.k_norm(key), *rotation)
        out = attend(self.layer, query, key, value, self.window, self.scale)
        return self.o_proj(out.reshape(len(x), -1))


def each_of(model: nn.Module, kind: type[_Kind]) -> Iterator[tuple[str, _Kind]]:
    """Yield a model's present modules of a kind, each with its name; none may lie within another one.

    Only names are kept meanwhile. A list of the modules would hold the weights of all that were replaced, and take as
    much memory as the model once more.
    """
    for name in [name for name, module in model.named_modules() if isinstance(module, kind)]:
        yield name, cast(_Kind, model.get_submodule(name))


class RotaryEmbedding:
    """Cosines and sines of positions, for one set of rotary parameters."""

    def __init__(self, rope: Mapping[str, Any], head_dim: int, model_length: int, served_length: int) -> None:
        """``model_length``: the checkpoint's ``max_position_embeddings``; ``served_length``: the longest to serve.

        longrope has two sets of factors, and a sequence cannot change from one to the other while its keys are cached:
        which set is used is settled here, by ``served_length``.

        Raises:
            DeploymentError: the type of scaling is not supported, or lacks a parameter.
        """
        kind = rope["rope_type"]
        if kind not in _ROPE_TYPES:
            raise DeploymentError(
                f"config.json: rope_type {kind!r} is not supported; supported: {', '.join(_ROPE_TYPES)}"
            )
        self.dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        self.length = served_length
        """How many positions there are."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        self.frequencies, self.scale = 1.0 / rope["rope_theta"] ** exponents, 1.0
        """Angles of position 1, float32 ``[dim / 2]``; and the factor of cosines and sines."""
        try:
            if kind == "linear":
                self.frequencies /= rope["factor"]
            elif kind == "llama3":
                self.frequencies = _llama3(self.frequencies, rope)
            elif kind == "yarn":
                self.frequencies, self.scale = _yarn(self.frequencies, rope, model_length)
            elif kind == "longrope":
                self.frequencies, self.scale = _longrope(self.frequencies, rope, model_length, served_length)
        except KeyError as missing:
            raise DeploymentError(f"config.json: rope_type {kind!r} needs {missing}, which is not there") from None
        except (ArithmeticError, ValueError) as error:
            raise DeploymentError(
                f"config.json: rope_type {kind!r} cannot be computed with its parameters: {error}"
            ) from None

    def to(self, device: torch.device) -> RotaryEmbedding:
        """Move the frequencies to ``device``."""
        self.frequencies = self.frequencies.to(device)
        return self

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return what ``rotate`` takes of positions ``[tokens]``, each ``[tokens, 1, dim]``.

        Cosines twice; sines with a minus, then without.
        """
        angles = (positions[:, None].float() * self.frequencies)[:, None]
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads ``x [tokens, heads, head_dim]``; dimensions beyond the rotary ones pass through."""
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :dim], cos, sin), x[..., dim:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(dim // 2, dims=-1), sin)


def _llama3(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Keep high frequencies, divide low ones by ``factor``, and interpolate smoothly between."""
    length, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    if low >= high:
        raise ValueError(f"low_freq_factor is {low}, and not below high_freq_factor, {high}")
    turns = length * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (smooth + (1 - smooth) / factor)


def _yarn(frequencies: Tensor, rope: Mapping[str, Any], model_length: int) -> tuple[Tensor, float]:
    """Interpolate the dimensions that turn seldom, keep those that turn often, and sharpen attention.

    Return the frequencies, and the factor of cosines and sines.
    """
    dim = 2 * len(frequencies)
    length = rope.get("original_max_position_embeddings") or model_length
    factor = rope.get("factor") or model_length / length

    def dimension_of(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = dimension_of(rope.get("beta_fast") or 32), dimension_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    interpolated = ramp.clamp(0, 1)
    scaled = frequencies * (1 - interpolated) + frequencies / factor * interpolated

    def attention(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return scaled, float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scaled, attention(rope["mscale"]) / attention(rope["mscale_all_dim"])
    return scaled, attention(1.0)


def _longrope(
    frequencies: Tensor, rope: Mapping[str, Any], model_length: int, served_length: int
) -> tuple[Tensor, float]:
    """Divide each frequency by a factor of its own: from the long list if long sequences are served.

    Return the frequencies, and the factor of cosines and sines.
    """
    length = rope.get("original_max_position_embeddings") or model_length
    factors = rope["long_factor"] if served_length > length else rope["short_factor"]
    if len(factors) != len(frequencies):
        raise DeploymentError(
            f"config.json: rope_type 'longrope' has {len(factors)} factors; {len(frequencies)} are expected"
        )
    factor = rope.get("factor") or model_length / length
    scale = rope.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    return frequencies / torch.tensor(factors, dtype=torch.float32), float(scale)
