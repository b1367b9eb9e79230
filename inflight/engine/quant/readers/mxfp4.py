"""Reads the checkpoints of gpt-oss, whose ``quant_method`` is ``mxfp4``: their experts alone are quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.engine.quant.config import LayerQuantization, Quantization
from inflight.engine.quant.formats import MXFP4_BLOCK
from inflight.errors import DeploymentError


def read(data: Mapping[str, Any], _: frozenset[str]) -> Quantization:
    """Read a checkpoint; see ``methods.load_quantization``."""
    kept = data.get("modules_to_not_convert") or []
    if not isinstance(kept, list) or any("experts" in str(name) for name in kept):
        raise DeploymentError(f"config.json: modules_to_not_convert is {kept!r}; a list without experts is expected")
    excluded = ("*.self_attn.*", "*.router", "lm_head")
    return Quantization(LayerQuantization("MXFP4", MXFP4_BLOCK), excluded, layers={}, fp8_kv_cache=False)
