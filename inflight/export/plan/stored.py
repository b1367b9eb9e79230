"""Checkpoints that are quantized already: what their weights take, and what multiplies them.

The readers of formats (``engine.quant.readers``) say how each linear is held, and the linears of the engine how many
bytes that takes. PyTorch comes with them, so that this module is imported only where a checkpoint is quantized.
"""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from inflight.engine.models.config import ModelConfig
from inflight.engine.models.naming import CheckpointNames
from inflight.engine.native.bindings import NativeError, Packed
from inflight.engine.native.weights import packed_type, quantized_parts
from inflight.engine.quant.config import LayerQuantization, Quantization
from inflight.engine.quant.grouped import LINEARS
from inflight.engine.quant.linears import LinearShape, QuantizedLinear
from inflight.engine.quant.readers import compressed_tensors
from inflight.engine.quant.readers.fields import wrong
from inflight.engine.quant.readers.methods import load_quantization
from inflight.engine.weight_files import SINGLE, read_index
from inflight.errors import DeploymentError
from inflight.export.plan.precision import PRECISIONS, Precision, StoredWeights
from inflight.export.plan.shape import Linear, linears
from inflight.export.quantize.modelopt import SCHEMES, fused_group
from inflight.gguf.files import require_contents
from inflight.text.files import read_json

TENSORS = (
    "weight", "weight_scale", "weight_scale_inv", "activation_scale", "qweight", "scales", "qzeros", "g_idx",
)  # fmt: skip
"""The tensors of a linear that the formats have: one that is quantized has all that its format asks for."""
_OF_TENSORRT_LLM = {scheme.algorithm: PRECISIONS[name] for name, scheme in SCHEMES.items()}
"""The precisions of ModelOpt's schemes that TensorRT-LLM reads, by their names in checkpoints."""


def read_stored(directory: Path, config: ModelConfig) -> StoredWeights | None:
    """Return how the checkpoint in ``directory`` holds its weights; None: it is not quantized.

    Where its files are not there, each linear that the configuration does not leave out is taken to be quantized.

    Raises:
        DeploymentError: it is quantized in a way that is not supported.
    """
    own, names = linears(config), tensor_names(directory)
    quantization = load_quantization(directory, names)
    if quantization is None:
        return None
    described: Mapping[str, Any] | None = read_json(directory / "config.json").get("quantization_config")
    if not names:
        names = _expected(described or {}, own)
        quantization = load_quantization(directory, names) or quantization
    naming, plain = CheckpointNames(config, names), CheckpointNames(config, ())
    prefix, own_prefix = (one.of("model.") for one in (naming, plain))
    held = {one.name: quantization.of(prefix + one.name.removeprefix(own_prefix)) for one in own}
    found = {name: kind for name, kind in held.items() if kind is not None}
    modelopt = described is None or described.get("quant_method") == "modelopt"
    made = {one.name: _made(found[one.name], one.inputs, one.outputs) for one in own if one.name in found}
    sizes = {name: sum(part.nbytes for part in linear.parameters()) for name, linear in made.items()}
    packed = {one.name: packed_as(found[one.name], one.inputs, one.outputs) for one in own if one.name in found}
    return StoredWeights(sizes, packed, _precision(config, quantization, own, found, packed, modelopt))


def _precision(
    config: ModelConfig,
    quantization: Quantization,
    own: tuple[Linear, ...],
    held: Mapping[str, LayerQuantization],
    packed: Mapping[str, Packed | None],
    modelopt: bool,
) -> Precision:
    """Return what follows for a plan; ``held``: how each of ``own`` that is quantized is held, by name; ``packed``: and
    what it is packed as.

    ``modelopt``: the checkpoint is ModelOpt's, whose schemes TensorRT-LLM reads.
    """
    schemes = sorted({one.quant_algo for one in held.values()})
    fused = {fused_group(one.name): held.get(one.name) for one in own}
    alike = all(fused[fused_group(one.name)] == held.get(one.name) for one in own)  # one product has one scheme
    built = _OF_TENSORRT_LLM.get(schemes[0]) if modelopt and len(schemes) == 1 else None
    return Precision(
        name=", ".join(schemes) or config.dtype,
        weight=0 if schemes else 2,
        arithmetic=built.arithmetic if built else "fp16",
        base=2,
        group=math.lcm(*(one.group_size for one in held.values())) if built is not None and built.group else 0,
        fp8_kv_cache=quantization.fp8_kv_cache,
        first_capability=built.first_capability if built else (7, 0),
        instead="the checkpoint that is not quantized",
        packed=next(iter(packed.values()), Packed.BFLOAT16) if alike and None not in packed.values() else None,
        by_tensorrt_llm=built is not None,
    )


@functools.cache
def packed_as(held: LayerQuantization, inputs: int, outputs: int) -> Packed | None:
    """Return what the native step packs a linear as that is held so; None: it does not multiply it."""
    try:
        return packed_type(quantized_parts("", _made(held, inputs, outputs)))
    except NativeError:
        return None


@functools.cache
def _made(held: LayerQuantization, inputs: int, outputs: int) -> QuantizedLinear:
    """Return the linear that the engine makes, without memory for its weight and without a bias."""
    shape = LinearShape(
        name=f"a linear of {inputs} inputs and {outputs} outputs",
        rows=outputs,
        columns=inputs,
        bias=False,
        dtype=torch.bfloat16,
        group_size=held.group_size or inputs,
        smoothed=False,
        exact=False,
        layout=held.layout,
    )
    return LINEARS[held.quant_algo](shape)


def tensor_names(directory: Path) -> frozenset[str]:
    """Return the names of the checkpoint's tensors; none: its files are not there."""
    if (places := read_index(directory)) is not None:
        return frozenset(places)
    file = directory / SINGLE
    if not file.exists():
        return frozenset()
    try:
        require_contents(file)
        with safe_open(file, framework="pt") as tensors:
            return frozenset(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise DeploymentError(f"{file}: cannot be read: {error}") from None


def _expected(described: Mapping[str, Any], own: tuple[Linear, ...]) -> frozenset[str]:
    """Return what tensors a checkpoint would have, by its configuration alone, which its reader has let pass.

    Raises:
        DeploymentError: what it says of linears that are not quantized is no list of names.
    """
    quantized = [one.name for one in own]
    if described.get("quant_method") == "compressed-tensors":
        quantized = compressed_tensors.expected(described, quantized)
    kept = described.get("modules_to_not_convert") or []
    if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
        raise wrong("modules_to_not_convert", kept, "a list of names")
    quantized = [
        one
        for one in quantized
        if not any(f".{name}." in f".{one}." or fnmatch.fnmatchcase(one, name) for name in kept)
    ]
    return frozenset(f"{name}.{kind}" for name in quantized for kind in TENSORS)
