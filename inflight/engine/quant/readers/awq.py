"""Reads checkpoints of AWQ (arXiv:2306.00978), as AutoAWQ writes them in its version ``gemm``.

Each linear has ``qweight`` int32 ``[in, out / 8]``, ``scales [groups, out]`` and ``qzeros`` int32 ``[groups, out /
8]``. A word holds eight outputs, from its lowest bits: 0, 2, 4, 6, 1, 3, 5, 7. A weight is ``(q - z) * s``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from inflight.engine.quant import packing
from inflight.engine.quant.config import LayerQuantization, Quantization
from inflight.engine.quant.linears import Layout
from inflight.engine.quant.readers.fields import chosen, group_size, modules
from inflight.engine.quant.readers.gptq import scales
from inflight.engine.quant.relay import Relay

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of its eight outputs is."""


def read(data: Mapping[str, Any], names: frozenset[str]) -> Quantization:
    """Read a checkpoint; see ``methods.load_quantization``."""
    chosen(data, "bits" if "bits" in data else "w_bit", (4,), 4)
    version = data.get("version") or data.get("format")
    chosen({"version": version.lower() if isinstance(version, str) else version}, "version", ("gemm",), "gemm")
    symmetric = not chosen(data, "zero_point", (True, False), True)
    size = group_size(data if "group_size" in data else {"group_size": data.get("q_group_size")}, 128)
    layer = LayerQuantization("W4A16_AWQ" if symmetric else "W4A16_GROUPS", size, Layout(zero_points=not symmetric))
    found, relays = dict[str, LayerQuantization](), dict[str, Relay]()
    for module in modules(names, "qweight", ("scales",) if symmetric else ("scales", "qzeros")):
        found[module] = layer
        relays |= {
            f"{module}.qweight": Relay(f"{module}.weight", _weight),
            f"{module}.scales": Relay(f"{module}.weight_scale", partial(scales, in_rows=False)),
            f"{module}.qzeros": Relay(None, _no_zeros) if symmetric else Relay(f"{module}.zero_point", _centred),
        }
    return Quantization(None, (), {}, False, found, relays)


def _weight(tensor: Tensor) -> Tensor:
    return packing.pack_rows(_centred(tensor))


def _centred(tensor: Tensor) -> Tensor:
    """Return int8 ``[out, ...]``, less half their range."""
    return packing.centred(packing.unpack(packing.words(tensor), 4, _PLACES), 4).t()


def _no_zeros(tensor: Tensor) -> Tensor:
    return packing.require_zeros(_centred(tensor))
