"""Rotary position embeddings and their scalings for long contexts.

Formulas: RoPE (Su et al. 2021, arXiv:2104.09864); linear (position interpolation, arXiv:2306.15595); llama3 (Llama
3.1's bands, arXiv:2407.21783); yarn (arXiv:2309.00071); longrope (arXiv:2402.13753). Parameter names are those of
transformers' ``config.json``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from inflight.errors import DeploymentError

SUPPORTED = ("default", "linear", "llama3", "yarn", "longrope")


class RotaryEmbedding:
    """Cosines and sines of positions, for one set of rotary parameters."""

    def __init__(self, rope: Mapping[str, Any], head_dim: int, model_length: int, served_length: int) -> None:
        """
        Args:
            rope: parameters; ``rope_type`` and ``rope_theta`` among them.
            head_dim: size of a head.
            model_length: the checkpoint's ``max_position_embeddings``.
            served_length: the longest sequence that will be served. longrope has two sets of factors, and a sequence
                cannot change from one to the other while its keys are cached: which one is used is settled here.

        Raises:
            DeploymentError: the type of scaling is not supported, or lacks a parameter.
        """
        kind = rope["rope_type"]
        if kind not in SUPPORTED:
            raise DeploymentError(
                f"config.json: rope_type {kind!r} is not supported; supported: {', '.join(SUPPORTED)}"
            )
        self.dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        self.length = served_length
        """Positions that there are."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        frequencies = 1.0 / rope["rope_theta"] ** exponents
        try:
            self._frequencies, self._scale = _scaled(frequencies, rope, self.dim, model_length, served_length)
        except KeyError as missing:
            raise DeploymentError(f"config.json: rope_type {kind!r} needs {missing}, which is not there") from None

    def to(self, device: torch.device) -> RotaryEmbedding:
        """Move the frequencies to ``device``."""
        self._frequencies = self._frequencies.to(device)
        return self

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return what ``rotate`` takes of positions ``[tokens]``, each ``[tokens, 1, dim]``.

        Cosines twice; sines with a minus, then without.
        """
        angles = (positions[:, None].float() * self._frequencies)[:, None]
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads ``x [tokens, heads, head_dim]``; dimensions beyond the rotary ones pass through."""
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :dim], cos, sin), x[..., dim:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(dim // 2, dims=-1), sin)


def _scaled(
    frequencies: Tensor, rope: Mapping[str, Any], dim: int, model_length: int, served_length: int
) -> tuple[Tensor, float]:
    """Return the frequencies as the type of scaling has them, and the factor of cosines and sines."""
    kind = rope["rope_type"]
    if kind == "linear":
        return frequencies / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(frequencies, rope), 1.0
    if kind == "yarn":
        return _yarn(frequencies, rope, dim, model_length)
    if kind == "longrope":
        return _longrope(frequencies, rope, model_length, served_length)
    return frequencies, 1.0


def _llama3(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Keep high frequencies, divide low ones by ``factor``, and interpolate smoothly between."""
    length, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = length * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (smooth + (1 - smooth) / factor)


def _yarn(frequencies: Tensor, rope: Mapping[str, Any], dim: int, model_length: int) -> tuple[Tensor, float]:
    """Interpolate the dimensions that turn seldom, keep those that turn often, and sharpen attention."""
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
    return scaled, _yarn_scale(rope, factor)


def _yarn_scale(rope: Mapping[str, Any], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


def _longrope(
    frequencies: Tensor, rope: Mapping[str, Any], model_length: int, served_length: int
) -> tuple[Tensor, float]:
    """Divide each frequency by a factor of its own: from the long list if long sequences are served."""
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
