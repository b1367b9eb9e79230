"""Rotary position embeddings, and what else a layer does with the positions of tokens.

Sources: RoPE (arXiv:2104.09864); RoPE scaling llama3 (The Llama 3 Herd of Models, arXiv:2407.21783); yarn
(arXiv:2309.00071); longrope (arXiv:2402.13753); dynamic NTK as transformers has it. Parameter names are those of
transformers' ``config.json``, and the order of operations is too: the last bit of a frequency near 1 is 0.008
radians at position 131,072.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inflight.engine.models.config import QueryScaling
from inflight.engine.models.yarn import yarn_sharpening
from inflight.errors import DeploymentError

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the step's positions."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional")


class Positions(NamedTuple):
    """What the positions of a step's tokens do in a layer."""

    rotation: Rotation | None
    """What queries and keys are rotated by; None: they are not."""
    query_scale: Tensor | None = None
    """What queries are multiplied by ``[tokens, 1, 1]``, float32; None: by nothing."""


class RotaryEmbedding:
    """Cosines and sines of positions, for one set of rotary parameters."""

    def __init__(self, rope: Mapping[str, Any], head_dim: int, model_length: int, served_length: int) -> None:
        """``model_length``: the checkpoint's ``max_position_embeddings``; ``served_length``: the longest to serve.

        longrope has two sets of factors, and the base of dynamic grows with the sequence. A sequence cannot change from
        one to the other while its keys are cached: ``served_length`` settles it here, for all sequences.

        Raises:
            DeploymentError: the type of scaling is not supported, or lacks a parameter.
        """
        kind = rope["rope_type"]
        if kind not in ROPE_TYPES:
            raise DeploymentError(
                f"config.json: rope_type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )
        self.dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        self.length = served_length
        """How many positions there are."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        if kind == "proportional":  # a part of the head's frequencies; what lies beyond them does not turn
            exponents, turning = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim, self.dim // 2
            self.dim = head_dim
        periods = rope["rope_theta"] ** exponents
        self.frequencies, self.scale = 1.0 / periods, 1.0
        """Angles of position 1, float32 ``[dim / 2]``; and the factor of cosines and sines."""
        try:
            if kind == "linear":
                self.frequencies /= rope["factor"]
            elif kind == "llama3":
                self.frequencies = _llama3(self.frequencies, rope)
            elif kind == "yarn":
                self.frequencies, self.scale = _yarn(periods, rope, model_length)
            elif kind == "longrope":
                self.frequencies, self.scale = _longrope(periods, rope, model_length, served_length)
            elif kind == "proportional":
                self.frequencies[turning:] = 0.0
                self.frequencies /= rope.get("factor", 1.0)
            elif kind == "dynamic":
                self.frequencies = _dynamic(self.dim, rope, model_length, served_length)
            if not (math.isfinite(self.scale) and bool(self.frequencies.isfinite().all())):
                raise ValueError("some of its frequencies, or their factor, are no finite numbers")
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


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate heads ``x [tokens, heads, head_dim]``; dimensions beyond the rotary ones pass through.

    ``interleaved``: the two dimensions of a pair are adjacent; else they lie half of the rotated dimensions apart.
    """
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :dim], cos, sin, interleaved), x[..., dim:]), dim=-1)
    if interleaved:
        apart = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(apart, cos, sin).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return torch.addcmul(x * cos, x.roll(dim // 2, dims=-1), sin)


def query_scale(scaling: QueryScaling, positions: Tensor) -> Tensor:
    """Return what the queries at ``positions [tokens]`` are multiplied by ``[tokens, 1, 1]``, float32.

    Source: Llama 4's and Ministral 3's models in transformers, after arXiv:2501.19399.
    """
    steps = torch.floor((positions.float() + scaling.offset) / scaling.length)
    return (1 + scaling.beta * torch.log1p(steps))[:, None, None]


def _llama3(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Keep high frequencies, divide low ones by ``factor``, and interpolate smoothly between."""
    length, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    if low >= high:
        raise ValueError(f"low_freq_factor is {low}, and not below high_freq_factor, {high}")
    lengths = 2 * math.pi / frequencies
    smooth = (length / lengths - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    slow, fast = lengths > length / low, lengths < length / high
    return torch.where(slow, frequencies / factor, torch.where(fast, frequencies, between))


def _yarn(periods: Tensor, rope: Mapping[str, Any], model_length: int) -> tuple[Tensor, float]:
    """Interpolate the dimensions that turn seldom, keep those that turn often, and sharpen attention.

    Return the frequencies, and the factor of cosines and sines.
    """
    dim = 2 * len(periods)
    length = rope.get("original_max_position_embeddings") or model_length
    factor = rope.get("factor") or model_length / length

    def dimension_of(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = dimension_of(rope.get("beta_fast") or 32), dimension_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    kept = 1 - ramp.clamp(0, 1)
    scaled = 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept

    if rope.get("attention_factor") is not None:
        return scaled, float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        sharpening, of_all = (yarn_sharpening(factor, rope[name]) for name in ("mscale", "mscale_all_dim"))
        return scaled, sharpening / of_all
    return scaled, yarn_sharpening(factor, 1.0)


def _longrope(periods: Tensor, rope: Mapping[str, Any], model_length: int, served_length: int) -> tuple[Tensor, float]:
    """Divide each frequency by a factor of its own: from the long list if long sequences are served.

    Return the frequencies, and the factor of cosines and sines.
    """
    length = rope.get("original_max_position_embeddings") or model_length
    factors = rope["long_factor"] if served_length > length else rope["short_factor"]
    if len(factors) != len(periods):
        raise DeploymentError(
            f"config.json: rope_type 'longrope' has {len(factors)} factors; {len(periods)} are expected"
        )
    factor = rope.get("factor") or model_length / length
    scale = rope.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * periods), float(scale)


def _dynamic(dim: int, rope: Mapping[str, Any], model_length: int, served_length: int) -> Tensor:
    """Return the frequencies of a base that is larger the longer the sequences are, beyond the model's own length."""
    length = max(served_length, model_length)
    growth = rope["factor"] * length / model_length - (rope["factor"] - 1)
    base = rope["rope_theta"] * growth ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / base**exponents
