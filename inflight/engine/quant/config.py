"""What a checkpoint says about its quantization: which linears are held in which scheme, and the KV cache's type.

ModelOpt's ``export_hf_checkpoint`` writes it twice: in full to ``hf_quant_config.json``, and in the form of other
quantization libraries to ``config.json`` as ``quantization_config``. The second is read where the first is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from inflight.engine.quant.formats import NVFP4_BLOCK
from inflight.engine.quant.gguf_linears import LINEARS
from inflight.engine.quant.linears import SCHEMES
from inflight.errors import DeploymentError, nearest
from inflight.gguf.checkpoint import open_gguf
from inflight.gguf.files import is_gguf
from inflight.gguf.types import BLOCKS
from inflight.text.checkpoint import read_json

FILE_NAME = "hf_quant_config.json"
MIXED = "MIXED_PRECISION"
_FLOAT_8 = {"num_bits": 8, "type": "float"}


@dataclass(frozen=True)
class LayerQuantization:
    """How one linear is held."""

    quant_algo: str
    group_size: int


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint is quantized."""

    default: LayerQuantization | None
    """Of every linear that is not excluded; None in mixed precision, where each has an entry of its own."""
    excluded: tuple[str, ...]
    """Names of modules, with wildcards."""
    layers: Mapping[str, LayerQuantization]
    """In mixed precision: by the linear's name."""
    fp8_kv_cache: bool

    def of(self, name: str) -> LayerQuantization | None:
        """Return how the linear called ``name`` in the checkpoint is held; None: not quantized."""
        if any(fnmatchcase(name, pattern) for pattern in self.excluded):
            return None
        return self.layers.get(name, self.default)

    @property
    def schemes(self) -> tuple[str, ...]:
        """The schemes' names."""
        kinds = (self.default, *self.layers.values())
        return tuple(sorted({kind.quant_algo for kind in kinds if kind}))

    @property
    def rounds_inputs(self) -> bool:
        """Whether any scheme rounds the inputs of its linears."""
        return any(LINEARS[name].round_input for name in self.schemes)


def load_quantization(directory: Path) -> Quantization | None:
    """Read how the checkpoint in ``directory``, or in a GGUF file, is quantized; None: it is not.

    Raises:
        DeploymentError: it is quantized in a way that is not supported.
    """
    if is_gguf(directory):
        blocks = open_gguf(directory).blocks
        layers = {name: LayerQuantization(kind, BLOCKS[kind].block) for name, kind in blocks.items()}
        return Quantization(None, (), layers, fp8_kv_cache=False) if layers else None
    foreign = read_json(directory / "config.json").get("quantization_config")
    method = foreign.get("quant_method") if isinstance(foreign, dict) else None
    if foreign is not None and method != "modelopt":
        raise DeploymentError(
            f"config.json: quantization_config.quant_method is {method!r}; only checkpoints quantized by ModelOpt "
            f"(quant_method 'modelopt') are served: {', '.join(SCHEMES)}; `inflight build` makes them"
        )
    own = read_json(directory / FILE_NAME, optional=True)
    if own:
        return _read(own.get("quantization"), FILE_NAME)
    return None if foreign is None else _read(_translated(foreign), "config.json: quantization_config")


def _translated(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``quantization_config`` in the words of ``hf_quant_config.json``."""
    scheme = data.get("kv_cache_scheme")
    if isinstance(scheme, dict) and _FLOAT_8.items() <= scheme.items():
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
    if not isinstance(size, int) or size < 1:
        raise DeploymentError(f"{source}: group_size is {size!r}; it must be a positive integer")
    return LayerQuantization(algorithm, size)
