"""Reads checkpoints whose ``quant_method`` is ``fp8``: E4M3 weights, with a scale for each block or for each linear.

Each linear has ``weight`` E4M3 ``[out, in]`` and ``weight_scale_inv``, which is multiplied by, in spite of its name:
``[out / 128, in / 128]`` where ``weight_block_size`` is ``[128, 128]``, the last blocks being as large as what is left;
one number where there are no blocks, which older files call ``weight_scale``. Numbers are floats, or in bytes the
exponents of powers of two.

``activation_scheme: static`` says that inputs are rounded to E4M3 by one scale of the checkpoint. ``dynamic`` lets a
GPU round them by the largest of each token's 128 inputs; transformers on a CPU does not, and neither does this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from inflight.engine.quant.config import LayerQuantization, Quantization
from inflight.engine.quant.formats import decode_e8m0
from inflight.engine.quant.linears import Layout
from inflight.engine.quant.readers.fields import LARGEST_GROUP, chosen, is_group, modules, unused, wrong
from inflight.engine.quant.relay import Relay
from inflight.errors import DeploymentError


def read(data: Mapping[str, Any], names: frozenset[str]) -> Quantization:
    """Read a checkpoint; see ``methods.load_quantization``."""
    static = chosen(data, "activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    chosen(data, "scale_fmt", ("float", "ue8m0"), "float")
    chosen(data, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    unused(data, ("kv_cache_scheme", "modules_to_convert"))
    block = data.get("weight_block_size")
    if block is not None and not _is_block(block):
        raise wrong("weight_block_size", block, f"two positive integers up to {LARGEST_GROUP}, or null")
    if block is not None and static:
        raise wrong("activation_scheme", "static", "'dynamic' where weight_block_size is given")
    rows, columns = block or (0, 0)
    layer = LayerQuantization("FP8" if static else "FP8_BLOCKS", columns, Layout(block_rows=rows))
    scale = "weight_scale_inv"
    if block is None and not any(name.endswith(f".{scale}") for name in names):
        scale = "weight_scale"
    found, relays = dict[str, LayerQuantization](), dict[str, Relay]()
    for module in modules(names, scale, ("weight",)):
        found[module] = layer
        relays[f"{module}.{scale}"] = Relay(f"{module}.weight_scale", _scales)
        if static:
            relays[_input_scale(module, names)] = Relay(f"{module}.input_scale", _scales)
    return Quantization(None, (), {}, False, found, relays)


def _is_block(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_group, value))


def _input_scale(module: str, names: frozenset[str]) -> str:
    """Return the name of the tensor by which inputs are rounded. Raises DeploymentError: there is none."""
    for kind in ("activation_scale", "input_scale"):
        if f"{module}.{kind}" in names:
            return f"{module}.{kind}"
    raise DeploymentError(f"checkpoint: no tensor {module}.activation_scale, and activation_scheme is 'static'")


def _scales(tensor: Tensor) -> Tensor:
    """Return float32 scales. Raises ValueError."""
    if tensor.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return decode_e8m0(tensor.view(torch.uint8))
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ValueError(f"is {tensor.dtype}; floats, or exponents in bytes, are expected")
    return tensor.float()
