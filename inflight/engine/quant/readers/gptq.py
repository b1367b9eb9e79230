"""Reads checkpoints of GPTQ (arXiv:2210.17323), as AutoGPTQ and GPTQModel write them.

Each linear has ``qweight`` int32 ``[in * bits / 32, out]``, whose words hold inputs that lie in a row, ``scales``
``[groups, out]``, ``qzeros`` int32 ``[groups, out * bits / 32]`` and ``g_idx [in]``, the group of each input. A weight
is ``(q - z) * s``. In the format ``gptq`` zeros are stored less one, modulo their range; in ``gptq_v2`` as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from inflight.engine.quant import packing
from inflight.engine.quant.config import LayerQuantization, Quantization
from inflight.engine.quant.linears import Layout
from inflight.engine.quant.readers.fields import chosen, group_size, modules, unused, wrong
from inflight.engine.quant.relay import Relay

_STORED_LESS = {"gptq": 1, "gptq_v2": 0}
"""By the format: what is taken from zeros before they are stored."""


def read(data: Mapping[str, Any], names: frozenset[str]) -> Quantization:
    """Read a checkpoint; see ``methods.load_quantization``."""
    bits = chosen(data, "bits", packing.WIDTHS)
    size = group_size(data, 128)
    ordered, symmetric = chosen(data, "desc_act", (False, True), False), chosen(data, "sym", (True, False), True)
    kind = "checkpoint_format" if data.get("checkpoint_format") is not None else "format"
    less = _STORED_LESS[chosen(data, kind, _STORED_LESS, "gptq")]
    chosen(data, "pack_dtype", ("int32",), "int32")
    unused(data, ("is_marlin_format", "adapter", "rotation"))
    _require_one_width(data.get("dynamic"))
    layer = LayerQuantization(_linear(bits, size, ordered, symmetric), size, Layout(1, not symmetric, ordered))
    found, relays = dict[str, LayerQuantization](), dict[str, Relay]()
    required = ("scales", *(() if symmetric else ("qzeros",)), *(("g_idx",) if ordered else ()))
    for module in modules(names, "qweight", required):
        found[module] = layer
        relays |= {
            f"{module}.qweight": Relay(f"{module}.weight", partial(_weight, bits=bits)),
            f"{module}.scales": Relay(f"{module}.weight_scale", partial(scales, in_rows=layer.quant_algo == "W8A16")),
            f"{module}.qzeros": Relay(
                None if symmetric else f"{module}.zero_point",
                partial(_zeros, bits=bits, less=less, symmetric=symmetric),
            ),
            f"{module}.g_idx": Relay(f"{module}.group_index", partial(packing.group_index, group_size=size))
            if ordered
            else Relay(None, partial(packing.consecutive, group_size=size)),
        }
    return Quantization(None, (), {}, False, found, relays)


def scales(tensor: Tensor, in_rows: bool) -> Tensor:
    """Return ``[out, groups]`` of ``[groups, out]``; ``in_rows``: ``[out]``, of the only group. Raises ValueError."""
    if tensor.dim() != 2 or not tensor.is_floating_point() or (in_rows and len(tensor) > 1):
        groups = "one group" if in_rows else "two dimensions"
        raise ValueError(f"is {tensor.dtype} {list(tensor.shape)}; scales of {groups} are expected")
    return tensor[0] if in_rows else tensor.t()


def _linear(bits: int, size: int, ordered: bool, symmetric: bool) -> str:
    """Return the name of the linear that holds such weights; where one is as simple as ModelOpt's, it is that."""
    if ordered or not symmetric or (bits == 8 and size):
        return f"W{bits}A16_GROUPS"
    return "W4A16_AWQ" if bits == 4 else "W8A16"


def _weight(tensor: Tensor, bits: int) -> Tensor:
    return packing.stored(packing.centred(packing.unpack(packing.words(tensor).t(), bits), bits), bits)


def _zeros(tensor: Tensor, bits: int, less: int, symmetric: bool) -> Tensor:
    """Return int8 ``[out, groups]``, less half their range."""
    kept = packing.unpack(packing.words(tensor), bits)
    zeros = packing.centred((kept + less) & ((1 << bits) - 1), bits).t()
    return packing.require_zeros(zeros) if symmetric else zeros


def _require_one_width(dynamic: Any) -> None:
    """Require that GPTQModel's rules for single modules only leave some as they are: its tensors say which."""
    if dynamic and not isinstance(dynamic, dict):
        raise wrong("dynamic", dynamic, "an object, or null")
    for rule in dynamic or {}:
        if not str(rule).startswith("-:"):
            raise wrong("dynamic", dynamic, "rules that leave modules as they are, which begin with '-:'")
