"""Linears and checkpoints in the formats that others publish: as their libraries pack them, and packed by hand."""

from __future__ import annotations

import base64
import functools
import json
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inflight.engine.quant.config import Quantization
from inflight.engine.quant.grouped import LINEARS
from inflight.engine.quant.linears import LinearShape, QuantizedLinear
from inflight.engine.quant.readers.methods import READERS
from inflight.engine.quant.relay import RelaidTensors

_FACTS = Path(__file__).parents[2] / "facts/quantized_linears.json"
MODULE = "model.layers.0.mlp.down_proj"


class HeldTensors:
    """Tensors in memory, in place of a checkpoint's files."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.names = tensors, frozenset(tensors)

    def load(self, names: Collection[str], take: Callable[[str, Tensor], None]) -> None:
        """Call ``take`` with each of the tensors ``names``."""
        for name in sorted(names):
            take(name, self.tensors[name])


@functools.cache
def packed_by_libraries() -> dict[str, dict[str, Any]]:
    """Return what ``tests/facts/quantized_linears.py`` has written, by the name of the case."""
    cases = json.loads(_FACTS.read_text())
    for case in cases.values():
        case["tensors"] = {name: _decoded(tensor) for name, tensor in case["tensors"].items()}
        case |= {kind: _decoded(case[kind]) for kind in ("decoded", "inputs", "rounded") if kind in case}
    return cases


def _decoded(data: dict[str, Any]) -> Tensor:
    octets = np.frombuffer(zlib.decompress(base64.b85decode(data["data"])), np.uint8).copy()
    return torch.from_numpy(octets).view(getattr(torch, data["dtype"])).reshape(data["shape"])


def read(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Quantization, RelaidTensors]:
    """Return what the reader makes of the tensors of one linear, which are named as in their module."""
    held = HeldTensors({f"{MODULE}.{kind}": tensor for kind, tensor in tensors.items()})
    quantization = READERS[config["quant_method"]](config, held.names)
    return quantization, RelaidTensors(held, quantization.relays)


def load_linear(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    rows: int,
    columns: int,
    dtype: torch.dtype = torch.float32,
    exact: bool = False,
) -> QuantizedLinear:
    """Return the linear that the engine makes of the tensors of one linear."""
    quantization, relaid = read(config, tensors)
    layer = quantization.of(MODULE)
    assert layer is not None
    group = layer.group_size or columns
    shape = LinearShape(MODULE, rows, columns, "bias" in tensors, dtype, group, False, exact, layer.layout)
    linear = LINEARS[layer.quant_algo](shape).to_empty(device="cpu").requires_grad_(False)
    targets = {f"{MODULE}.{kind}": parameter for kind, parameter in linear.named_parameters()}
    assert targets.keys() == relaid.names

    def take(name: str, tensor: Tensor) -> None:
        target = targets[name]
        assert tensor.shape == target.shape or tensor.numel() == target.numel() == 1, name
        target.copy_(tensor.reshape(target.shape))

    relaid.load(relaid.names, take)
    return linear


# What follows packs by the rules as they are published, in numpy, and shares nothing with the engine's code.


def _words(values: np.ndarray, bits: int) -> np.ndarray:
    """Return int32 ``[..., n * bits / 32]`` of unsigned ``[..., n]``, the first in the lowest bits."""
    each = 32 // bits
    parts = values.astype(np.uint64).reshape(*values.shape[:-1], -1, each)
    shifted = parts << (np.arange(each, dtype=np.uint64) * np.uint64(bits))
    return shifted.sum(-1).astype(np.uint32).view(np.int32)


@dataclass(frozen=True)
class Integers:
    """A weight in integers: ``(values - zeros) * scales`` of each output and its group."""

    values: np.ndarray
    """Unsigned ``[out, in]``."""
    scales: np.ndarray
    """float32 ``[out, groups]``, of numbers that float16 has."""
    zeros: np.ndarray
    """Unsigned ``[out, groups]``."""
    groups: np.ndarray
    """Of each input."""
    bits: int

    @classmethod
    def of(cls, weight: np.ndarray, bits: int, group: int, symmetric: bool, shuffled: bool = False) -> Integers:
        """Round a weight ``[out, in]``."""
        inputs, half = weight.shape[1], 1 << (bits - 1)
        groups = np.arange(inputs) // (group if group > 0 else inputs)
        groups = np.random.default_rng(inputs).permutation(groups) if shuffled else groups
        low, high = (
            np.stack([reduce(weight[:, groups == one], 1) for one in range(groups.max() + 1)], 1)
            for reduce in (np.min, np.max)
        )
        spread = np.maximum(-low, high) / (half - 1) if symmetric else (high - low) / (2 * half - 1)
        scales = spread.astype(np.float16).astype(np.float32)
        zeros = np.full(scales.shape, half) if symmetric else np.clip(np.round(-low / scales), 1, 2 * half - 1)
        values = np.round(weight / scales[:, groups]) + zeros[:, groups]
        return cls(np.clip(values, 0, 2 * half - 1), scales, zeros, groups, bits)

    def decoded(self) -> np.ndarray:
        """Return float32 ``[out, in]``."""
        exact = (self.values - self.zeros[:, self.groups]) * self.scales[:, self.groups]
        return exact.astype(np.float32)

    def gptq(self, less: int) -> dict[str, np.ndarray]:
        """Return the tensors of GPTQ; ``less``: what is taken from zeros before they are stored."""
        return {
            "qweight": _words(self.values, self.bits).T,
            "qzeros": _words((self.zeros.T - less) % (1 << self.bits), self.bits),
            "scales": self.scales.T.astype(np.float16),
            "g_idx": self.groups.astype(np.int32),
        }

    def awq(self) -> dict[str, np.ndarray]:
        """Return the tensors of AWQ: outputs lie in each word as 0, 2, 4, 6, 1, 3, 5, 7."""
        order = np.arange(len(self.values)).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel()
        return {
            "qweight": _words(self.values.T[:, order], 4),
            "qzeros": _words(self.zeros.T[:, order], 4),
            "scales": self.scales.T.astype(np.float16),
        }

    def compressed(self, symmetric: bool) -> dict[str, np.ndarray]:
        """Return the tensors of compressed-tensors, packed."""
        tensors = {
            "weight_packed": _words(self.values, self.bits),
            "weight_scale": self.scales,
            "weight_shape": np.array(self.values.shape),
        }
        return tensors if symmetric else tensors | {"weight_zero_point": _words(self.zeros.T, self.bits).T}


def blocks_of_e4m3(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return E4M3 ``[out, in]``, float32 scales of blocks, and what both stand for in float32."""
    stored, decoded = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
            scales[row, column] = weight[place].abs().max() / 448
            stored[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
            decoded[place] = stored[place].float() * scales[row, column]
    return stored, scales, decoded
