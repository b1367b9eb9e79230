"""Reads what ModelOpt says of a checkpoint's quantization.

``export_hf_checkpoint`` writes it twice: in full to ``hf_quant_config.json``, and in the form of other quantization
libraries to ``config.json`` as ``quantization_config``. The second is read where the first is missing. Tensors are
already as ``quant.linears`` has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.engine.quant.config import LayerQuantization, Quantization
from inflight.engine.quant.formats import NVFP4_BLOCK
from inflight.engine.quant.linears import SCHEMES
from inflight.engine.quant.readers.fields import LARGEST_GROUP, is_group
from inflight.errors import DeploymentError, nearest

FILE_NAME = "hf_quant_config.json"
MIXED = "MIXED_PRECISION"
FLOAT_8 = {"num_bits": 8, "type": "float"}
"""What other libraries' configurations say of E4M3."""


def read_own(data: Mapping[str, Any]) -> Quantization:
    """Read ``hf_quant_config.json``. Raises DeploymentError: it says what is not supported."""
    return _read(data.get("quantization"), FILE_NAME)


def read(data: Mapping[str, Any], names: frozenset[str]) -> Quantization:
    """Read ``quantization_config`` of ``config.json``. Raises DeploymentError: it says what is not supported."""
    return _read(_translated(data), "config.json: quantization_config")


def _translated(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``quantization_config`` in the words of ``hf_quant_config.json``."""
    scheme = data.get("kv_cache_scheme")
    if isinstance(scheme, dict) and FLOAT_8.items() <= scheme.items():
        scheme = "FP8"
    own = {"kv_cache_quant_algo": scheme, "exclude_modules": data.get("ignore")}
    return own | {name: data[name] for name in ("quant_algo", "group_size", "quantized_layers") if name in data}


def _read(data: Any, source: str) -> Quantization:
    if not isinstance(data, dict):
        raise DeploymentError(f"{source}: `quantization` is {data!r}; an object is expected")
    kv_cache = data.get("kv_cache_quant_algo")
    if kv_cache not in (None, "FP8"):
        raise DeploymentError(f"{source}: kv_cache_quant_algo {kv_cache!r} is not supported; supported: FP8")
    for name, kind in (("exclude_modules", list), ("quantized_layers", dict)):
        if not isinstance(data.get(name) or kind(), kind):
            raise DeploymentError(f"{source}: {name} is {data[name]!r}; a {kind.__name__} is expected")
    mixed = data.get("quant_algo") == MIXED
    layers = data.get("quantized_layers") or {} if mixed else {}
    if mixed and not layers:
        raise DeploymentError(f"{source}: quant_algo is {MIXED}, and quantized_layers names no layer")
    return Quantization(
        default=None if mixed or data.get("quant_algo") is None else _read_layer(data, source),
        excluded=tuple(map(str, data.get("exclude_modules") or ())),
        layers={name: _read_layer(layer, f"{source}: {name}") for name, layer in layers.items()},
        fp8_kv_cache=kv_cache == "FP8",
    )


def _read_layer(data: Any, source: str) -> LayerQuantization:
    if not isinstance(data, dict):
        raise DeploymentError(f"{source}: {data!r} is not an object with a quant_algo")
    algorithm = str(data.get("quant_algo"))
    if algorithm not in SCHEMES:
        raise DeploymentError(
            f"{source}: quant_algo {algorithm!r} is not supported; supported: {', '.join((*SCHEMES, MIXED))}"
            f"{nearest(algorithm, SCHEMES)}"
        )
    if data.get("has_zero_point"):
        raise DeploymentError(f"{source}: has_zero_point is true; weights with zero points are not supported")
    size = data.get("group_size") or (NVFP4_BLOCK if algorithm == "NVFP4" else 128)
    if not is_group(size):
        raise DeploymentError(f"{source}: group_size is {size!r}; it must be a positive integer up to {LARGEST_GROUP}")
    return LayerQuantization(algorithm, size)
